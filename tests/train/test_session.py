from __future__ import annotations

import math
import sys
import threading
import warnings
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from raysgd._state_codec import decode, lend
from raysgd.engine.types import Heartbeat, World
from raysgd.exceptions import TrainBackendError
from raysgd.train import session
from raysgd.train._mailbox import Ended
from raysgd.train._tf_cluster import TensorflowBackend
from raysgd.train.backend import Backend
from raysgd.train.constants import (
    BASIC_AUTOFILLED_KEYS,
    DETAILED_AUTOFILLED_KEYS,
    TIME_THIS_ITER_S,
    TIMESTAMP,
    TRAINING_ITERATION,
)
from raysgd.train.session import FunctionSession, FunctionSpec, Message, TrainingResultType, take_step

REPORT, CHECKPOINT = TrainingResultType.REPORT, TrainingResultType.CHECKPOINT


def spec(function: Any, **options: Any) -> FunctionSpec:
    return FunctionSpec(function, options.pop("encode", dict), options.pop("score_attribute", TIMESTAMP), **options)


@pytest.fixture
def replica() -> Iterator[FunctionSession]:
    made = FunctionSession(World(rank=0, size=2))
    yield made
    made.end()


def begin(replica: FunctionSession, function: Any, checkpoint: Any = None, shard: Any = None, **options: Any) -> None:
    replica.begin(spec(function, **options), checkpoint, shard)


def user_keys(message: Message | Ended) -> dict[str, Any]:
    assert isinstance(message, Message)
    return {key: value for key, value in message.data.items() if not key.startswith("_")}


class TestReports:
    def test_carry_the_metrics_and_what_every_report_has(self, replica: FunctionSession) -> None:
        begin(replica, lambda: [session.report(loss=number) for number in (3, 2)])
        first, second = replica.next(), replica.next()
        assert isinstance(first, Message)
        assert isinstance(second, Message)
        assert first.kind is REPORT
        assert set(first.data) == {"loss"} | BASIC_AUTOFILLED_KEYS
        assert [first.data["loss"], second.data["loss"]] == [3, 2]
        assert [first.data[TRAINING_ITERATION], second.data[TRAINING_ITERATION]] == [1, 2]
        assert isinstance(first.data[TIMESTAMP], int)

    def test_say_more_if_they_are_to(self, replica: FunctionSession) -> None:
        begin(replica, lambda: session.report(loss=1), is_detailed=True)
        message = replica.next()
        assert isinstance(message, Message)
        assert set(message.data) == {"loss"} | BASIC_AUTOFILLED_KEYS | DETAILED_AUTOFILLED_KEYS

    def test_keep_the_time_that_the_function_measured_itself_and_nothing_else_of_ours(
        self, replica: FunctionSession
    ) -> None:
        begin(replica, lambda: session.report(**{TIME_THIS_ITER_S: 7.0, TRAINING_ITERATION: 70}))
        message = replica.next()
        assert isinstance(message, Message)
        assert (message.data[TIME_THIS_ITER_S], message.data[TRAINING_ITERATION]) == (7.0, 1)

    def test_may_be_one_dict_and_leave_it_as_it_was(self, replica: FunctionSession) -> None:
        metrics = {"loss": 1}
        begin(replica, lambda: session.report(metrics))
        assert user_keys(replica.next()) == {"loss": 1} == metrics

    def test_take_a_keyword_called_checkpoint_for_a_metric(self, replica: FunctionSession) -> None:
        begin(replica, lambda: session.report(loss=1, checkpoint=5))
        message = replica.next()
        assert user_keys(message) == {"loss": 1, "checkpoint": 5}
        assert isinstance(message, Message)
        assert message.checkpoint_ref is None

    def test_may_bring_a_checkpoint_with_their_dict(self, replica: FunctionSession) -> None:
        def function() -> Any:
            session.report({"loss": 1}, checkpoint={"weight": 2})
            return session.load_checkpoint()

        begin(replica, function)
        message = replica.next()
        assert isinstance(message, Message)
        assert (message.kind, user_keys(message)) == (REPORT, {"loss": 1})
        assert message.checkpoint_ref is not None
        assert decode(message.checkpoint_ref.data, copy=True)["weight"] == 2
        assert replica.next() == Ended({"weight": 2})

    @pytest.mark.parametrize(
        "call",
        [
            lambda: session.report(3),
            lambda: session.report({"a": 1}, {"b": 2}),
            lambda: session.report({"a": 1}, b=2),
            lambda: session.report({"a": 1}, checkpoint=3),
        ],
    )
    def test_refuse_anything_else(self, replica: FunctionSession, call: Any) -> None:
        begin(replica, call)
        with pytest.raises(TypeError, match=r"`report` takes|`checkpoint=3`"):
            replica.next()

    def test_are_encoded_in_the_worker(self, replica: FunctionSession) -> None:
        begin(replica, lambda: session.report(loss=1), encode=lambda data: ("encoded", data["loss"]))
        message = replica.next()
        assert isinstance(message, Message)
        assert decode(message.data, copy=True) == ("encoded", 1)

    def test_with_arrays_arrive_as_they_were_when_they_were_reported(self, replica: FunctionSession) -> None:
        curve = np.zeros(3)

        def function() -> None:
            session.report(curve=curve)
            curve[:] = 1
            session.report(curve=curve)

        begin(replica, function)
        first, second = replica.next(), replica.next()
        assert isinstance(first, Message)
        assert isinstance(second, Message)
        assert [decode(message.data, copy=True)["curve"].max() for message in (first, second)] == [0, 1]

    def test_that_are_muted_are_not_waited_for_but_checkpoints_are(self, replica: FunctionSession) -> None:
        def function() -> str:
            session.report(loss=1)
            session.save_checkpoint(weight=1)
            session.report(loss=2)
            return "end"

        begin(replica, function)
        replica.mute()
        message = replica.next()
        assert isinstance(message, Message)
        assert message.kind is CHECKPOINT
        assert replica.next() == Ended("end")


