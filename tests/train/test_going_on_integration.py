"""Functions that go on where they are when other workers are lost, which are killed for real.

Covers `raysgd.train._torch.global_steps`: what it does needs several ranks, and losses of some.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from raysgd.exceptions import RanksDifferError
from raysgd.train import FailureConfig, RunConfig, ScalingConfig, Trainer, TrainingCallback
from raysgd.train.torch import TorchConfig, TorchTrainer
from tests.train.elastic_functions import sample_stream, train_counting, train_unprepared, undisturbed

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("ray_cluster")]

NUM_EPOCHS = 5
Death = dict[str, Any]


class Noting(TrainingCallback):
    """Notes the epochs that are reported, and how many workers report them."""

    def __init__(self) -> None:
        self.reports: list[tuple[int, int]] = []

    def handle_result(self, results: list[dict[str, Any]], **info: Any) -> None:
        assert len({result["epoch"] for result in results}) == 1
        self.reports.append((results[0]["epoch"], len(results)))


def dying(rank: int, place: str, number: int) -> Death:
    return {"rank": rank, "at": (place, number), "name": f"death_{rank}"}


def config_of(folder: Path, *deaths: Death, **more: Any) -> dict[str, Any]:
    return {"folder": str(folder), "num_epochs": NUM_EPOCHS, "deaths": deaths, **more}


def check_weights(folder: Path, num_epochs: int = NUM_EPOCHS, **how: bool) -> None:
    """A sample that a step was taken on once more or less would change its own weight by 0.008."""
    found = json.loads((folder / "weights.json").read_text())
    assert found == pytest.approx(undisturbed(num_epochs, **how), abs=1e-6)


def run(
    folder: Path,
    config: dict[str, Any],
    num_workers: tuple[int, int] = (1, 3),
    backend: str | TorchConfig = "torch",
    dataset: Any = None,
    **options: Any,
) -> Any:
    """Runs the function; returns what it returned, the reports, and what happened to the workers."""
    trainer, noting = Trainer(backend, num_workers, logdir=folder / "runs", elastic=True, **options), Noting()
    try:
        trainer.start()
        returned = trainer.run(train_counting, config, dataset=dataset, callbacks=[noting])
        return returned, noting.reports, [event.kind for event in trainer.history.events]
    finally:
        trainer.shutdown()


@pytest.mark.promise("A function continues where it is")
@pytest.mark.parametrize(
    "deaths",
    [
        (dying(2, "backward", 5), dying(0, "reporting", 3)),
        pytest.param((dying(0, "stepped", 6), dying(1, "step", 13)), marks=pytest.mark.soak),
        pytest.param((dying(0, "forward", 8), dying(2, "report", 2)), marks=pytest.mark.soak),
    ],
    ids=["in the exchange and inside a report", "between steps", "before the exchange and at the end of a pass"],
)
def test_survivors_go_on_where_they_are_and_each_sample_counts_once(tmp_path: Path, deaths: tuple[Death, ...]) -> None:
    returned, reports, kinds = run(tmp_path, config_of(tmp_path, *deaths, decays=True))
    assert [epoch for epoch, _ in reports] == [*range(NUM_EPOCHS)]
    assert kinds == ["started", "continued", "continued"]
    [answer] = returned
    assert (answer["first"], answer["failed"], answer["steps"]) == (0, 2, 4 * NUM_EPOCHS)
    assert answer["tracked"] == 4 * NUM_EPOCHS, "what a forward pass changes is undone in a batch that failed"
    check_weights(tmp_path, decays=True)


def test_a_batch_that_steps_two_optimizers_is_undone_and_repeated(tmp_path: Path) -> None:
    deaths = dying(2, "between", 5), dying(0, "stepped", 9)
    returned, reports, kinds = run(tmp_path, config_of(tmp_path, *deaths, has_two=True))
    assert [epoch for epoch, _ in reports] == [*range(NUM_EPOCHS)]
    assert kinds == ["started", "continued", "continued"]
    [answer] = returned
    assert (answer["failed"], answer["steps"], answer["tracked"]) == (2, 4 * NUM_EPOCHS, 8 * NUM_EPOCHS)
    assert (answer["began_as"], answer["rank"]) == (1, 0), "a variable stays, and the rank is another one"
    check_weights(tmp_path, has_two=True)


def test_what_fit_runs_goes_on_too_and_its_metrics_come_from_the_lowest_rank_that_is_left(tmp_path: Path) -> None:
    deaths = dying(0, "reporting", 1), dying(1, "backward", 14)
    trainer = TorchTrainer(
        train_counting,
        train_loop_config=config_of(tmp_path, *deaths),
        scaling_config=ScalingConfig(num_workers=(1, 3), elastic=True),
        run_config=RunConfig(storage_path=str(tmp_path / "runs"), failure_config=FailureConfig(max_failures=1)),
    )
    result = trainer.fit()
    frame = result.metrics_dataframe
    assert list(frame["epoch"]) == [*range(NUM_EPOCHS)]
    assert frame["size"].iloc[-1] == 1
    check_weights(tmp_path)


def test_a_run_grows_back_after_a_checkpoint(tmp_path: Path) -> None:
    config = config_of(tmp_path, dying(1, "backward", 6), saves=True)
    returned, reports, kinds = run(tmp_path, config, resize_interval_s=0)
    assert kinds == ["started", "continued", "grown"]
    in_second = reports[1][1]
    assert in_second in (2, 3), "3 where the checkpoint of the first epoch arrives after the failure"
    assert reports == [(0, 3), (1, in_second), (2, 3), (3, 3), (4, 3)]
    assert [answer["first"] for answer in returned] == 3 * [2 if in_second == 2 else 1]
    check_weights(tmp_path)


@pytest.mark.parametrize(
    ("deaths", "spares"),
    [
        ((dying(0, "reporting", 1), dying(2, "backward", 13)), 1),
        pytest.param((dying(0, "backward", 5), dying(1, "reporting", 2)), 0, marks=pytest.mark.soak),
    ],
    ids=["a spare steps in", "with fewer"],
)
def test_functions_on_a_stream_go_on_where_they_are(tmp_path: Path, deaths: tuple[Death, ...], spares: int) -> None:
    config = config_of(tmp_path, *deaths, data="stream", admits=True, saves=True, step_s=0.1)
    if spares:
        config["awaits_at"] = 4 * NUM_EPOCHS - 1
    returned, reports, kinds = run(tmp_path, config, dataset=sample_stream(), spare_workers=spares)
    assert [epoch for epoch, _ in reports] == [*range(NUM_EPOCHS)]
    assert {*kinds} <= {"started", "continued", "grown"}
    assert len(returned) == 3 or not spares
    check_weights(tmp_path, is_streamed=True)


def test_where_a_part_of_the_data_is_lost_with_its_worker_the_function_starts_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = pytest.importorskip("ray.data")
    data.DataContext.get_current().enable_progress_bars = False
    rows = data.from_items([{"id": number} for number in range(8)], override_num_blocks=2)
    config = config_of(tmp_path, dying(1, "rows", 2), data="parts", saves=True)  # the other waits for it there
    options = {"dataset": rows, "resources_per_worker": {"CPU": 0.5}}
    returned, reports, kinds = run(tmp_path, config, (1, 2), **options)
    assert kinds == ["started", "restored"]
    assert "the dataset was divided at the start" in caplog.text
    assert [epoch for epoch, _ in reports] == [*range(NUM_EPOCHS)]
    assert [answer["first"] for answer in returned] == [2, 2]
    check_weights(tmp_path)


@pytest.mark.parametrize(
    ("flaw", "words"),
    [
        ("model", "`more.bias` of `Counting` has another shape in a worker that steps in"),
        pytest.param("parts", "has prepared Counting, SGD, LambdaLR, and the others", marks=pytest.mark.soak),
        pytest.param("scheduler", "the learning rates of the workers differ", marks=pytest.mark.soak),
        pytest.param("function", "this one cannot step in", marks=pytest.mark.soak),
    ],
)
def test_a_worker_that_does_not_fit_the_others_is_named_and_the_function_starts_again(
    tmp_path: Path, flaw: str, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    config = config_of(tmp_path, dying(1, "backward", 9), admits=True, saves=True, step_s=0.1, flaw=flaw)
    config |= {"awaits_at": 12, "awaited": 2}  # the other one waits there for the one that steps in
    returned, reports, kinds = run(tmp_path, config, (1, 2), spare_workers=1)
    assert kinds[-1] == "restored"
    assert words in caplog.text
    assert [epoch for epoch, _ in reports] == [*range(NUM_EPOCHS)]
    assert returned[0]["first"] >= 2, "not from the beginning"
    if flaw != "scheduler":
        check_weights(tmp_path)


@pytest.mark.soak
def test_an_exchange_of_user_code_that_breaks_unseen_ends_in_no_hang(tmp_path: Path) -> None:
    config = config_of(tmp_path, dying(1, "backward", 9), saves=True, flaw="hidden")
    _, reports, _ = run(tmp_path, config, (1, 2))
    assert [epoch for epoch, _ in reports] == [*range(NUM_EPOCHS)]
    check_weights(tmp_path)


@pytest.mark.parametrize(
    ("place", "number"),
    [
        ("between", 0),  # the other rank would wait in that step, and this one in the next forward pass
        pytest.param("batch", 2, marks=pytest.mark.soak),
        pytest.param("step", 0, marks=pytest.mark.soak),
        pytest.param("between", 3, marks=pytest.mark.soak),
        pytest.param("step", 3, marks=pytest.mark.soak),
    ],
)
def test_a_step_that_one_rank_alone_leaves_out_is_an_error_and_no_hang(
    tmp_path: Path, place: str, number: int, caplog: pytest.LogCaptureFixture
) -> None:
    config = config_of(tmp_path, saves=True, has_two=True, leaves_out=(place, number))
    returned, reports, kinds = run(tmp_path, config, (1, 2), TorchConfig(timeout_s=60))
    assert kinds == ["started", "restored"]
    assert "the survivors cannot continue by themselves: not all workers take this step" in caplog.text
    assert [epoch for epoch, _ in reports] == [*range(NUM_EPOCHS)]
    assert len({answer["steps"] for answer in returned}) == 1
    check_weights(tmp_path, has_two=True)


def test_a_function_whose_own_exchange_breaks_starts_again_from_its_checkpoint(tmp_path: Path) -> None:
    config = config_of(tmp_path, dying(1, "backward", 9), saves=True, exchanges=True)
    returned, _, kinds = run(tmp_path, config)
    assert kinds == ["started", "restored"]
    assert [answer["first"] for answer in returned] == [2, 2, 2]
    check_weights(tmp_path)


@pytest.mark.usefixtures("patient")
def test_what_is_not_prepared_is_an_error_and_so_are_workers_whose_weights_differ(tmp_path: Path) -> None:
    trainer = Trainer("torch", (1, 2), logdir=tmp_path, elastic=True)
    try:
        trainer.start()
        for missing, words in (
            ("optimizer", "the optimizer of `Counting` is not prepared"),
            ("another", "the optimizer of `Counting` is not prepared"),
            ("loader", r"`prepare_data_loader\(loader, exact=True\)`"),
            ("model", "no model is prepared for several workers"),
            ("lengths", "needs a stream whose rows are counted before they are read"),
            ("exchange", r"`.*` of model 1 \(`Counting`\) on rank 1.*leave `elastic` out"),
        ):
            with pytest.raises(RanksDifferError if missing == "exchange" else ValueError, match=words):
                trainer.run(train_unprepared, {"missing": missing})
    finally:
        trainer.shutdown()
