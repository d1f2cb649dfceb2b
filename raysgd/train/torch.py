"""PyTorch in training functions: the process group, and helpers for models, loaders, optimizers and mixed precision.

The helpers work inside a function that a trainer runs. They get what the function already has ready for several
workers, and leave it as it is for one.
"""

from __future__ import annotations

import os
import random
import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields
from types import MethodType
from typing import TYPE_CHECKING, Any

from raysgd._optional import require

require("torch", extra="torch", purpose="`raysgd.train.torch`")

import numpy as np  # noqa: E402
import torch  # noqa: E402

from raysgd._checks import check_seconds  # noqa: E402
from raysgd.backends.torch import TorchBackend as ProcessGroup  # noqa: E402
from raysgd.backends.torch import end_process_group  # noqa: E402
from raysgd.engine.backend import FORM_TIMEOUT_S  # noqa: E402
from raysgd.engine.backend import Backend as Connection  # noqa: E402
from raysgd.torch.ddp import DDP  # noqa: E402
from raysgd.torch.options import FSDPOptions  # noqa: E402
from raysgd.torch.parallel import NoParallel  # noqa: E402
from raysgd.torch.precision import NativeAmp, Precision  # noqa: E402
from raysgd.train._running import running_session  # noqa: E402
from raysgd.train._session import Session, current_session  # noqa: E402
from raysgd.train._torch_checkpoint import TorchCheckpoint as TorchCheckpoint  # noqa: E402
from raysgd.train._torch_data import DeviceLoader, divided  # noqa: E402
from raysgd.train._torch_profiler import TorchWorkerProfiler as TorchWorkerProfiler  # noqa: E402
from raysgd.train.backend import Backend, BackendConfig, EncodedData, Placed  # noqa: E402

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

    from raysgd.train.worker_group import WorkerGroup

_UNSET: Any = object()
_GOODBYE_S = 2.0


@dataclass
class TorchConfig(BackendConfig):
    """Connects the workers with a process group of `torch.distributed`, also a single one.

    Attributes:
        backend: "nccl", "gloo", ...; None for NCCL where workers have GPUs, else gloo.
        init_method: "env" tells the workers of their meeting point in `MASTER_ADDR` and `MASTER_PORT`; "tcp" does not.
        timeout_s: How long a collective may wait for the other ranks.
        form_timeout_s: How long the workers may take to form the group; never longer than `timeout_s`.

    Raises:
        ValueError: Another `init_method`, when the workers are started.
    """

    backend: str | None = None
    init_method: str = "env"
    timeout_s: int = 1800
    form_timeout_s: float = FORM_TIMEOUT_S

    @property
    def backend_cls(self) -> type[Backend]:
        return TorchBackend

    def connection(self, num_gpus_per_worker: float) -> Connection:
        check_seconds("timeout_s", self.timeout_s, may_be_least=False)
        check_seconds("form_timeout_s", self.form_timeout_s, may_be_least=False)
        if self.init_method not in ("env", "tcp"):
            raise ValueError(f'`init_method={self.init_method!r}`: allowed are "env" and "tcp".')
        transport = self.backend or ("nccl" if num_gpus_per_worker > 0 else "gloo")
        group = ProcessGroup(transport, float(self.timeout_s), float(self.form_timeout_s))
        return Placed(group, names_address=self.init_method == "env", names_place=True)


class TorchBackend(Backend):
    """The driver's part. What is reported or saved leaves the workers without wrappers, and arrives in host memory.

    The wrappers that models have deep inside of a checkpoint stay behind too, wherever a state is encoded.
    """

    share_cuda_visible_devices = True

    def on_shutdown(self, worker_group: WorkerGroup, backend_config: BackendConfig) -> None:
        """Lets the workers leave their process group; one that is busy is not waited for, it is ended all the same."""
        import ray

        references = worker_group.execute_async(_leave_group)
        ray.wait(references, num_returns=len(references), timeout=_GOODBYE_S)

    @staticmethod
    def encode_data(data_dict: dict[str, Any]) -> EncodedData:
        return {key: unwrapped(value) for key, value in data_dict.items()}


def unwrapped(value: Any) -> Any:
    """A model without `DistributedDataParallel`; anything else unchanged."""
    return value.module if isinstance(value, torch.nn.parallel.DistributedDataParallel) else value


def _leave_group() -> None:
    """Leaves the process group, unless a function still runs, whose collectives would be in the way."""
    if current_session() is None:
        end_process_group()


# -------------------------------------------------------------------------------------------------- helpers


