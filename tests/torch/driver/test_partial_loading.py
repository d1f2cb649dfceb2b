"""Loading a part of a file, and files of safetensors.

Covers `raysgd.torch.checkpoints.weights_file` and `raysgd.torch.driver.framework`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from raysgd.exceptions import CheckpointCorruptedError
from raysgd.torch import TorchTrainer
from raysgd.torch.checkpoints import weights_file
from raysgd.torch.driver.framework import PARTS, LoadReport
from tests.torch.operators_for_tests import NUM_FEATURES, DropoutOperator, LinearOperator, equal

Make = Callable[..., TorchTrainer]


class Body(DropoutOperator):
    """Two layers, momentum, and a state of its own."""

    def setup(self, config: dict[str, Any]) -> None:
        super().setup({**config, "optimizer": "adam"})
        self.note = config.get("note", "own")

    def state_dict(self) -> Any:
        return self.note

    def load_state_dict(self, state_dict: Any) -> None:
        self.note = state_dict


class OtherHead(Body):
    """The same with another head and one more layer."""

    def make_model(self) -> torch.nn.Module:
        body = super().make_model()
        return torch.nn.Sequential(*list(body)[:2], torch.nn.Linear(8, 4), torch.nn.Linear(4, 1))  # type: ignore[call-overload]


class Tied(LinearOperator):
    """Its layers share a weight."""

    def make_model(self) -> torch.nn.Module:
        first, second = torch.nn.Linear(NUM_FEATURES, NUM_FEATURES), torch.nn.Linear(NUM_FEATURES, NUM_FEATURES)
        second.weight = first.weight
        return torch.nn.Sequential(first, second, torch.nn.Linear(NUM_FEATURES, 1))


class Two(LinearOperator):
    def setup(self, config: dict[str, Any]) -> None:
        super().setup(config)
        self.register(models=[self.model, torch.nn.Linear(2, 2)], optimizers=self.optimizer)


@pytest.fixture
def trained(make_local: Make, tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    trainer = make_local(Body, config={"seed": 1, "note": "saved"})
    trainer.train()
    trainer.train(num_steps=2)
    trainer.save(tmp_path / "last.pt")
    return tmp_path / "last.pt", trainer.state_dict()


class TestParts:
    def test_weights_alone_leave_the_rest_as_it_is(self, make_local: Make, trained: Any) -> None:
        path, saved = trained
        trainer = make_local(Body)
        trainer.train()
        before = trainer.state_dict()
        report = trainer.load(path, parts=("models",))
        after = trainer.state_dict()
        assert equal(after.pop("models"), saved["models"])
        assert before.pop("models")
        assert equal(after, before)
        assert report == LoadReport(("models",), num_loaded=4)

    def test_all_parts_are_the_whole_file(self, make_local: Make, trained: Any) -> None:
        path, saved = trained
        by_parts, whole = make_local(Body), make_local(Body)
        parts = tuple(part for part in PARTS if part not in ("criterion", "schedulers"))
        report = by_parts.load(path, parts=parts)
        assert whole.load(path) is None
        assert report is not None
        assert report.parts == parts
        for trainer in (by_parts, whole):
            assert equal(trainer.state_dict(), saved)
        results = []
        for trainer in (by_parts, whole):
            torch.manual_seed(2)
            results.append((trainer.train(), trainer.state_dict()))
        assert equal(results[0], results[1]), "also the place in the pass"

    def test_the_place_in_the_data_stays_without_progress(self, make_local: Make, trained: Any) -> None:
        trainer = make_local(Body)
        trainer.train(num_steps=3)
        trainer.load(trained[0], parts=["operator", "models"])
        trainer.train()
        operator: Any = trainer.get_local_operator()
        assert (operator.note, len(operator.seen)) == ("saved", 5), "two more of five batches"

    def test_precision_takes_neither_states_of_callbacks_nor_unknown_parts(
        self, make_local: Make, trained: Any, tmp_path: Path
    ) -> None:
        torch.save({**torch.load(trained[0]), "callbacks": {"Mine": 1}, "other": 2}, tmp_path / "more.pt")
        trainer = make_local(Body)
        before = trainer.state_dict()
        trainer.load(tmp_path / "more.pt", parts=("precision",))
        assert equal(trainer.state_dict(), before)

    @pytest.mark.parametrize(
        ("options", "error", "message"),
        [
            ({"parts": ("model",)}, ValueError, r"`parts` has 'model'\. Did you mean `models`\? Available: `models`"),
            ({"parts": "models"}, TypeError, "need a tuple of names"),
            ({"parts": ()}, ValueError, "name at least one part"),
            ({"parts": ("schedulers",)}, ValueError, "The file has no 'schedulers'"),
            ({"strict": "no"}, ValueError, "any string would count as True"),
        ],
    )
    def test_what_cannot_be_meant_is_refused(
        self, make_local: Make, trained: Any, options: Any, error: type[Exception], message: str
    ) -> None:
        trainer = make_local(Body)
        before = trainer.state_dict()
        with pytest.raises(error, match=message):
            trainer.load(trained[0], **options)
        assert equal(trainer.state_dict(), before)

    @pytest.mark.parametrize("options", [{"parts": ("models",)}, {"strict": False}])
    def test_a_model_that_is_no_dict_is_refused(
        self, make_local: Make, trained: Any, tmp_path: Path, options: Any
    ) -> None:
        torch.save({**torch.load(trained[0]), "models": [3]}, tmp_path / "strange.pt")
        with pytest.raises(ValueError, match=r"Model 0 in the file is a `int`, not a dict\. Nothing was loaded"):
            make_local(Body).load(tmp_path / "strange.pt", **options)


class TestWhatFits:
    def test_is_loaded_and_the_rest_is_reported(self, make_local: Make, trained: Any) -> None:
        path, saved = trained
        trainer = make_local(OtherHead)
        before = trainer.state_dict()["models"][0]
        report = trainer.load(path, strict=False)
        after = trainer.state_dict()["models"][0]
        assert report is not None
        assert report.missing == ("3.weight", "3.bias")
        assert report.mismatched == {"2.weight": ((1, 8), (4, 8)), "2.bias": ((1,), (4,))}
        assert (report.unexpected, report.is_complete, report.num_loaded) == ((), False, 2)
        assert equal(after["0.weight"], saved["models"][0]["0.weight"])
        assert all(equal(after[name], before[name]) for name in ("2.weight", "2.bias", "3.weight", "3.bias"))
        assert str(report) == (
            "loaded models; 2 weights; missing: 3.weight, 3.bias; other shapes: "
            "2.weight: (1, 8) in the file, (4, 8) in the model, 2.bias: (1,) in the file, (4,) in the model"
        )
        with pytest.raises(ValueError, match=r"does not match the registered model, so nothing was loaded"):
            trainer.load(path, parts=("models",))
        assert equal(trainer.state_dict()["models"][0], after)

    def test_names_of_several_models_begin_with_the_number_of_the_model(
        self, make_local: Make, trained: Any, tmp_path: Path
    ) -> None:
        saved = make_local(Two).state_dict()
        other = saved["models"][1]
        other["extra"] = other.pop(missing := next(iter(other)))
        torch.save(saved, tmp_path / "two.pt")
        report = make_local(Two).load(tmp_path / "two.pt", strict=False)
        assert (report.missing, report.unexpected) == ((f"1.{missing}",), ("1.extra",))


class TestSafetensors:
    def test_a_file_is_read_by_safetensors_and_by_another_trainer(self, make_local: Make, tmp_path: Path) -> None:
        trainer, other = make_local(Body), make_local(Body, config={"seed": 1})
        trainer.train()
        path = trainer.save(tmp_path / "model.safetensors", format="safetensors")
        weights = load_file(path)
        assert equal(dict(trainer.state_dict()["models"][0]), weights)
        trainer.get_model(to_cpu=True).load_state_dict(weights)
        other.train()
        epoch = other.train()["epoch"]
        report = other.load(path)
        assert report == LoadReport(("models",), num_loaded=4)
        assert equal(dict(other.state_dict()["models"][0]), weights)
        assert other.train()["epoch"] == epoch + 1, "nothing else has changed"

    def test_tied_weights_are_written_once_and_loaded_twice(self, make_local: Make, tmp_path: Path) -> None:
        trainer, other = make_local(Tied), make_local(Tied, config={"seed": 1})
        path = trainer.save(tmp_path / "tied.safetensors", format="safetensors")
        with safe_open(path, "pt") as file:
            assert "1.weight" not in file.keys()  # noqa: SIM118
            assert json.loads(file.metadata()["raysgd_tied"]) == {"1.weight": "0.weight"}
        other.load(path)
        assert equal(other.state_dict()["models"], trainer.state_dict()["models"])
        save_file({name: tensor + 1 for name, tensor in load_file(path).items()}, path)  # of another program
        for options in ({}, {"strict": False}):
            other.load(path, **options)
            state = other.state_dict()["models"][0]
            assert equal(state["1.weight"], trainer.state_dict()["models"][0]["0.weight"] + 1)

    def test_several_models_are_told_apart(self, make_local: Make, tmp_path: Path) -> None:
        trainer, other = make_local(Two), make_local(Two, config={"seed": 1})
        path = trainer.save(tmp_path / "two.safetensors", format="safetensors")
        assert sorted(load_file(path)) == ["0.bias", "0.weight", "1.bias", "1.weight"]
        other.load(path)
        assert equal(other.state_dict()["models"], trainer.state_dict()["models"])

    def test_targets_of_save_work_alike(self, make_local: Make) -> None:
        trainer, other = make_local(), make_local(config={"seed": 1})
        trainer.save("memory://weights/last.safetensors", blocking=False, format="safetensors")
        trainer.shutdown()
        other.load("memory://weights/last.safetensors")
        expected = make_local().state_dict()["models"]
        assert equal(other.state_dict()["models"], expected)

    def test_damage_is_found(self, make_local: Make, tmp_path: Path) -> None:
        trainer = make_local()
        path = trainer.save(tmp_path / "last.safetensors", format="safetensors")
        content = path.read_bytes()
        before = trainer.state_dict()
        odd = {"raysgd_models": "2", "raysgd_tied": "{}"}
        save_file({"name": torch.ones(1)}, tmp_path / "odd.safetensors", metadata=odd)
        for damaged in (content[:-3], content[:20], (tmp_path / "odd.safetensors").read_bytes()):
            path.write_bytes(damaged)
            with pytest.raises(CheckpointCorruptedError, match="not an intact safetensors file"):
                trainer.load(path)
        assert equal(trainer.state_dict(), before)

    @pytest.mark.parametrize(
        ("names", "metadata"),
        [
            (["5.weight"], {"raysgd_models": "2"}),
            (["-1.weight", "0.weight"], {"raysgd_models": "2"}),
            (["weight"], {"raysgd_models": "0"}),
            (["weight"], {"raysgd_tied": "[1]"}),
            (["weight"], {"raysgd_tied": '{"b": ["weight"]}'}),
            (["weight"], {"raysgd_tied": "[" * 100_000}),
            (["weight"], {"raysgd_left_out": '{"a":' * 100_000}),
            (["weight"], {"raysgd_left_out": "3"}),
            (["weight"], {"raysgd_left_out": '{"by": "A", "parts": [{"bias": 3}]}'}),
        ],
        ids=lambda value: str(value)[:40],
    )
    def test_metadata_of_another_form_are_damage(
        self, names: list[str], metadata: dict[str, str], tmp_path: Path
    ) -> None:
        path = tmp_path / "file.safetensors"
        save_file({name: torch.ones(1) for name in names}, path, metadata)
        with pytest.raises(CheckpointCorruptedError, match="`shown` is not an intact safetensors file"):
            weights_file.read(str(path), "shown")

    def test_what_is_no_tensor_cannot_be_written(self, make_local: Make, tmp_path: Path) -> None:
        class Extra(torch.nn.Linear):
            def get_extra_state(self) -> Any:
                return {"version": 1}

            def set_extra_state(self, state: Any) -> None: ...

        class HasExtra(LinearOperator):
            def make_model(self) -> torch.nn.Module:
                return Extra(NUM_FEATURES, 1)

        with pytest.raises(ValueError, match=r"`models\[0\]\['_extra_state'\]` is a `dict`: .*`?format=\"torch\""):
            make_local(HasExtra).save(tmp_path / "x.safetensors", format="safetensors")
        assert not (tmp_path / "x.safetensors").exists()

    def test_an_unknown_format_is_refused(self, make_local: Make, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match=r"`format='safetensor'`.*Did you mean `safetensors`"):
            make_local().save(tmp_path / "x", format="safetensor")
