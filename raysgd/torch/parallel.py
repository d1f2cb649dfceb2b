"""How the replicas of a model are kept equal: one object, asked nowhere else.

The loss of a batch is the mean over its samples, and the transport takes the plain mean of the ranks' gradients. Where
the ranks' batches differ in size the two do not fit together, so a rank's gradient is weighted by its share of the
samples first (`Step.weight`, 1.0 nearly always). Where the library itself runs the backward pass it weights the loss,
which is free; where user code may call `backward` by itself, a communication hook weights the gradient on its way out.
With gradient accumulation a hook would see the sum of several batches, so there the library has to run the pass. It has
to do so too where user code says how much a batch counts. `raysgd.torch.step` has the arithmetic.
"""

# No postponed annotations here: PyTorch looks at those of a communication hook and takes types only, no strings.

import copy
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from types import FunctionType
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from raysgd.backends.group import Group
from raysgd.backends.torch import exchanges_at_once, is_on_one_node
from raysgd.torch.blocks import without_checkpointing
from raysgd.torch.exchanges import Exchanges
from raysgd.torch.loading import load_model, load_optimizer
from raysgd.torch.step import Step, accept, never_defer

# Starts to add a tensor of integers up over the ranks, in place, and returns what waits for it.
Summation = Callable[[torch.Tensor], Callable[[], Any]]


_FIRST_BUCKET_BYTES = 2**20  # of `DistributedDataParallel`
_DTYPES = (torch.float32, torch.float64)

COMM_HOOK = "comm_hook"  # key of `ddp_args` that DistributedDataParallel itself does not know

# What a module is given from outside, and what making it anew would clear.
_KEPT_BY_WRAPPER = (
    "training",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
)


@dataclass(frozen=True, eq=False)
class _HookState:
    """What a communication hook of ours is called with.

    PyTorch keeps it in the model. A copy of the model shares it, and a pickled one goes without: neither is trained.

    Attributes:
        parallel: Knows the weight of the step, and watches its exchanges.
        process_group: Who takes part, if that is a group of the user's own. None for the default group: one that is
            left has to be freed then and there, not whenever garbage is collected, perhaps in a process that was forked
            and has none of its threads.
        goes_at_once: Whether to go past gloo where that can be done.
        function: A hook of the user's that does the rest; None for an average.
        state: What that one is called with.
    """

    parallel: "DDP"
    process_group: Any
    goes_at_once: bool = False
    function: Callable[..., Any] | None = None
    state: Any = None

    def __deepcopy__(self, memo: dict[int, Any]) -> "_HookState":
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _HookState, (None, None)


def _copied(model: torch.nn.Module) -> torch.nn.Module:
    """A copy; also of a model whose modules keep what they computed last, which PyTorch alone refuses to copy."""
    kept = [value for module in model.modules() for value in vars(module).values() if isinstance(value, torch.Tensor)]
    return copy.deepcopy(model, {id(value): value.detach().clone() for value in kept if not value.is_leaf})


