"""The communication hook that raysgd installs on each `DistributedDataParallel` wrapper.

`DistributedDataParallel` passes gradients to the hook in buckets. The hook multiplies the gradients by this rank's
weight, all-reduces them, and records whether that succeeded. Once per optimizer step, with the last bucket of a
backward pass, the hook also sends this rank's metrics. PyTorch allows one hook per model. If the user has
a hook, raysgd's hook calls it.

Some gradients are sent over the mesh instead of gloo. The mesh is raysgd's own set of direct connections between the
ranks. For small tensors, it is faster than gloo.
"""

# This module has no `from __future__ import annotations`, because PyTorch checks the annotations of a communication
# hook and does not accept strings.

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import FunctionType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import DistNetworkError
from torch.nn.parallel import DistributedDataParallel

from raysgd.core.connections.group import Array, Group
from raysgd.core.connections.mesh.mesh import MeshBroken
from raysgd.core.connections.torch import mesh_group
from raysgd.torch.parallel.leg import Leg
from raysgd.torch.parallel.scale import Items

COMM_HOOK = "comm_hook"  # key of `ddp_args` for the user's hook; not an argument of DistributedDataParallel

_NO_ROW: Array = np.empty(0, np.uint8)
_FIRST_BUCKET_BYTES = 2**20  # this and the next constant are defaults of `DistributedDataParallel`
_USUAL_BUCKET_MB = 25
_DTYPES = (torch.float32, torch.float64)


@dataclass(frozen=True, eq=False)
class _HookState:
    """The state of raysgd's communication hook for one model.

    PyTorch stores this object in the model's wrapper. A deep copy of the wrapper shares the object, and a pickle of the
    wrapper contains an empty `_HookState` instead. Neither matters, because copies are not trained.

    Attributes:
        parallel: Strategy of this worker. It tracks the current batch and the communication in the batch.
        work: Name under which the `FlightRecorder` records the all-reduce of this model's gradients.
        goes_at_once: True to send gradients over the mesh instead of gloo if possible.
        function: The user's hook, which all-reduces the gradients; None for the default all-reduce.
        state: State of the user's hook.
    """

    parallel: Any
    work: str = ""
    goes_at_once: bool = False
    function: Callable[..., Any] | None = None
    state: Any = None

    def __deepcopy__(self, memo: dict[int, Any]) -> "_HookState":
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _HookState, (None,)


def register(parallel: Any, model: DistributedDataParallel, options: dict[str, Any], work: str) -> None:
    """Install raysgd's hook, which calls the user's hook if there is one.

    Args:
        parallel: Strategy of this worker.
        model: Wrapper on which to install the hook.
        options: Options of the wrapper, which may include the user's hook.
        work: Name of the gradient all-reduce in the `FlightRecorder`.

    Raises:
        ValueError: The user registered a hook on the model, and PyTorch allows only one. Or the user passed a hook that
            is not callable, or see `check_group`.
    """
    check_group(model, options)
    hook = options.get(COMM_HOOK)
    state, function = (None, None) if hook is None else _hook_of_user(hook)
    given = _HookState(parallel, work, hook is None and _goes_at_once(model, options), function, state)
    try:
        model.register_comm_hook(given, _exchange)
    except RuntimeError as error:
        raise ValueError(
            "a model has a communication hook that you registered with `register_comm_hook`, so its "
            "gradients cannot be weighted by samples. Pass the hook to `register`, as in "
            '`ddp_args={"comm_hook": (state, hook)}`.'
        ) from error


def check_group(model: DistributedDataParallel, options: dict[str, Any]) -> None:
    """Raise a `ValueError` if the user wrapped a model with a `process_group`."""
    # A process group that the user created would be invalid after a failure, because all ranks then join a new group.
    if options.get("process_group") is not None or model.process_group is not dist.group.WORLD:
        raise ValueError(
            "A model is wrapped with a `process_group`, but gradients are averaged over all workers: omit it. To "
            'average over other groups, pass `TorchTrainer(strategy="none")` and wrap the model yourself.'
        )


def obstacle(options: dict[str, Any]) -> str | None:
    """Return why a model's wrapper cannot be rebuilt with the user's communication hook; None if it can.

    Args:
        options: Options of the wrapper.
    """
    if _has_state(options.get(COMM_HOOK)):
        return "a communication hook in `ddp_args` has a state that differs between workers"
    return None


