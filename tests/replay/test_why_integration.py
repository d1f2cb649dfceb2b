"""The samples that a journal gives for a step are those that the workers trained on, whatever happened to them.

Covers `raysgd.replay.questions`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray.cloudpickle

from raysgd import Recovery
from raysgd.journal.journal import Journal
from raysgd.replay import why
from raysgd.torch import TorchTrainer
from tests.journal.test_journal_integration import Kill
from tests.replay import seeing
from tests.replay.seeing import Seeing, StreamSeeing, seen_in
from tests.torch import operators_for_tests, samplers, streamed

pytestmark = pytest.mark.integration

WITH_KILLS = Recovery(wait_for_workers=False, resize_interval_s=600.0)


@pytest.fixture(autouse=True)
def ships_the_operators() -> Iterator[None]:
    """Let workers use them without a path to the tests."""
    modules = (seeing, operators_for_tests, samplers, streamed, sys.modules["tests.streams.made"])
    for module in modules:
        ray.cloudpickle.register_pickle_by_value(module)
    yield
    for module in modules:
        ray.cloudpickle.unregister_pickle_by_value(module)


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "a batch for each worker": ({"shuffle": True}, {"num_workers": 3}),
    "batches that a kill makes fewer": ({"shuffle": True, "kill": "step:3"}, {"num_workers": 3}),
    "split batches in order": ({"kill": "step:2", "batch_size": 9}, {"split_batches": True, "num_workers": 3}),
    "micro batches": ({"shuffle": True, "batch_size": 10}, {"split_batches": True, "micro_batch_size": 2}),
    "accumulation": ({"shuffle": True, "batch_size": 3}, {"accumulate_grad_batches": 3}),
    "logical shards": ({"shuffle": True, "kill": "step:4"}, {"deterministic": True, "num_workers": 3}),
    "a sampler": ({"order": "sampler", "kill": "step:3"}, {"split_batches": True, "num_workers": 3}),
    "a sampler that is told the epoch": ({"order": "epochs"}, {}),
    "a batch sampler": ({"order": "batches"}, {"split_batches": True}),
}


@pytest.mark.parametrize("case", CASES)
def test_the_samples_of_a_step_are_those_that_each_rank_had(ray_cluster: None, tmp_path: Path, case: str) -> None:
    config, options = CASES[case]
    check(Seeing, {"num_samples": 50, **config}, options, tmp_path, needs_program="order" in config)


@pytest.mark.parametrize("kind", ["plain", "shuffled", "filtered"])
def test_the_rows_of_a_stream_are_those_that_each_rank_had(ray_cluster: None, tmp_path: Path, kind: str) -> None:
    check(
        StreamSeeing,
        {"kind": kind, "kill": "step:9"},
        {"num_workers": 3, "split_batches": True},
        tmp_path,
        needs_program=True,
    )


def check(
    operator_cls: Any, config: dict[str, Any], options: dict[str, Any], tmp_path: Path, needs_program: bool
) -> None:
    config = {**config, "log": str(tmp_path / "log")}
    (tmp_path / "log").mkdir()
    callbacks = [Kill(1, config["kill"])] if "kill" in config else []
    chosen = {"num_workers": 2, "use_gpu": False, "num_cpus_per_worker": 0.5, "recovery": WITH_KILLS, **options}
    with TorchTrainer(training_operator_cls=operator_cls, config=config, **chosen) as trainer:
        trainer.fit(3, folder=tmp_path / "run", callbacks=callbacks)
    journal, seen, program = Journal(tmp_path / "run"), seen_in(tmp_path / "log"), operator_cls
    assert any(leg.num_workers == 2 for leg in journal.legs) or "kill" not in config
    for step in journal.numbers():
        without = why(tmp_path / "run", step)
        if needs_program:
            assert without.samples is None
            assert "pass `--program`" in str(without.obstacle)
        found = why(tmp_path / "run", step, program=program) if needs_program else without
        first = journal.begin_of(step) + 1
        assert found.samples is not None
        assert found.obstacle is None
        for rank, own in enumerate(found.samples):
            had = [number for at in range(first, step + 1) for number in seen.get((at, rank), [])]
            assert [numbered(each) for each in own] == had, f"step {step}, rank {rank}"


def numbered(sample: Any) -> int:
    """Return the number of a sample. Shards of the stream have 15 rows."""
    return sample if isinstance(sample, int) else int(sample.shard.removeprefix("shard-")) * 15 + sample.row
