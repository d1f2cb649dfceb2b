"""Detects ranks that do different work in a training call, and ranks whose parameters are no longer in sync.

If a rank calls more or fewer collectives than the other ranks, its calls are matched with the wrong calls on those
ranks, or its last call waits forever. Collectives detect this only if the tensors' sizes differ. To detect it in other
cases, each rank records its actions (gradient all-reduces and optimizer steps), and the driver compares the records. A
rank sends its record in the heartbeats of a call and with the call's result. To detect different parameters, each rank
sends two checksums for each parameter after some of the calls.
"""

from __future__ import annotations

import threading
import time
import zlib
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from raysgd.trainer.messages.joint_work import JointWork
from raysgd.trainer.messages.weight_sums import WeightSums, models_to_compare, tolerance_of

_NUM_MARKS = 32  # number of hashes to report, one per recent action; a rank further behind cannot be compared
_CHUNK = 1 << 16  # elements that a CPU converts at once, to stay in its cache
_CHUNK_ELSEWHERE = 1 << 24  # elements that a GPU converts at once
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # integer dtypes by size in bytes


class GlobalRecord:
    """Records this rank's actions in one call, for comparison with the other ranks' actions. Any thread may read it.

    Args:
        number: Number of the call in this worker group, the same on all ranks; 0 before the first call.

    Attributes:
        number: Number of the call in this worker group.
    """

    def __init__(self, number: int = 0) -> None:
        self.number = number
        self._changing = threading.Lock()
        self._is_open, self._is_over = number > 0, False
        self._counts: Counter[str] = Counter()
        self._marks = deque([0], _NUM_MARKS)

    def note(self, what: str) -> None:
        """Record that this rank starts an action. All ranks must start the same actions in the same order.

        Args:
            what: Name of the action, such as "gradients were exchanged".
        """
        with self._changing:
            if self._is_open:
                self._counts[what] += 1
                self._marks.append(zlib.crc32(what.encode(), self._marks[-1]))

    @property
    def work(self) -> JointWork | None:
        """The recorded actions, in the form that is sent to the driver; None before the worker group's first call."""
        with self._changing:
            if not self.number:
                return None
            return JointWork(dict(self._counts), tuple(self._marks), self._is_over, self.number)

    @contextmanager
    def of_call(self) -> Iterator[None]:
        """Record actions in the `with` block. If the block does not raise, mark the record as complete at its end."""
        try:
            yield
            self._is_over = True
        finally:
            self._is_open = False


def sums_of(
    models: Sequence[torch.nn.Module],
    compares_ranks: Any,
    left_out_of: Callable[[torch.nn.Module], Collection[str] | None],
    is_exact: bool,
) -> WeightSums | None:
    """Return checksums of all parameters that must be in sync, even frozen ones. Return None if there are none.

    Models without trainable parameters are left out.

    Args:
        models: Registered models, without wrappers.
        compares_ranks: The operator's attribute `compares_ranks`, which selects the models to compare.
        left_out_of: Function that returns the names of a model's parameters that may differ between ranks; None if all
            may differ.
        is_exact: True for checksums that change with any bit. False for sums, which are compared with a tolerance.

    Raises:
        ValueError: `compares_ranks` is neither a bool nor a sequence of registered models.
    """
    began = time.perf_counter()
    if isinstance(compares_ranks, tuple | list):
        compares_ranks = tuple(
            each.module if isinstance(each, DistributedDataParallel) else each for each in compares_ranks
        )
    found: dict[str, torch.Tensor] = {}
    for number, model in models_to_compare(models, compares_ranks):
        left_out = left_out_of(model)
        if left_out is not None and any(each.requires_grad for each in model.parameters()):
            of_model = f"of model {number} (`{type(model).__name__}`)"
            kept = ((name, each) for name, each in model.named_parameters() if name not in left_out)
            found |= {f"`{name}` {of_model}": each.detach() for name, each in kept if _has_numbers(each)}
    if not found:
        return None
    rows = [_row(parameter, is_exact) for parameter in found.values()]
    numbers = torch.stack([row.to(rows[0].device) for row in rows]).cpu().numpy()  # wait for the GPU only once
    tolerances = tuple(tolerance_of(parameter.element_size()) for parameter in found.values())
    shapes = tuple(tuple(parameter.shape) for parameter in found.values())
    return WeightSums(tuple(found), shapes, numbers, tolerances, time.perf_counter() - began)


def _has_numbers(parameter: torch.Tensor) -> bool:
    return not is_lazy(parameter) and not parameter.is_meta and parameter.layout == torch.strided


def _row(parameter: torch.Tensor, is_exact: bool) -> torch.Tensor:
    """Return two checksums of a parameter: the sum of its values and the sum of their squares.

    With `is_exact`, the values are the bits of the elements as integers. The parameter is converted in chunks to save
    memory.
    """
    flat, rows = (torch.view_as_real(parameter) if parameter.is_complex() else parameter).reshape(-1), []
    for part in flat.split(_CHUNK if flat.device.type == "cpu" else _CHUNK_ELSEWHERE):
        if is_exact:  # a sum of integers is the same in any order, unlike a sum of floats
            bits = part.view(_BITS[part.element_size()]).long()
            rows.append(torch.stack((bits.sum(), (bits * bits).sum())))
        else:
            numbers = part.double()
            rows.append(torch.stack((numbers.sum(), numbers.dot(numbers))))
    return rows[0] if len(rows) == 1 else torch.stack(rows).sum(0)
