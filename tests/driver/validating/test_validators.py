"""What validators are started with, which state they validate, and when they start anew."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from raysgd.driver.validating.validators import ValidatingSpares, Validators, settings_of_validators
from raysgd.engine.processes.snapshots import NewestSnapshot, Snapshot
from raysgd.exceptions import WorkersLostError
from raysgd.messages.settings import GroupSettings


class Lost:
    """A state whose worker died before it had sent it."""

    def result(self, timeout_s: float | None = None) -> Snapshot:
        raise WorkersLostError("gone")


class Scene:
    """Validators whose controllers and calls note what they are asked."""

    def __init__(self) -> None:
        self.steps: list[Any] = []
        controller = SimpleNamespace(
            kill_group=lambda: self.steps.append("kill"), start=lambda: self.steps.append("start")
        )
        training = SimpleNamespace(newest_snapshot=lambda: NewestSnapshot(Snapshot("of now", ())))
        calls = SimpleNamespace(sharing=None, validate=self.validate)
        self.replicas = SimpleNamespace(settings="first")
        parts: Any = (controller, training, calls, self.replicas)
        self.validators = Validators(*parts, new_sharing=lambda: "sharing")  # type: ignore[arg-type,return-value]

    def validate(self, asked: Any, dataset: Any, state: Snapshot) -> list[Any]:
        self.steps.append(state.shared_state)
        return []


@pytest.fixture
def scene() -> Scene:
    return Scene()


ASKED: Any = None


def test_they_start_with_the_first_validation_and_anew_with_other_settings(scene: Scene) -> None:
    for settings, state in (("first", "a"), ("first", "b"), ("second", "c")):
        scene.replicas.settings = settings
        scene.validators.validate(ASKED, None, NewestSnapshot(Snapshot(state, ())))
    assert scene.steps == ["kill", "start", "a", "b", "kill", "start", "c"]


def test_a_state_that_was_lost_on_its_way_is_replaced_by_that_of_now(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    lost: Any = Lost()
    scene.validators.validate(ASKED, None, lost)
    assert scene.steps[-1] == "of now"
    assert "validated instead" in caplog.text


class SpareScene:
    """Spares of a training that note what they are to run, and the workers that train."""

    def __init__(self, *answers: Any) -> None:
        self.args: list[list[Any]] = []
        self.answers = list(answers)
        training: Any = SimpleNamespace(
            lend_spare=lambda: "loan",
            run_on_spare=self.run,
            newest_snapshot=lambda: NewestSnapshot(Snapshot("of now", (), reference="reference")),
        )
        calls: Any = SimpleNamespace(requests=self.requests, validate=lambda asked, dataset: ["of those that train"])
        self.spares = ValidatingSpares(training, calls, lambda: "function", new_sharing=lambda: "sharing")  # type: ignore[arg-type,return-value]

    def run(self, loan: Any, function: Any, make_args: Any, on_wait: Any) -> Any:
        assert loan == "loan"
        self.args += [make_args() for _ in self.answers]
        return self.answers[-1]

    def requests(self, name: str, asked: Any, dataset: Any, worlds: Any, sharing: Any) -> list[tuple[Any, ...]]:
        return [(name, asked, dataset, len(worlds), sharing)]


def test_a_spare_is_given_the_state_with_its_request_in_each_attempt() -> None:
    scene = SpareScene(None, "answer")
    validate = scene.spares.begin(NewestSnapshot(Snapshot("small", ())))
    assert validate(ASKED, "data", lambda: None) == ["answer"]
    assert scene.args == [["small", "validation", ASKED, "data", 1, "sharing"]] * 2


def test_where_no_spare_is_left_the_workers_that_train_validate(caplog: pytest.LogCaptureFixture) -> None:
    lost: Any = Lost()
    scene = SpareScene(None)
    assert scene.spares.begin(lost)(ASKED, None, lambda: None) == ["of those that train"]
    assert scene.args[0][0] == "reference", "of the state of now, as the other one was lost"
    assert "no spare is left" in caplog.text


def test_their_group_has_what_the_others_have_but_no_spares() -> None:
    of_training = GroupSettings(
        num_workers=4, backend="gloo", timeout_s=60, min_workers=3, spare_workers=1, validation_workers=2
    )
    found = settings_of_validators(of_training)
    assert (found.num_workers, found.min_workers, found.spare_workers, found.backend) == (2, 1, 0, "gloo")


@pytest.mark.parametrize(
    ("options", "obstacles", "message"),
    [({"use_local": True}, (), "use_local"), ({}, ((True, '`parallel="fsdp"`'),), "fsdp"), ({}, ((False, "no"),), "")],
)
def test_they_are_refused_where_the_state_cannot_reach_them(options: Any, obstacles: Any, message: str) -> None:
    group = GroupSettings(num_workers=2, backend="gloo", timeout_s=60, validation_workers=1, **options)
    if not message:
        group.refuse_validators(obstacles)
        return
    with pytest.raises(ValueError, match=message):
        group.refuse_validators(obstacles)
