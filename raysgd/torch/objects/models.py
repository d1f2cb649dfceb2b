"""Models and batches as PyTorch objects: moves, sends, fills and switches them, and finds their blocks.

Tensors on PyTorch's meta device have shapes but no memory. Their values are set by each module's method
`reset_parameters`, which PyTorch also calls when a module is constructed. Tensors stay the same Python objects, so
optimizers that were created earlier still refer to the model's parameters. ADR 92 explains why users may register a
model on the meta device.

A block is an element of a `ModuleList` or `Sequential` that has parameters: a layer of a transformer, or a stage of a
convolutional network. Elements inside another block are not blocks, so blocks are never nested.

ADR 23 explains why models are changed in place and why modes are restored.

Each module inside a model has a separate mode. For example, a frozen batch norm or a teacher network stays in
evaluation mode during training. `model.train()` would put these into training mode as well, so the mode of each module
is stored before `model.eval()` and restored afterwards.
"""

from __future__ import annotations

import copy
import copyreg
import logging
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from dataclasses import fields, is_dataclass, replace
from functools import partial
from itertools import chain
from typing import Any, cast

import torch
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

from raysgd.core.private_names import require_names
from raysgd.exceptions import InvalidRegistrationError

logger = logging.getLogger(__name__)

_CAPTURING = "transformers.utils.output_capturing"