class NoParallel:
    """A single replica, or replicas that the user keeps equal.

    Args:
        has_others: Whether there are other ranks, whose loss would matter.

    Attributes:
        synchronizes: Whether every step involves all ranks.
        is_sharded: Whether a rank holds a part of each model only, so that its whole state takes all ranks to read.
        step: The step that the replica is in.
        exchanges: What became of the exchanges of that step.
    """

    synchronizes = False
    is_sharded = False

    def __init__(self, has_others: bool = True) -> None:
        self.step = Step()
        self._has_others = has_others
        self.step.is_joint = self.synchronizes
        self.exchanges = Exchanges()
        self._weights_in_hook = False

    # ---------------------------------------------------------------------------------------- set-up

    def wrap(self, model: torch.nn.Module, device_ids: list[int] | None, options: dict[str, Any]) -> torch.nn.Module:
        """The model to call in training. `options` are those for `DistributedDataParallel`."""
        return model

    def wrap_optimizer(self, optimizer: Any) -> Any:
        """The optimizer to use in training."""
        return optimizer

    def adopt(self, optimizers: Sequence[Any]) -> None:
        """Makes optimizers that were made before `wrap` step what the wrapped models train."""

    # ---------------------------------------------------------------------------------------- training

    def arm(
        self, models: Sequence[torch.nn.Module], weight_in_hook: bool, window: int = 1, may_defer: bool = True
    ) -> None:
        """Gets ready for a call of `train`.

        Args:
            models: The wrapped models.
            weight_in_hook: Whether user code may run backward passes past the rung that weights the loss. It may catch
                what they raise, too, so exchanges are looked at before a step counts.
            window: How many batches make an optimizer step.
            may_defer: Whether the exchange of gradients may wait for the last of them.
        """
        self.step.open_call(window)
        self.step.check = self.exchanges.check if weight_in_hook and self._has_others else accept

    @property
    def obstacle(self) -> str | None:
        """Why the models cannot go on in a group that is formed anew; None when they can."""
        return "the replicas are not kept equal by `DistributedDataParallel`"

    def reform(self) -> None:
        """Connects the models to the group that was formed anew; they stay the same objects."""
        self.exchanges.forget()

    def weighted(self, loss: torch.Tensor, optimizer: Any = None) -> torch.Tensor:
        """The loss to run the backward pass on, of a batch that counts by its samples.

        Raises:
            RuntimeError: Nobody knows which batch it is of.
        """
        step = self.step
        step.own_s += time.perf_counter() - step.began_at
        if step.window == 1 and (self._weights_in_hook or not self.synchronizes):
            return loss
        step.use()
        factor = step.factor_of(optimizer) if step.window > 1 else step.weight
        return loss if factor == 1.0 else loss * factor

    @contextmanager
    def weighting(
        self, loss: torch.Tensor, optimizers: Sequence[Any], weight: float, parameters: Iterable[torch.Tensor]
    ) -> Iterator[torch.Tensor]:
        """The loss to run the backward pass on, of a batch that counts by a weight of the user's.

        Args:
            loss: The mean over whatever the weight counts.
            optimizers: Those that it trains.
            weight: See `raysgd.torch.step`.
            parameters: What gets gradients. With weight 0 these are 0, also where the mean over nothing is NaN.

        Raises:
            RuntimeError: Nobody knows which batch it is of.
            ValueError: This kind of replicas cannot do that.
        """
        step = self.step
        step.own_s += time.perf_counter() - step.began_at
        step.use(by_samples=False)
        factor = step.factor_of(optimizers[0], weight)
        with step.weighting(), nullcontext() if weight else _silenced(parameters):
            yield loss * factor

    def exchange(self, parameters: Sequence[torch.Tensor]) -> None:
        """Averages gradients over the ranks whose exchange was put off for a batch that never came."""

    @contextmanager
    def evaluating(self, models: Sequence[torch.nn.Module]) -> Iterator[None]:
        """The context for evaluation, where ranks may have different numbers of batches."""
        yield

    # ---------------------------------------------------------------------------------------- state

    def state_of(self, part: Any) -> dict[str, Any]:
        """The whole state of a model or an optimizer; where parts are sharded all ranks have to ask, for rank 0."""
        state: dict[str, Any] = part.state_dict()
        return state

    def load_model(self, model: torch.nn.Module, state: Mapping[str, Any]) -> None:
        """Takes over such a state of a model."""
        load_model(model, state)

    def load_optimizer(self, optimizer: Any, state: Mapping[str, Any]) -> None:
        """Takes over such a state of an optimizer."""
        load_optimizer(optimizer, state)

    def plain_model(self, model: torch.nn.Module) -> torch.nn.Module | None:
        """A copy without anything that the library put around or into it, on the CPU; None on ranks without one."""
        return without_checkpointing(_copied(unwrap(model)).cpu())

    # ---------------------------------------------------------------------------------------- between ranks

    def all_sum(self, tensor: torch.Tensor) -> None:
        """Adds a tensor up over all ranks, in place; every one of several ranks has to ask."""
        dist.all_reduce(tensor)

    def summation(self) -> Summation:
        """A way to add numbers up over the ranks beside the training; all ranks must ask for it at the same time."""
        # A group of its own: on the default one these calls could overtake those of the backward pass.
        group = dist.new_group(backend="gloo")

        def start(numbers: torch.Tensor) -> Callable[[], Any]:
            return dist.all_reduce(numbers, group=group, async_op=True).wait

        return start


