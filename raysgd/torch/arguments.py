"""What `TorchTrainer` accepts: checks that refuse an argument before anything starts, and defaults.

Every check raises `ValueError` or `TypeError` (or `DeprecationWarning` for what older versions took), and says what was
passed, what is allowed, and what to do.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from raysgd._optional import require
from raysgd.backends.horovod import INSTALL_COMMAND, import_horovod
from raysgd.exceptions import InvalidCountError
from raysgd.torch import constants
from raysgd.torch.training_operator import TrainingOperator
from raysgd.utils import BATCH_SIZE

logger = logging.getLogger(__name__)


def check_count(name: str, value: Any, hint: str) -> None:
    """Refuses anything but a positive integer."""
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise ValueError(f"`{name}={value!r}`: need at least 1, as an integer. {hint}")


def check_kinds(config: Any, initialization_hook: Any, num_cpus_per_worker: Any) -> None:
    """Refuses arguments of the wrong kind."""
    if config is not None and not isinstance(config, Mapping):
        raise TypeError(f"`config={config!r}`: need a dict, which the operator's `setup` is given.")
    if initialization_hook is not None and not callable(initialization_hook):
        raise TypeError(f"`initialization_hook={initialization_hook!r}`: need a function without parameters.")
    is_number = isinstance(num_cpus_per_worker, int | float) and not isinstance(num_cpus_per_worker, bool)
    if not is_number or num_cpus_per_worker < 0:
        raise ValueError(f"`num_cpus_per_worker={num_cpus_per_worker!r}`: need a number of CPUs, 0 or more.")


def check_num_steps(num_steps: Any) -> None:
    """Refuses anything but None or a count."""
    if num_steps is not None and (isinstance(num_steps, bool) or not isinstance(num_steps, int) or num_steps < 0):
        raise InvalidCountError(
            f"`num_steps={num_steps!r}`: need a number of batches per worker, or None for one pass."
        )


def check_use_local(num_workers: int) -> None:
    """Refuses a driver that is not in the cluster as a worker."""
    if num_workers > 1:
        from raysgd.engine.resources import is_ray_client

        if is_ray_client():
            raise ValueError(
                "`use_local=True` does not work through a Ray Client connection: this process is not in the cluster."
            )
    _warn_local_once()


_warned: set[str] = set()


def _warn_local_once() -> None:
    if "use_local" not in _warned and torch.cuda.is_available():
        _warned.add("use_local")
        logger.warning("`use_local=True`: rank 0 shares this process, and its view of CUDA devices, with your program")


def check_operator_class(operator_cls: Any) -> None:
    """Refuses anything but an operator class."""
    if isinstance(operator_cls, type) and issubclass(operator_cls, TrainingOperator):
        return
    found = (
        f"an instance of `{type(operator_cls).__name__}`"
        if isinstance(operator_cls, TrainingOperator)
        else repr(operator_cls)
    )
    raise TypeError(f"`training_operator_cls` is {found}: need a subclass of `TrainingOperator`, the class itself.")


def check_tqdm() -> None:
    """Refuses `use_tqdm` where tqdm is missing."""
    try:
        require("tqdm.auto", extra="progress", purpose="`use_tqdm=True`")
    except ImportError as error:
        raise ValueError(str(error)) from error


def refuse_creators(*creators: Any) -> None:
    """Refuses the creator functions that were arguments once."""
    if any(creators):
        raise DeprecationWarning(
            "Creator functions are not arguments of `TorchTrainer` any more: make an operator class of them with "
            "`TrainingOperator.from_creators(...)` and pass it as `training_operator_cls`."
        )


_REPLACEMENTS = {
    "num_replicas": "use `num_workers`",
    "batch_size": f"put the batch size of all workers into `config` under `raysgd.utils.BATCH_SIZE` ({BATCH_SIZE!r})",
    "apex_args": "pass it to `TrainingOperator.register`",
    "data_loader_args": "make the `DataLoader` with these options in the operator's `setup`",
}


def refuse_retired(**arguments: Any) -> None:
    """Refuses other arguments that were retired, and names what replaces them."""
    for name, value in arguments.items():
        if value is not None:
            raise DeprecationWarning(f"`{name}` is not an argument of `TorchTrainer` any more: {_REPLACEMENTS[name]}.")


def refuse_unknown(unknown: Mapping[str, Any], known: Iterable[str]) -> None:
    """Refuses keywords that nobody knows, with a guess at what was meant."""
    for name in unknown:
        close = difflib.get_close_matches(name, [*known], n=1)
        hint = f" Did you mean `{close[0]}`?" if close else ""
        raise TypeError(f"`TorchTrainer` does not know `{name}`.{hint}")


def validate_scheduler_step_freq(scheduler_step_freq: Any) -> None:
    """Refuses an unknown frequency."""
    if scheduler_step_freq and scheduler_step_freq not in constants.VALID_SCHEDULER_STEP:
        allowed = ", ".join(repr(name) for name in sorted(constants.VALID_SCHEDULER_STEP))
        raise ValueError(f"`scheduler_step_freq={scheduler_step_freq!r}`: allowed are None, {allowed}.")


def resolve_use_gpu(use_gpu: bool | str) -> bool:
    """Whether to use GPUs; "auto" asks the driver's PyTorch."""
    available = torch.cuda.is_available()
    if use_gpu == "auto":
        return available
    if not use_gpu and available:
        logger.info("GPUs are there, but `use_gpu` is off: pass `use_gpu=True` to train on them")
    return bool(use_gpu)


def resolve_backend(backend: str, use_gpu: bool) -> str:
    """The backend that "auto" stands for, or the one that was named."""
    if backend == "auto":
        return "nccl" if use_gpu else "gloo"
    if backend not in ("nccl", "gloo", "horovod"):
        raise ValueError(f'`backend={backend!r}`: allowed are "auto", "gloo", "nccl" and "horovod".')
    return backend


def check_horovod(use_fp16: Any, use_gpu: bool) -> None:
    """Refuses what cannot be had together with `backend="horovod"`, and that itself where Horovod is missing."""
    hvd = import_horovod()
    if use_fp16 == "apex":
        raise ValueError(
            '`use_fp16="apex"` does not work with `backend="horovod"`, because both rebuild the optimizer: use '
            '`use_fp16=True`, or `backend="gloo"` or "nccl".'
        )
    if use_gpu and not (hvd.cuda_built() or hvd.rocm_built()):
        raise ValueError(
            '`use_gpu` is on, but this Horovod was built for CPUs: pass `use_gpu=False`, use `backend="nccl"`, or run: '
            f"HOROVOD_GPU_OPERATIONS=NCCL {INSTALL_COMMAND}"
        )


def resolve_timeout(timeout_s: float | None, backend: str) -> float:
    """Seconds that a collective may take: what was passed, or the default of the transport."""
    if timeout_s is not None:
        if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or timeout_s <= 0:
            raise ValueError(f"`timeout_s={timeout_s!r}`: need a positive number of seconds.")
        return timeout_s
    return constants.NCCL_TIMEOUT_S if backend == "nccl" else 1800