def without_hook(options: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments for `DistributedDataParallel`: `ddp_args` without the user's hook."""
    return {name: value for name, value in options.items() if name != COMM_HOOK}


def _exchange(state: _HookState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
    """Scale the gradients of a bucket, then average them with the user's hook, over the mesh, or with PyTorch.

    PyTorch calls this hook for each bucket, and waits for the returned future.
    """
    parallel, gradients = state.parallel, bucket.buffer()
    if bucket.is_last():
        parallel.averaged.add(id(bucket.parameters()[0]))
        parallel.leg.note_all_reduce(state.work)
    group = mesh_group() if state.goes_at_once else None
    if group is not None and group.is_quick_for(gradients.nbytes):
        return _average_at_once(parallel, group, bucket)
    parallel.multiply_by_weight(gradients)
    function, given = state.function, state.state
    if function is None:
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

        function, given = allreduce_hook, dist.group.WORLD
    leg, is_last = parallel.leg, bucket.is_last()
    with leg.record.noting_losses():
        future = _tracked(function(given, bucket), leg, is_last)
        if is_last:
            try:
                leg.send_rows()
            except MeshBroken as error:
                # After a `MeshBroken`, the library shuts down the mesh but not gloo's connections. Other ranks may be
                # waiting on gloo's connections, so raise an error after which both are shut down.
                raise DistNetworkError(str(error)) from None
    return future


def _tracked(future: Any, leg: Leg, is_last: bool) -> Any:
    """Record how a running all-reduce ends. Return a future that completes or fails when the all-reduce does.

    An all-reduce may end after its group has. It is therefore recorded for its own step.

    Args:
        future: Future of the all-reduce.
        leg: Tracks the current step.
        is_last: True if this is the last all-reduce in the backward pass of a model.
    """
    record, ledger = leg.record, leg.ledger
    record.is_averaged |= is_last
    # The last all-reduce starts when the backward pass has computed all gradients. From then on, this rank only waits,
    # so this time is measured as communication.
    is_awaited = is_last and ledger.begin_exchange()

    def received(future: Any) -> Any:
        with record.noting_losses():
            gradients = future.value()
        if is_awaited:
            ledger.end_exchange()
        return gradients

    return future.then(received)  # the backward pass waits for the returned future, and thus for the callback


def completed(gradients: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    """Return a completed future for gradients that are already averaged. A communication hook must return a future."""
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(gradients)
    return future


def _average_at_once(parallel: Any, group: Group, bucket: Any) -> Any:
    """Average the gradients of a bucket over the mesh, and return them in a completed future.

    With the first bucket, this rank also sends the batch's items, if it counts by items. With the last
    bucket, it also sends its metrics, once per optimizer step.
    """
    gradients, leg = bucket.buffer(), parallel.leg
    told, numbers = parallel.multiply_by_weight(gradients, is_told=True), gradients.numpy()
    is_last = bucket.is_last()
    with leg.record.noting_losses(), leg.ledger.exchanging(group):
        if told is not None:
            gather = partial(_add_up_with_items, group, numbers, told)
            if not (is_last and leg.send_rows(gather)):
                gather(_NO_ROW)
        elif not (is_last and leg.send_rows(partial(group.add_up_with, numbers))):
            group.add_up(numbers)
    leg.record.is_averaged |= is_last
    return completed(gradients.div_(float(group.size) if told is None else told.divisor))


def _add_up_with_items(group: Group, numbers: Array, told: Items, row: Array) -> list[Array]:
    """Sum gradients over the ranks. With the gradients, send this rank's items and metrics.

    Args:
        group: Mesh that connects the ranks.
        numbers: Gradients of this rank. They are replaced by their sum.
        told: Items of this rank's batch. The items of all ranks are added to it.
        row: Encoded metrics of this rank.

    Returns:
        The encoded metrics of each rank.
    """
    own = np.array([told.own], np.float64).view(np.uint8)
    received = group.add_up_with(numbers, np.concatenate((own, row)))
    told.learn([each[: own.nbytes].view(np.float64).item() for each in received])
    return [each[own.nbytes :] for each in received]


def _goes_at_once(model: DistributedDataParallel, options: dict[str, Any]) -> bool:
    """Return True if a model's gradients can be sent over the mesh, and gloo would have no advantage.

    The advantage of gloo is that its threads send a bucket while the backward pass computes the next bucket. This saves
    little time if all gradients fit into two buckets.
    """
    most = _FIRST_BUCKET_BYTES + (options.get("bucket_cap_mb") or _USUAL_BUCKET_MB) * 2**20
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return (
        not any(getattr(module, "sparse", False) for module in model.modules())
        and all(each.device.type == "cpu" and each.dtype in _DTYPES for each in parameters)
        and sum(each.nbytes for each in parameters) <= most
    )


def _hook_of_user(hook: Any) -> tuple[Any, Callable[..., Any]]:
    """Return the state and the function of a communication hook that the user passed to `register`.

    Args:
        hook: A function, whose state is None, or a tuple `(state, function)`.

    Raises:
        ValueError: The function is not callable.
    """
    state, function = hook if isinstance(hook, tuple) else (None, hook)
    if not callable(function):
        raise ValueError(
            f"`ddp_args={{'{COMM_HOOK}': {hook!r}}}`: need a communication hook of PyTorch, or a tuple of the state "
            "that it is called with and the hook."
        )
    return state, function


def _has_state(hook: Any) -> bool:
    """Return True if a user's hook may store state between calls, such as a process group or a counter."""
    if hook is None:
        return False
    state, function = _hook_of_user(hook)
    return state is not None or not isinstance(function, FunctionType)
