"""Saving and loading the state of one worker in this process.

Covers `raysgd.torch.objects.loading` and `raysgd.torch.driver.framework`: whether a state fits is
decided before anything of it is loaded.
"""

from __future__ import annotations

import random
import threading
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from raysgd.torch import TorchTrainer
from raysgd.torch.checkpoints import checkpoint_file
from raysgd.torch.checkpoints.checkpoint_file import CheckpointCorruptedError, UnsafeCheckpointError
from raysgd.torch.data.sample_order import ShuffledOrder
from tests.torch.operators_for_tests import (
    NUM_FEATURES,
    BatchNormOperator,
    DropoutOperator,
    LinearOperator,
    ScheduledOperator,
    equal,
    samples_seen,
)

MakeTrainer = Callable[..., TorchTrainer]


class Stateful(ScheduledOperator, DropoutOperator):
    """Has a state of its own."""

    def setup(self, config: dict[str, Any]) -> None:
        super().setup(config)
        self.extra: Any = config.get("extra")

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        return {**super().train_batch(batch, batch_info), "noise": random.random() + numpy.random.random()}

    def validate_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        return {**super().validate_batch(batch, batch_info), "noise": torch.rand(()) + random.random()}

    def state_dict(self) -> Any:
        return self.extra

    def load_state_dict(self, state_dict: Any) -> None:
        self.extra = state_dict


def stateful(make_local: MakeTrainer, **config: Any) -> TorchTrainer:
    return make_local(Stateful, config={"optimizer": "adam", **config}, scheduler_step_freq="batch")


# ------------------------------------------------------------------------------------------------ the state


def test_the_state_has_its_parts_in_their_order(make_local: MakeTrainer) -> None:
    assert list(make_local().state_dict()) == ["epoch", "operator", "models", "optimizers"]
    trainer = make_local(Stateful, scheduler_step_freq="manual", use_fp16=True)
    state = trainer.state_dict()
    assert list(state) == ["epoch", "operator", "models", "optimizers", "schedulers", "amp_native"]
    assert (state["epoch"], state["operator"]) == (0, None)
    assert isinstance(state["models"][0], OrderedDict)
    assert [len(state[key]) for key in ("models", "optimizers", "schedulers")] == [1, 1, 1]


def test_a_state_is_a_copy(make_local: MakeTrainer) -> None:
    trainer = make_local(config={"optimizer": "adam"})
    trainer.train()
    first, again = trainer.state_dict(), trainer.state_dict()
    trainer.train()
    assert equal(first, again)
    assert not equal(first, trainer.state_dict())
    first["models"][0]["weight"].zero_()
    assert not equal(first, again)


def test_what_was_changed_by_hand_in_live_objects_is_in_the_next_state(make_local: MakeTrainer, tmp_path: Path) -> None:
    trainer = stateful(make_local)
    trainer.train()
    operator, model = trainer.get_local_operator(), trainer.get_model()
    trainer.save(tmp_path / "before.pt")
    operator.optimizer.param_groups[0]["lr"] = 7.0  # type: ignore[attr-defined]
    trainer.save(tmp_path / "after.pt")
    assert checkpoint_file.read(tmp_path / "after.pt")["optimizers"][0]["param_groups"][0]["lr"] == 7.0
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert not any(tensor.any() for tensor in trainer.state_dict()["models"][0].values())


class Lazy(LinearOperator):
    def make_model(self) -> torch.nn.Module:
        return torch.nn.LazyLinear(1)


def test_a_state_is_loaded_into_a_model_that_has_no_shape_yet(make_local: MakeTrainer, tmp_path: Path) -> None:
    first = make_local(Lazy)
    first.train()
    path = first.save(tmp_path / "lazy.pt")
    second = make_local(Lazy)
    second.load(path)
    assert equal(second.state_dict(), first.state_dict())
    assert second.train()["epoch"] == 2


