"""Loads saved states into models and optimizers, after checking that they match the registered objects.

The entire state is checked before anything is replaced. Otherwise, a mismatch might be detected only after one model
has been loaded, in the next optimizer step, or never. The checks also compare types and sizes that `load_state_dict`
does not compare. `torch.compile(model)` adds prefixes to the names of parameters. Names are compared without these
prefixes.
"""

from __future__ import annotations

import copy
import functools
import numbers
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch.nn.parameter import is_lazy
from torch.optim.lr_scheduler import LRScheduler

from raysgd.core.arguments import is_integer
from raysgd.torch.objects.slots import IMPLEMENTATION, check_slots, is_in_range, is_number, is_of_pytorch
from raysgd.trainer.worker.replica_state import require

_EXTRA_STATE = "_extra_state"
"""Suffix of keys in a state dict for values that a module's `get_extra_state` returned.

When such a value is loaded, the module may keep a reference to the value.
"""


def load_model(model: torch.nn.Module, saved: Mapping[str, Any], *, is_whole: bool = True) -> None:
    """Load a state dict into a model. The model keeps no reference to the state dict.

    Of the attribute `_metadata`, only the versions of modules are used. Otherwise, it could make PyTorch replace the
    model's parameters, which the optimizer would then no longer train.

    Args:
        model: Model that gets the state.
        saved: State dict that `check_model` has accepted.
        is_whole: False to allow missing entries.
    """
    copies = {
        id(value): value
        for name, value in saved.items()
        if isinstance(value, torch.Tensor) and not name.endswith(_EXTRA_STATE)
    }
    state = copy.deepcopy(saved, copies)
    if (metadata := getattr(state, "_metadata", None)) is not None:
        state._metadata = {  # type: ignore[attr-defined]
            name: {key: value for key, value in entry.items() if key == "version"} for name, entry in metadata.items()
        }
    model.load_state_dict(state, strict=is_whole)


def load_optimizer(optimizer: Any, saved: Mapping[str, Any]) -> None:
    """Load a state dict into an optimizer. Values are copied into the optimizer's tensors if dtype and shape match.

    An optimizer keeps references to the tensors that are passed to its `load_state_dict`. Therefore, this function
    passes the optimizer's own tensors, filled with the saved values, and copies of all other tensors. A copy has memory
    for each of its elements, even if the elements of the saved tensor share memory, and the memory format of its
    parameter. Fused optimizers expect both.
    """
    groups = getattr(optimizer, "param_groups", ())
    taken = {_address(parameter) for group in groups for parameter in group["params"]}
    copies: dict[int, Any] = {}
    own = optimizer.state_dict()
    own_entries, entries = own.get("state", {}), saved.get("state", {})
    saved_groups = saved.get("param_groups", ()) if "param_groups" in own else ()
    with torch.no_grad():
        for group, saved_group in zip(groups, saved_groups, strict=False):
            for parameter, index in zip(group["params"], saved_group["params"], strict=False):
                _fill(own_entries.get(index), entries.get(index), copies, taken, parameter)
        _fill(own_entries, entries, copies, taken)
    optimizer.load_state_dict(copy.deepcopy(saved, copies))


def _fill(own: Any, saved: Any, copies: dict[int, Any], taken: set[int], parameter: torch.Tensor | None = None) -> None:
    """Copy each tensor in `saved` into the tensor under the same keys in `own`, if `_is_alike` returns True for them.

    Clone the other tensors.

    Args:
        own: Current state of the optimizer.
        saved: State to load.
        copies: Dict to which this function adds each filled tensor in `own`, and each clone, by the ID of the saved
            tensor.
        taken: Addresses of memory that must not be written to, because it was already filled or belongs to a parameter.
        parameter: Parameter to which `saved` belongs.
    """
    if isinstance(saved, Mapping):
        for key, value in saved.items():
            _fill(own.get(key) if isinstance(own, Mapping) else None, value, copies, taken, parameter)
    elif type(saved) is torch.Tensor and id(saved) not in copies:
        if _is_alike(own, saved) and _address(own) not in taken:
            taken.add(_address(own))
            copies[id(saved)] = own.copy_(saved)
        else:
            copies[id(saved)] = copied(saved, parameter)


