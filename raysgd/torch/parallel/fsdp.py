"""The strategy "fsdp": shards models, gradients and optimizer states over the ranks with `fully_shard` (FSDP2).

Each rank holds a shard of every parameter. For the forward and backward pass of a block of the model, the block's
parameters are gathered from all ranks, and resharded afterwards. The same holds in evaluation. A block must have enough
parameters to be worth a collective. Parameters outside of such blocks are gathered together. Checkpoints, snapshots and
`get_model` contain full parameters, so they can be used with any other strategy.

All ranks must take part in each forward pass of a sharded model. In training, all ranks take the same steps. In
evaluation, however, a rank may have more batches than others, or generate a longer text. Therefore, evaluation proceeds
in rounds. Before each forward pass, a rank announces to all ranks which model it calls. Ranks that call no model, or
another model, receive the arguments of the forward pass, run the same forward pass and discard its output. They run no
code of the operator. A rank that has finished its batches takes part in rounds until no rank has batches left. ADR 92
discusses alternatives.
"""

from __future__ import annotations

import copy
import math
import pickle
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Shard

from raysgd.core.connections.torch import board_of_group, new_group_beside
from raysgd.core.memory import return_large_blocks
from raysgd.torch.objects.loading import copied
from raysgd.torch.objects.models import blocks_of, fill, is_empty, to_device, without_checkpointing
from raysgd.torch.parallel.options import FSDPOptions
from raysgd.torch.parallel.strategy import Strategy
from raysgd.torch.parallel.sync import GradientSync
from raysgd.torch.parallel.tensors import take_from_first, trainable

_HAS_LEFT = -1  # sent instead of a model's number by a rank that has no batches left

GatherNumbers = Callable[[int], list[int]]
"""Function that sends a number to the other ranks and returns a list of the numbers of all ranks, by rank."""
Share = Callable[[Any, int], Any]
"""Function that sends the arguments of a forward pass from the given rank to all ranks, and returns the arguments."""
Context = Callable[[], AbstractContextManager[Any]]


class ForwardRounds:
    """Takes part in the rounds of an evaluation. In a round, all ranks run the same forward pass of a sharded model.

    Args:
        gather: Gathers a number from each rank.
        share: Sends the arguments of a forward pass from one rank to all ranks.
    """

    def __init__(self, gather: GatherNumbers, share: Share) -> None:
        self._gather, self._share = gather, share
        self._models: Sequence[Any] = ()
        self._is_open = False
        self._context: Context = nullcontext

    @contextmanager
    def opened(self, models: Sequence[Any], context: Context = nullcontext) -> Iterator[None]:
        """Run evaluation code in the `with` block. The block ends on all ranks at the same time.

        If user code raises on a rank between two forward passes, the rank still takes part in the remaining forward
        passes, so that the other ranks can finish.

        Args:
            models: Sharded models, in the same order on each rank.
            context: Function that returns the context manager, such as autocast, in which to run forward passes that
                other ranks have requested.
        """
        self._models, self._context, self._is_open = models, context, True
        try:
            yield
        except Exception:  # user code may raise any exception
            with suppress(Exception):  # connections may be lost as well, but the user's exception is more useful
                self._help()
            raise
        else:
            self._help()
        finally:
            self._is_open = False

    def enter(self, model: Any, args: Any, kwargs: Any) -> None:
        """Take part in rounds until the ranks agree on the model that this rank is about to call.

        Called before each forward pass of a sharded model. Afterwards, all ranks run a forward pass of this model.
        Outside of evaluation, the method does nothing.

        Args:
            model: The model that this rank calls.
            args: Positional arguments of the forward pass.
            kwargs: Keyword arguments of the forward pass.
        """
        own = next((number for number, each in enumerate(self._models) if each is model), None)
        if not self._is_open or own is None:
            return
        while self._round(own, (args, kwargs)) != own:
            pass

    def _help(self) -> None:
        while self._round(_HAS_LEFT) is not None:
            pass

    def _round(self, said: int, call: Any = None) -> int | None:
        """Agree with all ranks on one of the models that they call, and run a forward pass of this model.

        If this rank itself calls the chosen model, the forward pass runs after this method has returned.

        Args:
            said: Number of the model that this rank calls; `_HAS_LEFT` if this rank has no batches left.
            call: Arguments with which this rank calls that model; None if this rank calls no model.

        Returns:
            Number of the model that the ranks run; None if no rank calls a model.
        """
        answers = self._gather(said)
        calls = [answer for answer in answers if answer != _HAS_LEFT]
        if not calls:
            return None
        chosen = min(calls)
        if any(answer != chosen for answer in answers):
            args, kwargs = self._share(call, answers.index(chosen))
            if said != chosen:
                self._run(self._models[chosen], args, kwargs)
        return chosen

    def _run(self, model: Any, args: Any, kwargs: Any) -> None:
        self._is_open = False  # this forward pass must not start another round
        try:
            with torch.no_grad(), self._context():
                model(*args, **kwargs)
        finally:
            self._is_open = True


