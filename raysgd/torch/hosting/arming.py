"""The steps of a training call: what they are made of is set before its first one, and looked at after its last one."""

from __future__ import annotations

from raysgd._arguments import is_integer
from raysgd.torch.data.batch_streams import LoaderSource
from raysgd.torch.hosting.step_loop import overrides
from raysgd.torch.operator.internals import TorchInternals
from raysgd.torch.parallel.strategy import NoParallel
from raysgd.torch.step.logical_shards import LogicalShards
from raysgd.torch.training_operator import TrainingOperator


class StepArming:
    """Gets ready for the steps of calls, and ends the last step of each.

    Args:
        operator: Takes the steps.
        parallel: How the replicas are kept equal.
    """

    def __init__(self, operator: TrainingOperator, parallel: NoParallel) -> None:
        self._operator = operator
        self._internals: TorchInternals = operator._raysgd
        self._parallel = parallel

    def begin(self, epoch_idx: int, source: LoaderSource | None = None) -> None:
        """Gets ready for the steps of a call over such data.

        Raises:
            ValueError: The operator's `accumulate_grad_batches` returned something that cannot work, or several
                optimizers are registered.
        """
        internals, step = self._internals, self._parallel.step
        window, wrapped = self._window(epoch_idx), internals.registered.wrapped
        self._check_optimizers(window)
        num_shards = 0 if source is None else source.num_shards
        step.most_parts = 1 if source is None or num_shards else source.most_batches
        step.shards = self._logical_shards(num_shards, window) if num_shards else None
        may_defer, may_run_backward = internals.precision.can_defer, _may_run_backward(self._operator)
        self._parallel.arm(wrapped, may_run_backward, window * step.most_parts, may_defer)
        internals.own_steps.begin_call()

    def _window(self, epoch_idx: int) -> int:
        """Returns how many batches make an optimizer step, as the operator says."""
        window = self._operator.accumulate_grad_batches(epoch_idx)
        if not is_integer(window) or window < 1:
            raise ValueError(
                f"`{type(self._operator).__name__}.accumulate_grad_batches` returned {window!r}: return how many "
                "batches make an optimizer step, at least 1."
            )
        return window

    def _check_optimizers(self, window: int) -> None:
        """Refuse steps of several batches with several optimizers, each of which would need its own window."""
        num_registered = len(self._internals.registered.optimizers)
        most = self._internals.context.settings.batch_options.max_batch_per_worker
        if num_registered > 1 and (window > 1 or most is not None):
            option = f"accumulate_grad_batches={window}" if window > 1 else "max_batch_per_worker"
            raise ValueError(
                f"`{option}` works with one optimizer, and {num_registered} are registered: register one with several "
                "parameter groups, or omit the option and accumulate in `train_batch`."
            )

    def _logical_shards(self, num_shards: int, window: int) -> LogicalShards:
        if window > 1:
            raise ValueError(
                f"`accumulate_grad_batches={window}` does not work with `deterministic=True`: make the joint batch as "
                "many times larger, and pass `max_batch_per_worker`."
            )
        world = self._internals.world
        return LogicalShards(num_shards, world.rank, world.size, self._internals.registered.wrapped)

    def finish(self, num_batches: int) -> None:
        """Leaves no gradient behind for another call.

        Raises:
            ValueError: An option of the trainer had no effect on the steps of these batches.
        """
        internals, step, name = self._internals, self._parallel.step, type(self._operator).__name__
        internals.finish_window()
        if step.window > 1 and num_batches and not step.is_used:
            raise ValueError(
                f"`{step.option}` had no effect: `{name}` computes its gradients by itself. Call `self.backward(loss)` "
                "and `self.optimizer_step()` in `train_batch`, for every batch (a `LightningModule` needs automatic "
                "optimization), or accumulate yourself and omit the option."
            )
        if num_batches and internals.own_steps.misses_clipping:
            raise ValueError(
                f"Gradient clipping had no effect: `{name}` steps an optimizer that is no "
                "`torch.optim.Optimizer`. Call `self.optimizer_step()` instead of its `step`, or clip the gradients "
                "yourself and leave `clip_grad_norm` and `clip_grad_value` out."
            )


def _may_run_backward(operator: TrainingOperator) -> bool:
    """Tells whether user code may compute gradients past the rung that weights the loss."""
    return any(overrides(operator, name) for name in ("train_epoch", "train_batch", "backward"))
