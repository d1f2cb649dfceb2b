"""What the class-based front ends share: one training call across losses, and the trainer that asks for it.

What it guarantees:

* A call of `train` or `validate` is answered once, with metrics that count every batch that this run has measured once.
* A call that broke off continues where its data stands, wherever the survivors are.
* Nothing in here imports a training framework.

What it leaves to others: the operator, its state and its batches (`raysgd.torch`, `raysgd.tf`), and who lives, who
steps in and what is retried (`raysgd.engine`).
"""
