"""The communication hooks of `DistributedDataParallel`: they weight gradients, send them, and note how that ended.

A model has one hook: the user's, inside a hook of raysgd that weights gradients; or that of raysgd alone, installed
where it weights gradients, takes the time, or sends them faster than gloo does.
"""

# No postponed annotations here: PyTorch looks at those of a communication hook and takes types only, no strings.

from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from raysgd.connections.group import Group
from raysgd.connections.torch import exchanges_at_once
from raysgd.torch.parallel.step import BatchStep
from raysgd.torch.parallel.strategy import NoParallel

COMM_HOOK = "comm_hook"  # key of `ddp_args` that DistributedDataParallel itself does not know

_FIRST_BUCKET_BYTES = 2**20  # of `DistributedDataParallel`
_DTYPES = (torch.float32, torch.float64)


@dataclass(frozen=True, eq=False)
class _HookState:
    """What our communication hook is called with.

    PyTorch keeps it in the model. A copy of the model shares it, and a pickled one goes without: neither is trained.

    Attributes:
        parallel: Knows the weight of the step, and watches its exchanges.
        process_group: Who takes part, if that is the user's own group. None for the default group: one that is
            left has to be freed then and there, not whenever garbage is collected, perhaps in a process that was forked
            and has none of its threads.
        work: What the exchange of this model's gradients is recorded as.
        goes_at_once: Whether to go past gloo where that can be done.
        function: A user's hook that does the rest; None for an average.
        state: What that one is called with.
    """

    parallel: NoParallel
    process_group: Any
    work: str = ""
    goes_at_once: bool = False
    function: Callable[..., Any] | None = None
    state: Any = None

    def __deepcopy__(self, memo: dict[int, Any]) -> "_HookState":
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _HookState, (None, None)


def register(
    parallel: NoParallel, model: DistributedDataParallel, options: dict[str, Any], is_armed: bool, work: str
) -> None:
    """Installs the hook that the user passed, or raysgd's where it is of use."""
    hook = options.get(COMM_HOOK)
    if hook is not None:
        state, function = _hook_of_user(hook)
        theirs = _HookState(parallel, _group_of_user(model), work, function=function, state=state)
        model.register_comm_hook(theirs, _weight_and_call)
    elif is_armed:
        # Only this decides, not the number of ranks or what was before: all ranks must do the same.
        goes_at_once = _goes_at_once(model)
        if parallel.weights_in_hook or parallel.times_exchanges or parallel.rows.is_used or goes_at_once:
            model.register_comm_hook(_HookState(parallel, _group_of_user(model), work, goes_at_once), _average)


def obstacle(model: DistributedDataParallel, options: dict[str, Any]) -> str | None:
    """Why the communication hook of a model does not work in a new wrapper; None when it does."""
    if _has_state(options.get(COMM_HOOK)):
        return "a communication hook in `ddp_args` has a state, which is another one on each worker"
    if any(hook not in (_average, _weight_and_call) for hook, _ in model._comm_hooks):
        return "a model has a communication hook that was registered by hand"
    return None


def without_hook(options: dict[str, Any]) -> dict[str, Any]:
    """The options that `DistributedDataParallel` itself knows."""
    return {name: value for name, value in options.items() if name != COMM_HOOK}


def _average(state: _HookState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
    parallel = state.parallel
    _record(state, bucket)
    if parallel.weights_in_hook:
        _weight(parallel.step, bucket.buffer())
    group = exchanges_at_once() if state.goes_at_once else None
    if group is not None and group.is_quick_for(bucket.buffer().nbytes):
        return _average_at_once(parallel, group, bucket)
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    future = allreduce_hook(state.process_group or dist.group.WORLD, bucket)  # type: ignore[arg-type]
    tracked = parallel.exchanges.track(future, bucket.is_last())
    _exchange_rows_beside(parallel, bucket)
    return tracked


def _exchange_rows_beside(parallel: NoParallel, bucket: Any) -> None:
    if bucket.is_last():
        with parallel.exchanges.noting():
            parallel.rows.exchange_beside_gloo()


def _record(state: _HookState, bucket: dist.GradBucket) -> None:  # type: ignore[name-defined]
    if bucket.is_last():
        state.parallel.exchanged.add(id(bucket.parameters()[0]))
        state.parallel.record.note(state.work)


def _average_at_once(parallel: NoParallel, group: Group, bucket: Any) -> Any:
    gradients = bucket.buffer()
    try:
        with parallel.exchanges.timed(group):
            if bucket.is_last():
                parallel.rows.add_up(group, gradients.numpy())
            else:
                group.add_up(gradients.numpy())
    except Exception as error:
        parallel.exchanges.note(error)
        raise
    parallel.exchanges.count(bucket.is_last())
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(gradients.div_(group.size))
    return future


def _group_of_user(model: DistributedDataParallel) -> Any:
    return None if model.process_group is dist.group.WORLD else model.process_group


def _goes_at_once(model: DistributedDataParallel) -> bool:
    """Whether the gradients are so few that their exchange begins when the backward pass is over, but for a first MiB.

    Gloo, whose threads exchange one bucket while the next is computed, has no use for them.
    """
    most = _FIRST_BUCKET_BYTES + model.bucket_bytes_cap
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return (
        model.process_group is dist.group.WORLD
        and not any(getattr(module, "sparse", False) for module in model.modules())
        and all(each.device.type == "cpu" and each.dtype in _DTYPES for each in parameters)
        and sum(each.nbytes for each in parameters) <= most
    )


def _weight(step: BatchStep, gradients: torch.Tensor) -> None:
    weight = step.outgoing_weight()
    if weight != 1.0:
        gradients.mul_(weight)


def _hook_of_user(hook: Any) -> tuple[Any, Callable[..., Any]]:
    """The state and the function of a user's hook: `function`, or `(state, function)`."""
    state, function = hook if isinstance(hook, tuple) else (None, hook)
    if not callable(function):
        raise ValueError(
            f"`ddp_args={{'{COMM_HOOK}': {hook!r}}}`: need a communication hook of PyTorch, or a tuple of the state "
            "that it is called with and the hook."
        )
    return state, function


def _has_state(hook: Any) -> bool:
    """Whether a user's hook may remember something: a group, what it sent before, a counter."""
    if hook is None:
        return False
    state, function = _hook_of_user(hook)
    return state is not None or not isinstance(function, FunctionType)


def _weight_and_call(state: _HookState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
    """Does what a user's hook does."""
    function, parallel = state.function, state.parallel
    assert function is not None
    _record(state, bucket)
    if parallel.weights_in_hook:
        _weight(parallel.step, bucket.buffer())
    elif not parallel.times_exchanges:
        future = function(state.state, bucket)
        _exchange_rows_beside(parallel, bucket)
        return future
    future = parallel.exchanges.track(function(state.state, bucket), bucket.is_last())
    _exchange_rows_beside(parallel, bucket)
    return future
