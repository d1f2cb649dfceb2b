"""Prepares a training function's models and optimizers for several workers, and gathers and loads their state.

The helper functions, such as `prepare_model`, share one `Accelerator` per run. This object has the device, the
precision, the seed, and the strategy for gathering state. `TorchWorkerProfiler` writes the traces of a worker.
"""

from __future__ import annotations

import os
import random
import tempfile
import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import fields
from pathlib import Path
from types import MethodType
from typing import Any

import numpy as np
import torch

from raysgd.air.session import Alone, RunningSession, current_session, helper_session
from raysgd.core.connections.torch import ordinal_of
from raysgd.core.files import check_local
from raysgd.torch.objects.precision import NativeAmp, Precision
from raysgd.torch.parallel.options import FSDPOptions
from raysgd.torch.parallel.strategy import DDP, Strategy
from raysgd.train._torch.global_steps import GlobalSteps
from raysgd.train._torch.process_group import unwrapped
from raysgd.train.constants import PYTORCH_PROFILER_KEY

_UNSET: Any = object()
_SCALED = "_goes_through_scaler"


class Accelerator:
    """State that `prepare_model` and the other helper functions share during one run.

    Attributes:
        seed: Seed of the random number generators; None if it was not set.
        parallel: Strategy that gathers and loads the state of models and optimizers.
        steps: Ensures that an optimizer step is taken on all ranks or on no rank, so that the function can continue
            after a worker was lost. None without `elastic=True`.
    """

    def __init__(self, precision: Precision, device: torch.device, steps: GlobalSteps | None = None) -> None:
        self.precision = precision
        self.device = device
        self.steps = steps
        if steps is not None and precision.scaler is not None:
            steps.share(precision.scaler)
        self.seed: int | None = None
        self.parallel = Strategy()
        self._replaced: dict[int, weakref.ref[torch.nn.Parameter]] = {}

    def divide(self, model: torch.nn.Module, world_size: int, options: FSDPOptions) -> torch.nn.Module:
        """Shard a model across the workers with FSDP, in place."""
        from raysgd.torch.parallel.fsdp import FSDP  # imported here because the import is slow and rarely needed

        self._replaced |= {id(parameter): weakref.ref(parameter) for parameter in model.parameters()}
        self.parallel = FSDP(self.device, world_size, options)
        model = self.parallel.wrap(model, None, {})
        self.parallel.rebind_optimizers(())  # frees the unsharded parameters, which optimizers do not need here
        return model

    def has_replaced(self, parameter: torch.nn.Parameter) -> bool:
        """Return True if sharding a model has replaced this parameter with another parameter."""
        reference = self._replaced.get(id(parameter))
        return reference is not None and reference() is parameter


def accelerate(amp: bool = False) -> None:
    """Set the precision of a run. Call this before the other helpers.

    With `amp=True`, the run uses fp16 with a gradient scaler on GPUs.

    Raises:
        RuntimeError: `accelerate` or another helper was called before in this run. Not raised outside a run.
    """
    session = helper_session()
    if session.accelerator is not None and current_session() is not None:
        raise RuntimeError("call `accelerate` once, and before all other helpers of `raysgd.train.torch`.")
    device = _device_of(session)
    precision = NativeAmp(torch.float16, device, enabled=device.type == "cuda") if amp else Precision()
    session.accelerator = Accelerator(precision, device, _steps_of(session))


def get_device() -> torch.device:
    """Return this worker's device."""
    return shared_accelerator().device


def get_devices() -> list[torch.device]:
    """Return this worker's devices: all of its GPUs, or the CPU."""
    return _devices_of(helper_session())


def enable_reproducibility(seed: int = 0) -> None:
    """Make runs with the same seed give the same results, at a lower speed on GPUs. Call this before other helpers."""
    shared_accelerator().seed = seed
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False


def shared_accelerator() -> Accelerator:
    """Return the `Accelerator` of this run. The first call creates it."""
    session = helper_session()
    if session.accelerator is None:
        session.accelerator = Accelerator(Precision(), _device_of(session), _steps_of(session))
    return session.accelerator


def _steps_of(session: RunningSession | Alone) -> GlobalSteps | None:
    return None if isinstance(session, Alone) or session.membership is None else GlobalSteps(session)


def _device_of(session: RunningSession | Alone) -> torch.device:
    """Return this worker's first GPU, or the CPU."""
    return _devices_of(session)[0]


def _devices_of(session: RunningSession | Alone) -> list[torch.device]:
    """Return this worker's GPUs, with the numbers that they have in this process, or the CPU if it has no GPUs.

    Outside a run, return PyTorch's current GPU.
    """
    if isinstance(session, Alone) and torch.cuda.is_available():
        return [torch.device("cuda", torch.cuda.current_device())]
    gpu_ids = session.world.gpu_ids
    if not gpu_ids or not torch.cuda.is_available():
        return [torch.device("cpu")]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return [torch.device("cuda", ordinal_of(gpu_id, visible)) for gpu_id in gpu_ids]