class Remembering(LinearOperator):
    """Has models that keep what they computed last."""

    def make_model(self) -> torch.nn.Module:
        return torch.nn.utils.spectral_norm(torch.nn.Linear(NUM_FEATURES, 1))


def test_a_model_that_keeps_what_it_computed_is_handed_out(make_local: MakeTrainer) -> None:
    trainer = make_local(Remembering)
    trainer.train()
    model, live = trainer.get_model(to_cpu=True), trainer.get_model()
    assert model is not live
    assert equal(model.state_dict(), live.state_dict())
    features = torch.ones(2, NUM_FEATURES)
    assert torch.equal(model.eval()(features), live.eval()(features))


def test_a_state_goes_from_one_trainer_to_another(make_local: MakeTrainer) -> None:
    first = stateful(make_local, extra={"best": 0.5})
    first.train()
    second = stateful(make_local, seed=1)
    assert second.load_state_dict(first.state_dict()) is None
    assert equal(second.state_dict(), first.state_dict())
    assert second.get_local_operator().extra == {"best": 0.5}  # type: ignore[attr-defined]
    assert second.train()["epoch"] == 2


def test_the_operator_is_given_its_state_also_if_it_is_nothing(make_local: MakeTrainer) -> None:
    trainer = stateful(make_local, extra="something")
    trainer.load_state_dict({**trainer.state_dict(), "operator": None})
    assert trainer.get_local_operator().extra is None  # type: ignore[attr-defined]


def test_what_was_loaded_is_not_taken_for_the_state_itself(make_local: MakeTrainer) -> None:
    trainer = stateful(make_local)
    trainer.load_state_dict({**trainer.state_dict(), "unknown": 1, "amp_native": {}})
    assert list(trainer.state_dict()) == ["epoch", "operator", "models", "optimizers", "schedulers"]


def test_what_was_used_of_the_data_by_the_last_call_is_not_told_after_a_load(
    tmp_path: Path, make_local: MakeTrainer
) -> None:
    trainer = make_local()
    path = trainer.save(tmp_path / "first.pt")
    for load in (lambda: trainer.load(path), lambda: trainer.load_state_dict(trainer.state_dict())):
        trainer.train()
        assert trainer.status().data is not None
        load()
        assert trainer.status().data is None


@pytest.mark.parametrize("method", ["save", "load"])
@pytest.mark.parametrize(
    ("uri", "message"),
    [
        ("nowhere://bucket/state.pt", r"`checkpoint='nowhere://bucket/state\.pt'`: `nowhere` is unknown"),
        ("s3://bucket/", r"`checkpoint='s3://bucket/'`: need the URI of a file"),
        ("s3://bucket", r"`checkpoint='s3://bucket'`: need the URI of a file"),
    ],
)
def test_a_uri_that_names_no_file_is_refused(make_local: MakeTrainer, method: str, uri: str, message: str) -> None:
    trainer = make_local()
    with pytest.raises(ValueError, match=message):
        getattr(trainer, method)(uri)
    trainer.train()


def test_a_loaded_state_is_not_shared_with_the_trainer(make_local: MakeTrainer) -> None:
    trainer = make_local(config={"optimizer": "adam"})
    trainer.train()
    state = trainer.state_dict()
    trainer.load_state_dict(state)
    trainer.train()
    assert not equal(trainer.state_dict(), state)
    assert state["optimizers"][0]["state"][0]["step"] == 5


def without(state: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in state.items() if name != key}


def as_of_sgd(adam: dict[str, Any]) -> dict[str, Any]:
    """What is left of a state where another optimizer does not know it."""
    return {**adam, "param_groups": [without(without(group, "betas"), "eps") for group in adam["param_groups"]]}


