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
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from types import FunctionType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.utils import _verify_param_shape_across_processes
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

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

# What a module is given from outside, and what making it again would clear.
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


@dataclass(eq=False)
class _Wrapping:
    """A model that `DistributedDataParallel` was put around.

    Attributes:
        model: The wrapper.
        options: What it was made with.
        covered: The parameters whose gradients it averages: those that were not frozen when it was made.
    """

    model: DistributedDataParallel
    options: dict[str, Any]
    covered: tuple[torch.nn.Parameter, ...]

    def fits(self, parameters: Iterable[torch.nn.Parameter]) -> bool:
        """Whether it does for what the model trains now; else it must be made again.

        It waits for gradients of parameters that were frozen since, unless it was told to look for unused ones. One
        around a model that is all frozen waits for nothing: models are frozen for a part of each batch, too.
        """
        now = [parameter for parameter in parameters if parameter.requires_grad]
        if not now or _are_same(now, self.covered):
            return True
        is_more = not {*map(id, now)} <= {*map(id, self.covered)}
        return not is_more and self.model.find_unused_parameters


@dataclass(frozen=True, eq=False)
class _HookState:
    """What our communication hook is called with.

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
        self._left_out: list[torch.nn.Module] = []

    # ---------------------------------------------------------------------------------------- set-up

    def wrap(self, model: torch.nn.Module, device_ids: list[int] | None, options: dict[str, Any]) -> torch.nn.Module:
        """The model to call in training. `options` are those for `DistributedDataParallel`."""
        return model

    def wrap_optimizer(self, optimizer: Any) -> Any:
        """The optimizer to use in training."""
        return optimizer

    def _leave_out(self, model: torch.nn.Module, group: Any = None) -> torch.nn.Module:
        """Makes a model equal on all ranks that has nothing to train, and so no gradients to average."""
        take_from_first((*model.parameters(), *model.buffers()), group)
        self._left_out.append(model)
        return model

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

    def match(self, models: Sequence[torch.nn.Module]) -> None:
        """Sees to it that gradients are averaged of all that the wrapped `models` train by now.

        Called before the first batch of a call and of a pass, on all ranks at the same time.

        Raises:
            ValueError: That cannot be done.
        """
        for model in self._left_out:
            if trainable(model) and any(model is each for each in models):
                raise ValueError(
                    f"A model that had nothing to train when it was registered (`{type(model).__name__}`) has "
                    "parameters with `requires_grad=True` now, whose gradients are not averaged over the workers. "
                    "Freeze it after `register` instead of before: a model that is registered with something to train "
                    "may be frozen and unfrozen later."
                )

    @property
    def obstacle(self) -> str | None:
        """Why the models cannot go on in a new group; None when they can."""
        return "the replicas are not kept equal by `DistributedDataParallel`"

    def reform(self) -> None:
        """Connects the models to the new group; they stay the same objects."""
        self.exchanges.forget()

    def weighted(self, loss: torch.Tensor, optimizer: Any = None) -> torch.Tensor:
        """The loss to run the backward pass on, of a batch that counts by its samples.

        Raises:
            RuntimeError: It is unknown which batch it is of.
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
            RuntimeError: It is unknown which batch it is of.
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
        self._wrapped: list[_Wrapping] = []
        self._armed: set[int] = set()
        self._uncovered: list[torch.nn.Parameter] = []

    def wrap(self, model: torch.nn.Module, device_ids: list[int] | None, options: dict[str, Any]) -> torch.nn.Module:
        covered = trainable(model)
        if not covered:
            return self._leave_out(model, options.get("process_group"))
        options = {"device_ids": device_ids, **options}
        wrapped = DistributedDataParallel(model, **_for_torch(options))
        self._register_hook(wrapped, options)
        self._wrapped.append(_Wrapping(wrapped, options, covered))
        return wrapped

    def _register_hook(self, wrapped: DistributedDataParallel, options: dict[str, Any]) -> None:
        hook = options.get(COMM_HOOK)
        if hook is not None:
            state, function = _hook_of_user(hook)
            theirs = _HookState(self, _group_of_user(wrapped), function=function, state=state)
            wrapped.register_comm_hook(theirs, _weight_and_call)
        elif id(wrapped) in self._armed:
            # Only this decides, not the number of ranks or what was before: all ranks must do the same.
            goes_at_once = _goes_at_once(wrapped)
            if self._weights_in_hook or goes_at_once:
                wrapped.register_comm_hook(_HookState(self, _group_of_user(wrapped), goes_at_once), _average)

    @property
    def obstacle(self) -> str | None:
        if any("process_group" in each.options for each in self._wrapped):
            return "`ddp_args` names a process group of its own"
        return next(filter(None, map(_hook_obstacle, self._wrapped)), None)

    def reform(self) -> None:
        """Builds each wrapper again around the same model, as the same object: user code keeps a reference."""
        super().reform()
        for each in self._wrapped:
            self._build_anew(each, init_sync=False)

    def _build_anew(self, each: _Wrapping, init_sync: bool) -> None:
        wrapped = each.model
        kept = {name: wrapped.__dict__[name] for name in _KEPT_BY_WRAPPER if name in wrapped.__dict__}
        with _something_to_train(wrapped.module):
            each.covered = trainable(wrapped.module)
            wrapped.__init__(wrapped.module, init_sync=init_sync, **_for_torch(each.options))  # type: ignore[misc]
        wrapped.__dict__.update(kept)
        self._register_hook(wrapped, each.options)

    def match(self, models: Sequence[torch.nn.Module]) -> None:
        """Builds wrappers again whose model trains something else than when they were made.

        The ranks ask each other first: one that builds alone would wait for the others for ever.
        """
        ours = {*map(id, self._left_out), *(id(each.model) for each in self._wrapped)}  # others are the user's to wrap
        parameters = {id(model): tuple(model.parameters()) for model in models if id(model) in ours}
        here = [each for each in self._wrapped if id(each.model) in parameters]
        everything = [parameter for part in parameters.values() for parameter in part]
        fits = self._agree([each.fits(parameters[id(each.model)]) for each in here], everything)
        super().match(models)
        for each in (each for each, fits_everywhere in zip(here, fits, strict=True) if not fits_everywhere):
            obstacle = _hook_obstacle(each)
            if obstacle is not None:
                raise ValueError(
                    f"Parameters were frozen or unfrozen since `register`, and {obstacle}, which would not fit the "
                    "others: freeze before `register`, or use a hook without a state."
                )
            self._build_anew(each, init_sync=True)
        covered = {id(parameter) for each in here for parameter in each.covered}
        self._uncovered = [parameter for parameter in everything if id(parameter) not in covered]

    def _agree(self, fits: list[bool], parameters: Iterable[torch.nn.Parameter]) -> list[bool]:
        """Of each wrapper, whether all ranks say that it fits.

        Raises:
            ValueError: The ranks train different parameters.
        """
        flags = bytes(parameter.requires_grad for parameter in parameters)
        own = zlib.crc32(flags) >> 8  # short, so that sums of squares are exact
        numbers = torch.tensor([own, own**2, *fits], device=_reachable())
        self.all_sum(numbers)
        total, squares, *counts = numbers.tolist()
        if squares * dist.get_world_size() != total**2:  # they are equal if all that was added up is
            raise ValueError(
                "The workers have frozen different parameters (`requires_grad`), so their gradients do not fit "
                "together: freeze and unfreeze the same parameters on all of them, whatever the rank."
            )
        return [count == dist.get_world_size() for count in counts]

    def _check_step(self, came_through: Callable[[], None]) -> None:
        came_through()
        if any(parameter.requires_grad for parameter in self._uncovered):
            raise ValueError(
                "Parameters were unfrozen (`requires_grad=True`) in the middle of a pass, and their gradients were not "
                "averaged over the workers. Unfreeze them between two calls of `train`, with `apply_all_operators`, or "
                "in `train_epoch` before the first batch is drawn."
            )

    def arm(
        self, models: Sequence[torch.nn.Module], weight_in_hook: bool, window: int = 1, may_defer: bool = True
    ) -> None:
        """Installs a hook where it is of use: for weighting and watching gradients, or for speed.

        A model for which the user registered a hook of his own by hand keeps that one; PyTorch allows one each.
        """
        wrapped = [model for model in models if isinstance(model, DistributedDataParallel)]
        self.step.defer = _deferrer(wrapped) if may_defer else never_defer
        super().arm(models, weight_in_hook, window)
        self.step.check = partial(self._check_step, self.step.check)
        self._weights_in_hook = self._weights_in_hook or weight_in_hook
        for model in wrapped:
            self._armed.add(id(model))
            if not model._comm_hooks:
                self._register_hook(model, {})

    @contextmanager
    def weighting(
        self, loss: torch.Tensor, optimizers: Sequence[Any], weight: float, parameters: Iterable[torch.Tensor]
    ) -> Iterator[torch.Tensor]:
        if any("process_group" in each.options for each in self._wrapped):
            raise no_weights('ddp_args={"process_group": ...}')
        with super().weighting(loss, optimizers, weight, parameters) as weighted:
            yield weighted

    def _start_sum(self, number: float) -> Callable[[], float]:
        # In the group of the gradients: there it comes right before those of the same backward pass, on every rank.
        numbers = torch.tensor([number], dtype=torch.float64, device=_reachable())
        with self.exchanges.noting():
            work = dist.all_reduce(numbers, async_op=True)
        return partial(self._sum_of, work, numbers)

    def _sum_of(self, work: Any, numbers: torch.Tensor) -> float:
        with self.exchanges.noting():
            work.wait()
        return numbers.item()

    def exchange(self, parameters: Sequence[torch.Tensor]) -> None:
        groups = {id(p): each.model.process_group for each in self._wrapped for p in each.model.parameters()}
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