class DDP(NoParallel):
    """`DistributedDataParallel` around every model that has something to train."""

    synchronizes = True

    def __init__(self) -> None:
        super().__init__()
        self.step.count_ranks, self.step.start_sum = dist.get_world_size, self._start_sum
        self._wrapped: list[tuple[DistributedDataParallel, dict[str, Any]]] = []
        self._armed: set[int] = set()

    def wrap(self, model: torch.nn.Module, device_ids: list[int] | None, options: dict[str, Any]) -> torch.nn.Module:
        if not any(parameter.requires_grad for parameter in model.parameters()):
            return model  # DDP refuses a frozen model, and there is no gradient to average
        options = {"device_ids": device_ids, **options}
        wrapped = DistributedDataParallel(model, **_for_torch(options))
        self._register_hook(wrapped, options)
        self._wrapped.append((wrapped, options))
        return wrapped

    def _register_hook(self, wrapped: DistributedDataParallel, options: dict[str, Any]) -> None:
        hook = options.get(COMM_HOOK)
        if hook is not None:
            state, function = _hook_of_user(hook)
            theirs = _HookState(self, _group_of_user(wrapped), function=function, state=state)
            wrapped.register_comm_hook(theirs, _weight_and_call)
        elif id(wrapped) in self._armed:
            # Nothing but this decides, such as how many ranks there are, or what was before: all must do the same.
            goes_at_once = _goes_at_once(wrapped)
            if self._weights_in_hook or goes_at_once:
                wrapped.register_comm_hook(_HookState(self, _group_of_user(wrapped), goes_at_once), _average)

    @property
    def obstacle(self) -> str | None:
        for wrapped, options in self._wrapped:
            if "process_group" in options:
                return "`ddp_args` names a process group of its own"
            if _has_state(options.get(COMM_HOOK)):
                return "a communication hook in `ddp_args` has a state, which is another one on each worker"
            if any(hook not in (_average, _weight_and_call) for hook, _ in wrapped._comm_hooks):
                return "a model has a communication hook that was registered by hand"
        return None

    def reform(self) -> None:
        """Builds each wrapper anew around the same model, as the same object: user code holds on to it."""
        super().reform()
        for wrapped, options in self._wrapped:
            kept = {name: wrapped.__dict__[name] for name in _KEPT_BY_WRAPPER if name in wrapped.__dict__}
            wrapped.__init__(wrapped.module, init_sync=False, **_for_torch(options))  # type: ignore[misc]
            wrapped.__dict__.update(kept)
            self._register_hook(wrapped, options)

    def arm(
        self, models: Sequence[torch.nn.Module], weight_in_hook: bool, window: int = 1, may_defer: bool = True
    ) -> None:
        """Installs a hook where it is of use: for weighting and watching gradients, or for speed.

        A model for which the user registered a hook of his own by hand keeps that one; PyTorch allows one each.
        """
        wrapped = [model for model in models if isinstance(model, DistributedDataParallel)]
        self.step.defer = _deferrer(wrapped) if may_defer else never_defer
        super().arm(models, weight_in_hook, window)
        self._weights_in_hook = self._weights_in_hook or weight_in_hook
        for model in wrapped:
            self._armed.add(id(model))
            if not model._comm_hooks:
                self._register_hook(model, {})

    def _start_sum(self, number: float) -> Callable[[], float]:
        # In the group of the gradients: there it comes right before those of the same backward pass, on every rank.
        device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else None
        numbers = torch.tensor([number], dtype=torch.float64, device=device)
        with self.exchanges.noting():
            work = dist.all_reduce(numbers, async_op=True)
        return partial(self._sum_of, work, numbers)

    def _sum_of(self, work: Any, numbers: torch.Tensor) -> float:
        with self.exchanges.noting():
            work.wait()
        return numbers.item()

    def exchange(self, parameters: Sequence[torch.Tensor]) -> None:
        groups = {id(p): wrapped.process_group for wrapped, _ in self._wrapped for p in wrapped.parameters()}
        for parameter in parameters:
            if parameter.grad is None:  # of this rank; others may have one
                parameter.grad = torch.zeros_like(parameter)
            group = groups.get(id(parameter), dist.group.WORLD)
            dist.all_reduce(parameter.grad, group=group)
            parameter.grad.div_(dist.get_world_size(group))

    @contextmanager
    def evaluating(self, models: Sequence[torch.nn.Module]) -> Iterator[None]:
        """Gives every rank those of the first one once, then keeps forward passes free of collectives."""
        wrapped = [model for model in models if isinstance(model, DistributedDataParallel)]
        for model in wrapped:
            first = dist.get_global_rank(model.process_group, 0)
            for buffer in model.module.buffers():
                dist.broadcast(buffer, first, group=model.process_group)
        before = [model.require_forward_param_sync for model in wrapped]
        try:
            for model in wrapped:
                model.require_forward_param_sync = False
            yield
        finally:
            for model, flag in zip(wrapped, before, strict=True):
                model.require_forward_param_sync = flag


