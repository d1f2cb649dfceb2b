"""Decides how many GPUs each worker gets, whether workers share GPUs, and how PyTorch workers communicate.

ADR 173 explains the decision for `use_gpu="auto"`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MOST_ON_A_GPU = 4
"""Number of workers that may share a GPU with `use_gpu="auto"`."""

_SHARES = tuple(10_000 // count / 10_000 for count in range(1, MOST_ON_A_GPU + 1))  # Ray counts in ten-thousandths
_TOLERANCE = 1e-6

MULTI_RANK = "NCCL_MULTI_RANK_GPU_ENABLE"
"""Environment variable with which users let NCCL run several ranks on one GPU."""

_MULTI_RANK_SINCE = 23000  # NCCL 2.30.0, in the form that `ncclGetVersion` returns


@dataclass(frozen=True)
class DriverView:
    """The GPUs and the NCCL that the driver sees.

    Attributes:
        num_gpus: Number of GPUs that PyTorch sees in this process. None if this PyTorch was built without GPU support.
            0 if unknown, as with TensorFlow, which the driver does not load.
        multi_rank: Value of the environment variable `MULTI_RANK` for the workers; None if it is not set.
        nccl: Version of the NCCL library in this process, such as 23007; 0 if it has none.
    """

    num_gpus: int | None = 0
    multi_rank: str | None = None
    nccl: int = 0


@dataclass(frozen=True)
class GpuChoice:
    """The GPUs of each worker.

    Attributes:
        num_gpus: GPUs of each worker: a fraction if workers share GPUs, 0 if they train on CPUs.
        backend: Backend of PyTorch workers: "gloo", "nccl" or "horovod".
    """

    num_gpus: float
    backend: str

    @property
    def is_shared(self) -> bool:
        """True if several workers may use the same GPU."""
        return 0 < self.num_gpus < 1


def choose_gpus(
    use_gpu: bool | str,
    num_workers: int,
    driver: DriverView,
    of_nodes: Sequence[float] | None,
    *,
    num_gpus_per_worker: float = 1,
    backend: str = "auto",
    has_driver: bool = False,
) -> GpuChoice:
    """Decide how many GPUs each worker gets, and over which backend PyTorch workers communicate.

    Args:
        use_gpu: True for `num_gpus_per_worker` GPUs each, False for CPUs, "auto" to go by the cluster.
        num_workers: The largest number of workers, spare workers included.
        driver: What this process sees.
        of_nodes: Number of GPUs of each node, whether free or not. Within a placement group, as in a trial of Ray Tune,
            of each of its bundles. None without Ray.
        num_gpus_per_worker: The user's number of GPUs for each worker.
        backend: The user's backend: "auto", or a name.
        has_driver: True if a worker runs in this process.

    Raises:
        ValueError: With "auto", more than `MOST_ON_A_GPU` workers would share a GPU. Or the backend does not support
            workers that share a GPU.
    """
    num_gpus = float(num_gpus_per_worker) if use_gpu else 0.0
    if use_gpu == "auto":
        if driver.num_gpus is None or (not driver.num_gpus and (has_driver or of_nodes is None)):
            num_gpus = 0.0
        elif of_nodes is not None:
            num_gpus = _that_fit(num_workers, num_gpus, of_nodes)
    choice = GpuChoice(num_gpus, backend)
    if backend == "auto":
        is_possible = num_gpus >= 1 or (choice.is_shared and not why_ranks_cannot_share(driver.multi_rank, driver.nccl))
        return GpuChoice(num_gpus, "nccl" if is_possible else "gloo")
    share = num_gpus or num_gpus_per_worker  # NCCL is refused for a part of a GPU also where there are no GPUs
    if share < 1 and num_workers > 1:
        if backend == "nccl" and not _is_set(driver.multi_rank):  # each worker checks the version that it has loaded
            obstacle = why_ranks_cannot_share(driver.multi_rank, driver.nccl)
            raise ValueError(
                f'`backend="nccl"` for workers that share a GPU (`num_gpus_per_worker={share:g}`): {obstacle} '
                'Or pass `backend="gloo"`, or omit it.'
            )
        if backend == "horovod" and use_gpu == "auto" and num_gpus:
            raise ValueError(
                f'`use_gpu="auto"` with `backend="horovod"` and {num_workers} workers: there are fewer GPUs, which '
                "Horovod's workers cannot share. Pass `use_gpu=False` to train on CPUs, fewer `num_workers`, or "
                '`backend="gloo"`.'
            )
    return choice


def _that_fit(num_workers: int, num_gpus_per_worker: float, of_nodes: Sequence[float]) -> float:
    if not any(of_nodes):
        return 0.0
    if num_gpus_per_worker != 1:  # the user's own number: if it does not fit, the reservation says what would
        return num_gpus_per_worker
    share = largest_share(num_workers, of_nodes)
    if not share:
        fitting = _num_fitting(_SHARES[-1], of_nodes)
        raise ValueError(
            f'`use_gpu="auto"` with {num_workers} workers (spares count too), but the cluster has {sum(of_nodes):g} '
            f"GPU(s), and at most {MOST_ON_A_GPU} workers share one: ask for at most {fitting} workers, pass "
            "`use_gpu=False` to train on CPUs, or choose the share yourself: `use_gpu=True, num_gpus_per_worker="
            f"{int(100 * sum(of_nodes) / num_workers) / 100:g}` (functions: `resources_per_worker`)."
        )
    return share


def largest_share(num_workers: int, of_nodes: Sequence[float]) -> float:
    """Return the largest part of a GPU that each worker can have, at most 1.

    Return 0 if more than `MOST_ON_A_GPU` workers would share a GPU.

    >>> [largest_share(num_workers, (1, 1)) for num_workers in (2, 3, 6, 9)]
    [1.0, 0.5, 0.3333, 0]
    """
    return next((share for share in _SHARES if _num_fitting(share, of_nodes) >= num_workers), 0)


def _num_fitting(share: float, of_nodes: Sequence[float]) -> int:
    return sum(int((num_gpus + _TOLERANCE) / share) for num_gpus in of_nodes)


def why_ranks_cannot_share(multi_rank: str | None, nccl: int) -> str:
    """Return why NCCL cannot run several ranks on one GPU, and what to do. Return "" if it can.

    Args:
        multi_rank: Value of the environment variable `MULTI_RANK`; None if it is not set.
        nccl: Version of the loaded library, such as 23007; 0 if there is none.

    >>> why_ranks_cannot_share("1", 23007)
    ''
    """
    if _is_set(multi_rank) and nccl >= _MULTI_RANK_SINCE:
        return ""
    variable = "not set" if multi_rank is None else f'"{multi_rank}"'
    version = f"NCCL {nccl // 10_000}.{nccl // 100 % 100}.{nccl % 100}" if nccl else "no NCCL"
    return (
        f"NCCL runs several ranks on one GPU only from version 2.30 on and with `{MULTI_RANK}=1`. Here, the variable "
        f"is {variable}, and {version} is loaded. Set it before the program starts, with `NCCL_NVLS_ENABLE=0` and "
        "`NCCL_MAX_CTAS=2`."
    )


def _is_set(multi_rank: str | None) -> bool:
    return multi_rank not in (None, "", "0")
