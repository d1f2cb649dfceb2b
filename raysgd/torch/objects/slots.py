"""Checks what a saved state has for each parameter of an optimizer (the slots of the parameter).

PyTorch's own optimizers show on tiny parameters which slots they make. Other optimizers are code of the user, which is
not run to find out. Their steps raise an error if sizes differ, because they use PyTorch's functions. Only fused
implementations do not check sizes: they would access memory past the end of a tensor that is too small.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from raysgd.trainer.worker.replica_state import require

IMPLEMENTATION = ("fused", "foreach", "capturable", "differentiable")
"""Options of parameter groups that select how a step is computed, not what. They are always the program's."""

_SIZE = 2
"""Size of each dimension of a tiny parameter."""

_Example = tuple[int, int, torch.Tensor]
"""One of several parameters that a step treats alike: the number of its group, its index in the state, itself."""


def check_slots(optimizer: Any, saved: Mapping[str, Any], parameters: Sequence[Sequence[torch.Tensor]]) -> None:
    """Check the slots in a saved state.

    A PyTorch optimizer takes a step on tiny parameters. The saved slots must be like those that it makes there, with
    the sizes of the real parameter. Then it loads the saved slots in a tiny form, and must be able to take a step.

    Args:
        optimizer: The registered optimizer.
        saved: Its saved state, with the program's implementation options.
        parameters: The parameters in each group.

    Raises:
        ValueError: A slot is not like what the optimizer makes, or the optimizer cannot take a step with the slots.
    """
    kind, groups, entries = type(optimizer), saved["param_groups"], saved["state"]
    is_known = is_of_pytorch(kind)
    indices = {index for group in groups for index in group["params"]}
    require(not is_known or entries.keys() <= indices, "an optimizer has a state for what is not its parameter")
    if isinstance(optimizer, torch.optim.LBFGS):  # it has slots for one flat tensor, under the first parameter
        [every] = parameters
        parameters = [[torch.empty(sum(each.numel() for each in every), dtype=every[0].dtype, device="meta")]]
        groups = [{**groups[0], "params": groups[0]["params"][:1]}]
        slots = entries.get(groups[0]["params"][0], {})
        scratch, history_size = slots.get("al"), groups[0]["history_size"]
        is_list = isinstance(scratch, list) and all(each is None or is_number(each) for each in scratch)
        require("al" not in slots or (is_list and len(scratch) == history_size), "'al' is no list for the history")
    places: list[_Example] = []
    for number, (group, own) in enumerate(zip(groups, parameters, strict=True)):
        for index, parameter in zip(group["params"], own, strict=True):
            if not is_lazy(parameter):
                places.append((number, index, parameter))
            else:
                is_safe = not group.get("fused") or not entries.get(index)
                require(is_safe, "a parameter of a fused optimizer has no shape yet")
    examples: dict[Hashable, _Example] = {}
    example_of: dict[int, int] = {}
    for number, index, parameter in places:
        looks = ((name, _look_of(value)) for name, value in entries.get(index, {}).items())
        example = examples.setdefault((number, parameter.ndim, parameter.dtype, *looks), (number, index, parameter))
        example_of[index] = example[1]
    made = _step(kind, groups, examples.values()) if is_known and places else {}
    for number, index, parameter in places:
        like, is_fused = made.get(example_of[index], {}), bool(groups[number].get("fused"))
        for name, value in entries.get(index, {}).items():
            require(
                _is_slot(name, value, like.get(name), tuple(parameter.shape), is_fused),
                f"{str(name)[:50]!r} of a parameter has another shape or type than `{kind.__name__}` makes for it",
            )
    if made:
        tiny = {
            index: _tiny(entries.get(index, {}), parameter, made[index]) for _, index, parameter in examples.values()
        }
        _step(kind, groups, examples.values(), tiny)


def is_of_pytorch(kind: type) -> bool:
    """Return True for a class of PyTorch's optimizers or schedulers."""
    return f"{kind.__module__}.".startswith("torch.optim.")


def is_number(value: Any) -> bool:
    """Return True for a number, or a tensor with one element."""
    if isinstance(value, torch.Tensor):
        return value.layout == torch.strided and not (value.is_meta or value.is_nested) and value.numel() == 1
    return isinstance(value, int | float) and is_in_range(value)


def is_in_range(value: Any) -> bool:
    """Return False for an integer that is too large for a tensor."""
    return not isinstance(value, int) or -(2**63) <= value < 2**63


