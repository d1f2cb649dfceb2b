from __future__ import annotations

import os
import shutil
import threading
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from raysgd.air import session as of_air
from raysgd.air.checkpoint import Checkpoint
from raysgd.air.config import ScalingConfig
from raysgd.air.reports import CheckpointUploadMode
from raysgd.air.session import TrialFacts
from raysgd.core.engine.shared.types import StateHandover, World
from raysgd.core.state.state_codec import EncodedState, decode, lend
from raysgd.core.text.log_lines import Once
from raysgd.exceptions import SessionMisuseError
from raysgd.storage import Folder, open_folder
from raysgd.train import session
from raysgd.train._worker.function_replica import FunctionReplica
from raysgd.train._worker.messages import FunctionEnded, FunctionMessage, FunctionSpec, Request
from raysgd.train.constants import DETAILED_AUTOFILLED_KEYS
from raysgd.train.data_parallel_trainer import DataParallelTrainer
from raysgd.train.fit.fit_session import FitSession, without_tensors
from tests.train.fit.notes import make_folder


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return open_folder(tmp_path / "trial")


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A folder of the function."""
    path = tmp_path / "own"
    path.mkdir()
    (path / "weights").write_bytes(b"1")
    return path


@pytest.fixture
def start(folder: Folder) -> Iterator[Callable[..., FunctionReplica]]:
    """Starts a function as a worker of `fit` does."""
    started: list[FunctionReplica] = []

    def start(
        function: Callable[[], Any],
        rank: int = 0,
        checkpoint: Any = None,
        shard: Any = None,
        is_detailed: bool = False,
        is_elastic: bool = False,
        **facts: Any,
    ) -> FunctionReplica:
        about = TrialFacts(folder, "run", "trial_1", "1", ScalingConfig(num_workers=2), **facts)
        make_session = partial(FitSession, facts=about)
        spec = FunctionSpec(function, dict, "_timestamp", is_detailed, make_session=make_session, is_elastic=is_elastic)
        replica = FunctionReplica(World(rank, size=2, local_rank=rank, local_size=2))
        started.append(replica)
        replica.start(spec, None if checkpoint is None else lend(checkpoint), shard)
        return replica

    yield start
    for replica in started:
        replica.end_function()


def message(answer: FunctionMessage | FunctionEnded) -> FunctionMessage:
    assert isinstance(answer, FunctionMessage)
    return answer


Start = Callable[..., FunctionReplica]


class TestReports:
    def test_say_where_they_come_from_if_asked(self, start: Start) -> None:
        answer = message(start(lambda: session.report({"loss": 1}), is_detailed=True).next(Request(0)))
        assert answer.data["loss"] == 1
        assert set(answer.data) - {"loss"} == DETAILED_AUTOFILLED_KEYS

    def test_carry_the_metrics_of_rank_0_as_they_are(self, start: Start) -> None:
        for rank, expected in ((0, {"loss": 1}), (1, None)):
            replica = start(lambda: session.report({"loss": 1}), rank)
            assert message(replica.next(Request(0))).data == expected
            assert replica.next(Request(0)) == FunctionEnded()

    def test_come_before_what_the_function_returns_which_leaves_the_worker_if_it_is_plain(self, start: Start) -> None:
        assert start(lambda: threading.Lock()).next(Request(0)) == FunctionEnded(None)
        assert start(lambda: [threading.Lock()]).next(Request(0)) == FunctionEnded(None)
        assert start(lambda: {"losses": [0.5, None]}).next(Request(0)) == FunctionEnded({"losses": [0.5, None]})

    def test_take_copies_of_tensors(self) -> None:
        torch = pytest.importorskip("torch")
        weight = torch.ones(2, requires_grad=True)
        taken = without_tensors({"loss": torch.tensor(0.5), "deep": [1, (weight,)], "model": {"weight": weight}})
        assert (taken["loss"], type(taken["loss"])) == (0.5, float)
        with torch.no_grad():
            weight.zero_()
        assert taken["deep"][1][0].tolist() == taken["model"]["weight"].tolist() == [1.0, 1.0]
        assert not taken["model"]["weight"].requires_grad

    def test_take_arrays_as_they_are(self) -> None:
        metrics = {"a": np.ones(2), "b": [1.0, "x", None]}
        assert without_tensors(metrics)["b"] is metrics["b"]
        assert without_tensors(metrics)["a"] is metrics["a"]


SAVED = Checkpoint.from_dict({"epoch": 3})


class TestKeywordsOfReports:
    """Keywords are metrics, unless they are the arguments of Ray's `report`."""

    @pytest.mark.parametrize(
        ("keywords", "metrics", "has_checkpoint"),
        [
            ({}, {}, False),
            ({"loss": 1}, {"loss": 1}, False),
            ({"loss": 1, "checkpoint": np.float32(5)}, {"loss": 1, "checkpoint": 5}, False),
            ({"loss": 1, "checkpoint": "best"}, {"loss": 1, "checkpoint": "best"}, False),
            ({"loss": 1, "checkpoint": None}, {"loss": 1, "checkpoint": None}, False),
            ({"metrics": 3}, {"metrics": 3}, False),
            ({"metrics": 3, "checkpoint": 5}, {"metrics": 3, "checkpoint": 5}, False),
            ({"metrics": {"loss": 1}}, {"loss": 1}, False),
            ({"metrics": {}}, {}, False),
            ({"metrics": {"loss": 1}, "checkpoint": None}, {"loss": 1}, False),
            ({"metrics": {"loss": 1}, "checkpoint": SAVED}, {"loss": 1}, True),
            ({"metrics": {"metrics": {"a": 1}, "checkpoint": 5}}, {"metrics": {"a": 1}, "checkpoint": 5}, False),
        ],
        ids=str,
    )
    def test_that_have_one_meaning(
        self, start: Start, keywords: dict[str, Any], metrics: dict[str, Any], has_checkpoint: bool
    ) -> None:
        answer = message(start(lambda: session.report(**keywords)).next(Request(0)))
        data = decode(answer.data, copy=True) if isinstance(answer.data, EncodedState) else answer.data
        assert (data, answer.checkpoint_ref is not None) == (metrics, has_checkpoint)

    @pytest.mark.parametrize(
        "keywords",
        [
            {"checkpoint": SAVED},
            {"loss": 1, "checkpoint": SAVED},
            {"loss": 1, "checkpoint": {"epoch": 3}},
            {"metrics": 3, "checkpoint": SAVED},
            {"metrics": None, "checkpoint": SAVED},
            {"metrics": {"loss": 1}, "loss": 1},
            {"metrics": {"loss": 1}, "checkpoint": SAVED, "checkpoint_upload": "best"},
            {"metrics": {"loss": 1}, "checkpoint": {"epoch": 3}},
        ],
        ids=str,
    )
    def test_that_have_none_are_refused(self, start: Start, keywords: dict[str, Any]) -> None:
        with pytest.raises(TypeError, match=r"`report` accepts either|need a `raysgd\.air\.Checkpoint`"):
            start(lambda: session.report(**keywords)).next(Request(0))

    @pytest.mark.parametrize("keyword", ["metrics", "loss"])
    def test_do_not_stand_beside_a_dict(self, start: Start, keyword: str) -> None:
        with pytest.raises(TypeError, match="`report` accepts either"):
            start(lambda: session.report({"loss": 1}, **{keyword: {"b": 2}})).next(Request(0))