def trainable(model: torch.nn.Module) -> tuple[torch.nn.Parameter, ...]:
    """The parameters of a model that are not frozen."""
    return tuple(parameter for parameter in model.parameters() if parameter.requires_grad)


def _are_same(these: Sequence[Any], those: Sequence[Any]) -> bool:
    return len(these) == len(those) and all(one is other for one, other in zip(these, those, strict=True))


@contextmanager
def _something_to_train(model: torch.nn.Module) -> Iterator[None]:
    """Unfreezes a model for a moment if all of it is frozen, which `DistributedDataParallel` refuses."""
    frozen = [] if trainable(model) else [p for p in model.parameters() if p.is_floating_point() or p.is_complex()]
    for parameter in frozen:
        parameter.requires_grad_(True)
    try:
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)


def take_from_first(tensors: Iterable[torch.Tensor], group: Any = None) -> None:
    """Gives every rank of a group the numbers that the first one has, whatever their format.

    Raises:
        RuntimeError: The ranks' tensors differ in shape.
    """
    group = group or dist.group.WORLD
    present = [each.detach() for each in tensors if each.numel() and not each.is_meta and not is_lazy(each)]
    if not present:
        return
    _verify_param_shape_across_processes(group, present)
    first = dist.get_global_rank(group, 0)
    for tensor in present:
        flat = tensor.contiguous().reshape(-1)
        dist.broadcast(flat.view(torch.uint8), first, group=group)
        if flat.data_ptr() != tensor.data_ptr():
            tensor.copy_(flat.reshape(tensor.shape))


def _reachable() -> torch.device | None:
    """Where numbers have to be that the default group adds up; None for the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else None


def _hook_obstacle(each: _Wrapping) -> str | None:
    """Why its communication hook does not work in a new wrapper; None when it does."""
    if _has_state(each.options.get(COMM_HOOK)):
        return "a communication hook in `ddp_args` has a state, which is another one on each worker"
    if any(hook not in (_average, _weight_and_call) for hook, _ in each.model._comm_hooks):
        return "a model has a communication hook that was registered by hand"
    return None


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

    Gloo, whose threads exchange one bucket while the next is computed, has no use for them. Between nodes this is not
    measured: only those that fit the first bucket.
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