def prepare_model(
    model: torch.nn.Module,
    move_to_device: bool | torch.device = True,
    wrap_ddp: bool | str | None = True,
    ddp_kwargs: Mapping[str, Any] | None = None,
    *,
    parallel_strategy: str | None = _UNSET,
    parallel_strategy_kwargs: Mapping[str, Any] | None = None,
) -> torch.nn.Module:
    """Prepare a model: move it to the device, apply the run's precision, and keep it in sync on all workers.

    With "fsdp", the model is sharded across the workers, in place. Create its optimizer afterwards, and save the
    result of `gather_state`. A single worker keeps the whole model.

    Args:
        model: PyTorch model to train.
        move_to_device: True to move the model to this worker's device; or the device to move it to.
        wrap_ddp: True to wrap the model in `DistributedDataParallel` if there are several workers, or with
            `elastic=True`; or the name of a `parallel_strategy`.
        ddp_kwargs: Arguments for `DistributedDataParallel`.
        parallel_strategy: Alternative to `wrap_ddp`: "ddp", "fsdp" (shard the model with `fully_shard`), or None.
        parallel_strategy_kwargs: Arguments for the strategy. "fsdp" has the same arguments as in
            `TorchTrainer(strategy_options=...)`.

    Raises:
        ValueError: The strategy or one of its options is unknown, or does not work with `elastic=True`.
    """
    strategy, options = _strategy_of(wrap_ddp, ddp_kwargs, parallel_strategy, parallel_strategy_kwargs)
    accelerator = shared_accelerator()
    world = helper_session().world
    device = move_to_device if isinstance(move_to_device, torch.device) else accelerator.device
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if move_to_device:
        model = model.to(device)
    if accelerator.precision.is_mixed:
        model.forward = ForwardInContext(model, accelerator.precision.forward)
    if (world.size == 1 and accelerator.steps is None) or strategy is None:
        return model
    if strategy == "fsdp" and accelerator.steps is not None:
        raise ValueError('`elastic=True` does not work with "fsdp", where each worker has only a shard of the model.')
    if strategy == "fsdp":
        return accelerator.divide(model, world.size, FSDPOptions(**options))
    device_ids = [device.index or 0] if device.type == "cuda" else None
    return (accelerator.steps or DDP()).wrap(model, device_ids, options)


def _strategy_of(
    wrap_ddp: bool | str | None,
    ddp_kwargs: Mapping[str, Any] | None,
    parallel_strategy: str | None,
    parallel_strategy_kwargs: Mapping[str, Any] | None,
) -> tuple[str | None, dict[str, Any]]:
    """Return the parallel strategy that the arguments of `prepare_model` select, and the options of the strategy."""
    if parallel_strategy is not _UNSET and wrap_ddp is not True:
        raise ValueError("`wrap_ddp` and `parallel_strategy` set the same option: pass one of them.")
    name, strategy = "parallel_strategy", parallel_strategy
    if parallel_strategy is _UNSET:
        in_words = ("ddp" if wrap_ddp else None) if isinstance(wrap_ddp, bool) else wrap_ddp
        name, strategy = "wrap_ddp", in_words
    if strategy not in ("ddp", "fsdp", None):
        raise ValueError(
            f'`{name}={strategy!r}`: allowed are "ddp", "fsdp" and None, and for `wrap_ddp` True and False.'
        )
    options = {**(ddp_kwargs or {}), **(parallel_strategy_kwargs or {})}
    unknown = sorted(set(options) - {option.name for option in fields(FSDPOptions)})
    if strategy == "fsdp" and unknown:
        known = ", ".join(option.name for option in fields(FSDPOptions))
        raise ValueError(f'`parallel_strategy_kwargs` has {", ".join(unknown)}. Allowed with "fsdp": {known}.')
    return strategy, options


def gather_state(part: torch.nn.Module | torch.optim.Optimizer) -> dict[str, Any]:
    """Return the state of a model or optimizer for `save_checkpoint`. Call this on all workers.

    For a model, this is the state of the whole model without its wrapper. If "fsdp" shards the model, the state is
    gathered on rank 0, and other ranks get None in place of each sharded tensor.
    """
    return shared_accelerator().parallel.state_of(unwrapped(part))