class Accelerator:
    """What the helpers of one run share.

    Attributes:
        seed: What random numbers start from; None for anything.
        parallel: How states are gathered and taken over.

    Args:
        precision: The number format.
        device: Where models and batches go.
    """

    def __init__(self, precision: Precision, device: torch.device) -> None:
        self.precision = precision
        self.device = device
        self.seed: int | None = None
        self.parallel = NoParallel()
        self._replaced: dict[int, weakref.ref[torch.nn.Parameter]] = {}

    def divide(self, model: torch.nn.Module, world_size: int, options: FSDPOptions) -> torch.nn.Module:
        """Divides a model over the workers, in place."""
        from raysgd.torch.fsdp import FSDP  # not at the top: it takes a while, and few need it

        self._replaced |= {id(parameter): weakref.ref(parameter) for parameter in model.parameters()}
        self.parallel = FSDP(self.device, world_size, options)
        model = self.parallel.wrap(model, None, {})
        self.parallel.rebind_optimizers(())  # lets go of the whole parameters
        return model

    def has_replaced(self, parameter: torch.nn.Parameter) -> bool:
        """Whether a part stands in the place of this parameter now."""
        reference = self._replaced.get(id(parameter))
        return reference is not None and reference() is parameter


def accelerate(amp: bool = False) -> None:
    """Chooses the precision of a run: with `amp`, fp16 with a gradient scaler on GPUs. Call it first.

    Raises:
        SessionMisuseError: Outside of a training function.
        RuntimeError: A helper was called before, or this was.
    """
    session = running_session("accelerate")
    if session.accelerator is not None:
        raise RuntimeError("call `accelerate` once, and before all other helpers of `raysgd.train.torch`.")
    device = _device_of(session)
    precision = NativeAmp(torch.float16, device, enabled=device.type == "cuda") if amp else Precision()
    session.accelerator = Accelerator(precision, device)


def get_device() -> torch.device:
    """The device of this worker.

    Raises:
        SessionMisuseError: Outside of a training function.
    """
    return _accelerator("get_device").device


def prepare_model(
    model: torch.nn.Module,
    move_to_device: bool | torch.device = True,
    wrap_ddp: bool | str | None = True,
    ddp_kwargs: Mapping[str, Any] | None = None,
    *,
    parallel_strategy: str | None = _UNSET,
    parallel_strategy_kwargs: Mapping[str, Any] | None = None,
) -> torch.nn.Module:
    """Gets a model ready: on its device, in the precision of the run, and kept equal on all workers.

    With "fsdp" it is divided over the workers, in place. Make its optimizer afterwards, and save what `gather_state`
    returns. A single worker keeps it whole.

    Args:
        model: The model.
        move_to_device: Whether to move it to this worker's device; or another device.
        wrap_ddp: Whether to wrap it in `DistributedDataParallel`, if there are several workers; or a
            `parallel_strategy`.
        ddp_kwargs: Arguments for that.
        parallel_strategy: Says the same in other words: "ddp" or None; or "fsdp", to divide it by `fully_shard`.
        parallel_strategy_kwargs: Arguments for that; with "fsdp" those of `TorchTrainer(fsdp_args=...)`.

    Raises:
        SessionMisuseError: Outside of a training function.
        ValueError: Another strategy, or options that it does not have.
    """
    strategy, options = _strategy_of(wrap_ddp, ddp_kwargs, parallel_strategy, parallel_strategy_kwargs)
    accelerator = _accelerator("prepare_model")
    world = running_session("prepare_model").world
    device = move_to_device if isinstance(move_to_device, torch.device) else accelerator.device
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if move_to_device:
        model = model.to(device)
    if accelerator.precision.is_mixed:
        model.forward = _InContext(model, accelerator.precision.forward)
    if world.size == 1 or strategy is None:
        return model
    if strategy == "fsdp":
        return accelerator.divide(model, world.size, FSDPOptions(**options))
    device_ids = [device.index or 0] if device.type == "cuda" else None
    return DDP().wrap(model, device_ids, options)


def _strategy_of(
    wrap_ddp: bool | str | None,
    ddp_kwargs: Mapping[str, Any] | None,
    parallel_strategy: str | None,
    parallel_strategy_kwargs: Mapping[str, Any] | None,
) -> tuple[str | None, dict[str, Any]]:
    """The strategy, whichever of its two names it was given by, and its options."""
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
        raise ValueError(f'`parallel_strategy_kwargs` has {", ".join(unknown)}: with "fsdp" allowed are {known}.')
    return strategy, options


def gather_state(part: torch.nn.Module | torch.optim.Optimizer) -> dict[str, Any]:
    """The whole state of a model or an optimizer, without wrappers, for `save_checkpoint`; all workers have to call it.

    Of parts that are divided by "fsdp" it is put together on rank 0; the others get it without the tensors.

    Raises:
        SessionMisuseError: Outside of a training function.
    """
    return _accelerator("gather_state").parallel.state_of(unwrapped(part))