def to_device(value: Any, device: torch.device) -> Any:
    """Return nested tuples, lists, dicts and dataclasses with all tensors on `device`.

    An object with a method `to`, such as a batch of `transformers`, is moved by that method. Tensors in pinned memory
    are copied to a GPU asynchronously. Copies to the CPU are complete when the function returns.
    """
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=device.type != "cpu")
    if hasattr(value, "to") and not isinstance(value, type):
        return value.to(device)
    if is_dataclass(value) and not isinstance(value, type):
        return _moved_dataclass(value, device)
    if isinstance(value, MutableMapping):
        moved = copy.copy(value)  # keeps the class of the mapping, such as `defaultdict`
        moved.update((key, to_device(item, device)) for key, item in value.items())
        return moved
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(to_device(item, device) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(to_device(item, device) for item in value)
    return value


def _moved_dataclass(value: Any, device: torch.device) -> Any:
    """Copy a dataclass with all tensors on `device`.

    Unless the dataclass is also a dict, its `__init__` is not called, because `__init__` may recompute values.
    """
    moved = {field.name: to_device(getattr(value, field.name), device) for field in fields(value)}
    if isinstance(value, MutableMapping):  # model outputs of `transformers` are both dataclasses and dicts
        remade: Any = replace(cast("Any", value), **moved)
        return remade
    copied = copy.copy(value)
    for name, item in moved.items():
        object.__setattr__(copied, name, item)  # unlike `setattr`, this also works for frozen dataclasses
    return copied


def read_tensors(tensors: list[torch.Tensor]) -> list[float]:
    """Return the values of one-element tensors. If all are on one device, wait only once for the device."""
    if len({tensor.device for tensor in tensors}) > 1:
        return [float(tensor) for tensor in tensors]
    if len({tensor.dtype for tensor in tensors}) > 1:
        tensors = [tensor.double() for tensor in tensors]
    values: list[float] = torch.stack([tensor.reshape(()) for tensor in tensors]).tolist()
    return values


def packed(model: torch.nn.Module) -> torch.nn.Module:
    """Make a model picklable, in place, and return the model. The receiving process must call `unpacked` on it.

    Pass a copy of the model, because this function changes the classes of some modules. Two things cannot be pickled.
    Modules with a parametrization have a class that `torch.nn.utils.parametrize` created, so they get their original
    class back. Hooks of `transformers` that collect outputs refer to a global variable, which is pickled by its name.
    """
    for part in model.modules():
        if parametrize.is_parametrized(part):
            part.__class__ = parametrize.type_before_parametrizations(part)
    if variable := getattr(sys.modules.get(_CAPTURING), "_active_collector", None):
        copyreg.pickle(type(variable), lambda _: "_active_collector")
    return model


def unpacked(model: torch.nn.Module) -> torch.nn.Module:
    """Undo `packed` on a model, in place, in the process that has received the model. Return the model.

    Modules with a parametrization get back the class that `torch.nn.utils.parametrize` creates. Modules of
    `transformers` are added to the registry in which `transformers` looks up which outputs to collect.
    """
    registry = getattr(sys.modules.get(_CAPTURING), "_CAN_RECORD_REGISTRY", {})
    parts: list[Any] = list(model.modules())
    for part in parts:
        if hasattr(part, "_can_record_outputs"):
            registry[part] = part._can_record_outputs
        if parametrize.is_parametrized(part):
            lists = part.parametrizations
            del part.parametrizations
            for name, each in lists.items():
                part.register_buffer(name, torch.empty(0))
                parametrize.register_parametrization(part, name, torch.nn.Identity(), unsafe=True)
                part.parametrizations[name] = each
    return model


class ModuleModes:
    """Puts models into evaluation mode, and later restores the previous mode of each module in the models."""

    def __init__(self) -> None:
        self._before: list[tuple[torch.nn.Module, bool]] = []
        self._after: list[bool] = []

    def evaluate(self, models: Iterable[Any]) -> None:
        """Put all models into evaluation mode. Objects in `models` that are not modules are ignored."""
        self.give_back()
        modules = [model for model in models if isinstance(model, torch.nn.Module)]
        parts = {id(part): part for model in modules for part in model.modules()}
        self._before = [(part, part.training) for part in parts.values()]
        for model in modules:
            model.eval()
        self.note()

    def note(self) -> None:
        """Record the modes of all modules at the end of the evaluation.

        If user code changes the mode of a module after that, `give_back` does not restore the mode.
        """
        self._after = [part.training for part, _ in self._before]

    def give_back(self) -> None:
        """Restore the modes from before `evaluate`, except for modules whose mode user code changed after `note`."""
        if not self._before:
            return
        wanted = [
            (part, before if part.training == after else part.training)
            for (part, before), after in zip(self._before, self._after, strict=True)
        ]
        self._before, self._after = [], []
        for part, mode in wanted:  # modules come before their submodules, whose modes they may change
            _set(part, mode)


def begin_training(model: torch.nn.Module) -> None:
    """Put a model into training mode if all of its modules are in evaluation mode, as they are in pretrained models.

    If only some modules are in evaluation mode, the user must have done this on purpose, so the model does not change.
    A model without trainable parameters does not change either.
    """
    if model.training:
        return
    is_evaluating = not any(part.training for part in model.modules())
    if is_evaluating and any(parameter.requires_grad for parameter in model.parameters()):
        model.train()


def _set(part: torch.nn.Module, mode: bool) -> None:
    if part.training == mode:
        return
    if type(part).train is torch.nn.Module.train:
        part.training = mode
    else:
        part.train(mode)  # an overridden `train` does more, such as merging weights for evaluation


_RESETS = ("reset_parameters", "_reset_parameters")  # PyTorch's attention modules use the latter name


def is_empty(model: torch.nn.Module) -> bool:
    """Return True if any tensor of a model is on the meta device."""
    return any(tensor.is_meta for tensor in _tensors(model, recurse=True))


def fill(part: torch.nn.Module, device: torch.device) -> None:
    """Allocate and initialize those tensors of a model or submodule that are on the meta device.

    Args:
        part: Model or submodule. Tensors that already have memory are moved to `device`, unless they are sharded.
        device: Device on which to allocate the tensors.

    Raises:
        InvalidRegistrationError: A module with tensors on the meta device has no `reset_parameters`, or this method
            does not set one of the tensors.
    """
    empty = [(module, [each for each in _tensors(module, recurse=False) if each.is_meta]) for module in part.modules()]
    for tensor in chain.from_iterable(tensors for _, tensors in empty):
        if tensor.is_meta:  # several modules may share a tensor, which is then already allocated
            torch.utils.swap_tensors(tensor, _room_like(tensor, device))
    for module, tensors in reversed(empty):  # initialize submodules first, as when a model is constructed
        if tensors:
            _reset(module, tensors)
    for tensor in _tensors(part, recurse=True):
        if type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.device.type != device.type:
            tensor.data = tensor.data.to(device)


def refuse_states(optimizers: Iterable[Any]) -> None:
    """Check that no optimizer already has state for parameters on the meta device.

    Raises:
        InvalidRegistrationError: An optimizer has such state.
    """
    for optimizer in optimizers:
        entries = getattr(optimizer, "state", {}).values()
        if any(isinstance(value, torch.Tensor) and value.is_meta for entry in entries for value in entry.values()):
            raise InvalidRegistrationError(
                f"`register(optimizers=...)` got a `{type(optimizer).__name__}`, which has a state before its first "
                "step, for a model on the meta device. Use an optimizer that makes its state in its first step, such "
                "as Adam, or make the model outside of `torch.device('meta')`."
            )


def _tensors(module: torch.nn.Module, recurse: bool) -> Sequence[torch.Tensor]:
    return [*module.parameters(recurse), *module.buffers(recurse)]


def _room_like(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return an allocated tensor like a meta tensor. Floats are NaN, to detect later if a module did not set them."""
    room = torch.empty_like(tensor, device=device, requires_grad=False)
    if room.is_floating_point() or room.is_complex():
        room.fill_(float("nan"))
    return torch.nn.Parameter(room, tensor.requires_grad) if isinstance(tensor, torch.nn.Parameter) else room


def _reset(module: torch.nn.Module, tensors: Sequence[torch.Tensor]) -> None:
    reset: Callable[[], Any] | None = next(filter(None, (getattr(module, name, None) for name in _RESETS)), None)
    require_names(torch.Tensor, "_version")
    versions = [tensor._version for tensor in tensors]
    if reset is not None:
        reset()
    named = dict(chain(module.named_parameters(recurse=False), module.named_buffers(recurse=False)))
    names = {id(tensor): name for name, tensor in named.items()}
    missed = [
        names[id(tensor)]
        for tensor, version in zip(tensors, versions, strict=True)
        if id(tensor) in names and _is_untouched(tensor, version)
    ]
    if missed:
        kind = type(module).__name__
        raise InvalidRegistrationError(
            f"`register(models=...)` got a model on the meta device, but "
            f"{', '.join(f'`{name}`' for name in missed)} of its `{kind}` would stay uninitialized, because `{kind}` "
            f"{'has no' if reset is None else 'does not set that in its'} `reset_parameters`. Give `{kind}` a method "
            "of this name that sets all its own parameters and buffers, or make it outside of `torch.device('meta')`."
        )


def _is_untouched(tensor: torch.Tensor, version: int) -> bool:
    if tensor.numel() and (tensor.is_floating_point() or tensor.is_complex()):
        return bool(tensor.isnan().all())  # `_room_like` set NaN; the version would not show a write through `.data`
    return bool(tensor.numel()) and tensor._version == version


def blocks_of(model: torch.nn.Module, min_parameters: int = 1) -> list[torch.nn.Module]:
    """Return a model's distinct blocks that have at least `min_parameters` parameter elements each.

    A block that occurs twice, or that shares a parameter with a module outside of the block, is omitted.

    Examples:
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU(), torch.nn.Linear(2, 1))
        >>> blocks_of(model)
        [Linear(in_features=2, out_features=2, bias=True), Linear(in_features=2, out_features=1, bias=True)]
    """
    owners = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    return [
        block
        for block in dict.fromkeys(_elements(model))
        if sum(parameter.numel() for parameter in block.parameters()) >= min_parameters and not _shares(block, owners)
    ]


def _elements(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    for child in module.children():
        is_element = isinstance(module, torch.nn.Sequential | torch.nn.ModuleList)
        if is_element and not isinstance(child, torch.nn.ModuleList):  # a `ModuleList` has no forward pass
            yield child
        else:
            yield from _elements(child)


def _shares(block: torch.nn.Module, owners: Counter[int]) -> bool:
    own = Counter(id(parameter) for _, parameter in block.named_parameters(remove_duplicate=False))
    return any(owners[identity] > count for identity, count in own.items())


def _recomputed(forward: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Run the forward pass of a block and store only its inputs. The backward pass recomputes the activations."""
    if not torch.is_grad_enabled():
        return forward(*args, **options)
    return checkpoint(forward, *args, use_reentrant=False, **options)


def checkpoint_activations(model: torch.nn.Module) -> int:
    """Let the blocks of a model recompute their activations in the backward pass. Return the number of changed blocks.

    The keys of the model's state dict do not change. A block with a batch norm is not changed, because a second forward
    pass of the block would update the running statistics twice for each batch.
    """
    blocks = [block for block in blocks_of(model) if not any(map(_is_batch_norm, block.modules()))]
    for block in blocks:
        block.forward = partial(_recomputed, block.forward)
    if not blocks:
        logger.warning(
            "`activation_checkpointing=True` has no effect, because no element of a `ModuleList` or `Sequential` in "
            "`%s` is free of batch norm",
            type(model).__name__,
        )
    return len(blocks)


def _is_batch_norm(part: torch.nn.Module) -> bool:
    """Return True if a module stores or synchronizes batch statistics. Other libraries' modules are recognized, too."""
    has_statistics = any(name == "running_mean" for name, _ in part.named_buffers(recurse=False))
    return has_statistics or isinstance(part, torch.nn.SyncBatchNorm)


def without_checkpointing(model: torch.nn.Module) -> torch.nn.Module:
    """Let the blocks of a model store their activations again, as before `checkpoint_activations`. Return the model."""
    for part in model.modules():
        if getattr(vars(part).get("forward"), "func", None) is _recomputed:
            del part.forward
    return model
