"""What training functions can call, inside and outside of a run.

Covers `raysgd.train._worker.function_replica` and `raysgd.air.session`: functions see
them through these calls.
"""

from __future__ import annotations

import math
import threading
import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

from raysgd.air import session as of_air
from raysgd.core.engine.shared.types import World
from raysgd.core.state.state_codec import EncodedState, decode
from raysgd.core.text.log_lines import Once
from raysgd.train import session
from raysgd.train._worker.function_replica import FunctionReplica
from raysgd.train._worker.messages import FunctionEnded, FunctionMessage, TrainingResultType
from raysgd.train.constants import (
    BASIC_AUTOFILLED_KEYS,
    DETAILED_AUTOFILLED_KEYS,
    TIME_THIS_ITER_S,
    TIMESTAMP,
    TRAINING_ITERATION,
)
from tests.train.replicas import begin, user_keys

REPORT, CHECKPOINT = TrainingResultType.REPORT, TrainingResultType.CHECKPOINT


class TestReports:
    def test_carry_the_metrics_and_what_every_report_has(self, replica: FunctionReplica) -> None:
        begin(replica, lambda: [session.report(loss=number) for number in (3, 2)])
        first, second = replica.next(), replica.next()
        assert first.kind is REPORT
        assert set(first.data) == {"loss"} | BASIC_AUTOFILLED_KEYS
        assert [first.data["loss"], second.data["loss"]] == [3, 2]
        assert [first.data[TRAINING_ITERATION], second.data[TRAINING_ITERATION]] == [1, 2]
        assert isinstance(first.data[TIMESTAMP], int)

    def test_say_more_if_they_are_to(self, replica: FunctionReplica) -> None:
        begin(replica, lambda: session.report(loss=1), is_detailed=True)
        message = replica.next()
        assert set(message.data) == {"loss"} | BASIC_AUTOFILLED_KEYS | DETAILED_AUTOFILLED_KEYS

    def test_keep_the_time_that_the_function_measured_itself_and_nothing_else_of_ours(
        self, replica: FunctionReplica
    ) -> None:
        begin(replica, lambda: session.report(**{TIME_THIS_ITER_S: 7.0, TRAINING_ITERATION: 70}))
        message = replica.next()
        assert (message.data[TIME_THIS_ITER_S], message.data[TRAINING_ITERATION]) == (7.0, 1)

    def test_may_be_one_dict_and_leave_it_as_it_was(self, replica: FunctionReplica) -> None:
        metrics = {"loss": 1}
        begin(replica, lambda: session.report(metrics))
        assert user_keys(replica.next()) == {"loss": 1} == metrics

    @pytest.mark.parametrize(
        "keywords", [{"loss": 1, "checkpoint": 5}, {"metrics": {"loss": 1}, "checkpoint": {"w": 2}}]
    )
    def test_take_any_keyword_for_a_metric(self, replica: FunctionReplica, keywords: dict[str, Any]) -> None:
        begin(replica, lambda: session.report(**keywords))
        message = replica.next()
        data = decode(message.data, copy=True) if isinstance(message.data, EncodedState) else message.data
        assert {name: data[name] for name in keywords} == keywords
        assert message.checkpoint_ref is None

    def test_may_bring_a_checkpoint_with_their_dict(self, replica: FunctionReplica) -> None:
        def function() -> Any:
            session.report({"loss": 1}, checkpoint={"weight": 2})
            return session.load_checkpoint()

        begin(replica, function)
        message = replica.next()
        assert (message.kind, user_keys(message)) == (REPORT, {"loss": 1})
        assert decode(message.checkpoint_ref.data, copy=True)["weight"] == 2
        assert replica.next() == FunctionEnded({"weight": 2})

    @pytest.mark.parametrize(
        "call",
        [
            lambda: session.report(3),
            lambda: session.report({"a": 1}, {"b": 2}),
            lambda: session.report({"a": 1}, b=2),
            lambda: session.report({"a": 1}, checkpoint=3),
        ],
    )
    def test_refuse_anything_else(self, replica: FunctionReplica, call: Any) -> None:
        begin(replica, call)
        with pytest.raises(TypeError, match=r"`report` accepts|`checkpoint=3`"):
            replica.next()

    def test_with_arrays_arrive_as_they_were_when_they_were_reported(self, replica: FunctionReplica) -> None:
        curve = np.zeros(3)

        def function() -> None:
            session.report(curve=curve)
            curve[:] = 1
            session.report(curve=curve)

        begin(replica, function)
        first, second = replica.next(), replica.next()
        assert isinstance(first, FunctionMessage)
        assert isinstance(second, FunctionMessage)
        assert [decode(message.data, copy=True)["curve"].max() for message in (first, second)] == [0, 1]

    def test_that_are_muted_are_not_waited_for_but_checkpoints_are(self, replica: FunctionReplica) -> None:
        def function() -> str:
            session.report(loss=1)
            session.save_checkpoint(weight=1)
            session.report(loss=2)
            return "end"

        begin(replica, function)
        replica.mute()
        message = replica.next()
        assert message.kind is CHECKPOINT
        assert replica.next() == FunctionEnded("end")


