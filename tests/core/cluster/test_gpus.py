"""How many GPUs each worker gets, whether workers share them, and how they talk."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from raysgd.core.cluster.resources import DriverView, GpuChoice, choose_gpus, why_ranks_cannot_share

CAN_SHARE = DriverView(1, "1", 23007)


def asking(of_nodes: Sequence[float] | None) -> Callable[[], Sequence[float]] | None:
    """What asks the cluster for its GPUs; nothing where there is no Ray."""
    return None if of_nodes is None else lambda: of_nodes


@pytest.mark.parametrize(
    ("seen", "of_nodes", "num_workers", "num_gpus_per_worker", "backend", "expected"),
    [
        # no GPU
        (0, (), 2, 1, "auto", (0, "gloo")),
        (0, (0, 0), 2, 1, "auto", (0, "gloo")),
        (1, (0,), 2, 1, "auto", (0, "gloo")),  # this process sees one, but Ray has none to give
        (0, (0,), 2, 1, "nccl", (0, "nccl")),
        # as many as workers, or more
        (1, (1,), 1, 1, "auto", (1, "nccl")),
        (2, (2,), 2, 1, "auto", (1, "nccl")),
        (2, (8,), 2, 1, "auto", (1, "nccl")),
        (0, (1, 1), 2, 1, "auto", (1, "nccl")),  # the head of a cluster has none
        (2, (2,), 2, 1, "gloo", (1, "gloo")),
        (4, (4,), 2, 2, "auto", (2, "nccl")),
        # fewer, but some
        (1, (1,), 2, 1, "auto", (0.5, "gloo")),
        (1, (1,), 3, 1, "auto", (0.3333, "gloo")),
        (1, (1,), 4, 1, "auto", (0.25, "gloo")),
        (2, (2,), 3, 1, "auto", (0.5, "gloo")),
        (0, (1, 1, 0), 3, 1, "auto", (0.5, "gloo")),
        (0, (3, 1), 16, 1, "auto", (0.25, "gloo")),
        (1, (1,), 2, 1, "gloo", (0.5, "gloo")),
        # the bundles of a trial of Tune: what was reserved for it
        (0, (0, 0.5, 0.5), 2, 1, "auto", (0.5, "gloo")),
        (0, (0, 0.3333, 0.3333, 0.3333), 3, 1, "auto", (0.3333, "gloo")),
        (0, (0, 1, 1), 2, 1, "auto", (1, "nccl")),
        (0, (0, 0, 0), 2, 1, "auto", (0, "gloo")),
        # the user's own number is kept, whether it fits or not
        (1, (1,), 2, 0.5, "auto", (0.5, "gloo")),
        (1, (1,), 8, 0.1, "auto", (0.1, "gloo")),
        (1, (1,), 2, 2, "auto", (2, "nccl")),
        # without Ray, and PyTorch without GPUs
        (0, None, 1, 1, "auto", (0, "gloo")),
        (1, None, 1, 1, "auto", (1, "nccl")),
        (None, None, 1, 1, "auto", (0, "gloo")),
        (None, (2,), 2, 1, "auto", (0, "gloo")),
    ],
)
def test_auto_goes_by_all_gpus_of_the_cluster(
    seen: int | None,
    of_nodes: Sequence[float] | None,
    num_workers: int,
    num_gpus_per_worker: float,
    backend: str,
    expected: tuple[float, str],
) -> None:
    options: dict[str, Any] = {"num_gpus_per_worker": num_gpus_per_worker, "backend": backend}
    assert choose_gpus("auto", num_workers, DriverView(seen), asking(of_nodes), **options) == GpuChoice(*expected)


@pytest.mark.parametrize(
    ("use_gpu", "num_gpus_per_worker", "expected"),
    [
        (True, 1, (1, "nccl")),
        (True, 2, (2, "nccl")),
        (True, 0.5, (0.5, "gloo")),
        (1, 1, (1, "nccl")),
        (False, 1, (0, "gloo")),
        (None, 0.5, (0, "gloo")),
    ],
)
def test_true_and_false_are_what_they_say_whatever_there_is(
    use_gpu: Any, num_gpus_per_worker: float, expected: tuple[float, str]
) -> None:
    for seen, of_nodes in ((None, None), (0, ()), (8, (8,))):
        choice = choose_gpus(use_gpu, 2, DriverView(seen), asking(of_nodes), num_gpus_per_worker=num_gpus_per_worker)
        assert choice == GpuChoice(*expected)


@pytest.mark.parametrize(("seen", "num_gpus"), [(0, 0), (1, 0.5)])
def test_a_worker_in_a_driver_without_gpus_needs_cpus(seen: int, num_gpus: float) -> None:
    assert choose_gpus("auto", 2, DriverView(seen), asking((1,)), has_driver=True).num_gpus == num_gpus


@pytest.mark.parametrize(
    ("driver", "use_gpu", "backend", "expected"),
    [
        (CAN_SHARE, "auto", "auto", "nccl"),
        (CAN_SHARE, "auto", "nccl", "nccl"),
        (CAN_SHARE, "auto", "gloo", "gloo"),
        (CAN_SHARE, True, "auto", "nccl"),
        (DriverView(1, "1", 22907), "auto", "auto", "gloo"),
        (DriverView(1, "1", 0), "auto", "auto", "gloo"),  # no library is loaded
        (DriverView(1, None, 23007), "auto", "auto", "gloo"),
        (DriverView(1, "0", 23007), "auto", "auto", "gloo"),
        (DriverView(0, "1", 0), True, "nccl", "nccl"),  # the workers look for the version
    ],
)
def test_nccl_connects_workers_on_one_gpu_where_the_user_and_the_library_let_it(
    driver: DriverView, use_gpu: Any, backend: str, expected: str
) -> None:
    share = 1 if use_gpu == "auto" else 0.5
    choice = choose_gpus(use_gpu, 2, driver, asking((1,)), num_gpus_per_worker=share, backend=backend)
    assert (choice.num_gpus, choice.backend) == (0.5, expected)


@pytest.mark.parametrize(
    ("num_workers", "of_nodes", "options", "words"),
    [
        (5, (1,), {}, "with 5 workers .* has 1 GPU.*at most 4 workers, pass `use_gpu=False`"),
        (9, (1, 1), {}, "ask for at most 8 workers"),
        (
            2,
            (1,),
            {"backend": "nccl"},
            "`NCCL_MULTI_RANK_GPU_ENABLE=1`. Here, .* is not set.*no NCCL is loaded",
        ),
        (2, (1,), {"backend": "horovod"}, "Horovod's workers cannot share.*`use_gpu=False`"),
    ],
)
def test_what_cannot_be_shared_is_refused_with_what_to_write(
    num_workers: int, of_nodes: Sequence[float], options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        choose_gpus("auto", num_workers, DriverView(1), asking(of_nodes), **options)


def test_a_single_worker_with_a_part_of_a_gpu_may_use_nccl() -> None:
    choice = choose_gpus(True, 1, DriverView(1), asking((1,)), num_gpus_per_worker=0.5, backend="nccl")
    assert choice == GpuChoice(0.5, "nccl")


@pytest.mark.parametrize(
    ("multi_rank", "nccl", "words"),
    [
        ("1", 23000, ""),
        ("1", 22999, "NCCL 2.29.99 is loaded"),
        (None, 23007, "variable is not set, and NCCL 2.30.7 is loaded"),
        ("0", 23007, 'variable is "0"'),
        ("", 0, 'variable is "", and no NCCL is loaded'),
    ],
)
def test_it_says_what_nccl_lacks(multi_rank: str | None, nccl: int, words: str) -> None:
    found = why_ranks_cannot_share(multi_rank, nccl)
    assert words in found
    assert bool(words) == bool(found)