def _look_of(value: Any) -> Hashable:
    """Return what a step may depend on in a slot, apart from the sizes and the values of large tensors."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.item() if type(value) is torch.Tensor and is_number(value) else None
    return type(value), value if isinstance(value, int | float) else id(value)


def _is_slot(name: Any, value: Any, made: Any, shape: tuple[int, ...], is_fused: bool) -> bool:
    """Return True if a saved slot is like the slot of a tiny parameter.

    Args:
        name: Name of the slot.
        value: The saved slot.
        made: Slot of the same name of the tiny parameter. None if there is no such slot, or if it is not known.
        shape: Shape of the real parameter.
        is_fused: True if the program uses a fused implementation.
    """
    if isinstance(made, list):  # a history: of numbers, or of tensors like the parameter
        like = torch.ones((_SIZE,) * len(shape))
        return isinstance(value, list) and all(
            is_number(each) or _is_slot(name, each, like, shape, False) for each in value
        )
    if made is None or (isinstance(made, torch.Tensor) and made.ndim):
        if not isinstance(value, torch.Tensor):
            return made is None or value is None
        if made is None and (not is_fused or (name == "step" and is_number(value))):
            return not (value.is_meta or value.is_nested)
        sizes = (_SIZE,) * len(shape) if made is None else made.shape
        wanted = tuple(own if size == _SIZE else size for own, size in zip(shape, sizes, strict=True))
        is_plain = value.layout == torch.strided and not (value.is_meta or value.is_nested)
        is_of_kind = value.is_complex() if made is not None and made.is_complex() else value.is_floating_point()
        return is_plain and is_of_kind and tuple(value.shape) == wanted
    if name != "step" or not is_number(value):
        return is_number(value)
    # With a negative number of steps, some optimizers divide by zero after a few steps.
    is_counted = not isinstance(value, torch.Tensor) or value.is_floating_point() or value.dtype == torch.int64
    return is_counted and bool(value >= 0)


def _step(
    kind: Any, groups: Sequence[Mapping[str, Any]], examples: Collection[_Example], state: Any = None
) -> dict[int, Mapping[str, Any]]:
    """Let an optimizer take a step on tiny parameters. Return their slots by index.

    Hooks, which are code of the user, are not called.

    Args:
        kind: Class of the optimizer.
        groups: Groups in a state. Their hyperparameters are used.
        examples: Parameters that become tiny ones.
        state: Tiny slots to load before the step, by index. None to load nothing.
    """
    tiny = {index: torch.nn.Parameter(_tensor(parameter.shape, _dtype(parameter))) for _, index, parameter in examples}
    for each in tiny.values():
        gradient = torch.full_like(each, 2.0)
        each.grad = gradient.to_sparse() if kind is torch.optim.SparseAdam else gradient
    indices = [[index for at, index, _ in examples if at == number] for number in range(len(groups))]
    try:
        saved = [{**_options(kind, own), "params": some} for own, some in zip(groups, indices, strict=True)]
        optimizer = kind([{**each, "params": [tiny[index] for index in each["params"]]} for each in saved])
        if state is not None:
            optimizer.load_state_dict({"state": state, "param_groups": saved})
        with torch.no_grad():
            inspect.unwrap(kind.step)(optimizer, lambda: torch.zeros(()))
    except Exception as error:  # with the content of a damaged file, the optimizer may raise any exception
        raise ValueError(
            "The state of an optimizer does not match, so nothing was loaded: "
            f"`{kind.__name__}` cannot load this state and take a step ({error!r:.200})."
        ) from error
    return {index: optimizer.state[each] for index, each in tiny.items()}


def _options(kind: Any, group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the hyperparameters of a group for tiny parameters on the CPU.

    A step that the program may take with `foreach` is tried with it, because it accepts fewer states.
    """
    kept = {name: value for name, value in group.items() if name not in ("params", "param_names")}
    numbers = {name: value.item() for name, value in kept.items() if isinstance(value, torch.Tensor)}
    plain: dict[str, bool] = {name: False for name in ("capturable", "differentiable") if name in kept}
    if "foreach" in kept:
        plain["foreach"] = kept["foreach"] is not False and not kept.get("fused")
    return {**kept, **numbers, **plain, **({"max_iter": 1} if kind is torch.optim.LBFGS else {})}


def _dtype(parameter: torch.Tensor) -> torch.dtype:
    return parameter.dtype if parameter.is_complex() else torch.float32


def _tensor(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.ones((_SIZE,) * len(shape), dtype=dtype, device="cpu")


def _tiny(value: Any, parameter: torch.Tensor, made: Any) -> Any:
    """Return a saved slot, or all slots of a parameter, for a tiny parameter.

    Args:
        value: The slots, a slot or a part of it.
        parameter: The real parameter.
        made: Slots or slot that a step has made for the tiny parameter; None if there is none.
    """
    if isinstance(value, Mapping) and isinstance(made, Mapping):
        return {name: _tiny(each, parameter, made.get(name)) for name, each in value.items()}
    if isinstance(value, list):
        return [_tiny(each, parameter, None) for each in value]
    if not isinstance(value, torch.Tensor):
        return value
    if isinstance(made, torch.Tensor) and made.ndim:
        return torch.ones(made.shape, dtype=value.dtype, device="cpu")
    is_like = value.shape == parameter.shape and parameter.ndim > 0
    return _tensor(value.shape, value.dtype) if is_like else value.to("cpu", copy=True)
