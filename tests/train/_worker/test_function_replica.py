from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from raysgd.core.engine.shared.types import Heartbeat, World
from raysgd.core.state.state_codec import lend
from raysgd.exceptions import TrainBackendError
from raysgd.train import session
from raysgd.train._worker.function_replica import FunctionReplica
from raysgd.train._worker.messages import NO_WORDS, FunctionEnded
from raysgd.train.backend import Backend
from tests.helpers.run_if import RunIf
from tests.train.replicas import begin, spec, user_keys


class TestTheReplica:
    def test_tells_the_function_its_place(self) -> None:
        replica = FunctionReplica(World(rank=3, size=4, local_rank=1))
        begin(replica, lambda: (session.world_rank(), session.local_rank(), session.world_size()))
        assert replica.next() == FunctionEnded((3, 1, 4))
        assert (session.world_rank(), session.local_rank(), session.world_size()) == (0, 0, 1)

    def test_runs_one_function_at_a_time(self, replica: FunctionReplica) -> None:
        begin(replica, lambda: session.report(a=1))
        with pytest.raises(TrainBackendError, match="running in this worker already"):
            begin(replica, lambda: None)
        assert user_keys(replica.next()) == {"a": 1}  # unharmed

    def test_has_no_results_before_a_function_was_started_or_after_its_end(self, replica: FunctionReplica) -> None:
        with pytest.raises(TrainBackendError, match="no function is running"):
            replica.next()
        begin(replica, lambda: None)
        replica.next()
        replica.mute()
        with pytest.raises(TrainBackendError):
            replica.next()

    def test_is_free_again_after_an_exception(self, replica: FunctionReplica) -> None:
        begin(replica, lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            replica.next()
        assert session.current_session() is None
        begin(replica, lambda: "next")
        assert replica.next() == FunctionEnded("next")

    @pytest.mark.usefixtures("unhurried")
    def test_ends_a_function_that_nobody_listens_to(self, replica: FunctionReplica) -> None:
        begin(replica, lambda: session.report(a=1))
        assert replica.end_function()
        assert session.current_session() is None
        assert replica.end_function()  # nothing left to end

    def test_starts_a_function_as_part_of_a_step_if_told_how(self, replica: FunctionReplica) -> None:
        packed = lend({"epoch": 2})
        assert replica.next_messages(NO_WORDS, True, 0, spec(session.load_checkpoint), packed, None) == [
            FunctionEnded({"epoch": 2})
        ]

    def test_gives_signs_of_life(self, replica: FunctionReplica) -> None:
        assert replica.heartbeat() == Heartbeat()
        begin(replica, lambda: session.report(a=1))
        replica.next()
        assert replica.heartbeat().step == 1


class TestExceptions:
    def test_may_be_explained_and_keep_the_line_of_the_user(self, replica: FunctionReplica) -> None:
        def fail() -> None:
            raise ValueError("opaque")

        begin(replica, fail, explain=lambda error: ValueError(f"{error} no more"))
        with pytest.raises(ValueError, match="opaque no more") as caught:
            replica.next()
        assert str(caught.value.__cause__) == "opaque"
        assert caught.traceback[-1].name == "fail"

    def test_are_raised_unchanged_where_nobody_can_say_more(self, replica: FunctionReplica) -> None:
        begin(replica, lambda: 1 / 0, explain=Backend.explain)
        with pytest.raises(ZeroDivisionError) as caught:
            replica.next()
        assert caught.value.__cause__ is None

    @RunIf(modules=["tensorflow"])
    def test_of_keras_3_under_a_strategy_are_explained(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from raysgd.train.tensorflow import TensorflowBackend

        opaque, other = ValueError("Attempt to convert a value (PerReplica:{...})"), ValueError("shapes")
        monkeypatch.setitem(sys.modules, "keras", SimpleNamespace(__version__="3.15.1"))  # importing it takes seconds
        assert "TF_USE_LEGACY_KERAS=1" in str(TensorflowBackend.explain(opaque))
        assert TensorflowBackend.explain(other) is other
        monkeypatch.setitem(sys.modules, "keras", SimpleNamespace(__version__="2.15.0"))
        assert TensorflowBackend.explain(opaque) is opaque
