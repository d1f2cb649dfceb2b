"""Functions for operators. The ready-made operators in `raysgd.operators` use them, and yours can, too.

They are defined in private modules. User code imports them from this module.
"""

from __future__ import annotations

from raysgd.core.imports import require
from raysgd.torch.data.batches import call_model, own_loss, prediction, split_batch
from raysgd.torch.objects.criteria import counts_labels

__all__ = ["call_model", "counts_labels", "own_loss", "prediction", "require", "split_batch"]