def no_weights(option: str) -> ValueError:
    """What to raise where gradients cannot be averaged by weights of the user's."""
    return ValueError(
        f"`weight=` of `self.backward`, or from `forward`, does not work with `{option}`: allowed are the default, "
        '`parallel="ddp"` with `backend="gloo"` or "nccl", and `parallel="none"`, where you average gradients yourself.'
    )


@contextmanager
def _silenced(parameters: Iterable[torch.Tensor]) -> Iterator[None]:
    """Makes the gradients that come to parameters 0, before anybody else sees them."""
    handles = [parameter.register_hook(torch.zeros_like) for parameter in parameters if parameter.requires_grad]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _for_torch(options: dict[str, Any]) -> dict[str, Any]:
    """The options that `DistributedDataParallel` itself knows."""
    return {name: value for name, value in options.items() if name != COMM_HOOK}


def _deferrer(models: Sequence[DistributedDataParallel]) -> Callable[[bool], None]:
    """What `DistributedDataParallel.no_sync` does, for a batch instead of a block of code."""

    def defer(is_deferred: bool) -> None:
        for model in models:
            model.require_backward_grad_sync = not is_deferred

    return defer


def _average(state: _HookState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
    parallel = state.parallel
    if parallel._weights_in_hook:
        _weight(parallel.step, bucket.buffer())
    group = exchanges_at_once() if state.goes_at_once else None
    if group is not None:
        return _average_at_once(parallel, group, bucket)
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    future = allreduce_hook(state.process_group or dist.group.WORLD, bucket)  # type: ignore[arg-type]
    return parallel.exchanges.watch(future, bucket.is_last())


def _average_at_once(parallel: DDP, group: Group, bucket: Any) -> Any:
    gradients = bucket.buffer()
    try:
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

    Gloo, whose threads exchange one bucket while the next is computed, has no use for them. Between nodes, where nobody
    has measured it, only those that fit the first bucket.
    """
    most = _FIRST_BUCKET_BYTES + (model.bucket_bytes_cap if is_on_one_node() else 0)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return (
        model.process_group is dist.group.WORLD
        and not any(getattr(module, "sparse", False) for module in model.modules())
        and all(each.device.type == "cpu" and each.dtype in _DTYPES for each in parameters)
        and sum(each.nbytes for each in parameters) <= most
    )


def _weight(step: Step, gradients: torch.Tensor) -> None:
    weight = step.outgoing_weight()
    if weight != 1.0:
        gradients.mul_(weight)


def _hook_of_user(hook: Any) -> tuple[Any, Callable[..., Any]]:
    """The state and the function of a hook of the user's: `function`, or `(state, function)`."""
    state, function = hook if isinstance(hook, tuple) else (None, hook)
    if not callable(function):
        raise ValueError(
            f"`ddp_args={{'{COMM_HOOK}': {hook!r}}}`: need a communication hook of PyTorch, or a tuple of the state "
            "that it is called with and the hook."
        )
    return state, function


def _has_state(hook: Any) -> bool:
    """Whether a hook of the user's may remember something: a group, what it sent before, a counter."""
    if hook is None:
        return False
    state, function = _hook_of_user(hook)
    return state is not None or not isinstance(function, FunctionType)


def _weight_and_call(state: _HookState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
    """Does what a hook of the user's does."""
    function, parallel = state.function, state.parallel
    assert function is not None
    if not parallel._weights_in_hook:
        return function(state.state, bucket)
    _weight(parallel.step, bucket.buffer())
    return parallel.exchanges.watch(function(state.state, bucket), bucket.is_last())


def unwrap(model: torch.nn.Module) -> torch.nn.Module:
    """The model without our wrapper, and without one that the user put around it under the usual name `module`."""
    inner = getattr(model, "module", None)
    return inner if isinstance(inner, torch.nn.Module) else model