def with_model(state: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """A state with other tensors in its model; without those that are None."""
    model = {name: value for name, value in {**state["models"][0], **changes}.items() if value is not None}
    return {**state, "models": [model]}


BROKEN: list[tuple[str, Callable[[dict[str, Any]], dict[str, Any]], type[Exception], str]] = [
    *[
        (f"no {key}", lambda s, key=key: without(s, key), ValueError, f"'{key}'")
        for key in ("epoch", "operator", "models", "optimizers", "schedulers")
    ],
    ("two models", lambda s: {**s, "models": s["models"] * 2}, ValueError, "2 models.*registered 1"),
    ("no optimizer", lambda s: {**s, "optimizers": []}, ValueError, "0 optimizers.*registered 1"),
    ("two schedulers", lambda s: {**s, "schedulers": s["schedulers"] * 2}, ValueError, "2 schedulers.*registered 1"),
    (
        "no state of a scheduler",
        lambda s: {**s, "schedulers": [3]},
        ValueError,
        "a `int`, which is not the state of a scheduler",
    ),
    (
        "other optimizer",
        lambda s: {**s, "optimizers": [as_of_sgd(s["optimizers"][0])]},
        ValueError,
        "lacks betas, eps",
    ),
    ("other model", lambda s: {**s, "models": [{"weight": torch.ones(2)}]}, ValueError, "nothing was loaded"),
    ("a tensor too few", lambda s: with_model(s, {"2.bias": None}), ValueError, r"Missing: \['2.bias'\]"),
    ("a tensor too many", lambda s: with_model(s, {"x": torch.ones(1)}), ValueError, r"unknown: \['x'\]"),
    ("other shape", lambda s: with_model(s, {"2.bias": torch.ones(2)}), ValueError, r"2.bias: \(2,\) instead of"),
]


@pytest.mark.parametrize(("change", "kind", "message"), [row[1:] for row in BROKEN], ids=[row[0] for row in BROKEN])
def test_a_state_that_does_not_fit_leaves_the_trainer_as_it_was(
    change: Any, kind: type[Exception], message: str, make_local: MakeTrainer
) -> None:
    trainer = stateful(make_local)
    trainer.train(num_steps=2)
    before = trainer.state_dict()
    with pytest.raises(kind, match=message):
        trainer.load_state_dict(change(trainer.state_dict()))
    assert equal(trainer.state_dict(), before)
    trainer.train(num_steps=1)
    assert trainer.apply_all_operators(samples_seen)[0][-1] == [8, 9, 10, 11]


@pytest.mark.parametrize("state", [None, [1]])
def test_what_is_no_state_at_all_is_refused(state: Any, make_local: MakeTrainer) -> None:
    with pytest.raises(TypeError, match=f"got `{type(state).__name__}`"):
        make_local().load_state_dict(state)


def test_schedulers_that_nobody_registered_are_not_ignored(make_local: MakeTrainer) -> None:
    state = stateful(make_local).state_dict()
    with pytest.raises(ValueError, match=r"1 schedulers.*registered 0"):
        make_local(DropoutOperator, config={"optimizer": "adam"}).load_state_dict(state)


# ------------------------------------------------------------------------------------------------ files


@pytest.mark.parametrize("kind", [str, Path])
def test_saving_returns_the_path_and_loading_nothing(kind: type, tmp_path: Path, make_local: MakeTrainer) -> None:
    trainer = make_local()
    trainer.train()
    path = kind(tmp_path / "last.pt")
    assert trainer.save(path) is path
    fresh = make_local(config={"seed": 1})
    assert fresh.load(path) is None
    assert equal(fresh.state_dict(), trainer.state_dict())


class Custom:
    """Not to be found in a file without running code."""


def test_what_could_not_be_loaded_back_is_refused_by_name(tmp_path: Path, make_local: MakeTrainer) -> None:
    trainer = stateful(make_local)
    path = trainer.save(tmp_path / "last.pt")
    content = path.read_bytes()
    trainer.get_local_operator().extra = {"history": [1, Custom()]}  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=r'state\["operator"\]\["history"\]\[1\].*Custom'):
        trainer.save(path)
    assert path.read_bytes() == content
    assert [each.name for each in tmp_path.iterdir()] == ["last.pt"]