class TestCheckpoints:
    def test_of_rank_0_go_to_the_driver_with_their_score(self, replica: FunctionSession) -> None:
        begin(replica, lambda: session.save_checkpoint(loss=2.0, epoch=1), score_attribute="loss")
        message = replica.next()
        assert isinstance(message, Message)
        assert message.kind is CHECKPOINT
        assert message.checkpoint_ref is not None
        assert message.checkpoint_ref.score == 2.0
        assert message.checkpoint_ref.token is None
        content = decode(message.checkpoint_ref.data, copy=True)
        assert {**content, TIMESTAMP: 0} == {"loss": 2.0, "epoch": 1, TIMESTAMP: 0}

    def test_of_other_ranks_stay_there(self) -> None:
        replica = FunctionSession(World(rank=1, size=2))

        def function() -> Any:
            session.save_checkpoint(epoch=1)
            return session.load_checkpoint()

        begin(replica, function)
        message = replica.next()
        assert isinstance(message, Message)
        assert message.checkpoint_ref is None
        assert replica.next() == Ended({"epoch": 1})

    def test_that_are_large_wait_as_a_copy_until_they_are_fetched(self, replica: FunctionSession) -> None:
        weights = np.zeros(1 << 18)

        def function() -> None:
            session.save_checkpoint(weights=weights)
            weights[:] = 1

        begin(replica, function)
        message = replica.next()
        assert isinstance(message, Message)
        assert message.checkpoint_ref is not None
        assert message.checkpoint_ref.data is None
        assert replica.next() == Ended()
        assert message.checkpoint_ref.token is not None
        assert decode(replica.fetch(message.checkpoint_ref.token), copy=True)["weights"].max() == 0
        assert weights.max() == 1
        with pytest.raises(KeyError):
            replica.fetch(message.checkpoint_ref.token)

    def test_are_prepared_by_the_backend_before_they_are_copied(self, replica: FunctionSession) -> None:
        weights = np.zeros(1 << 18)
        function = partial(session.save_checkpoint, weights=weights)
        begin(replica, function, encode=lambda content: ("encoded", content["weights"]))
        message = replica.next()
        assert isinstance(message, Message)
        assert message.checkpoint_ref is not None
        assert message.checkpoint_ref.token is not None
        weights[:] = 1
        name, arrived = decode(replica.fetch(message.checkpoint_ref.token), copy=True)
        assert (name, arrived.max()) == ("encoded", 0)

    def test_that_cannot_be_pickled_are_an_error_of_the_function(self, replica: FunctionSession) -> None:
        begin(replica, lambda: session.save_checkpoint(lock=threading.Lock()))
        with pytest.raises(TypeError, match="pickle"):
            replica.next()

    def test_can_be_loaded_as_they_were_saved_or_passed_in(self, replica: FunctionSession) -> None:
        weights = [1]

        def function() -> bool:
            before = session.load_checkpoint()
            session.save_checkpoint(weights=weights)
            after = session.load_checkpoint()
            return before == {"epoch": 3} and after is not None and after["weights"] is weights

        begin(replica, function, {"epoch": 3})
        replica.next()
        assert replica.next() == Ended(True)

    def test_without_a_score_say_so(self, replica: FunctionSession) -> None:
        begin(replica, lambda: session.save_checkpoint(epoch=1), score_attribute="loss")
        message = replica.next()
        assert isinstance(message, Message)
        assert message.checkpoint_ref is not None
        assert message.checkpoint_ref.score is None


