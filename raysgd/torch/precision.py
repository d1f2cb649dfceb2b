"""In which number format a model is trained: one object, asked nowhere else.

`Precision` itself is plain fp32; the others override only what differs. One parser, at the end, turns the user's flag
into an object, and reports a bad flag.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

_STATE_KEYS_OF_OLD = "amp"  # the name under which old checkpoints keep the state of Apex


class Precision:
    """Plain fp32, and the interface of the others.

    Attributes:
        is_mixed: Whether part of the computation runs in a shorter format.
        flag: What operators find as `self.use_fp16`: False, True for PyTorch's own, or "apex".
        state_key: Where a checkpoint keeps the state; None when there is none.
        namespace: What operators find as `self._amp`.
        scaler: What operators find as `self._amp_scaler`.
    """

    is_mixed = False
    flag: bool | str = False
    state_key: str | None = None
    namespace: Any = None
    scaler: Any = None

    def prepare(
        self, models: list[torch.nn.Module], optimizers: list[Any], initialize: Callable[..., Any]
    ) -> tuple[list[torch.nn.Module], list[Any]]:
        """Gets models and optimizers ready, after they are on their device and before they are wrapped."""
        return models, optimizers

    def forward(self) -> AbstractContextManager[Any]:
        """The context for forward passes and losses."""
        return nullcontext()

    def backward(self, loss: torch.Tensor, optimizer: Any) -> None:
        """Computes the gradients."""
        loss.backward()

    def unscale(self, optimizer: Any) -> None:
        """Brings the gradients to their true size, for code that looks at them before the step."""

    def step(self, optimizer: Any) -> None:
        """Steps the optimizer."""
        optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        """State for a checkpoint, under `state_key`."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over such a state."""


class NativeAmp(Precision):
    """PyTorch's own mixed precision: fp16 with a gradient scaler, or bf16 without one.

    Args:
        dtype: `torch.float16` or `torch.bfloat16`.
        device: Where the model is.
        enabled: False makes every part a no-op that still works, as the old library did on CPUs.
    """

    is_mixed = True
    flag = True

    def __init__(self, dtype: torch.dtype, device: torch.device, enabled: bool = True) -> None:
        kind = device.type
        self.forward_context = partial(torch.amp.autocast, kind, dtype=dtype, enabled=enabled)
        self.namespace = SimpleNamespace(autocast=self.forward_context, GradScaler=torch.amp.GradScaler)
        if dtype == torch.float16:
            self.scaler = torch.amp.GradScaler(kind, enabled=enabled)
            self.state_key = "amp_native"

    def forward(self) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = self.forward_context()
        return context

    def backward(self, loss: torch.Tensor, optimizer: Any) -> None:
        (self.scaler.scale(loss) if self.scaler else loss).backward()

    def unscale(self, optimizer: Any) -> None:
        if self.scaler:
            self.scaler.unscale_(optimizer)

    def step(self, optimizer: Any) -> None:
        if not self.scaler:
            optimizer.step()
            return
        self.scaler.step(optimizer)
        self.scaler.update()

    def state_dict(self) -> dict[str, Any]:
        return dict(self.scaler.state_dict()) if self.scaler else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.scaler and state:
            self.scaler.load_state_dict(state)


class Apex(Precision):
    """NVIDIA Apex's `amp`, which has to be built from a source version that still has it."""

    is_mixed = True
    flag = "apex"
    state_key = "amp_apex"

    def __init__(self) -> None:
        self.namespace = _apex_amp()
        if self.namespace is None:
            raise _apex_missing()

    def prepare(
        self, models: list[torch.nn.Module], optimizers: list[Any], initialize: Callable[..., Any]
    ) -> tuple[list[torch.nn.Module], list[Any]]:
        models, optimizers = initialize(self.namespace, models, optimizers)
        return list(models), list(optimizers)

    def backward(self, loss: torch.Tensor, optimizer: Any) -> None:
        with self.namespace.scale_loss(loss, optimizer) as scaled:
            scaled.backward()

    def state_dict(self) -> dict[str, Any]:
        return dict(self.namespace.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state:
            self.namespace.load_state_dict(state)


def saved_state(precision: Precision, state: dict[str, Any]) -> dict[str, Any] | None:
    """The part of a checkpoint that belongs to `precision`, also under the key of old files; None when it has none."""
    if precision.state_key is None:
        return None
    found = state.get(precision.state_key)
    if found is None and precision.flag == "apex":
        found = state.get(_STATE_KEYS_OF_OLD)
    return found


def choose_amp_backend(use_fp16: Any, native_amp: Any = None, apex_amp: Any = None) -> bool | str:
    """Checks `use_fp16` and says which way it means.

    Args:
        use_fp16: `False`, `True` or `"apex"`.
        native_amp: PyTorch's mixed precision if it can be imported; None looks for it.
        apex_amp: `apex.amp` if it can be imported; None looks for it.

    Returns:
        `False` for no mixed precision, `True` for PyTorch's own, `"apex"` for Apex.

    Raises:
        ValueError: For any other value, `None` included.
        ImportError: If what it asks for is not there.
    """
    if not (isinstance(use_fp16, int) and use_fp16 in (0, 1)) and use_fp16 != "apex":
        raise ValueError(f'`use_fp16={use_fp16!r}`: allowed are `False`, `True` (PyTorch\'s own) and `"apex"`.')
    if not use_fp16:
        return False
    native = native_amp if native_amp is not None else getattr(torch, "amp", None)
    if use_fp16 != "apex" and native:
        return True
    if not (apex_amp if apex_amp is not None else _apex_amp()):
        raise _apex_missing()
    return "apex"


def make_precision(use_fp16: Any, device: torch.device) -> Precision:
    """The object for the flag; see `choose_amp_backend` for what is allowed."""
    chosen = choose_amp_backend(use_fp16)
    if chosen == "apex":
        return Apex()
    return NativeAmp(torch.float16, device, enabled=device.type == "cuda") if chosen else Precision()


def _apex_amp() -> Any:
    try:
        from apex import amp
    except ImportError:
        return None
    return amp


def _apex_missing() -> ImportError:
    return ImportError(
        '`use_fp16="apex"` needs `apex.amp`, which cannot be imported. Apex installs from source only, and its '
        "`amp` has left "
        "its main line: build a version that still has it, or use PyTorch's own mixed precision with `use_fp16=True`."
    )