def load_state(part: torch.nn.Module | torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Takes over a state of `gather_state`, or of `state_dict` of a plain part, before or after it was prepared.

    Raises:
        SessionMisuseError: Outside of a training function.
    """
    parallel = _accelerator("load_state").parallel
    if isinstance(part, torch.nn.Module):
        model = unwrapped(part)
        is_divided = any(hasattr(parameter, "full_tensor") for parameter in model.parameters())
        (parallel if is_divided else NoParallel()).load_model(model, state)
    else:
        parallel.load_optimizer(part, state)


class _InContext:
    """A model's `forward` inside of a context. A copy of the model, and what a pickle brings back, has the plain one.

    Args:
        model: The model, before this becomes its `forward`.
        context: Makes the context.
    """

    def __init__(self, model: torch.nn.Module, context: Callable[[], AbstractContextManager[Any]]) -> None:
        self._model, self._forward, self._context = model, model.forward, context

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._context():
            return self._forward(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._model, "forward")  # of the other model, which then has none of its own yet


def prepare_data_loader(
    data_loader: DataLoader[Any],
    add_dist_sampler: bool = True,
    move_to_device: bool = True,
    auto_transfer: bool = True,
    *,
    exact: bool = False,
) -> DataLoader[Any]:
    """Gets a loader ready: over this worker's part of the samples, with batches on the device.

    Call `loader.sampler.set_epoch(epoch)` before each pass for another order each time. All workers get the same number
    of samples: where these cannot be divided evenly, the first ones come twice, unless `exact` is set.

    Args:
        data_loader: The loader.
        add_dist_sampler: Whether to divide a map-style dataset over the workers.
        move_to_device: Whether to move the batches.
        auto_transfer: Whether to do so one batch ahead, beside the computation; GPUs only.
        exact: Whether each sample comes once on one worker, as for an evaluation. Workers may then get different
            numbers of batches. A training of `DistributedDataParallel` models needs `model.join()` around such a pass.

    Raises:
        SessionMisuseError: Outside of a training function.
        ValueError: The loader has a `batch_sampler` of a class that cannot be divided.
    """
    accelerator = _accelerator("prepare_data_loader")
    if add_dist_sampler:
        data_loader = divided(data_loader, running_session("prepare_data_loader").world, accelerator.seed, exact)
    return DeviceLoader(data_loader, accelerator.device, auto_transfer) if move_to_device else data_loader


def prepare_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Gets an optimizer ready, in place: with mixed precision its `step` goes through the gradient scaler.

    Schedulers may be attached to it before or after that.

    Raises:
        SessionMisuseError: Outside of a training function.
        ValueError: It was made before its model was divided, and so steps parameters that are not trained.
    """
    accelerator = _accelerator("prepare_optimizer")
    if any(accelerator.has_replaced(parameter) for group in optimizer.param_groups for parameter in group["params"]):
        raise ValueError(
            'The optimizer has the parameters from before `prepare_model(..., "fsdp")`: create it afterwards.'
        )
    if accelerator.precision.scaler is not None and not hasattr(optimizer.step, _SCALED):
        _step_by_way_of(accelerator.precision, optimizer)
    return optimizer


_SCALED = "_goes_through_scaler"


def _step_by_way_of(precision: Precision, optimizer: torch.optim.Optimizer) -> None:
    """Replaces `optimizer.step` in place, so that there is no other way to step it."""
    own = optimizer.step  # perhaps that of a scheduler, which counts the steps

    def step(self: Any, closure: Any = None) -> None:
        if closure is not None:
            raise ValueError("`closure`: a step with scaled gradients cannot use one.")
        present = self.step
        self.step = own  # for the scaler, which calls it unless gradients have overflowed
        try:
            precision.step(self)
        finally:
            self.step = present

    setattr(step, _SCALED, True)
    optimizer.step = MethodType(step, optimizer)  # type: ignore[method-assign]  # schedulers wrap methods only


def backward(tensor: torch.Tensor) -> None:
    """Computes the gradients of a loss, scaled if the precision of the run asks for it.

    Raises:
        SessionMisuseError: Outside of a training function.
    """
    _accelerator("backward").precision.backward(tensor, None)


def enable_reproducibility(seed: int = 0) -> None:
    """Makes two runs with the same seed do the same. Slower on GPUs. Call it before the other helpers.

    Raises:
        SessionMisuseError: Outside of a training function.
    """
    _accelerator("enable_reproducibility").seed = seed
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False


def _accelerator(helper: str) -> Accelerator:
    session = running_session(helper)
    if session.accelerator is None:
        session.accelerator = Accelerator(Precision(), _device_of(session))
    accelerator: Accelerator = session.accelerator
    return accelerator


def _device_of(session: Session) -> torch.device:
    """The first of this worker's GPUs, as the process counts those that it sees; else the CPU."""
    gpu_ids = session.world.gpu_ids
    if not gpu_ids or not torch.cuda.is_available():
        return torch.device("cpu")
    visible = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    if gpu_ids[0] not in visible:
        raise RuntimeError(
            f"This worker's GPU {gpu_ids[0]} is not among CUDA_VISIBLE_DEVICES={','.join(visible)!r}, which something "
            "has changed after the worker was started."
        )
    return torch.device("cuda", visible.index(gpu_ids[0]))