class TestCheckpoints:
    def test_of_rank_0_go_to_the_driver_with_their_score(self, replica: FunctionReplica) -> None:
        begin(replica, lambda: session.save_checkpoint(loss=2.0, epoch=1), score_attribute="loss")
        message = replica.next()
        assert message.kind is CHECKPOINT
        assert message.checkpoint_ref.score == 2.0
        assert message.checkpoint_ref.token is None
        content = decode(message.checkpoint_ref.data, copy=True)
        assert {**content, TIMESTAMP: 0} == {"loss": 2.0, "epoch": 1, TIMESTAMP: 0}

    def test_of_other_ranks_stay_there(self) -> None:
        replica = FunctionReplica(World(rank=1, size=2))

        def function() -> Any:
            session.save_checkpoint(epoch=1)
            return session.load_checkpoint()

        begin(replica, function)
        message = replica.next()
        assert message.checkpoint_ref is None
        assert replica.next() == FunctionEnded({"epoch": 1})

    def test_that_are_large_wait_as_a_copy_until_they_are_fetched(self, replica: FunctionReplica) -> None:
        weights = np.zeros(1 << 18)

        def function() -> None:
            session.save_checkpoint(weights=weights)
            weights[:] = 1

        begin(replica, function)
        message = replica.next()
        assert message.checkpoint_ref.data is None
        assert replica.next() == FunctionEnded()
        assert message.checkpoint_ref.token is not None
        assert decode(replica.fetch(message.checkpoint_ref.token), copy=True)["weights"].max() == 0
        assert weights.max() == 1
        with pytest.raises(KeyError):
            replica.fetch(message.checkpoint_ref.token)

    def test_are_prepared_by_the_backend_before_they_are_copied(self, replica: FunctionReplica) -> None:
        weights = np.zeros(1 << 18)
        function = partial(session.save_checkpoint, weights=weights)
        begin(replica, function, encode=lambda content: ("encoded", content["weights"]))
        message = replica.next()
        assert message.checkpoint_ref.token is not None
        weights[:] = 1
        name, arrived = decode(replica.fetch(message.checkpoint_ref.token), copy=True)
        assert (name, arrived.max()) == ("encoded", 0)

    def test_that_cannot_be_pickled_are_an_error_of_the_function(self, replica: FunctionReplica) -> None:
        begin(replica, lambda: session.save_checkpoint(lock=threading.Lock()))
        with pytest.raises(TypeError, match="pickle"):
            replica.next()

    def test_can_be_loaded_as_they_were_saved_or_passed_in(self, replica: FunctionReplica) -> None:
        weights = [1]

        def function() -> bool:
            before = session.load_checkpoint()
            session.save_checkpoint(weights=weights)
            after = session.load_checkpoint()
            return before == {"epoch": 3} and after is not None and after["weights"] is weights

        begin(replica, function, {"epoch": 3})
        replica.next()
        assert replica.next() == FunctionEnded(True)


class TestCheckpointsThatSeveralRanksReport:
    """Only one of them is kept: that of the lowest rank."""

    @pytest.fixture
    def second(self) -> Iterator[FunctionReplica]:
        made = FunctionReplica(World(rank=1, size=2))
        yield made
        made.end_function()

    def token_of(self, message: FunctionMessage | FunctionEnded) -> int:
        assert message.checkpoint_ref.data is None
        assert message.checkpoint_ref.token is not None
        return message.checkpoint_ref.token

    def test_are_not_copied_where_nobody_wants_them(self, second: FunctionReplica) -> None:
        asked: list[Any] = []

        def function() -> str:
            session.report({"loss": 1}, checkpoint={"weights": np.zeros(1 << 18)})
            return "went on"

        begin(second, function, encode=lambda data: asked.append(data) if "weights" in data else data)
        token = self.token_of(second.next())
        second.refuse(token)
        assert second.next() == FunctionEnded("went on")
        assert asked == []
        with pytest.raises(KeyError):
            second.fetch(token)

    def test_are_copied_when_they_are_fetched_and_the_function_waits_for_that(self, second: FunctionReplica) -> None:
        weights = np.zeros(1 << 18)

        def function() -> None:
            session.report({"loss": 1}, checkpoint={"weights": weights})
            weights[:] = 1

        begin(second, function, score_attribute="weights")
        message = second.next()
        assert weights.max() == 0
        assert decode(second.fetch(self.token_of(message)), copy=True)["weights"].max() == 0
        assert second.next() == FunctionEnded()
        assert weights.max() == 1

    def test_that_cannot_be_copied_fail_on_both_sides(self, second: FunctionReplica) -> None:
        begin(second, lambda: session.report({"loss": 1}, checkpoint={"lock": threading.Lock()}))
        token = self.token_of(second.next())
        with pytest.raises(KeyError):
            second.fetch(token)
        with pytest.raises(TypeError, match="pickle"):
            second.next()

    @pytest.mark.usefixtures("unhurried")
    def test_do_not_hold_up_the_end_of_a_run(self, second: FunctionReplica) -> None:
        begin(second, lambda: session.report({"loss": 1}, checkpoint={"weight": 1}))
        second.next()
        assert second.end_function()


class TestShards:
    def shard(self, replica: FunctionReplica, shard: Any, *args: Any) -> Any:
        begin(replica, lambda: session.get_dataset_shard(*args), shard=shard)
        return replica.next()

    def test_are_found_by_their_names_and_a_single_one_by_any(self, replica: FunctionReplica) -> None:
        assert self.shard(replica, [1, 2], "any") == FunctionEnded([1, 2])
        assert self.shard(replica, {"train": [1], "val": [2]}, "val") == FunctionEnded([2])

    @pytest.mark.parametrize(("args", "error"), [((), RuntimeError), (("val",), KeyError)])
    def test_are_named_where_the_name_is_missing_or_wrong(
        self, replica: FunctionReplica, args: tuple[str, ...], error: type[Exception]
    ) -> None:
        with pytest.raises(error, match=r"\['train'\]"):
            self.shard(replica, {"train": [1]}, *args)

    def test_are_none_with_a_warning_without_data(self, replica: FunctionReplica) -> None:
        with pytest.warns(UserWarning, match="No dataset"):
            assert self.shard(replica, None) == FunctionEnded(None)


class TestOutsideOfARun:
    @pytest.fixture(autouse=True)
    def forget_warnings(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(of_air, "_once", Once())

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
