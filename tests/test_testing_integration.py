"""What users break on purpose really breaks, in real workers.

Covers `raysgd.testing.faults`: only a real worker can be broken.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ray.cluster_utils import Cluster

from raysgd import testing
from raysgd.testing import faults
from raysgd.torch import TorchTrainer
from tests.helpers.doors import controller_of
from tests.helpers.processes import shipped
from tests.torch import ledger, operators_for_tests
from tests.torch.ledger import Ledger

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module", autouse=True)
def ships_what_tests_define() -> Iterator[None]:
    with shipped(ledger, operators_for_tests):
        yield


@pytest.fixture(scope="module")
def pair(ray_cluster: None) -> Iterator[TorchTrainer]:
    """Two workers."""
    with TorchTrainer(training_operator_cls=Ledger, num_workers=2) as trainer:
        yield trainer


def count(trainer: TorchTrainer) -> int:
    return controller_of(trainer).history.num_failures


@pytest.mark.parametrize("rank", [2, -1, True, "1", None, [], [1, 7]])
def test_a_rank_that_there_is_not_is_refused(rank: Any, pair: TorchTrainer) -> None:
    with pytest.raises(ValueError, match=r"ranks 0 to 1|at least one rank"):
        testing.kill_worker(pair, rank)


def test_a_slow_rank_is_slow_as_long_as_it_is_meant_to(pair: TorchTrainer) -> None:
    began = time.monotonic()
    with testing.slow_rank(pair, 1, 0.2), testing.slow_rank(pair, 0, 0.01):
        pair.train(num_steps=3)
    assert time.monotonic() - began >= 0.6
    are_armed = pair.apply_all_workers(lambda: [trap.is_armed for trap in faults._traps])
    assert are_armed == [[False], [False]]
    assert count(pair) == 0


def test_a_full_disk_is_full_for_saves_only_of_this_trainer(pair: TorchTrainer, tmp_path: Path) -> None:
    path = pair.save(tmp_path / "last.pt")
    before = path.read_bytes()
    with testing.fail_save(pair, after_bytes=100):
        with pytest.raises(OSError, match="No space left") as caught:
            pair.save(path)
        pair.save(path, blocking=False)
    assert caught.value.errno == errno.ENOSPC
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["last.pt"]
    with pytest.raises(OSError, match="No space left"):
        pair.save(path)  # tells of the one in the background
    with testing.fail_save(pair, PermissionError("not here")), pytest.raises(PermissionError, match="not here"):
        pair.save(path)
    assert pair.save(path) == path
    pair.load(path)


def test_what_was_taken_back_does_not_happen(pair: TorchTrainer, tmp_path: Path) -> None:
    failures = count(pair)
    testing.kill_worker(pair, 1, at="step:0")
    testing.kill_worker(pair, 1, at="save")
    testing.kill_worker(pair, 1, at="setup")
    testing.disarm(pair)
    pair.train(num_steps=1)
    pair.save(tmp_path / "last.pt")
    assert count(pair) == failures
    assert "save" not in vars(pair)


def test_a_fault_is_armed_on_no_rank_if_one_of_them_is_dead(ray_cluster: None) -> None:
    with TorchTrainer(training_operator_cls=Ledger, num_workers=2) as trainer:
        testing.kill_worker(trainer, 1)
        with pytest.raises(RuntimeError, match=r"`rank=1`: its worker has died .* Make a call first"):
            testing.kill_worker(trainer, [0, 1], at="step:0")
        trainer.train(num_steps=1)
        assert count(trainer) == 1


def test_a_cluster_keeps_its_head_and_the_drivers_node(pair: TorchTrainer) -> None:
    cluster = Cluster()
    with pytest.raises(ValueError, match="not in this cluster"):
        testing.remove_node(cluster, trainer=pair, rank=1)
    with pytest.raises(ValueError, match="is not a node of this cluster"):
        testing.remove_node(cluster, object())


def test_a_trainer_that_is_shut_down_has_nobody_to_kill(ray_cluster: None) -> None:
    trainer = TorchTrainer(training_operator_cls=Ledger)
    trainer.shutdown()
    with pytest.raises(RuntimeError, match="shut down"):
        testing.kill_worker(trainer, 0)