def hook_of(rounds: ForwardRounds) -> Callable[..., None]:
    """Return a forward pre-hook, for compiled and other models, that calls `rounds.enter` before each forward pass."""

    def hook(model: Any, args: Any, kwargs: Any) -> None:
        enter = torch.compiler.disable(rounds.enter) if torch.compiler.is_compiling() else rounds.enter
        enter(model, args, kwargs)

    return hook


_reduce_scatter: Any = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)  # in newer versions of PyTorch, the function has the first name


class FSDPSync(GradientSync):
    """Averages gradients in the reduce-scatter of `fully_shard`, which calls this object."""

    # Gradients of user code must not wait: it may stop accumulating early, and what was not reduced in its backward
    # pass cannot be reduced later.
    averages = _defers = True

    def _set_sync(self, is_now: bool) -> None:
        for root in _roots(self.models):
            root.set_requires_gradient_sync(is_now)

    def are_cleared(self, parameters: Iterable[torch.Tensor]) -> bool:
        """Return True if no parameter has a gradient from earlier batches to which the current batch can add.

        Always return False if communication may be deferred, because `fully_shard` then stores gradients where they
        cannot be checked.
        """
        return not self.defers and super().are_cleared(parameters)

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any, async_op: bool = False
    ) -> Any:
        # Not as an all-reduce of the step: nobody would notice how it ends.
        self.leg.flight_recorder.note("gradients were exchanged")
        self.leg.multiply(input_tensor)
        return _reduce_scatter(output=output_tensor, input=input_tensor, op=op, group=group, async_op=async_op)


