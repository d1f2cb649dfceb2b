"""Batch norms and shares of a joint batch: a pass whose shares they cannot train on is refused when it begins."""

from __future__ import annotations

from collections.abc import Iterable

from torch.nn import BatchNorm1d, BatchNorm2d, BatchNorm3d, Module, SyncBatchNorm

from raysgd.torch.data.pass_plan import PassPlan

LOCAL = (BatchNorm1d, BatchNorm2d, BatchNorm3d)
"""Those that look at the batch of their own rank."""

SINGLE_SAMPLE = (
    "A batch norm cannot train on a single sample, and sizes leave a worker one here: the joint batch has one sample, "
    "or batches of a worker have two at most. Pass `drop_last=True` to the train loader, choose another batch size or "
    "`max_batch_per_worker` (at least 3), pass `sync_batchnorm=True` on GPUs, or use a norm that looks at each sample "
    "by itself, such as `GroupNorm`."
)

_NO_SAMPLE = (
    "`sync_batchnorm=True` needs a sample on each worker, and sizes leave a worker none here: pass `drop_last=True` to "
    "the train loader, or choose a batch size of at least two samples for each worker."
)


def check_norms(models: Iterable[Module], plan: PassPlan) -> None:
    """Refuse the rest of a pass if it has a share that a batch norm cannot train on.

    Norms of images are not refused: an image has many values for each channel.

    Raises:
        ValueError: It has.
    """
    in_training = [module for model in models for module in model.modules() if module.training]
    if any(isinstance(module, BatchNorm1d) for module in in_training) and plan.has_single_samples:
        raise ValueError(SINGLE_SAMPLE)
    if any(isinstance(module, SyncBatchNorm) for module in in_training) and plan.has_empty_shares:
        raise ValueError(_NO_SAMPLE)
