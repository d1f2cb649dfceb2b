"""The journal of a run: which samples each step had, its loss, and the norm of its gradients.

`fit` keeps a journal in the folder of the run, in `journal/`. It is plain data, and small: 16 bytes for a step, and a
line for each part of an epoch that one group of workers ran. It has no list of samples. Their order is a function of a
seed and the number of the epoch, so the line says where in that order the part begins, and how steps are divided.

`journal.jsonl` has one JSON object per line:

- `run`: a program begins or resumes the run, with its config and options;
- `leg`: a group of workers begins to train at a step. What earlier lines say about later steps is void;
- `checkpoint`: a file was saved after a step.

`steps.bin` has a record for each batch of a worker: the mean loss over all samples of the step that ends with it (8
bytes), the norm of its gradients (4 bytes, -1 if nothing computed it), and the weight of the mean, such as the number
of samples (4 bytes, 0 if no step ends here, -1 if no loss counted in the step). All are little-endian floating-point
numbers.

This package writes and reads the journal, and knows no framework. `raysgd.replay` finds the samples, and trains steps
again. A run without a folder of its own enters neither.
"""
