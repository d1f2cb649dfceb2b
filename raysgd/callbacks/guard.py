"""`Guard`: leaves out steps whose loss or gradients are not finite, or whose gradient norm is far above the usual one.

All workers see the same summed gradients, so they decide alike without a message. A loss that is not finite makes the
gradients of its worker NaN, and with them the sums on all workers. Only after a bad step do workers tell each other
whose loss it was. ADR 177 gives the reasons.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from raysgd.callbacks.monitors import norm_of
from raysgd.callbacks.worker_callback import WorkerCallback, index_of, is_sharded, models_of, optimizers_of, rank_of
from raysgd.core.arguments import is_integer, is_number
from raysgd.exceptions import CallbackError

logger = logging.getLogger(__name__)

_MOST_NORMS, _WARM_UP = 128, 32
_MOST_OVERFLOWS = 20  # PyTorch's scaler begins at 2**16 and halves its scale, so 20 in a row are no matter of scale


class Guard(WorkerCallback):
    """Leaves bad steps out on all workers: the optimizer does not step, and the samples do not count.

    Each optimizer is judged by itself. Without `self.backward`, only the gradients are checked. Attributes of your
    operator are not restored. A GPU waits for the gradient norm in each step. In fp16, overflows are left to the
    gradient scaler, up to 20 in a row. Your own `train_epoch`, `strategy="none"`, steps with a closure or by
    `self._amp_scaler`, and `rewind` with FSDP are refused. A `GradScaler` that you made hides bad steps from `Guard`.

    Args:
        nonfinite: What to do if a worker's loss, or a gradient, is not finite: "skip" leaves the step out, "raise" ends
            the run.
        spike: Also leave out a step whose gradient norm before clipping is more than `spike` times the median of the
            last 128 norms, such as 10. Needs 32 steps to begin. None for no limit.
        max_skipped: Largest number of steps of an epoch to leave out. One more ends the run with an error.
        rewind: When a step is left out, also restore the newest state in memory that is at least this number of steps
            old. Two copies of the models and optimizers are kept on their devices. None to continue where the run is.
    """

    def __init__(
        self, nonfinite: str = "skip", *, spike: float | None = None, max_skipped: int = 10, rewind: int | None = None
    ) -> None:
        if nonfinite not in ("skip", "raise"):
            raise ValueError(f'`nonfinite={nonfinite!r}`: allowed are "skip" and "raise".')
        if spike is not None and not (is_number(spike) and spike > 1):
            raise ValueError(f"`spike={spike!r}`: need a number above 1, such as 10, or None for no limit.")
        if not (is_integer(max_skipped) and max_skipped >= 0):
            raise ValueError(f"`max_skipped={max_skipped!r}`: need the number of steps, 0 or more.")
        if rewind is not None and not (is_integer(rewind) and rewind >= 1):
            raise ValueError(f"`rewind={rewind!r}`: need a number of steps, at least 1, or None.")
        self._raises, self._spike, self._most, self._rewind = nonfinite == "raise", spike, max_skipped, rewind

    def on_begin(self, operator: Any) -> None:
        internals = operator._raysgd
        if internals.world.size > 1 and not (internals.sync.averages or is_sharded(operator)):
            raise ValueError(
                '`Guard` decides by gradients that all workers share, and `strategy="none"` shares none: use '
                '`strategy="ddp"`, or check the loss in `train_batch`.'
            )
        if self._rewind is not None and is_sharded(operator):
            raise ValueError('`Guard(rewind=...)` does not work with `strategy="fsdp"`: omit `rewind`.')
        self._step = self._completed = 0  # the step that is judged, and the last one before it
        # The state: the latest norms of each optimizer, the overflows in a row, the epoch, and its steps left out.
        self._norms: dict[int, list[float]] = {}
        self._num_overflows, self._epoch, self._skipped = 0, -1, list[int]()
        self._losses: Any = 0.0  # 0 if all losses of the step are finite, otherwise NaN
        self._copies: list[tuple[int, Callable[[], None]]] = []  # number of completed steps, and how to restore them

    def _on_leg(self, operator: Any, leg: Mapping[str, Any]) -> None:
        if leg["obstacle"] is not None:
            raise ValueError(f"`Guard` needs the number of each step, and {leg['obstacle']}: override `train_batch`.")
        if self._epoch != leg["pass"]:
            self._epoch, self._skipped = leg["pass"], []
        # An interrupted step is repeated, and new workers have no copies.
        self._skipped = [step for step in self._skipped if step <= leg["step"]]
        is_new_group = leg["num_workers"] > 1 and operator._raysgd.sync.leg.flight_recorder.number <= 1
        self._copies = [each for each in self._copies if each[0] < leg["step"] and not is_new_group]
        self._step, self._losses = leg["step"], 0.0
        self._buffers = _buffers_of(operator)

    def _see_loss(self, operator: Any, loss: Any) -> Any:
        value = loss.detach()
        is_bad = value - value  # NaN if the loss is infinite or NaN, otherwise 0
        self._losses = self._losses + is_bad.sum()
        return loss * (1 + is_bad)

    def _leaves_out(self, operator: Any, optimizer: Any) -> bool:
        norm, index, step = float(norm_of(operator, optimizer)), index_of(operator, optimizer), operator.global_step + 1
        losses, self._losses = self._losses, 0.0
        if step != self._step:
            self._step, self._completed = step, self._step
        found = self._judge(operator, step, index, norm, losses)
        if found is None:
            self._buffers = _buffers_of(operator)
            if index == 0 and self._wants_copy():
                del self._copies[:-1]
                self._copies.append((self._completed, operator._raysgd.copy_state()))
            return False
        reason, ranks = found
        back_to = self._restore(operator, index)
        entry = {"step": step, "optimizer": index, "reason": reason, "ranks": ranks, "back_to": back_to}
        operator._raysgd.callbacks.note_left_out(entry)
        if rank_of(operator) == 0:
            also = "" if back_to is None else f"; the state after step {back_to} is restored"
            logger.warning("step %d is left out: %s%s%s", step, reason, _on(ranks), also)
        self._skipped += [step] if step not in self._skipped else []
        if len(self._skipped) > self._most or (self._raises and not math.isfinite(norm)):
            raise CallbackError(self._report(reason, ranks))
        return True

    def _judge(self, operator: Any, step: int, index: int, norm: float, losses: Any) -> tuple[str, list[int]] | None:
        """Return why a step is bad and the ranks whose losses are not finite, or None for a good step."""
        if not math.isfinite(norm):
            flags = [
                float(rank == rank_of(operator) and math.isnan(losses)) for rank in range(operator._raysgd.world.size)
            ]
            ranks = [rank for rank, flag in enumerate(operator._raysgd.sum_over_workers(*flags)) if flag]
            self._num_overflows += 1
            if operator._raysgd.precision.skips_overflows and not ranks and self._num_overflows < _MOST_OVERFLOWS:
                return None  # the gradient scaler skips the step itself, and lowers its scale
            return "the loss is not finite" if ranks else "the gradients are not finite", ranks
        self._num_overflows = 0
        if self._spike is None or not norm:
            return None
        norms = self._norms.setdefault(index, [])
        usual = statistics.median(norms) if len(norms) >= _WARM_UP else math.inf
        if norm > self._spike * usual:
            return f"the gradient norm is {norm:.4g}, more than {self._spike:g} times the usual {usual:.4g}", []
        self._norms[index] = [*norms, norm][-_MOST_NORMS:]
        return None

    def _wants_copy(self) -> bool:
        """Return True to copy the state before the step."""
        return self._rewind is not None and (not self._copies or self._completed - self._copies[-1][0] >= self._rewind)

    def _is_old_enough(self, copied: int, index: int) -> bool:
        """Return True if the state after the step `copied` may be restored when the step is left out."""
        return self._rewind is not None and self._completed - copied >= self._rewind

    def _restore(self, operator: Any, index: int) -> int | None:
        """Restore the buffers from before the step, or the state of an earlier step. Return the number of that step."""
        import torch

        with torch.no_grad():
            for buffer, before in zip(_all_buffers(operator), self._buffers, strict=True):
                buffer.copy_(before)
        usable = [each for each in self._copies if self._is_old_enough(each[0], index)]
        if not usable:
            return None
        self._copies = usable  # later copies are of steps that no longer count
        back_to, restore = usable[-1]
        restore()
        return back_to

    def _report(self, reason: str, ranks: list[int]) -> str:
        steps = ", ".join(map(str, self._skipped))
        advice = f"`raysgd why FOLDER --step {self._skipped[-1]}` lists the samples of a step."
        if len(self._skipped) > self._most:
            return (
                f"`Guard(max_skipped={self._most})`: steps {steps} of this epoch are bad, the last because "
                f"{reason}{_on(ranks)}. {advice}"
            )
        return f'`Guard(nonfinite="raise")`: in step {self._skipped[-1]}, {reason}{_on(ranks)}. {advice}'

    def state_dict(self) -> dict[str, Any]:
        norms = [self._norms.get(index, []) for index in range(max(self._norms, default=-1) + 1)]
        return {
            "norms": norms,
            "num_overflows": self._num_overflows,
            "epoch": self._epoch,
            "skipped": list(self._skipped),
        }

    def _check_state(self, operator: Any, state: Any) -> None:
        entries = state if isinstance(state, Mapping) else {}
        norms: Any = entries.get("norms")
        skipped = entries.get("skipped")
        numbers = [entries.get("num_overflows"), entries.get("epoch"), *(skipped if isinstance(skipped, list) else "?")]
        is_right = isinstance(norms, list) and len(norms) <= len(optimizers_of(operator))
        if not (
            is_right
            and all(isinstance(each, list) and all(type(norm) is float and norm > 0 for norm in each) for each in norms)
            and all(type(number) is int for number in numbers)
        ):
            raise ValueError("The state of `Guard` does not match, so nothing was loaded: its numbers are no numbers.")

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._norms = {index: list(norms) for index, norms in enumerate(state["norms"])}
        self._num_overflows, self._epoch = state["num_overflows"], state["epoch"]
        self._skipped, self._copies = list(state["skipped"]), []


class Repeated(Guard):
    """Leaves out the steps that a run has left out, and goes back to the same steps, to replay the run.

    Args:
        lines: The lines about steps that were left out in the journal of the run.
    """

    def __init__(self, lines: Iterable[Any]) -> None:
        super().__init__(max_skipped=2**53)
        self._lines = {(each.step, each.optimizer): each for each in lines}

    def state_key(self) -> str:
        return "Guard"

    def _judge(self, operator: Any, step: int, index: int, norm: float, losses: Any) -> tuple[str, list[int]] | None:
        line = self._lines.get((step, index))
        return None if line is None else (line.reason, list(line.ranks))

    def _wants_copy(self) -> bool:
        return any(each.back_to == self._completed for each in self._lines.values())

    def _is_old_enough(self, copied: int, index: int) -> bool:
        return bool(self._lines[self._step, index].back_to == copied)


def _on(ranks: list[int]) -> str:
    return f" on rank {', '.join(map(str, ranks))}" if ranks else ""


def _all_buffers(operator: Any) -> list[Any]:
    return [buffer for model in models_of(operator) for buffer in model.buffers()]


def _buffers_of(operator: Any) -> list[Any]:
    return [buffer.detach().clone() for buffer in _all_buffers(operator)]
