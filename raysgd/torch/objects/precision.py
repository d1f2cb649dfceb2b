"""The numeric precision in which a model is trained: fp32, PyTorch's mixed precision, or NVIDIA Apex.

The class `Precision` implements fp32 and is the base class of the other precisions. The functions at the end of the
module check the user's options `use_fp16` and `precision`, and create the object that these options select.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

logger = logging.getLogger(__name__)

_NOTHING = nullcontext()
_SHORT = (torch.bfloat16, torch.float16)
_NATIVE, _APEX = "amp_native", "amp_apex"
_STATE_KEY_OF_OLD = "amp"  # key for the state of Apex in checkpoints of the old library, `ray.util.sgd`
STATE_KEYS = (_NATIVE, _APEX, _STATE_KEY_OF_OLD)
"""Keys in a checkpoint under which the state of a precision may be."""


class Precision:
    """Plain fp32, and the interface of the other precisions.

    Attributes:
        is_mixed: True if part of the computation uses a lower precision.
        flag: Value of an operator's `self.use_fp16`: False, True for PyTorch's mixed precision, or "apex".
        state_key: Key in a checkpoint for the state of this object; None if it has no state.
        namespace: Object that operators use as `self._amp`. Except with Apex, it has a function `autocast`.
        scaler: Gradient scaler that operators use as `self._amp_scaler`; None if this precision has no scaler.
        skips_overflows: True if an optimizer step is skipped when gradients have overflowed.
        can_defer: True if the all-reduce of accumulated gradients may be deferred to the last batch of a step.
    """

    is_mixed = False
    flag: bool | str = False
    state_key: str | None = None
    namespace: Any = SimpleNamespace(autocast=lambda *_, **__: nullcontext())
    scaler: Any = None
    skips_overflows = False
    can_defer = True

    def prepare(
        self, models: list[torch.nn.Module], optimizers: list[Any], initialize: Callable[..., Any]
    ) -> tuple[list[torch.nn.Module], list[Any]]:
        """Prepare models and optimizers, after they were moved to the device and before they are wrapped.

        Args:
            models: Models to prepare.
            optimizers: Optimizers to prepare.
            initialize: Function that initializes Apex with the user's arguments. Other precisions ignore the function.

        Returns:
            The models and the optimizers to use in training.
        """
        return models, optimizers

    def forward(self) -> AbstractContextManager[Any]:
        """Return the context manager in which to compute outputs and losses."""
        return _NOTHING

    def backward(self, loss: torch.Tensor, optimizer: Any) -> None:
        """Compute the gradients of `loss`, scaled if this precision scales gradients."""
        loss.backward()

    def unscale(self, optimizer: Any) -> None:
        """Undo the scaling of an optimizer's gradients. Called before code that reads or clips gradients."""

    def scale_again(self, optimizer: Any) -> bool:
        """Scale the gradients of an optimizer, if they were unscaled and the optimizer has not stepped since.

        Called before a backward pass, whose scaled gradients may add to them. Return True if they were unscaled.
        """
        return False

    def parameters(self, optimizer: Any) -> list[torch.Tensor]:
        """Return the parameters that an optimizer updates. Their attribute `grad` has the gradients for the step."""
        return [parameter for group in optimizer.param_groups for parameter in group["params"]]

    def step(self, optimizer: Any) -> None:
        """Step an optimizer, unless its gradients have overflowed."""
        optimizer.step()

    def begin_call(self) -> None:
        """Prepare for a call to `train`, before its first batch."""

    def check_use(self) -> None:
        """Raise if the precision that the user requested had no effect. Called before each optimizer step."""

    def has_skipped(self) -> bool:
        """Return True if a step was skipped since the last call to this method, because gradients had overflowed."""
        return False

    def state_dict(self) -> dict[str, Any]:
        """Return the state that checkpoints contain under the key `state_key`."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state that `state_dict` returned when a checkpoint was saved."""