def load_state(part: torch.nn.Module | torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Load state into a model or optimizer, before or after it was prepared.

    Args:
        part: The model or the optimizer.
        state: The result of `gather_state`, or of `state_dict()` of a model or optimizer that was not prepared.
    """
    parallel = shared_accelerator().parallel
    if isinstance(part, torch.nn.Module):
        model = unwrapped(part)
        is_divided = any(hasattr(parameter, "full_tensor") for parameter in model.parameters())
        (parallel if is_divided else Strategy()).load_model(model, state)
    else:
        parallel.load_optimizer(part, state)


class ForwardInContext:
    """Makes a model's `forward` run in a context, such as autocast.

    Copies and pickles of the model get the original `forward`, without the context.
    """

    def __init__(self, model: torch.nn.Module, context: Callable[[], AbstractContextManager[Any]]) -> None:
        self._model, self._forward, self._context = model, model.forward, context

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._context():
            return self._forward(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._model, "forward")  # a copy of the model gets its own `forward`, without this wrapper


def prepare_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Prepare an optimizer in place: with mixed precision, `step` uses the gradient scaler.

    With `elastic=True`, `step` does nothing if the batch failed because a worker was lost. The batch is then repeated.
    Schedulers may be attached before or after this call.

    Raises:
        ValueError: The optimizer was created before its model was sharded, so it would step parameters that are not
            trained.
    """
    accelerator = shared_accelerator()
    if any(accelerator.has_replaced(parameter) for group in optimizer.param_groups for parameter in group["params"]):
        raise ValueError(
            'The optimizer has the parameters from before `prepare_model(..., "fsdp")`: create the optimizer '
            "afterwards."
        )
    if accelerator.precision.scaler is not None and not hasattr(optimizer.step, _SCALED):
        _step_by_way_of(accelerator.precision, optimizer)
    if accelerator.steps is not None:
        accelerator.steps.guard(optimizer)
    return optimizer


def prepare_state(*parts: Any) -> None:
    """With `elastic=True`, register objects whose state a new worker must load when it joins the training.

    The state of prepared models, optimizers and loaders is loaded anyway. Further objects may be schedulers, weight
    averages or counters: any object with `state_dict` and `load_state_dict`. Pass the same objects in the same order on
    all workers.

    Args:
        parts: Objects whose state is equal on all workers.

    Raises:
        TypeError: An object has no `state_dict` or no `load_state_dict`.
    """
    for part in parts:
        if not hasattr(part, "state_dict") or not hasattr(part, "load_state_dict"):
            raise TypeError(f"`prepare_state({part!r:.200})`: need something with `state_dict` and `load_state_dict`.")
    steps = shared_accelerator().steps
    if steps is not None:
        steps.share(*parts)


def _step_by_way_of(precision: Precision, optimizer: torch.optim.Optimizer) -> None:
    """Replace `optimizer.step` in place, so that every step goes through the gradient scaler."""
    own = optimizer.step  # may already be a wrapper with which a scheduler counts the steps

    def step(self: Any, closure: Any = None) -> None:
        if closure is not None:
            raise ValueError("`closure`: a step with scaled gradients does not support a closure.")
        present = self.step
        self.step = own  # for the scaler, which calls `self.step` unless gradients have overflowed
        try:
            precision.step(self)
        finally:
            self.step = present

    setattr(step, _SCALED, True)
    optimizer.step = MethodType(step, optimizer)  # type: ignore[method-assign]  # schedulers wrap methods only


def backward(tensor: torch.Tensor) -> None:
    """Compute the gradients of a loss, like `tensor.backward()`. After `accelerate(amp=True)`, scale the loss first."""
    shared_accelerator().precision.backward(tensor, None)


class TorchWorkerProfiler:
    """Collects `torch.profiler` traces in a worker, for `TorchTensorboardProfilerCallback` in the driver.

    Args:
        trace_dir: Folder for traces on the worker's machine. Default: `pytorch_profiler_worker_traces` in the system's
            temporary folder.
    """

    def __init__(self, trace_dir: str | None = None) -> None:
        self._rank = helper_session().world.rank
        check_local("trace_dir", trace_dir)
        folder = Path(trace_dir) if trace_dir else Path(tempfile.gettempdir()) / "pytorch_profiler_worker_traces"
        folder.mkdir(parents=True, exist_ok=True)
        self.trace_dir = folder
        self._names: list[str] = []

    def trace_handler(self, p: torch.profiler.profile) -> None:
        """Write the trace that a profiler has recorded.

        Pass this method to `torch.profiler.profile` as `on_trace_ready`.
        """
        name = f"worker_{self._rank}_epoch_{p.step_num}.pt.trace.json"
        p.export_chrome_trace(str(self.trace_dir / name))
        self._names.append(name)

    def get_and_clear_profile_traces(self) -> dict[str, list[tuple[str, str]]]:
        """Return the traces that were written since the last call.

        Report them with `report(**profiler.get_and_clear_profile_traces())`.
        """
        names, self._names = self._names, []
        return {PYTORCH_PROFILER_KEY: [(name, (self.trace_dir / name).read_text()) for name in names]}