def copied(value: Any, parameter: torch.Tensor | None = None) -> Any:
    """Return a copy of a value in an optimizer's state. A copied tensor has memory for each of its elements.

    A deep copy of a tensor in a file would not: its elements may share memory, which a fused optimizer does not expect.

    Args:
        value: The value.
        parameter: Parameter to which the value belongs. A tensor of its shape gets its memory format, too.
    """
    if type(value) is not torch.Tensor:
        return copy.deepcopy(value)
    made = value.detach().clone()
    if parameter is None or type(parameter) not in (torch.Tensor, torch.nn.Parameter) or value.is_nested:
        return made.requires_grad_(value.requires_grad)
    if parameter.shape == value.shape and parameter.layout == value.layout == torch.strided:
        made = torch.empty_like(parameter, dtype=value.dtype, device=value.device).copy_(made)
    return made.requires_grad_(value.requires_grad)


def _is_alike(own: Any, saved: Any) -> bool:
    """Return True if a saved value can be copied into `own`, a value in an optimizer's state.

    Both must be plain tensors of equal dtype and shape, and `own` must not be a view of a larger tensor.
    """
    if type(own) is not torch.Tensor or type(saved) is not torch.Tensor:
        return False
    kinds = [(tensor.layout, tensor.dtype, tensor.shape) for tensor in (own, saved)]
    if kinds[0] != kinds[1] or own.layout is not torch.strided or own.is_meta:
        return False
    return own.is_leaf and own.numel() > 0 and own.untyped_storage().nbytes() == own.nbytes


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


_COMPILED = "_orig_mod"


def plain(name: Any) -> Any:
    """Return the name of a parameter or module without the prefixes of `torch.compile`.

    Examples:
        >>> plain("encoder._orig_mod.0.weight")
        'encoder.0.weight'
    """
    return ".".join(part for part in name.split(".") if part != _COMPILED) if isinstance(name, str) else name


def with_plain_names(state: Any) -> Any:
    """Return a model's state dict, with the prefixes of `torch.compile` removed from its names."""
    return _renamed(state, plain, plain)


def with_names_of(model: torch.nn.Module, saved: Any) -> Any:
    """Rename the entries of a saved state dict to the names in a model.

    The names in the state dict, in the model, or in both may have the prefixes of `torch.compile`.
    """
    own = model.state_dict()
    names, modules = ({plain(name): name for name in known} for known in (own, getattr(own, "_metadata", ())))
    return _renamed(
        saved, lambda name: names.get(plain(name), plain(name)), lambda name: modules.get(plain(name), plain(name))
    )


def _renamed(state: Any, name_of: Callable[[Any], Any], module_of: Callable[[Any], Any]) -> Any:
    """Return a state dict with new names for its entries, and for the modules in its attribute `_metadata`.

    Args:
        state: State dict. Any other object is returned unchanged.
        name_of: Function that returns the new name of an entry.
        module_of: Function that returns the new name of a module. PyTorch stores the version of each module in
            `_metadata`.
    """
    if not isinstance(state, Mapping) or all(name_of(name) == name for name in state):
        return state
    renamed: Any = OrderedDict((name_of(name), value) for name, value in state.items())
    versions = getattr(state, "_metadata", None)
    if isinstance(versions, Mapping):
        renamed._metadata = OrderedDict((module_of(name), value) for name, value in versions.items())
    return renamed


