"""`excludes_frozen_from_state`: states without the frozen parameters that `setup` makes again."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from raysgd.callbacks import EMA, SWA, Checkpointing
from raysgd.torch import TorchTrainer
from raysgd.torch.parallel.fsdp import FSDP
from raysgd.train.torch import TorchCheckpoint, TorchPredictor
from tests.torch.operators_for_tests import NUM_FEATURES, equal
from tests.torch.remade_operators import Adapted, Adapter, Plain

Make = Callable[..., TorchTrainer]

BASE = ["base.0.weight", "base.0.bias", "base.1.weight", "base.1.bias"]
KEPT = ["norm.weight", "norm.bias", "norm.running_mean", "norm.running_var", "norm.num_batches_tracked"]
KEPT += ["adapter.weight", "adapter.bias"]


class WideBody(Adapted):
    """Unfreezes the last layer of the base when it is told to."""

    def train_epoch(self, iterator: Any, info: Any = None, *args: Any) -> dict[str, Any]:  # type: ignore[override]
        if (info or {}).get("unfreeze"):
            unfreeze(self)
        return super().train_epoch(iterator, info, *args)


def unfreeze(operator: Any) -> None:
    last = operator.model.base[1].requires_grad_(True)
    operator.optimizer.add_param_group({"params": list(last.parameters())})
    operator.rewrap()


class MovingTarget(Adapted):
    """Lets its frozen base follow the adapter, as momentum encoders do."""

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        self.model.base[0].bias.data.mul_(0.9).add_(0.1)
        return super().train_batch(batch, batch_info)


def model_of(trainer: TorchTrainer) -> dict[str, torch.Tensor]:
    return dict(trainer.get_model(to_cpu=True).state_dict())


def test_it_trains_what_it_trains_without_the_attribute(make_local: Make) -> None:
    marked, plain = make_local(Adapted), make_local(Plain)
    for _ in range(2):
        assert marked.train() == plain.train()
    assert equal(model_of(marked), model_of(plain)), "with the frozen base: `get_model` returns all of it"
    assert list(plain.state_dict()["models"][0]) == [*BASE, *KEPT]
    assert "remade" not in plain.state_dict()


def test_a_state_holds_what_is_trained_and_all_buffers(make_local: Make) -> None:
    trainer = make_local(Adapted)
    trainer.train()
    state = trainer.state_dict()
    assert list(state["models"][0]) == KEPT
    assert [*state["remade"]["parts"][0]] == BASE
    trained = model_of(trainer)
    trainer.train()
    trainer.load_state_dict(state)
    assert equal(model_of(trainer), trained)


def test_a_file_continues_in_another_trainer(make_local: Make, tmp_path: Path) -> None:
    trainer = make_local(Adapted, config={"width": 20000})
    trainer.train()
    small, whole = tmp_path / "small.pt", tmp_path / "whole.pt"
    trainer.save(small)
    trainer.save(whole, frozen=True)
    assert small.stat().st_size < 50_000 < 300_000 < whole.stat().st_size
    other = make_local(Adapted, config={"width": 20000})
    other.load(small)
    assert equal(model_of(other), model_of(trainer))
    assert other.train() == trainer.train()
    without = make_local(Plain, config={"width": 20000})
    without.load(whole)
    assert "remade" not in torch.load(whole)
    assert list(torch.load(small)["models"][0]) == KEPT
    assert set(torch.load(whole)["models"][0]) == {*BASE, *KEPT}
    for each in (other, without):
        each.load(whole)
    assert equal(model_of(other), model_of(without))


def test_files_written_in_the_background_can_be_whole_too(make_local: Make, tmp_path: Path) -> None:
    trainer = make_local(Adapted)
    trainer.save(tmp_path / "whole.pt", blocking=False, frozen=True)
    trainer.train()
    trainer.shutdown()
    assert set(torch.load(tmp_path / "whole.pt")["models"][0]) == {*BASE, *KEPT}


def test_whole_files_of_before_are_loaded_where_the_base_is_the_same(make_local: Make, tmp_path: Path) -> None:
    before, now = make_local(Plain), make_local(Adapted)
    before.train()
    before.save(tmp_path / "before.pt")
    now.load(tmp_path / "before.pt")
    assert equal(model_of(now), model_of(before))
    assert list(now.state_dict()["models"][0]) == KEPT
    other = make_local(Adapted, config={"base": 1})
    was = model_of(other)
    with pytest.raises(ValueError, match=r"`base.0.weight` of model 0 \(`Adapter`\) .* has other values"):
        other.load(tmp_path / "before.pt")
    assert equal(model_of(other), was)


@pytest.mark.parametrize(
    ("config", "finding"),
    [
        ({"base": 1}, "has other values in the state than in this trainer"),
        ({"width": 32}, "is float32 64x3 in the state and float32 32x3 in this trainer"),
        ({"dtype": torch.bfloat16}, "is float32 64x3 in the state and bfloat16 64x3 in this trainer"),
    ],
)
@pytest.mark.parametrize("saver", [Adapted, Plain])
def test_another_base_is_refused_by_the_name_of_a_parameter(
    make_local: Make, tmp_path: Path, config: dict[str, Any], finding: str, saver: type[Adapted]
) -> None:
    make_local(saver).save(tmp_path / "one.pt")
    trainer = make_local(Adapted, config=config)
    was = model_of(trainer)
    with pytest.raises(ValueError, match=rf"`base.0.weight` of model 0 \(`Adapter`\) .* {finding}"):
        trainer.load(tmp_path / "one.pt")
    assert equal(model_of(trainer), was)


def test_an_operator_that_does_not_say_it_is_told_the_line_to_write(make_local: Make, tmp_path: Path) -> None:
    make_local(Adapted).save(tmp_path / "one.pt")
    with pytest.raises(
        ValueError, match=r"`[\w.]*Adapted.setup` creates again, .* `excludes_frozen_from_state = True` in `Plain`"
    ):
        make_local(Plain).load(tmp_path / "one.pt")


def test_a_state_that_holds_neither_numbers_nor_digest_is_refused(make_local: Make) -> None:
    trainer = make_local(Adapted)
    state = trainer.state_dict()
    del state["remade"]["parts"][0]["base.0.bias"]
    with pytest.raises(ValueError, match=r"Missing: \['base.0.bias'\]"):
        trainer.load_state_dict(state)
    for broken in ({"parts": 3}, [], {"parts": [3]}, {"parts": ["base.0.bias"]}):
        with pytest.raises(ValueError, match=r"does not say what is left out|Missing"):
            trainer.load_state_dict({**trainer.state_dict(), "remade": broken})


def test_what_moves_without_gradients_is_refused_by_name(make_local: Make) -> None:
    trainer = make_local(MovingTarget)
    trainer.train()
    with pytest.raises(ValueError, match=r"`base.0.bias` of model 0 \(`Adapter`\) has changed since `setup`"):
        trainer.save("never.pt")


def test_what_is_unfrozen_is_in_the_state_from_then_on(make_local: Make, tmp_path: Path) -> None:
    trainer, plain = make_local(Adapted), make_local(Plain)
    for each in (trainer, plain):
        each.train()
        each.save(tmp_path / f"{each is plain}.pt")
        each.apply_all_operators(unfreeze)
        each.train()
    assert list(trainer.state_dict()["models"][0]) == [*BASE[2:], *KEPT]
    assert equal(model_of(trainer), model_of(plain))
    trainer.save(tmp_path / "later.pt")
    other = make_local(Adapted)
    other.apply_all_operators(unfreeze)
    other.load(tmp_path / "later.pt")
    assert equal(model_of(other), model_of(plain))


def test_what_was_unfrozen_where_a_file_was_saved_comes_with_it(make_local: Make, tmp_path: Path) -> None:
    trainer = make_local(Adapted)
    trainer.apply_all_operators(unfreeze)
    trainer.train()
    trainer.save(tmp_path / "later.pt")
    other = make_local(Adapted)
    other.load(tmp_path / "later.pt", parts=("models",))
    assert equal(model_of(other), model_of(trainer))
    other.train()
    assert list(other.state_dict()["models"][0]) == [*BASE[2:], *KEPT], "`setup` does not make it"


def test_parts_of_files_can_be_loaded(make_local: Make, tmp_path: Path) -> None:
    trained, plain = make_local(Adapted), make_local(Plain)
    for each in (trained, plain):
        each.train()
    trained.save(tmp_path / "small.pt")
    plain.save(tmp_path / "whole.pt")
    plain.save(tmp_path / "whole.safetensors", format="safetensors")
    for name in ("small.pt", "whole.pt", "whole.safetensors"):
        for options in ({"parts": ("models",)}, {"strict": False}):
            trainer = make_local(Adapted)
            report = trainer.load(tmp_path / name, **options)  # type: ignore[arg-type]
            assert report.is_complete
            assert equal(model_of(trainer), model_of(plain)), (name, options)
            assert list(trainer.state_dict()["models"][0]) == KEPT
    with pytest.raises(ValueError, match="excludes_frozen_from_state"):
        make_local(Plain).load(tmp_path / "small.pt", parts=("models",))
    with pytest.raises(ValueError, match="has other values"):
        make_local(Adapted, config={"base": 1}).load(tmp_path / "whole.safetensors")


def test_a_file_of_weights_has_what_is_trained_or_all(make_local: Make, tmp_path: Path) -> None:
    trainer = make_local(Adapted)
    trainer.save(tmp_path / "some.safetensors", format="safetensors")
    trainer.save(tmp_path / "all.safetensors", format="safetensors", frozen=True)
    assert set(load_file(tmp_path / "some.safetensors")) == set(KEPT)
    assert set(load_file(tmp_path / "all.safetensors")) == {*BASE, *KEPT}
    trainer.train()
    trainer.save(tmp_path / "some.safetensors", format="safetensors")
    other = make_local(Adapted)
    assert other.load(tmp_path / "some.safetensors").is_complete
    assert equal(model_of(other), model_of(trainer))
    with pytest.raises(ValueError, match="has other values in the state than in this trainer"):
        make_local(Adapted, config={"base": 1}).load(tmp_path / "some.safetensors")


def test_a_predictor_asks_for_the_frozen_parameters(make_local: Make, tmp_path: Path) -> None:
    trainer = make_local(Adapted)
    trainer.train()
    trainer.save(tmp_path / "some.pt")
    trainer.save(tmp_path / "all.pt", frozen=True)
    some, whole = (torch.load(tmp_path / name)["models"][0] for name in ("some.pt", "all.pt"))
    finding = r"omits parameters of `model` \(`Adapter`\): `base.0.weight` and 3 more.*save\(path, frozen=True\)`"
    with pytest.raises(ValueError, match=finding):
        TorchPredictor.from_checkpoint(TorchCheckpoint.from_state_dict(some), Adapter(0, 64))
    by_hand = Adapter(0, 64)
    by_hand.load_state_dict(some, strict=False)
    inputs = np.ones((5, NUM_FEATURES), dtype=np.float32)
    expected = TorchPredictor(trainer.get_model(to_cpu=True)).predict(inputs)
    for predictor in (
        TorchPredictor.from_checkpoint(TorchCheckpoint.from_state_dict(whole), Adapter(1, 64)),
        TorchPredictor.from_checkpoint(TorchCheckpoint.from_model(trainer.get_model(to_cpu=True))),
        TorchPredictor(by_hand),
    ):
        assert np.array_equal(predictor.predict(inputs), expected)


@pytest.mark.parametrize("change", ["another name", "another shape", "no buffer"])
def test_a_state_of_another_model_keeps_the_error_of_pytorch(change: str) -> None:
    state = dict(Adapter(0, 64).state_dict())
    del state["base.0.weight"]
    if change == "another name":
        state["other"] = torch.ones(1)
    elif change == "another shape":
        state["base.0.weight"] = torch.ones(1)
    else:
        del state["norm.running_mean"]
    with pytest.raises(RuntimeError, match="in loading state_dict for Adapter"):
        TorchPredictor.from_checkpoint(TorchCheckpoint.from_state_dict(state), Adapter(0, 64))


@pytest.mark.parametrize("callback", [EMA(0.5), SWA()])
def test_averages_leave_out_what_is_made_again(make_local: Make, callback: Any) -> None:
    trainer, plain = make_local(Adapted), make_local(Plain)
    for each in (trainer, plain):
        each.fit(2, callbacks=[callback])
    [state] = trainer.state_dict()["callbacks"].values()
    assert set(state["weights"][0]) == set(KEPT)
    assert equal(callback.get_model(trainer).state_dict(), callback.get_model(plain).state_dict())
    with callback.swap(trainer), callback.swap(plain):
        assert trainer.validate() == plain.validate()
    assert equal(model_of(trainer), model_of(plain))


def test_a_reload_compares_the_base_too(make_local: Make) -> None:
    trainer = make_local(Adapted)
    trainer.train()

    class Edited(Adapted):
        pass

    trainer.reload(Edited)
    assert list(trainer.state_dict()["models"][0]) == KEPT
    with pytest.raises(ValueError, match="Write `excludes_frozen_from_state = True` in `Plain`"):
        trainer.reload(Plain)


def test_divided_models_are_refused(make_local: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raysgd.torch.parallel.strategy.Strategy.is_sharded", FSDP.is_sharded)
    with pytest.raises(
        ValueError, match=r"`Adapted.excludes_frozen_from_state = True` cannot work with `strategy=\"fsdp\"`"
    ):
        make_local(Adapted)


# ------------------------------------------------------------------------------------------------ drawn by a seed

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
NUM_SOAK = 200


class Drawn(Adapted):
    """Frozen parameters of random sizes and dtypes beside the base, some of them tied or not in one piece."""

    def make_model(self) -> torch.nn.Module:
        draw, model = random.Random(self.config["case"]), super().make_model()
        torch.manual_seed(self.config["case"])
        more = {}
        for number in range(draw.randint(1, 6)):
            numbers = torch.randn([draw.choice((1, 3, 17, 64)) for _ in range(draw.randint(1, 3))])
            numbers = numbers.transpose(0, -1) if draw.random() < 0.3 else numbers
            more[f"part{number}"] = torch.nn.Parameter(numbers.to(draw.choice(DTYPES)), requires_grad=False)
            if draw.random() < 0.2:
                more[f"tied{number}"] = more[f"part{number}"]
        spoil = self.config.get("spoil")
        if spoil is not None:
            name = draw.choice([*more])
            changed = spoil(more.pop(name).detach().clone(), draw)
            if changed is not None:
                more[name] = torch.nn.Parameter(changed, requires_grad=False)
        model.more = torch.nn.ParameterDict(more)
        return model


def one_number(numbers: torch.Tensor, draw: random.Random) -> torch.Tensor:
    place = tuple(draw.randrange(size) for size in numbers.shape)
    numbers[place] += 1
    return numbers


def another_dtype(numbers: torch.Tensor, draw: random.Random) -> torch.Tensor:
    return numbers.to(draw.choice([each for each in DTYPES if each != numbers.dtype]))


MISTAKES: dict[str, Callable[[torch.Tensor, random.Random], torch.Tensor | None]] = {
    "another base": lambda numbers, draw: torch.randn_like(numbers) + 9,
    "one number": one_number,
    "another dtype": another_dtype,
    "another shape": lambda numbers, draw: numbers.unsqueeze(0),
    "missing": lambda numbers, draw: None,
}


def move(operator: Any, case: int) -> str:
    """Let a frozen parameter follow something else, as momentum encoders do; return its name."""
    draw = random.Random(case)
    name, parameter = draw.choice([each for each in operator.model.named_parameters() if not each[1].requires_grad])
    moved = parameter.detach() * 0.9 + 0.1 * (parameter.detach() + 3)
    if draw.random() < 0.3:
        parameter.data = moved
    elif draw.random() < 0.5:
        parameter.data.copy_(moved)
    else:
        parameter.detach().copy_(moved)
    return str(name)


@pytest.mark.parametrize(
    "case", [*range(3), *(pytest.param(case, marks=pytest.mark.soak) for case in range(3, NUM_SOAK))]
)
def test_every_mistake_is_an_error_that_names_the_parameter(make_local: Make, tmp_path: Path, case: int) -> None:
    right = make_local(Drawn, config={"case": case})
    right.train()
    right.save(tmp_path / "small.pt")
    right.save(tmp_path / "whole.pt", frozen=True)
    again = make_local(Drawn, config={"case": case})
    for name in ("small.pt", "whole.pt"):
        again.load(tmp_path / name)
        assert equal(model_of(again), model_of(right))
    mistake = [*MISTAKES][case % len(MISTAKES)]
    wrong = make_local(Drawn, config={"case": case, "spoil": MISTAKES[mistake]})
    was = model_of(wrong)
    for name in ("small.pt", "whole.pt"):
        with pytest.raises(ValueError, match=r"`?more\.(part|tied)\d`? of model 0|unknown: \['more\.(part|tied)\d"):
            wrong.load(tmp_path / name)
    assert equal(model_of(wrong), was)
    [moved] = again.apply_all_operators(partial(move, case=case))
    with pytest.raises(ValueError, match=r"`[\w.]+` of model 0 \(`Adapter`\) has changed since `setup`") as raised:
        again.save(tmp_path / "small.pt")
    assert moved in str(raised.value) or moved.startswith("more.part")  # or by the other name of a tied one


def test_a_run_resumes_from_the_adapter_alone(make_local: Make, tmp_path: Path) -> None:
    def run(num_epochs: int, operator_cls: type[Adapted] = Adapted, **config: Any) -> TorchTrainer:
        trainer = make_local(operator_cls, config=config)
        saving = Checkpointing(metric="val_loss")
        trainer.fit(num_epochs, folder=tmp_path / "run", resume_from="auto", callbacks=[saving])
        return trainer

    run(2)
    files = [*(tmp_path / "run").rglob("*.ckpt")]
    assert files
    assert all(list(torch.load(each)["models"][0]) == KEPT for each in files)
    resumed = run(4)
    alone = make_local(Plain)
    alone.fit(4)
    assert equal(model_of(resumed), model_of(alone))
    with pytest.raises(ValueError, match=r"`base.0.weight` of model 0"):
        run(5, base=1)


class UnderItsFormerName(Plain):
    """Says it with the attribute's former name."""

    remakes_frozen = True


def test_the_former_name_of_the_attribute_works_and_is_told(make_local: Make, caplog: pytest.LogCaptureFixture) -> None:
    assert set(make_local(UnderItsFormerName).state_dict()["models"][0]) == set(
        make_local(Adapted).state_dict()["models"][0]
    )
    words = "`UnderItsFormerName.remakes_frozen` has a new name: write `excludes_frozen_from_state = True`"
    assert caplog.text.count(words) == 1