class TestCheckpointsThatSeveralRanksReport:
    """Only one of them is kept: that of the lowest rank."""

    @pytest.fixture
    def second(self) -> Iterator[FunctionSession]:
        made = FunctionSession(World(rank=1, size=2))
        yield made
        made.end()

    def token_of(self, message: Message | Ended) -> int:
        assert isinstance(message, Message)
        assert message.checkpoint_ref is not None
        assert message.checkpoint_ref.data is None
        assert message.checkpoint_ref.token is not None
        return message.checkpoint_ref.token

    def test_are_not_copied_where_nobody_wants_them(self, second: FunctionSession) -> None:
        asked: list[Any] = []

        def function() -> str:
            session.report({"loss": 1}, checkpoint={"weights": np.zeros(1 << 18)})
            return "went on"

        begin(second, function, encode=lambda data: asked.append(data) if "weights" in data else data)
        token = self.token_of(second.next())
        second.refuse(token)
        assert second.next() == Ended("went on")
        assert asked == []
        with pytest.raises(KeyError):
            second.fetch(token)

    def test_are_copied_when_they_are_fetched_and_the_function_waits_for_that(self, second: FunctionSession) -> None:
        weights = np.zeros(1 << 18)

        def function() -> None:
            session.report({"loss": 1}, checkpoint={"weights": weights})
            weights[:] = 1

        begin(second, function, score_attribute="weights")
        message = second.next()
        assert weights.max() == 0
        assert decode(second.fetch(self.token_of(message)), copy=True)["weights"].max() == 0
        assert second.next() == Ended()
        assert weights.max() == 1

    def test_that_cannot_be_copied_fail_on_both_sides(self, second: FunctionSession) -> None:
        begin(second, lambda: session.report({"loss": 1}, checkpoint={"lock": threading.Lock()}))
        token = self.token_of(second.next())
        with pytest.raises(KeyError):
            second.fetch(token)
        with pytest.raises(TypeError, match="pickle"):
            second.next()

    def test_do_not_hold_up_the_end_of_a_run(self, second: FunctionSession) -> None:
        begin(second, lambda: session.report({"loss": 1}, checkpoint={"weight": 1}))
        second.next()
        assert second.end()


class TestExceptions:
    def test_may_be_explained_and_keep_the_line_of_the_user(self, replica: FunctionSession) -> None:
        def fail() -> None:
            raise ValueError("opaque")

        begin(replica, fail, explain=lambda error: ValueError(f"{error} no more"))
        with pytest.raises(ValueError, match="opaque no more") as caught:
            replica.next()
        assert str(caught.value.__cause__) == "opaque"
        assert caught.traceback[-1].name == "fail"

    def test_are_raised_unchanged_where_nobody_can_say_more(self, replica: FunctionSession) -> None:
        begin(replica, lambda: 1 / 0, explain=Backend.explain)
        with pytest.raises(ZeroDivisionError) as caught:
            replica.next()
        assert caught.value.__cause__ is None

    def test_of_keras_3_under_a_strategy_are_explained(self, monkeypatch: pytest.MonkeyPatch) -> None:
        opaque, other = ValueError("Attempt to convert a value (PerReplica:{...})"), ValueError("shapes")
        monkeypatch.setitem(sys.modules, "keras", SimpleNamespace(__version__="3.15.1"))  # importing it takes seconds
        assert "TF_USE_LEGACY_KERAS=1" in str(TensorflowBackend.explain(opaque))
        assert TensorflowBackend.explain(other) is other
        monkeypatch.setitem(sys.modules, "keras", SimpleNamespace(__version__="2.15.0"))
        assert TensorflowBackend.explain(opaque) is opaque