class FSDP(Strategy):
    """The strategy that applies `fully_shard` to every model with trainable parameters.

    Args:
        device: Device of this rank's models.
        world_size: Number of ranks.
        options: The trainer's options for this strategy.
    """

    is_sharded = True

    def __init__(self, device: torch.device, world_size: int, options: FSDPOptions | None = None) -> None:
        super().__init__(FSDPSync())
        self._device, self._world_size = device, world_size
        self._options = options or FSDPOptions()
        self._mesh: DeviceMesh | None = None
        self._moved: dict[int, torch.nn.Parameter] = {}  # sharded parameters, by the IDs of the full parameters
        self._whole: list[torch.nn.Parameter] = []  # the full parameters, referenced here so that their IDs stay unique
        self._skeletons: dict[int, torch.nn.Module] = {}
        self._rounds = ForwardRounds(self._numbers_of_all, self._arguments_of)
        self._group_beside: Any = None
        if device.type == "cpu":
            return_large_blocks()  # gathered parameters are allocated and freed in each forward and backward pass

    def wrap(self, model: torch.nn.Module, device_ids: list[int] | None, options: dict[str, Any]) -> torch.nn.Module:
        """Copy rank 0's values into a model, shard the model in place, and return it.

        A model without trainable parameters is not sharded. `device_ids` and `options` are for DDP, and are ignored.

        Raises:
            ValueError: A block's trainable parameters have several dtypes, or the ranks created different models.
        """
        if not trainable(model):
            return self._leave_out(model)
        comes_empty = is_empty(model)
        if not comes_empty:
            take_from_first((*model.parameters(), *model.buffers()))
        self._skeletons[id(model)] = _skeleton_of(model)
        whole = dict(model.named_parameters())
        mesh = self._mesh = self._mesh or init_device_mesh(self._device.type, (self._world_size,))
        policies = self._options.for_pytorch()
        blocks = blocks_of(model, self._options.min_block_parameters)
        for unit in (*blocks, model):
            reshards = unit is not model and self._options.reshard_after_forward
            _check_dtypes(unit)
            with self._filled_for_a_moment(unit) if comes_empty else nullcontext():
                fully_shard(unit, mesh=mesh, reshard_after_forward=reshards, **policies)
        for name, parameter in model.named_parameters():
            self._moved[id(whole[name])] = parameter
            self._whole.append(whole[name])
        model.register_forward_pre_hook(hook_of(self._rounds), prepend=True, with_kwargs=True)
        return model

    @contextmanager
    def _filled_for_a_moment(self, part: torch.nn.Module) -> Iterator[None]:
        """For the `with` block, allocate a module that is on the meta device, and copy rank 0's values into it.

        The `with` block must shard the module. After the block, the memory of the full parameters is freed.
        """
        fill(part, self._device)
        whole = [parameter for parameter in part.parameters() if not isinstance(parameter, DTensor)]
        take_from_first((*whole, *part.buffers()))
        yield
        for parameter in whole:  # optimizers still refer to these parameters, so free their memory explicitly
            parameter.data = parameter.data.new_empty(0)

    def rebind_optimizers(self, optimizers: Sequence[Any]) -> None:
        """Replace the full parameters in optimizers with the sharded parameters, and shard the optimizers' states."""
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["params"] = [self._moved.get(id(parameter), parameter) for parameter in group["params"]]
            for parameter in [key for key in optimizer.state if id(key) in self._moved]:
                moved = self._moved[id(parameter)]
                optimizer.state[moved] = _divided(optimizer.state.pop(parameter), moved)
        self._whole.clear()
        self._moved.clear()

    def attach(self, models: Sequence[torch.nn.Module]) -> None:
        for part in _sharded_parts(models):
            part.set_custom_reduce_scatter(self.sync)

    @contextmanager
    def evaluating(self, models: Sequence[torch.nn.Module]) -> Iterator[None]:
        """Copy rank 0's buffers to every rank, then evaluate in the `with` block. The models stay sharded.

        Ranks may run different numbers of forward passes in the block.
        """
        roots = _roots(models)
        self._repeat_buffers(roots)
        for model in roots:
            model.set_reshard_after_forward(True)
            model.reshard()  # a forward pass without a backward pass may have left the parameters gathered
        try:
            with self._rounds.opened(roots, self.forward_context):
                yield
        finally:
            for part in _sharded_parts(models):
                part.reshard()  # an exception in a forward pass may have left the parameters gathered
                keeps = part in roots or not self._options.reshard_after_forward
                part.set_reshard_after_forward(not keeps, recurse=False)

    def _numbers_of_all(self, own: int) -> list[int]:
        numbers = torch.zeros(self._world_size, dtype=torch.int64)
        numbers[dist.get_rank()] = own
        dist.all_reduce(numbers, group=self.group_beside)
        return numbers.tolist()

    def _arguments_of(self, own: Any, source: int) -> Any:
        """Send the arguments of a forward pass from the rank `source` to all ranks.

        They are pickled, and anyone can connect to gloo. Therefore, gloo sends only the key under which the arguments
        are on the board, whose connections are authenticated.
        """
        key, board = torch.tensor([secrets.randbits(62)]), board_of_group()
        if source == dist.get_rank():
            board.put(_topic(key), pickle.dumps(to_device(own, torch.device("cpu"))))
        dist.broadcast(key, source, group=self.group_beside)
        # A rank that is gone ends the wait, so the wait needs no limit.
        return to_device(pickle.loads(board.take(_topic(key), math.inf)), self._device)

    def state_of(self, part: Any) -> dict[str, Any]:
        """Return the full state dict of a model or optimizer on rank 0.

        On other ranks, the state dict has None in place of sharded tensors. All ranks must call this method together.
        """
        state: dict[str, Any] = _gathered(part.state_dict(), keep=dist.get_rank() == 0)
        return state

    def empty_like(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if not isinstance(tensor, DTensor):
            return super().empty_like(tensor, dtype)
        return _as_divided(torch.empty_like(tensor.to_local(), dtype=dtype), tensor)

    @property
    def group_beside(self) -> Any:
        """A separate gloo process group of all ranks.

        The first read creates the group, so all ranks must read this property for the first time together.
        """
        self._group_beside = self._group_beside or new_group_beside()
        return self._group_beside

    def load_model(self, model: torch.nn.Module, state: Mapping[str, Any]) -> None:
        """Load this rank's shards of a model from a state dict with full or sharded tensors, without communication."""
        own = model.state_dict()
        rest = dict(state)
        with torch.no_grad():
            for name, tensor in own.items():
                if isinstance(tensor, DTensor):
                    tensor.to_local().copy_(_part_of(rest.pop(name), tensor))
        model.load_state_dict(rest, strict=False)

    def load_optimizer(self, optimizer: Any, state: Mapping[str, Any]) -> None:
        """Load a full state dict into an optimizer. Tensors with the shape of their parameter are sharded like it."""
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        indices = [index for group in state["param_groups"] for index in group["params"]]
        by_index = dict(zip(indices, parameters, strict=True))
        entries = {
            index: _divided(entry, by_index[index]) if index in by_index else entry
            for index, entry in state["state"].items()
        }
        optimizer.load_state_dict({**state, "state": entries})

    def plain_model(self, model: torch.nn.Module) -> torch.nn.Module | None:
        """Return a full CPU copy of a model on rank 0, and None on other ranks.

        A model that is not sharded is copied on every rank. All ranks must call this method together.
        """
        state = self.state_of(model)
        skeleton = self._skeletons.get(id(model))
        if skeleton is None:
            return super().plain_model(model)
        if dist.get_rank():
            return None
        plain = _filled(skeleton, state)
        for name, buffer in model.named_buffers():  # includes non-persistent buffers, which the state dict lacks
            owner, _, attribute = name.rpartition(".")
            setattr(plain.get_submodule(owner), attribute, buffer.detach().cpu().clone())
        return without_checkpointing(plain).train(model.training)


def _topic(key: torch.Tensor) -> str:
    return f"raysgd/arguments/{int(key)}"


def _check_dtypes(unit: torch.nn.Module) -> None:
    """Check that the trainable parameters of a block, which are gathered together, have the same dtype.

    Raises:
        ValueError: The trainable parameters have several dtypes.
    """
    dtypes = {each.dtype for each in trainable(unit) if not isinstance(each, DTensor)}
    if len(dtypes) > 1:
        found = ", ".join(sorted(str(each).removeprefix("torch.") for each in dtypes))
        raise ValueError(
            f'`strategy="fsdp"` gathers the parameters of `{type(unit).__name__}` together, but its trainable '
            f"parameters have several dtypes ({found}). Cast them to one dtype, as with `.float()`, before you create "
            "the optimizer. Frozen parameters may keep another dtype."
        )


def _sharded_parts(models: Iterable[torch.nn.Module]) -> list[Any]:
    return [part for model in models for part in model.modules() if isinstance(part, FSDPModule)]


def _roots(models: Iterable[torch.nn.Module]) -> list[Any]:
    return [model for model in models if isinstance(model, FSDPModule)]


def _skeleton_of(model: torch.nn.Module) -> torch.nn.Module:
    """Return a copy of a model with parameters on the meta device, which take no memory.

    A model cannot be copied once it is sharded. `plain_model` therefore fills a copy of the returned model with values.
    """
    memo: dict[int, Any] = {
        id(parameter): torch.nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
        for parameter in model.parameters()
    }
    return copy.deepcopy(model, memo)


def _filled(skeleton: torch.nn.Module, state: Mapping[str, Any]) -> torch.nn.Module:
    """Return a copy of `skeleton`, a model without values, filled with the tensors in a state dict.

    Parameters that were tied, which means shared by several modules, stay tied.
    """
    plain = copy.deepcopy(skeleton)
    names: dict[int, list[str]] = {}
    for name, parameter in plain.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    plain.load_state_dict(state, strict=False, assign=True)
    for first, *others in names.values():
        for name in others:
            owner, _, attribute = name.rpartition(".")
            setattr(plain.get_submodule(owner), attribute, plain.get_parameter(first))
    return plain


def _gathered(value: Any, keep: bool) -> Any:
    """Return nested containers with full tensors, on the CPU, in place of sharded tensors.

    All ranks must call this function together.

    Args:
        value: Nested containers.
        keep: False to return None in place of each sharded tensor, to save memory on this rank.
    """
    if isinstance(value, DTensor):
        whole = value.full_tensor()
        return whole.cpu() if keep else None
    if isinstance(value, dict):
        return {key: _gathered(item, keep) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_gathered(item, keep) for item in value)
    return value


def _part_of(whole: torch.Tensor, like: DTensor) -> torch.Tensor:
    """Return this rank's shard of a tensor.

    Args:
        whole: Full tensor, or a tensor that is already sharded.
        like: Sharded tensor whose layout determines the shard.
    """
    if isinstance(whole, DTensor):
        return whole.to_local()
    [placement] = like.placements
    if not isinstance(placement, Shard):
        return whole
    chunks = torch.chunk(whole, like.device_mesh.size(), dim=placement.dim)
    rank = like.device_mesh.get_local_rank()
    return chunks[rank] if rank < len(chunks) else whole.narrow(placement.dim, 0, 0)


def _divided(entry: Any, parameter: Any) -> Any:
    """Return an optimizer's state for a parameter, with tensors that are sharded like the parameter.

    Args:
        entry: State that the optimizer has for the parameter, with full or sharded tensors.
        parameter: The parameter. If it is not sharded, the result is a copy of the state.
    """
    if not isinstance(entry, Mapping):
        return copy.deepcopy(entry)
    if not isinstance(parameter, DTensor):
        return {name: copied(value, parameter) for name, value in entry.items()}
    return {name: _divided_tensor(value, parameter) for name, value in entry.items()}


def _divided_tensor(value: Any, parameter: DTensor) -> Any:
    if isinstance(value, DTensor):
        return value
    is_like = isinstance(value, torch.Tensor) and value.shape == parameter.shape
    if not is_like or not value.ndim:
        return copied(value)
    return _as_divided(_part_of(value, parameter).to(parameter.device, copy=True).contiguous(), parameter)


def _as_divided(part: torch.Tensor, like: DTensor) -> DTensor:
    return DTensor.from_local(
        part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
