"""Class-based distributed training for PyTorch.

It guarantees the following:

* On any number of workers, `train()` and `validate()` report the same metrics as one process over the same samples.
* One optimizer step of N workers equals the step of one process on the global batch, even if workers have different
  numbers of samples.
* If a worker dies, the other workers continue the `train()` or `validate()` call in progress if they can. Otherwise,
  all workers restart from the last snapshot. They then repeat that call and, by default, at most 30 s of earlier calls.

The user provides the model, the loss and the data. The workers communicate through `torch.distributed`.
"""

from __future__ import annotations

from raysgd.core.imports import lazy_names, require_installed

require_installed("torch", extra="torch", purpose="`raysgd.torch`")


lazy_names(__name__)
