"""`Accelerator`: device, precision and seed that the helpers of one run share, and how states are gathered."""

from __future__ import annotations

import os
import random
import weakref

import numpy as np
import torch

from raysgd.air._running import RunningSession, running_session
from raysgd.torch.objects.precision import NativeAmp, Precision
from raysgd.torch.parallel.options import FSDPOptions
from raysgd.torch.parallel.strategy import NoParallel
from raysgd.train._torch.global_steps import GlobalSteps


class Accelerator:
    """The things that the helpers of one run share.

    Attributes:
        seed: What random numbers start from; None for anything.
        parallel: How states are gathered and taken over.
        steps: The steps that all ranks take together; None where a loss of workers ends the function.
    """

    def __init__(self, precision: Precision, device: torch.device, steps: GlobalSteps | None = None) -> None:
        self.precision = precision
        self.device = device
        self.steps = steps
        if steps is not None and precision.scaler is not None:
            steps.share(precision.scaler)
        self.seed: int | None = None
        self.parallel = NoParallel()
        self._replaced: dict[int, weakref.ref[torch.nn.Parameter]] = {}

    def divide(self, model: torch.nn.Module, world_size: int, options: FSDPOptions) -> torch.nn.Module:
        """Divides a model over the workers, in place."""
        from raysgd.torch.parallel.fsdp import FSDP  # not at the top: it takes a while, and few need it

        self._replaced |= {id(parameter): weakref.ref(parameter) for parameter in model.parameters()}
        self.parallel = FSDP(self.device, world_size, options)
        model = self.parallel.wrap(model, None, {})
        self.parallel.rebind_optimizers(())  # lets go of the whole parameters
        return model

    def has_replaced(self, parameter: torch.nn.Parameter) -> bool:
        """Return whether a part stands in the place of this parameter now."""
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
    session.accelerator = Accelerator(precision, device, _steps_of(session))


def get_device() -> torch.device:
    """The device of this worker.

    Raises:
        SessionMisuseError: Outside of a training function.
    """
    return accelerator_of("get_device").device


def get_devices() -> list[torch.device]:
    """The devices of this worker: one for each of its GPUs, or the CPU.

    Raises:
        SessionMisuseError: Outside of a training function.
    """
    return _devices_of(running_session("get_devices"))


def enable_reproducibility(seed: int = 0) -> None:
    """Makes two runs with the same seed do the same. Slower on GPUs. Call it before the other helpers.

    Raises:
        SessionMisuseError: Outside of a training function.
    """
    accelerator_of("enable_reproducibility").seed = seed
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False


def accelerator_of(helper: str) -> Accelerator:
    """Return what the helpers share in this run; raises as `running_session`."""
    session = running_session(helper)
    if session.accelerator is None:
        session.accelerator = Accelerator(Precision(), _device_of(session), _steps_of(session))
    accelerator: Accelerator = session.accelerator
    return accelerator


def _steps_of(session: RunningSession) -> GlobalSteps | None:
    return GlobalSteps(session) if session.membership is not None else None


def _device_of(session: RunningSession) -> torch.device:
    """The first of this worker's GPUs; else the CPU."""
    return _devices_of(session)[0]


def _devices_of(session: RunningSession) -> list[torch.device]:
    """This worker's GPUs, as the process counts those that it sees; else the CPU."""
    gpu_ids = session.world.gpu_ids
    if not gpu_ids or not torch.cuda.is_available():
        return [torch.device("cpu")]
    visible = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    missing = [gpu_id for gpu_id in gpu_ids if gpu_id not in visible]
    if missing:
        raise RuntimeError(
            f"This worker's GPU {missing[0]} is not among CUDA_VISIBLE_DEVICES={','.join(visible)!r}, which something "
            "has changed after the worker was started."
        )
    return [torch.device("cuda", visible.index(gpu_id)) for gpu_id in gpu_ids]