def test_whoever_wants_to_can_save_anything(tmp_path: Path, make_local: MakeTrainer) -> None:
    trainer = stateful(make_local, extra={"history": [1, Custom()]})
    path = trainer.save(tmp_path / "last.pt", weights_only=False)
    fresh = stateful(make_local)
    with pytest.raises(UnsafeCheckpointError, match="weights_only=False"):
        fresh.load(path)
    fresh.load(path, weights_only=False)
    assert isinstance(fresh.get_local_operator().extra["history"][1], Custom)  # type: ignore[attr-defined]


def test_what_cannot_be_saved_is_refused_at_once_also_in_the_background(
    tmp_path: Path, make_local: MakeTrainer
) -> None:
    trainer = stateful(make_local, extra=Custom())
    with pytest.raises(ValueError, match=r'state\["operator"\]'):
        trainer.save(tmp_path / "last.pt", blocking=False)


def test_a_file_of_the_old_library_is_loaded(tmp_path: Path, make_local: MakeTrainer) -> None:
    trainer = stateful(make_local, extra=[1, 2])
    trainer.train(), trainer.train(num_steps=2)
    path = tmp_path / "legacy.pt"
    torch.save(trainer.state_dict(), path)  # the parts, and nothing about positions
    fresh = stateful(make_local, seed=1)
    fresh.load(path)
    assert equal(fresh.state_dict(), trainer.state_dict())
    result = fresh.train()
    assert (result["epoch"], result["batch_count"]) == (3, 5)


def test_an_older_file_of_the_old_library_is_loaded(tmp_path: Path, make_local: MakeTrainer) -> None:
    trainer = make_local(use_fp16=True)
    state = {**without(trainer.state_dict(), "amp_native"), "amp": {"loss_scale": 1.0}}
    torch.save(state, tmp_path / "legacy.pt", _use_new_zipfile_serialization=False)
    trainer.load(tmp_path / "legacy.pt")


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


@pytest.mark.parametrize(
    ("damage", "kind"),
    [(Path.unlink, FileNotFoundError), (truncate, CheckpointCorruptedError)],
)
def test_a_damaged_file_leaves_the_trainer_as_it_was(
    damage: Any, kind: type[Exception], tmp_path: Path, make_local: MakeTrainer
) -> None:
    trainer = make_local()
    path = trainer.save(tmp_path / "last.pt")
    trainer.train(num_steps=3)
    before = trainer.state_dict()
    damage(path)
    with pytest.raises(kind, match=r"last\.pt"):
        trainer.load(path)
    assert equal(trainer.state_dict(), before)
    assert trainer.train()["batch_count"] == 2


# ------------------------------------------------------------------------------------------------ resuming


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_run_resumes_inside_a_pass(shuffle: bool, tmp_path: Path, make_local: MakeTrainer) -> None:
    trainer = stateful(make_local, shuffle=shuffle)
    trainer.train(num_steps=8)
    path = trainer.save(tmp_path / "last.pt")
    begun = trainer.apply_all_operators(samples_seen)[0][5:]
    results = [trainer.train(), trainer.train(num_steps=7)]
    seen = trainer.apply_all_operators(samples_seen)
    end = trainer.state_dict()
    fresh = stateful(make_local, shuffle=shuffle, seed=1)
    fresh.load(path)
    assert [fresh.train(), fresh.train(num_steps=7)] == results
    assert fresh.apply_all_operators(samples_seen) == seen
    assert equal(fresh.state_dict(), end)
    assert sorted(number for batch in begun + seen[0][:2] for number in batch) == list(range(20))
    assert (results[0]["batch_count"], results[0]["epoch"]) == (2, 2)


