"""What validators are started with, which state they validate, and when they start anew."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from raysgd.driver.validators import ValidatingSpares, Validators, settings_of_validators
from raysgd.engine.snapshots import NewestSnapshot, Snapshot
from raysgd.exceptions import WorkersLostError
from raysgd.messages.settings import GroupSettings, ReplicaMaker, ReplicaSettings


class Lost:
    """A state whose worker died before it had sent it."""

    def result(self, timeout_s: float | None = None) -> Snapshot:
        raise WorkersLostError("gone")


def settings(revision: int = 0, *changes: dict[str, Any]) -> ReplicaSettings:
    return ReplicaSettings(object, {"a": 1}, revision=revision, config_changes=changes)


def state(content: str) -> Any:
    return NewestSnapshot(Snapshot(content, ()))


ASKED: Any = None
SHARING: Any = SimpleNamespace(forget=lambda: None)


class Scene:
    """Validators whose controllers and calls note what they are asked."""

    def __init__(self) -> None:
        self.steps: list[Any] = []
        self.controller = SimpleNamespace(
            group=None, kill_group=lambda: self.steps.append("kill"), start=self.start, run=self.run
        )
        calls = SimpleNamespace(sharing=None, validate=self.validate)
        parts: Any = (self.controller, calls, ReplicaMaker(object), "follow")
        self.validators = Validators(*parts)

    def start(self) -> None:
        self.controller.group = "group"
        self.steps.append("start")

    def run(self, call: Any) -> None:
        self.steps.append((call.function, len(call.args_for([None])[0][0].config_changes)))

    def validate(self, asked: Any, dataset: Any, snapshot: Snapshot) -> list[Any]:
        self.steps.append(snapshot.shared_state)
        return []

    def begin(self, of: ReplicaSettings, content: str) -> Any:
        return self.validators.begin(ASKED, None, of, SHARING, state(content))


@pytest.fixture
def scene() -> Scene:
    return Scene()


def test_they_start_with_the_first_validation_and_are_told_of_changes(scene: Scene) -> None:
    first, changed = settings(), settings(0, {"a": 0})
    validations = [scene.begin(*each) for each in ((first, "a"), (first, "b"), (changed, "c"), (first, "d"))]
    assert scene.steps == []
    for validate in validations:
        validate(lambda: None)
    assert scene.steps == ["kill", "start", "a", "b", ("follow", 1), "c", "kill", "start", "d"]


def test_other_operators_are_made_in_new_validators(scene: Scene) -> None:
    for each in (settings(), settings(1)):
        scene.begin(each, "a")(lambda: None)
    assert scene.steps == ["kill", "start", "a"] * 2


def test_validators_that_could_not_follow_are_started_again(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    scene.begin(settings(), "a")(lambda: None)
    validate = scene.begin(settings(0, {"a": 0}), "b")
    with monkeypatch.context() as patch:
        patch.setattr(scene.controller, "run", lambda call: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            validate(lambda: None)
    validate(lambda: None)
    assert scene.steps == ["kill", "start", "a", "kill", "start", "b"]


def test_a_state_that_was_lost_on_its_way_is_not_replaced_by_a_later_one(scene: Scene) -> None:
    lost: Any = Lost()
    with pytest.raises(WorkersLostError):
        scene.validators.begin(ASKED, None, settings(), SHARING, lost)(lambda: None)
    assert scene.steps == []


class SpareScene:
    """Spares of a training that note what they are to run, and the workers that train."""

    def __init__(self, *answers: Any, has_spares: bool = True) -> None:
        self.args: list[list[Any]] = []
        self.answers = list(answers)
        self.training: Any = SimpleNamespace(
            lend_spare=lambda: "loan" if has_spares else None,
            has_spares=has_spares,
            facts=["facts of then"],
            run_on_spare=self.run,
        )
        calls: Any = SimpleNamespace(requests=self.requests, validate=lambda asked, dataset: ["of those that train"])
        self.spares = ValidatingSpares(self.training, calls, lambda: "function")

    def run(self, loan: Any, function: Any, make_args: Any, on_wait: Any) -> Any:
        assert loan == "loan"
        self.args += [make_args() for _ in self.answers]
        return self.answers[-1]

    def requests(self, name: str, asked: Any, dataset: Any, worlds: Any, sharing: Any, facts: Any) -> list[Any]:
        return [(name, asked, dataset, len(worlds), sharing, facts)]


def test_a_spare_is_given_settings_and_state_of_the_call_in_each_attempt() -> None:
    scene, then = SpareScene(None, "answer"), settings()
    validate = scene.spares.begin(ASKED, "data", then, SHARING, state("small"))
    scene.training.facts = ["facts of now"]
    assert validate(lambda: None) == ["answer"]
    assert scene.args == [[then, "small", "validation", ASKED, "data", 1, SHARING, "facts of then"]] * 2


def test_where_there_is_no_spare_the_workers_that_train_validate_at_once(caplog: pytest.LogCaptureFixture) -> None:
    validate = SpareScene(has_spares=False).spares.begin(ASKED, None, settings(), SHARING, state("small"))
    assert "there is no spare" in caplog.text
    assert validate(lambda: None) == ["of those that train"]


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