class TestCheckpoints:
    def test_dicts_travel_and_are_there_at_once(self, start: Start, folder: Folder) -> None:
        seen: list[Any] = []

        def loop() -> None:
            session.report({}, checkpoint=Checkpoint.from_dict({"epoch": 3}))
            seen.append(session.get_checkpoint())

        replica = start(loop)
        ref = message(replica.next(Request(0))).checkpoint_ref
        assert not ref.is_stored
        assert replica.next(Request(1)) == FunctionEnded()
        assert seen[0].to_dict() == {"epoch": 3}
        assert not folder.exists()

    def test_folders_are_stored_under_the_number_that_came_with_the_request(
        self, start: Start, folder: Folder, own: Path
    ) -> None:
        seen: list[Any] = []

        def loop() -> None:
            session.report({"epoch": 0})  # a rank that saves only sometimes is not out of line
            session.report({"epoch": 1}, checkpoint=Checkpoint.from_directory(own))
            seen.append(session.get_checkpoint())

        replica = start(loop)
        assert message(replica.next(Request(6))).checkpoint_ref is None
        ref = message(replica.next(Request(7))).checkpoint_ref
        assert ref.is_stored
        assert folder.staged("checkpoint_000007").read("weights") == b"1"
        assert folder.committed() == []
        folder.commit("checkpoint_000007")
        assert replica.next(Request(8)) == FunctionEnded()
        assert seen[0].path == str(folder.local_path / "checkpoint_000007")

    def test_a_folder_has_nothing_of_what_a_lost_rank_has_half_stored(
        self, start: Start, folder: Folder, own: Path
    ) -> None:
        folder.staged("checkpoint_000001").write("epoch_1", b"1")
        replica = start(lambda: session.report({}, checkpoint=Checkpoint.from_directory(own)), 1, is_elastic=True)
        replica.regroup(World(0, 1), StateHandover())
        replica.start()
        message(replica.next(Request(1)))
        assert folder.staged("checkpoint_000001").names() == ["weights"]

    @pytest.mark.parametrize(("deletes", "is_deleted"), [(None, True), (False, False)])
    def test_folders_may_be_stored_while_the_function_goes_on(
        self, start: Start, folder: Folder, own: Path, deletes: bool | None, is_deleted: bool
    ) -> None:
        went_on, seen = threading.Event(), []

        def loop() -> None:
            session.report(
                {"epoch": 1},
                checkpoint=Checkpoint.from_directory(own),
                checkpoint_upload_mode=CheckpointUploadMode.ASYNC,
                delete_local_checkpoint_after_upload=deletes,
            )
            went_on.set()
            seen.append(session.get_checkpoint())

        replica = start(loop)
        assert went_on.wait(60), "the driver has not asked for anything yet"
        assert message(replica.next(Request(7))).data == {"epoch": 1}
        assert folder.staged("checkpoint_000007").read("weights") == b"1"
        folder.commit("checkpoint_000007")
        assert replica.next(Request(8)) == FunctionEnded()
        assert seen[0].path == str(folder.local_path / "checkpoint_000007")
        assert own.exists() is not is_deleted

    def test_an_upload_that_fails_meanwhile_is_an_error_of_the_function(self, start: Start, own: Path) -> None:
        checkpoint = Checkpoint.from_directory(own)
        shutil.rmtree(own)
        replica = start(
            lambda: session.report({}, checkpoint=checkpoint, checkpoint_upload_mode=CheckpointUploadMode.ASYNC)
        )
        with pytest.raises(OSError, match="own"):
            replica.next(Request(0))

    @pytest.mark.parametrize(
        ("option", "message"),
        [
            ({"checkpoint_dir_name": "best"}, "`checkpoint_dir_name='best'`: checkpoints are numbered"),
            ({"checkpoint_upload_mode": CheckpointUploadMode.NO_UPLOAD}, "NO_UPLOAD.*cannot be restored"),
            ({"checkpoint_upload_mode": "ASYNC"}, "`checkpoint_upload_mode='ASYNC'`: need a `raysgd.train.Checkp"),
            ({"checkpoint_upload_fn": print}, "`checkpoint_upload_fn=.*`: workers store checkpoints themselves"),
            ({"validation": True}, "`validation=True`: checkpoints are not validated in tasks of their own"),
        ],
    )
    def test_what_is_not_done_with_them_is_refused(self, start: Start, option: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            start(lambda: session.report({}, checkpoint=SAVED, **option)).next(Request(0))

    def test_folders_of_other_ranks_are_stored_when_the_names_that_are_taken_are_known(
        self, start: Start, folder: Folder, own: Path
    ) -> None:
        (own / "parts").mkdir()
        (own / "parts" / "1").write_bytes(b"1")
        replica = start(lambda: session.report({}, checkpoint=Checkpoint.from_directory(own)), rank=1)
        ref = message(replica.next(Request(7))).checkpoint_ref
        assert ref.token is not None
        assert set(ref.files) == {"weights", "parts/1"}
        staged = folder.staged("checkpoint_000007")
        staged.write("weights", b"0")
        assert replica.store(None, ())
        assert staged.names() == ["weights"]
        assert replica.store(ref.token, ["weights"])
        assert (staged.names(), staged.read("weights"), staged.read("parts/1")) == (["parts", "weights"], b"0", b"1")
        assert replica.next(Request(8)) == FunctionEnded()
        assert not replica.store(ref.token, [])

    def test_a_folder_that_cannot_be_stored_is_an_error_of_the_function(
        self, start: Start, folder: Folder, own: Path
    ) -> None:
        (own / "a").mkdir()
        (own / "a" / "b").touch()
        replica = start(lambda: session.report({}, checkpoint=Checkpoint.from_directory(own)), rank=1)
        ref = message(replica.next(Request(0))).checkpoint_ref
        folder.staged("checkpoint_000000").write("a", b"a file where a folder is to be")
        assert not replica.store(ref.token, [])
        with pytest.raises(OSError, match="could not copy"):
            replica.next(Request(1))

    def test_a_function_begins_from_what_the_driver_sends(self, folder: Folder) -> None:
        def begun_from(given: Any) -> Any:
            facts = TrialFacts(folder, "", "", "", ScalingConfig())
            return FitSession(World(0, 1), FunctionSpec(int, dict, "x"), given, facts=facts).current_checkpoint()

        (folder / "checkpoint_000001").write("weights", b"1")
        assert Path(begun_from(folder / "checkpoint_000001").path, "weights").read_bytes() == b"1"
        for given in ({"epoch": 3}, Checkpoint.from_dict({"epoch": 3})):
            assert begun_from(given).to_dict() == {"epoch": 3}
        assert begun_from(None) is None

    @pytest.mark.parametrize("function", [session.load_checkpoint, partial(session.save_checkpoint, epoch=1)])
    def test_the_functions_of_the_other_trainer_say_what_to_use(self, start: Start, function: Any) -> None:
        with pytest.raises(SessionMisuseError, match="In a function that `fit` runs"):
            start(function).next(Request(0))


class TestTheContext:
    def test_names_the_place_and_the_trial(self, start: Start, folder: Folder) -> None:
        seen: dict[str, Any] = {}

        def loop() -> None:
            context = session.get_context()
            seen["place"] = [
                context.get_world_size(),
                context.get_world_rank(),
                context.get_local_rank(),
                context.get_local_world_size(),
                context.get_node_rank(),
            ]
            seen["trial"] = [context.get_experiment_name(), context.get_trial_name(), context.get_trial_id()]
            seen["dir"] = context.get_trial_dir()
            seen["metadata"] = session.get_metadata()
            seen["storage"] = context.get_storage()

        start(loop, 1, metadata={"a": 1}).next(Request(0))
        assert seen["place"] == [2, 1, 1, 2, 0]
        assert seen["trial"] == ["run", "trial_1", "1"]
        assert seen["dir"] == str(folder.local_path)
        assert seen["metadata"] == {"a": 1}
        assert seen["storage"] == folder

    def test_has_defaults_outside_of_a_run_and_warns_once_for_each(self) -> None:
        context = session.get_context()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            of_air._once = Once()
            found = [context.get_world_size(), context.get_world_rank(), context.get_local_world_size()]
            found += [context.get_trial_name(), session.get_checkpoint(), context.get_trial_name()]
        assert found == [1, 0, 0, None, None, None]
        assert [str(each.message).partition("`")[2].partition("`")[0] for each in caught] == [
            "get_world_size",
            "get_world_rank",
            "get_local_world_size",
            "get_trial_name",
            "get_checkpoint",
        ]


class TestData:
    def test_is_found_by_its_name_and_none_by_another(self, start: Start, caplog: pytest.LogCaptureFixture) -> None:
        seen: list[Any] = []
        names = ["train", "other", None]
        start(lambda: seen.extend(map(session.get_dataset_shard, names)), shard={"train": [1, 2]}).next(Request(0))
        assert seen == [[1, 2], None, [1, 2]]
        assert "there is no dataset 'other' (available: ['train'])" in caplog.text

    def test_has_to_be_named_where_there_are_several(self, start: Start) -> None:
        with pytest.raises(RuntimeError, match=r"\['a', 'b'\]"):
            start(session.get_dataset_shard, shard={"a": [], "b": []}).next(Request(0))


class TestSurroundings:
    def test_the_environment_may_say_where_the_function_works(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        trial = make_folder(tmp_path)
        trainer = DataParallelTrainer(lambda: None, scaling_config=ScalingConfig(num_workers=1))
        assert trainer._facts(trial).workdir == str(trial.local_path)
        monkeypatch.setenv("RAY_CHDIR_TO_TRIAL_DIR", "0")
        assert trainer._facts(trial).workdir is None

    def test_the_function_works_in_the_folder_of_the_trial(self, start: Start, tmp_path: Path) -> None:
        before, seen = os.getcwd(), []
        workdir = tmp_path / "there" / "work"
        assert start(lambda: seen.append(os.getcwd()), workdir=str(workdir)).next(Request(0)) == FunctionEnded()
        assert (seen, os.getcwd()) == ([str(workdir)], before)

    def test_a_session_function_of_ray_is_an_error_with_advice(self, start: Start) -> None:
        foreign = pytest.importorskip("ray.train")
        with pytest.raises(SessionMisuseError, match=r"Import `raysgd\.train` instead of `ray\.train`"):
            start(lambda: foreign.report({"loss": 1})).next(Request(0))

    def test_reports_of_ray_tune_are_those_of_the_run(self, start: Start, own: Path) -> None:
        tune = pytest.importorskip("ray.tune")
        seen: list[Any] = []

        def loop() -> None:
            seen.append(tune.get_checkpoint())
            tune.report({"loss": 1}, checkpoint=tune.Checkpoint.from_directory(str(own)))
            seen.append(tune.get_checkpoint())

        replica = start(loop)
        assert message(replica.next(Request(0))).data == {"loss": 1}
        assert replica.next(Request(0)) == FunctionEnded()
        assert seen[0] is None
        assert Path(seen[1].path).name == "checkpoint_000000"

    def test_what_else_ray_asks_its_session_is_an_error_with_advice(self, start: Start) -> None:
        foreign = pytest.importorskip("ray.air.session")
        pytest.importorskip("ray.tune")
        assert start(lambda: foreign.report({"loss": 1})).next(Request(0)) != FunctionEnded()
        with pytest.raises(SessionMisuseError, match=r"instead of `ray\.air\.session`\. `trial_dir` was requested"):
            start(foreign.get_trial_dir).next(Request(0))

    def test_a_run_of_wandb_has_the_names_of_the_trial(self, start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
        pytest.importorskip("ray.tune")
        wandb = pytest.importorskip("raysgd.air.integrations.wandb")  # imports Ray's session, as the module of a user
        monkeypatch.setenv("WANDB_MODE", "disabled")
        monkeypatch.setenv("WANDB_START_METHOD", "fork")  # Ray sets it
        started: list[dict[str, Any]] = []
        fake = SimpleNamespace(init=lambda **options: started.append(options))
        assert start(lambda: wandb.setup_wandb({"lr": 1}, _wandb=fake)).next(Request(0)) == FunctionEnded()
        assert [(run["id"], run["name"], run["group"], run["config"]) for run in started] == [
            ("1", "trial_1", "run", {"lr": 1})
        ]

    def test_any_other_warning_stays_one(self, start: Start) -> None:
        with warnings.catch_warnings(record=True):
            assert start(lambda: warnings.warn("other", UserWarning, stacklevel=1)).next(Request(0)) == FunctionEnded()