class TestShards:
    def shard(self, replica: FunctionSession, shard: Any, *args: Any) -> Any:
        begin(replica, lambda: session.get_dataset_shard(*args), shard=shard)
        return replica.next()

    def test_a_single_one_is_returned_whatever_it_is_called(self, replica: FunctionSession) -> None:
        assert self.shard(replica, [1, 2], "any") == Ended([1, 2])

    def test_one_of_several_is_found_by_its_name(self, replica: FunctionSession) -> None:
        assert self.shard(replica, {"train": [1], "val": [2]}, "val") == Ended([2])

    def test_one_of_several_needs_a_name(self, replica: FunctionSession) -> None:
        with pytest.raises(RuntimeError, match=r"say which one, of \['train'\]"):
            self.shard(replica, {"train": [1]})

    def test_an_unknown_name_is_an_error(self, replica: FunctionSession) -> None:
        with pytest.raises(KeyError, match="there are"):
            self.shard(replica, {"train": [1]}, "val")

    def test_no_data_is_none_with_a_warning(self, replica: FunctionSession) -> None:
        with pytest.warns(UserWarning, match="No dataset"):
            assert self.shard(replica, None) == Ended(None)


class TestTheReplica:
    def test_tells_the_function_its_place(self) -> None:
        replica = FunctionSession(World(rank=3, size=4, local_rank=1))
        begin(replica, lambda: (session.world_rank(), session.local_rank(), session.world_size()))
        assert replica.next() == Ended((3, 1, 4))
        assert (session.world_rank(), session.local_rank(), session.world_size()) == (0, 0, 1)

    def test_runs_one_function_at_a_time(self, replica: FunctionSession) -> None:
        begin(replica, lambda: session.report(a=1))
        with pytest.raises(TrainBackendError, match="running in this worker already"):
            begin(replica, lambda: None)
        assert user_keys(replica.next()) == {"a": 1}  # unharmed

    def test_has_no_results_before_a_function_was_started_or_after_its_end(self, replica: FunctionSession) -> None:
        with pytest.raises(TrainBackendError, match="no function is running"):
            replica.next()
        begin(replica, lambda: None)
        replica.next()
        with pytest.raises(TrainBackendError):
            replica.mute()

    def test_is_free_again_after_an_exception(self, replica: FunctionSession) -> None:
        begin(replica, lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            replica.next()
        assert session.current_session() is None
        begin(replica, lambda: "next")
        assert replica.next() == Ended("next")

    def test_ends_a_function_that_nobody_listens_to(self, replica: FunctionSession) -> None:
        begin(replica, lambda: session.report(a=1))
        assert replica.end()
        assert session.current_session() is None
        assert replica.end()  # nothing left to end

    def test_starts_a_function_as_part_of_a_step_if_told_how(self, replica: FunctionSession) -> None:
        packed = lend({"epoch": 2})
        assert take_step(replica, spec(lambda: session.load_checkpoint()), packed, None) == Ended({"epoch": 2})

    def test_gives_signs_of_life(self, replica: FunctionSession) -> None:
        assert replica.heartbeat() == Heartbeat()
        begin(replica, lambda: session.report(a=1))
        replica.next()
        assert replica.heartbeat().step == 1


class TestOutsideOfARun:
    @pytest.fixture(autouse=True)
    def forget_warnings(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(session, "_warned", set())

    @pytest.mark.parametrize("name", ["report", "save_checkpoint", "load_checkpoint", "get_dataset_shard"])
    def test_a_function_warns_once_and_does_nothing(self, name: str) -> None:
        function = getattr(session, name)
        with pytest.warns(UserWarning, match=f"`{name}` has no effect"):
            assert function() is None
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert function() is None

    def test_wrong_arguments_are_wrong_there_too(self) -> None:
        with pytest.raises(TypeError):
            session.report(math.pi)