def test_a_run_of_large_data_resumes_inside_a_pass(tmp_path: Path, make_local: MakeTrainer) -> None:
    """Its order is computed where it is read."""
    trainer, fresh = (make_local(config={"shuffle": True, "num_samples": 2**20, "seed": seed}) for seed in (0, 1))
    trainer.train(num_steps=3)
    path = trainer.save(tmp_path / "last.pt")
    seed = torch.load(path)["resume"]["position"]["seed"]
    fresh.load(path)
    fresh.train(num_steps=5)
    [seen] = fresh.apply_all_operators(samples_seen)
    batch_size = len(seen[0])
    indices = ShuffledOrder(2**20).indices(seed, 0)[3 * batch_size : 8 * batch_size]
    assert [number for batch in seen for number in batch] == list(indices)


def test_random_numbers_drawn_by_functions_and_validation_are_noticed(tmp_path: Path, make_local: MakeTrainer) -> None:
    trainer = make_local()
    trainer.save(tmp_path / "first.pt")
    trainer.apply_all_workers(lambda: torch.manual_seed(77))
    trainer.save(tmp_path / "second.pt")
    expected = torch.rand(())
    trainer.load(tmp_path / "second.pt")
    assert torch.rand(()) == expected


# ------------------------------------------------------------------------------------------------ in the background


class Large(LinearOperator):
    """Too large for its state to travel with an answer."""

    def make_model(self) -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(NUM_FEATURES, 9999), torch.nn.Linear(9999, 1))


@pytest.fixture
def slow_disk(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Writes begin when the event is set."""
    released = threading.Event()
    write = checkpoint_file.write

    def wait_and_write(*args: Any, **kwargs: Any) -> None:
        released.wait(60)
        write(*args, **kwargs)

    monkeypatch.setattr(checkpoint_file, "write", wait_and_write)
    return released


@pytest.mark.parametrize("operator_cls", [LinearOperator, Large, BatchNormOperator])
def test_a_file_written_later_holds_the_state_of_the_call(
    operator_cls: type, slow_disk: threading.Event, tmp_path: Path, make_local: MakeTrainer
) -> None:
    trainer = make_local(operator_cls, config={"lr": 1e-6})
    trainer.train()
    expected = trainer.state_dict()
    assert trainer.save(tmp_path / "last.pt", blocking=False) == tmp_path / "last.pt"
    for _ in range(2):
        trainer.train()
        trainer.state_dict()
    assert not (tmp_path / "last.pt").exists()
    slow_disk.set()
    trainer.shutdown()
    fresh = make_local(operator_cls, config={"seed": 1})
    fresh.load(tmp_path / "last.pt")
    assert equal(fresh.state_dict(), expected)


@pytest.mark.parametrize("is_trained", [True, False])
def test_nothing_of_a_file_is_held_on_to(is_trained: bool, tmp_path: Path, make_local: MakeTrainer) -> None:
    trainer = make_local(Large, config={"optimizer": "adam"})
    trainer.train()
    expected = trainer.state_dict()
    trainer.save(tmp_path / "last.pt")
    other = trainer if is_trained else make_local(Large, config={"optimizer": "adam", "seed": 1})
    if is_trained:
        other.train()
    other.load(tmp_path / "last.pt")
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()
    (tmp_path / "last.pt").write_bytes(b"")
    assert equal(other.state_dict(), expected)


def test_a_write_that_failed_is_told_once_by_the_next_save_or_the_end(tmp_path: Path, make_local: MakeTrainer) -> None:
    trainer = make_local()
    (tmp_path / "a_file").touch()
    for following in (lambda: trainer.save(tmp_path / "last.pt"), trainer.shutdown):
        trainer.save(tmp_path / "a_file" / "last.pt", blocking=False)
        with pytest.raises((FileExistsError, NotADirectoryError), match="a_file"):
            following()
        following()
    assert (tmp_path / "last.pt").exists()


def test_saves_come_in_their_order(tmp_path: Path, make_local: MakeTrainer) -> None:
    trainer = make_local()
    for _ in range(3):
        trainer.train()
        trainer.save(tmp_path / "last.pt", blocking=False)
    trainer.shutdown()
    assert torch.load(tmp_path / "last.pt", weights_only=False)["epoch"] == 3