def check_model(model: torch.nn.Module, saved: Any, left_out: Collection[str] = ()) -> None:
    """Check that a saved state matches a model.

    Args:
        model: Model to compare with.
        saved: Saved state of the model. If it is not a state dict, it is rejected.
        left_out: Names, without the prefixes of `torch.compile`, of parameters that may be missing from the state.

    Raises:
        ValueError: The state is malformed, or its names, shapes or memory layouts differ from the model's.
    """
    require(isinstance(saved, Mapping), f"the state of a model is a `{type(saved).__name__}`, not a dict")
    own = model.state_dict()
    missing, extra = sorted(own.keys() - saved.keys()), sorted(map(str, saved.keys() - own.keys()))
    if left_out:
        missing = [name for name in missing if plain(name) not in left_out]
    shapes = [
        f"{name}: {_shown(saved[name])} instead of {_shown(tensor)}"
        for name, tensor in own.items()
        if isinstance(tensor, torch.Tensor) and name in saved and not _takes(tensor, saved[name])
    ]
    if missing or extra or shapes:
        raise ValueError(
            "The state of a model does not match the registered model, so nothing was loaded. "
            f"Missing: {missing or 'nothing'}; unknown: {extra or 'nothing'}; shapes: {shapes or 'all match'}."
        )
    _check_versions(getattr(saved, "_metadata", None))


def _takes(own: torch.Tensor, saved: Any) -> bool:
    """Return True if a saved value can be loaded into a model's tensor.

    Args:
        own: Tensor of the model. An uninitialized parameter or buffer of a lazy module accepts any shape.
        saved: The saved value.
    """
    if is_lazy(saved):
        return is_lazy(own)
    if type(saved) not in (torch.Tensor, torch.nn.Parameter, type(own)) or saved.is_meta != own.is_meta:
        return False
    is_like = is_lazy(own) or (not saved.is_nested and own.shape == saved.shape and own.layout == saved.layout)
    if own.is_quantized or saved.is_quantized:
        return is_like and own.dtype == saved.dtype and own.qscheme() == saved.qscheme()
    return is_like and _can_be_copied(saved.dtype, own.dtype)


@functools.cache
def _can_be_copied(source: torch.dtype, target: torch.dtype) -> bool:
    """Return True if PyTorch can copy a tensor of one dtype into a tensor of another dtype."""
    try:
        torch.empty(1, dtype=target, device="cpu").copy_(torch.zeros(1, dtype=source, device="cpu"))
    except RuntimeError:  # includes NotImplementedError
        return False
    return True