class NativeAmp(Precision):
    """PyTorch's mixed precision: fp16 with a gradient scaler, or bf16 with a gradient scaler that does nothing.

    Args:
        dtype: `torch.float16` or `torch.bfloat16`.
        device: Device of the model.
        enabled: False to compute in fp32, although user code uses autocast and the gradient scaler. The old library,
            `ray.util.sgd`, did this on CPUs.
        must_act: True to check that user code uses mixed precision. See `check_use`.
    """

    is_mixed = True
    flag = True

    def __init__(self, dtype: torch.dtype, device: torch.device, enabled: bool = True, must_act: bool = False) -> None:
        kind, scales = device.type, dtype == torch.float16
        self._autocast = partial(torch.amp.autocast, kind, dtype=dtype, enabled=enabled)
        self._name = "fp16" if scales else "bf16"
        self._must_act = must_act
        self._has_computed = self._has_scaled = True
        make_scaler = partial(torch.amp.GradScaler, kind, enabled=enabled and scales)
        self.namespace = SimpleNamespace(autocast=self.forward, GradScaler=make_scaler)
        self.scaler = make_scaler()
        self.skips_overflows = self.scaler.is_enabled()
        self.state_key = _NATIVE if scales else None
        self._num_optimizers = 1
        self._stepped: set[int] = set()
        self._unscaled: set[int] = set()
        self._scale = self.scaler.get_scale()

    def prepare(
        self, models: list[torch.nn.Module], optimizers: list[Any], initialize: Callable[..., Any]
    ) -> tuple[list[torch.nn.Module], list[Any]]:
        self._num_optimizers = len(optimizers)
        return models, optimizers

    def forward(self, *args: Any, **options: Any) -> AbstractContextManager[Any]:
        """Return PyTorch's autocast context manager, and record that it is used.

        User code may call this method as `self._amp.autocast`.
        """
        self._has_computed = True
        context: AbstractContextManager[Any] = self._autocast(*args, **options)
        return context

    def begin_call(self) -> None:
        self._has_computed = self._has_scaled = not self._must_act

    def check_use(self) -> None:
        """Check that user code has used mixed precision in the current training call.

        Warn if user code has used mixed precision only for the backward pass.

        Raises:
            ValueError: User code has not used mixed precision at all, so the option `precision` had no effect.
        """
        if self._has_computed:
            return
        advice = (
            f'`precision="{self._name}"` had no effect: nothing was computed in `self.autocast()`. Compute outputs and '
            "losses in `with self.autocast():`, and call `self.backward(loss)` and `self.optimizer_step()`. If you use "
            "`torch.autocast` yourself, leave `precision` out."
        )
        if not self._has_scaled:
            raise ValueError(advice)
        self._must_act, self._has_computed = False, True
        logger.warning(advice)

    def backward(self, loss: torch.Tensor, optimizer: Any) -> None:
        self._has_scaled = True
        if id(optimizer) in self._stepped:
            self._update()
        self.scaler.scale(loss).backward()

    def unscale(self, optimizer: Any) -> None:
        # The scaler raises if gradients are unscaled twice, or if there are none when it updates the scale.
        if id(optimizer) not in self._unscaled and any(each.grad is not None for each in self.parameters(optimizer)):
            self._unscaled.add(id(optimizer))
            self.scaler.unscale_(optimizer)

    def scale_again(self, optimizer: Any) -> bool:
        if id(optimizer) not in self._unscaled or id(optimizer) in self._stepped:
            return False
        self._update()
        for parameter in self.parameters(optimizer):
            if parameter.grad is not None:
                parameter.grad.mul_(self.scaler.get_scale())
        return True

    def step(self, optimizer: Any) -> None:
        """Step an optimizer, unless its gradients have overflowed. Once all optimizers have stepped, update the scale.

        All optimizers share the scale of the gradients. If the scale were updated earlier, the gradients of the
        remaining optimizers would have the old scale. However, if an optimizer steps again before all others have
        stepped, the scale is updated before this second step.
        """
        if id(optimizer) in self._stepped:
            self._update()
        self.scaler.step(optimizer)
        self._stepped.add(id(optimizer))
        if len(self._stepped) >= self._num_optimizers:
            self._update()

    def _update(self) -> None:
        self._stepped.clear()
        self._unscaled.clear()
        self.scaler.update()

    def has_skipped(self) -> bool:
        """Return True if an optimizer step was skipped since the last call to this method.

        The gradient scaler decreases the scale with each skipped step, even if user code calls the scaler itself. This
        method therefore checks whether the scale has decreased.
        """
        before, self._scale = self._scale, self.scaler.get_scale()
        return self._scale < before

    def state_dict(self) -> dict[str, Any]:
        if self._stepped:
            self._update()
        return dict(self.scaler.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self._stepped or self._unscaled:
            self._update()  # the scaler must forget a step that is replaced by the loaded state
        if state:
            self.scaler.load_state_dict(state)
            self._scale = self.scaler.get_scale()


class Apex(Precision):
    """Mixed precision of NVIDIA Apex (`apex.amp`). Apex must be built from an older commit that still contains `amp`.

    Apex checks for overflowed gradients at the end of each backward pass. At this time, all ranks must have the same
    gradients. Therefore, the all-reduce of gradients cannot be deferred to a later batch.
    """

    is_mixed = True
    flag = "apex"
    state_key = _APEX
    skips_overflows = True
    can_defer = False

    def __init__(self) -> None:
        self.namespace = _apex_amp()
        if self.namespace is None:
            raise _apex_missing()
        self._scales: list[float] = []

    def prepare(
        self, models: list[torch.nn.Module], optimizers: list[Any], initialize: Callable[..., Any]
    ) -> tuple[list[torch.nn.Module], list[Any]]:
        models, optimizers = initialize(self.namespace, models, optimizers)
        self._scales = self._read_scales()
        return list(models), list(optimizers)

    def backward(self, loss: torch.Tensor, optimizer: Any) -> None:
        with self.namespace.scale_loss(loss, optimizer) as scaled:
            scaled.backward()

    def parameters(self, optimizer: Any) -> list[torch.Tensor]:
        return list(self.namespace.master_params(optimizer))

    def has_skipped(self) -> bool:
        before, self._scales = self._scales, self._read_scales()
        return any(after < earlier for after, earlier in zip(self._scales, before, strict=False))

    def _read_scales(self) -> list[float]:
        return [float(entry["loss_scale"]) for entry in self.namespace.state_dict().values()]

    def state_dict(self) -> dict[str, Any]:
        return dict(self.namespace.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state:
            self.namespace.load_state_dict(state)
            self._scales = self._read_scales()


def warn_of_short_weights(optimizers: Iterable[Any], owner: str) -> None:
    """Warn about PyTorch optimizers that train 16-bit weights, in which small updates are rounded away.

    Optimizers of other libraries are not reported, because they may compensate for this, for example with an fp32 copy
    of the weights.

    Args:
        optimizers: Optimizers that the operator registered.
        owner: Name of the operator's class, for the warning.
    """
    for optimizer in optimizers:
        if type(optimizer).__module__.startswith("torch.optim."):
            parameters = (each for group in optimizer.param_groups for each in group["params"])
            short = [each for each in parameters if each.requires_grad and each.dtype in _SHORT]
            if short:
                bits = torch.finfo(short[0].dtype)
                logger.warning(
                    "`%s` trains %d parameters in %s with `%s`, which rounds each update to that format, so an update "
                    "smaller than 1/%d of its weight is lost. Train in fp32: load the model with "
                    "`from_pretrained(..., dtype=torch.float32)`, or call `model.float()` before you make the "
                    'optimizer. `TorchTrainer(precision="bf16")` then computes in bf16',
                    owner,
                    len(short),
                    bits.dtype,
                    type(optimizer).__name__,
                    round(2 / bits.eps),
                )


def saved_state(precision: Precision, state: dict[str, Any]) -> dict[str, Any] | None:
    """Return the entry for a precision in the state from a checkpoint; None if the state has no such entry.

    Args:
        precision: The precision.
        state: State from a checkpoint of this library or of the old library, `ray.util.sgd`.
    """
    if precision.state_key is None:
        return None
    found = state.get(precision.state_key)
    if found is None and precision.flag == "apex":
        found = state.get(_STATE_KEY_OF_OLD)
    return found


def choose_amp_backend(use_fp16: Any, native_amp: Any = None, apex_amp: Any = None) -> bool | str:
    """Check the option `use_fp16`, and return the implementation of mixed precision that the option selects.

    Args:
        use_fp16: `False`, `True` or `"apex"`.
        native_amp: Module `torch.amp`; None to import it.
        apex_amp: Module `apex.amp`; None to import it.

    Returns:
        `False` for no mixed precision, `True` for PyTorch's, `"apex"` for Apex.

    Raises:
        ValueError: `use_fp16` has another value, such as `None`.
        ImportError: The selected backend is not installed.
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


PRECISIONS = ("fp32", "fp16", "bf16", "apex")


def choose_precision(use_fp16: Any, precision: Any = None) -> str:
    """Check the options `use_fp16` and `precision`, and return the name of the precision that they select.

    Args:
        use_fp16: Option of the old library, `ray.util.sgd`. See `choose_amp_backend`.
        precision: One of `PRECISIONS`, or None to let `use_fp16` decide.

    Returns:
        One of `PRECISIONS`, or "legacy" for `use_fp16=True`: fp16 on a GPU, disabled on a CPU.

    Raises:
        ValueError: An option has an invalid value, or both options are set.
        ImportError: The package that the precision needs is not installed.
    """
    chosen = choose_amp_backend(use_fp16)
    if precision is None:
        return "apex" if chosen == "apex" else "legacy" if chosen else "fp32"
    if not isinstance(precision, str) or precision not in PRECISIONS:
        allowed = ", ".join(f'"{name}"' for name in PRECISIONS)
        raise ValueError(f"`precision={precision!r}`: allowed are {allowed}, or None to go by `use_fp16`.")
    if chosen:
        raise ValueError(
            f"`use_fp16={use_fp16!r}` and `precision={precision!r}` both choose a format: pass one of them."
        )
    if precision == "apex" and _apex_amp() is None:
        raise _apex_missing()
    return precision


def make_precision(use_fp16: Any, device: torch.device, precision: Any = None) -> Precision:
    """Create the `Precision` for the options `use_fp16` and `precision`. See `choose_precision` for allowed values.

    Args:
        use_fp16: Option of the old library, `ray.util.sgd`.
        device: Device of the model.
        precision: One of `PRECISIONS`, or None to let `use_fp16` decide.
    """
    chosen = choose_precision(use_fp16, precision)
    if chosen == "apex":
        return Apex()
    if chosen == "legacy":
        return NativeAmp(torch.float16, device, enabled=device.type == "cuda")
    dtypes = {"fp16": torch.float16, "bf16": torch.bfloat16}
    return NativeAmp(dtypes[chosen], device, must_act=True) if chosen in dtypes else Precision()


def _apex_amp() -> Any:
    try:
        from apex import amp
    except ImportError:
        return None
    return amp


def _apex_missing() -> ImportError:
    return ImportError(
        "`apex.amp` of NVIDIA Apex cannot be imported. It installs from source only, and left Apex's "
        "main line in spring 2025: check out a commit of https://github.com/NVIDIA/apex from before its pull request "
        "1896 and run `pip install --no-build-isolation .` there. Or use PyTorch's own mixed precision with "
        '`precision="fp16"` or `precision="bf16"`.'
    )