def _shown(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return f"a `{type(value).__name__}`"
    if is_lazy(value):
        return "any shape"
    shape = "nested" if value.is_nested else str(tuple(value.shape))
    return shape if _can_be_copied(value.dtype, torch.float32) else f"{shape} of {value.dtype}"


def _check_versions(metadata: Any) -> None:
    """Check that the versions of modules in a state dict are numbers.

    Args:
        metadata: Attribute `_metadata` of a state dict, in which PyTorch stores the versions; None if it has none.
    """
    if metadata is None:
        return
    require(isinstance(metadata, Mapping), "the versions of a model's layers are not a dict")
    for entry in metadata.values():
        require(
            isinstance(entry, Mapping) and is_integer(entry.get("version") or 0), "a layer's version is not a number"
        )


def with_own_options(optimizer: Any, saved: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return an optimizer's saved state with the program's choice of how a step is computed, such as `fused`.

    Numbers get the program's form, as in `with_own_numbers`.

    Args:
        optimizer: The registered optimizer.
        saved: Its saved state. A state without groups is returned unchanged.
    """
    if "param_groups" not in saved or not hasattr(optimizer, "param_groups"):
        return saved
    groups = zip(_options_of(optimizer, len(saved["param_groups"])), saved["param_groups"], strict=True)
    return {**saved, "param_groups": [_with_own_options(*each) for each in groups]}


def _with_own_options(own: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
    kept = {name: _as_own(own.get(name), value) for name, value in saved.items() if name not in IMPLEMENTATION}
    return {**kept, **{name: own[name] for name in IMPLEMENTATION if name in own}}


def with_own_numbers(scheduler: Any, saved: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a scheduler's saved state, with each number in the program's form: a number, or a tensor of one element.

    Otherwise, a file would decide which form the states have that the program saves later.

    Args:
        scheduler: The registered scheduler. The state of a scheduler that is not PyTorch's is returned unchanged.
        saved: State that `check_schedulers` has accepted.
    """
    if not is_of_pytorch(type(scheduler)):
        return saved
    own = scheduler.state_dict()
    state = {name: _as_own(own.get(name), value) for name, value in saved.items()}
    if "_schedulers" in state:
        state["_schedulers"] = [*map(with_own_numbers, scheduler._schedulers, saved["_schedulers"])]
    return state


def _as_own(own: Any, saved: Any) -> Any:
    """Return a saved number, or a list or tuple of numbers, in the form that the program's value has."""
    if isinstance(own, list | tuple) and isinstance(saved, list | tuple) and len(saved) == len(own):
        values = [*map(_as_own, own, saved)]
        return tuple(values) if isinstance(own, tuple) else values
    if not is_number(own) or not is_number(saved):
        return saved
    value = saved.item() if isinstance(saved, torch.Tensor) else saved
    if not isinstance(own, torch.Tensor):
        return int(value) if isinstance(value, bool) and not isinstance(own, bool) else value
    if not own.is_floating_point() or isinstance(value, complex):
        return saved
    made = torch.tensor(value, dtype=own.dtype, device=own.device).reshape(own.shape)
    return made.requires_grad_(own.requires_grad)


def _options_of(optimizer: Any, num_groups: int) -> list[dict[str, Any]]:
    """Return the options of an optimizer's groups. Groups that are yet to be added have the default options."""
    groups, defaults = optimizer.param_groups[:num_groups], getattr(optimizer, "defaults", {})
    own = [{name: value for name, value in group.items() if name != "params"} for group in groups]
    return [{**defaults, **group} for group in [*own, *[{}] * (num_groups - len(own))]]


def check_optimizer(optimizer: Any, saved: Any, parameters: Sequence[Sequence[torch.Tensor]]) -> None:
    """Check that a saved state matches an optimizer.

    Args:
        optimizer: The registered optimizer.
        saved: Its saved state.
        parameters: The parameters in each group, as they will be when the state is loaded.

    Raises:
        ValueError: The parameter groups, their hyperparameters, or the slots of the parameters do not match.
    """
    require(isinstance(saved, Mapping), f"the state of an optimizer is a `{type(saved).__name__}`, not a dict")
    own = optimizer.state_dict()
    saved_groups = saved.get("param_groups", ())
    require(isinstance(saved_groups, Sequence), "the groups of an optimizer are not a list")
    for group in saved_groups:
        is_group = isinstance(group, Mapping) and isinstance(group.get("params"), Sequence)
        require(is_group and all(map(is_integer, group["params"])), "a group of an optimizer has no parameters")
    sizes, saved_sizes = list(map(len, parameters)), [len(group["params"]) for group in saved_groups]
    if "param_groups" in own and sizes != saved_sizes:
        raise ValueError(
            f"The state of an optimizer does not match, so nothing was loaded. Its groups have {saved_sizes} "
            f"parameters, but those of the registered optimizer have {sizes}. Register an optimizer with the same "
            "groups in `setup`."
        )
    if "param_groups" not in own:
        return
    for options, saved_group in zip(_options_of(optimizer, len(sizes)), saved_groups, strict=True):
        _check_settings(optimizer, options, saved_group)
    entries = saved.get("state")
    require(isinstance(entries, Mapping), "the state of an optimizer's parameters is not a dict")
    indices = [index for group in saved_groups for index in group["params"]]
    require(len(set(indices)) == len(indices), "an optimizer has a parameter twice")
    are_dicts = all(isinstance(entries.get(index, {}), Mapping) for index in indices)
    require(are_dicts, "the state of an optimizer's parameter is not a dict")
    check_slots(optimizer, with_own_options(optimizer, saved), parameters)


_OF_SCHEDULERS = ("initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum", "swa_lr")
"""Names that PyTorch's schedulers add to parameter groups. Names that code of the user adds may appear at any step."""


def _check_settings(optimizer: Any, own: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    needed = {
        name
        for name, value in own.items()
        if (name in getattr(optimizer, "defaults", {}) or name in _OF_SCHEDULERS)
        and (isinstance(value, tuple) or is_number(value))
        and not isinstance(value, bool)
    }  # a state from an older version of PyTorch may lack other settings, which PyTorch then adds
    if missing := sorted(needed - saved.keys()):
        raise ValueError(
            "The state of an optimizer does not match, so nothing was loaded. It belongs to another kind of optimizer "
            f"or has no such scheduler, because it lacks {', '.join(missing)}, which `{type(optimizer).__name__}` and "
            "its schedulers need."
        )
    _check_kinds({name: own[name] for name in own if name not in IMPLEMENTATION}, saved, "the optimizer's")
    if is_of_pytorch(type(optimizer)):  # where the program has no text, a file may have one, but nothing else
        texts = [name for name, value in optimizer.defaults.items() if value is None and name not in IMPLEMENTATION]
        unlike = [name for name in texts if not isinstance(saved.get(name), str | None)]
        require(not unlike, f"{unlike} of an optimizer is not a text")


def check_schedulers(schedulers: Sequence[Any], states: Any) -> None:
    """Check that saved states match the registered schedulers.

    Raises:
        ValueError: There are more or fewer states than schedulers, or a state has unexpected names or types.
    """
    require(isinstance(states, list | tuple), "the states of the schedulers are not a list")
    strangers = [type(state).__name__ for state in states if not isinstance(state, Mapping)]
    if strangers or len(states) != len(schedulers):
        raise ValueError(
            f"The state of the schedulers does not match, so nothing was loaded: {len(schedulers)} are registered, but "
            f"the state holds {len(states)}"
            f"{f', including a `{strangers[0]}`, which is not the state of a scheduler' if strangers else ''}."
        )
    for scheduler, saved in zip(schedulers, states, strict=True):
        if unlike := _unlike(scheduler.state_dict(), saved, scheduler):
            raise ValueError(
                f"The state does not match, so nothing was loaded: {unlike} of a scheduler are missing, unknown or of "
                f"another form than in the registered `{type(scheduler).__name__}`. Register a scheduler with the same "
                'arguments in `setup`, or load other parts of the file, such as `load(path, parts=("models",))`.'
            )


_PARTS_OF_SCHEDULERS = ("lr_lambdas", "_schedulers", "_scale_fn_custom")
"""Names of entries with the states of other objects. Schedulers of PyTorch fail without them, and load them too."""

_CHOICES = ("mode", "threshold_mode", "scale_mode", "_anneal_func_type", "_anneal_strategy", "_schedule_phases")
"""Names of entries by which schedulers of PyTorch choose what to compute. Subclasses of users inherit them."""

_LATER = ("_is_initial", "_get_lr_called_within_step", "_last_lr", "default_min_lr", "use_beta1")
"""Names that states of schedulers lack if an earlier version of PyTorch saved them."""

_FORMER = ("verbose",)
"""Names that only earlier versions of PyTorch saved. Now, they have no effect."""


def _unlike(own: Mapping[str, Any], saved: Any, holder: Any) -> list[str]:
    """Return the names of entries in a saved state that differ from the current ones in more than a number.

    Of objects of the user, such as a subclass of a scheduler or a callable for `LambdaLR`, only the kinds of values are
    compared. New names are accepted if they replace nothing.

    Args:
        own: Current state of the object.
        saved: The saved state.
        holder: The object: a scheduler, or what a scheduler of PyTorch calls.
    """
    if not isinstance(saved, Mapping):
        return [f"a `{type(saved).__name__}`"]
    is_known, *bases = [is_of_pytorch(each) and each is not LRScheduler for each in type(holder).__mro__]
    attributes, is_derived, unlike = getattr(holder, "__dict__", {}), any(bases), []
    for name in {**own, **saved}:
        if name not in saved:
            fits = name in _LATER if is_known else name not in _PARTS_OF_SCHEDULERS
        elif name not in own:
            is_former = name in _FORMER and isinstance(saved[name], bool)
            fits = is_former or not (is_known or name in attributes or _is_method(type(holder), name))
        elif is_known or name in (*_PARTS_OF_SCHEDULERS, *(_CHOICES if is_derived else ())):
            fits = _is_like(own[name], saved[name], attributes.get(name))
        else:
            fits = _is_of_kind(own[name], saved[name])
        if not fits:
            unlike.append(str(name)[:50])
    return unlike


def _is_method(kind: type, name: Any) -> bool:
    """Return True for the name of a method or property of a class, or for what is not a name."""
    found = getattr(kind, name, None) if isinstance(name, str) else len
    return callable(found) or hasattr(found, "__get__")


def _is_like(own: Any, saved: Any, holder: Any) -> bool:
    """Return True if a saved value differs from a value in the state of a PyTorch scheduler by nothing but numbers.

    Args:
        own: The value in the state.
        saved: The saved value.
        holder: The value itself, which has a state if it is an object.
    """
    if isinstance(own, list | tuple):
        holders = holder if isinstance(holder, list | tuple) and len(holder) == len(own) else own
        return isinstance(saved, list | tuple) and len(saved) == len(own) and all(map(_is_like, own, saved, holders))
    if isinstance(own, Mapping) and not isinstance(holder, Mapping):
        return not _unlike(own, saved, holder)
    if isinstance(own, Mapping) and all(map(_is_real, own)):  # how often each milestone occurs
        return isinstance(saved, type(own)) and all(_is_real(each) for pair in saved.items() for each in pair)
    if isinstance(own, Mapping):
        is_mapping = isinstance(saved, Mapping) and saved.keys() == own.keys()
        return is_mapping and all(_is_like(value, saved[name], holder.get(name)) for name, value in own.items())
    if own is None or isinstance(own, str | bool):
        return type(saved) is type(own) and bool(saved == own)
    if isinstance(own, torch.Tensor) and isinstance(saved, torch.Tensor):
        return is_number(saved) and _is_real(saved.item())
    return _is_real(saved)


def _is_real(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool) and is_in_range(value)


def check_precision(own: Mapping[str, Any], saved: Any) -> None:
    """Check that the saved state of a gradient scaler matches the current state.

    Args:
        own: Current state of the gradient scaler.
        saved: Saved state, which may be empty.

    Raises:
        ValueError: An entry is missing from the saved state, or its type differs.
    """
    require(isinstance(saved, Mapping), "the state of mixed precision is not a dict")
    if saved:
        missing = sorted(own.keys() - saved.keys())
        require(not missing, f"the state of mixed precision lacks {missing}")
        _check_kinds(own, saved, "mixed precision's")
        for name, value in own.items():
            if isinstance(value, int | float):
                is_usable = _is_counted if name in ("growth_interval", "_growth_tracker") else _is_factor
                require(is_usable(saved[name]), f"mixed precision's {name!r} is not a number in its range")


def _is_counted(value: Any) -> bool:
    return is_integer(value) and 0 <= value < 2**31


def _is_factor(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value <= torch.finfo(torch.float32).max


def _check_kinds(own: Mapping[str, Any], saved: Mapping[str, Any], whose: str) -> None:
    for name, value in own.items():
        if name in saved and not _is_of_kind(value, saved[name]):
            raise ValueError(
                f"The state does not match, so nothing was loaded: {whose} {name!r} is a "
                f"`{type(saved[name]).__name__}` instead of a `{type(value).__name__}`."
            )


def _is_of_kind(own: Any, saved: Any) -> bool:
    """Return True if a saved value may replace a current value, judging by their types.

    Args:
        own: The current value. If it is None, any saved value is suitable.
        saved: The saved value. If it is None, the current value must be None, a bool or a text.
    """
    if own is None or saved is None:
        return own is None or isinstance(own, bool | str)
    if is_number(own):
        return is_number(saved) and _is_complex(saved) <= _is_complex(own)
    if isinstance(own, tuple) and all(map(is_number, own)):
        return isinstance(saved, list | tuple) and len(saved) == len(own) and all(map(_is_of_kind, own, saved))
    for kind in (str, list | tuple, Mapping):
        if isinstance(own, kind):
            return isinstance(saved, kind)
    return True


def _is_complex(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_complex()
