"""Adapters on pretrained bases: what is saved, and in which precision they are trained."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.version import Version

from raysgd import TorchTrainer
from raysgd.operators import HuggingFaceOperator
from tests.torch.operators_for_tests import equal

pytestmark = pytest.mark.usefixtures("keeps_the_environment")


@pytest.fixture
def remade(lab: Any) -> Any:
    class Remade(lab.Task):  # type: ignore[name-defined, misc]
        excludes_frozen_from_state = True

    return Remade


def local(operator_cls: Any, task: str = "adapter", **options: Any) -> TorchTrainer:
    config = {"task": task, "lr": 0.01, **options.pop("config", {})}
    return TorchTrainer(training_operator_cls=operator_cls, config=config, use_local=True, **options)


def adapter_of(trainer: TorchTrainer) -> dict[str, torch.Tensor]:
    state = trainer.get_model(to_cpu=True).state_dict()
    return {name: each for name, each in state.items() if "lora" in name}


def test_the_base_of_an_adapter_is_in_no_file_of_an_operator_that_makes_it_again(
    lab: Any, remade: Any, tmp_path: Path
) -> None:
    with local(remade) as trainer, local(lab.Task) as plain:
        for each in (trainer, plain):
            each.train()
            each.save(tmp_path / "file.pt")
            state = torch.load(tmp_path / "file.pt")
            assert all("lora" in name for name in state["models"][0]) == (each is trainer)
        trainer.save(tmp_path / "file.pt")
        assert equal(trainer.get_model().state_dict(), plain.get_model().state_dict())
        with local(remade) as other:
            other.load(tmp_path / "file.pt")
            assert other.train() == trainer.train()


def test_the_line_to_write_is_named_once(lab: Any, remade: Any, caplog: pytest.LogCaptureFixture) -> None:
    class Refuses(lab.Task):  # type: ignore[name-defined, misc]
        excludes_frozen_from_state = False

    for operator_cls, task in ((remade, "adapter"), (Refuses, "adapter"), (lab.Task, "next words")):
        local(operator_cls, task).shutdown()
    assert "excludes_frozen_from_state" not in caplog.text
    with local(lab.Task) as trainer:
        trainer.train()
        [told] = [
            record.getMessage() for record in caplog.records if "excludes_frozen_from_state" in record.getMessage()
        ]
    assert "write `excludes_frozen_from_state = True` in `Task`, otherwise `excludes_frozen_from_state = False`" in told


SETTINGS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "constant": ({}, {}, {"lr_scheduler_type": "constant"}),
    "linear, with decay": (
        {"scheduler": "linear", "num_warmup_steps": 2, "num_training_steps": 24, "weight_decay": 0.1},
        {"scheduler_step_freq": "batch"},
        {"lr_scheduler_type": "linear", "warmup_steps": 2, "weight_decay": 0.1},
    ),
    "cosine": (
        {"scheduler": "cosine", "num_training_steps": 24},
        {"scheduler_step_freq": "batch"},
        {"lr_scheduler_type": "cosine"},
    ),
    "checkpointed": (
        {},
        {"activation_checkpointing": True},
        {"lr_scheduler_type": "constant", "gradient_checkpointing": True},
    ),
    "accumulated": (
        {"optimizer": "sgd", "lr": 1.0},
        {"accumulate_grad_batches": 3},
        {
            "optim": "sgd",
            "lr_scheduler_type": "constant",
            "gradient_accumulation_steps": 3,
            "learning_rate": 1.0,
        },
    ),
}


@pytest.mark.parametrize(
    ("setting", "base"),
    [
        (setting, base)
        for setting in SETTINGS
        for base in ("fp32", "bf16")
        if (setting, base) != ("accumulated", "bf16")
    ],
)
def test_an_adapter_is_trained_as_the_trainer_of_transformers_trains_it(
    lab: Any, remade: Any, setting: str, base: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Not with accumulation in bf16, where theirs scales each loss: the gradients are rounded at another size."""
    if Version(metadata.version("transformers")) < Version("5.23"):
        pytest.skip("their mean over the words counts the first word of each text, for which there is no loss")
    config, options, arguments = SETTINGS[setting]
    task = "adapter" if base == "fp32" else "adapter on bf16"
    theirs = lab.train_with_theirs(task, tmp_path, num_epochs=4, bf16=base == "bf16", **arguments)
    with local(remade, task, config=config, clip_grad_norm=1.0, precision=base, **options) as trainer:
        for _ in range(4):
            trainer.train()
        ours = trainer.get_model()
    for name, each in theirs.named_parameters():
        own = dict(ours.named_parameters())[name]
        assert own.dtype == each.dtype == (torch.float32 if "lora" in name or base == "fp32" else torch.bfloat16)
        assert (own - each).norm() <= 1e-6 * each.norm()
        assert "lora_B" not in name or own.abs().max() > 0, "it was trained"
    assert "rounds each update" not in caplog.text


def test_what_is_trained_on_a_frozen_base_is_cast_to_fp32(lab: Any, caplog: pytest.LogCaptureFixture) -> None:
    class HeadOnly(HuggingFaceOperator):
        def build_model(self, config: dict[str, Any]) -> Any:
            model = lab.model_of("classify texts").to(torch.bfloat16)
            model.requires_grad_(False)
            model.classifier.requires_grad_(True)
            return model

        def build_data(self, config: dict[str, Any]) -> Any:
            return lab.samples("text"), None

        def build_collator(self, config: dict[str, Any]) -> Any:
            return lab.TASKS["classify texts"][2](lab.tokenizer())

    with local(HeadOnly, precision="bf16") as trainer:
        trainer.train()
        model = trainer.get_model()
    assert {each.dtype for each in model.classifier.parameters()} == {torch.float32}
    assert {each.dtype for each in model.bert.parameters()} == {torch.bfloat16}
    assert "rounds each update" not in caplog.text
    local(HeadOnly).shutdown()
    assert "trains 2 parameters in bfloat16" in caplog.text


def test_an_adapter_comes_and_goes_in_the_format_of_peft(lab: Any, remade: Any, tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import LlamaForCausalLM

    with local(remade) as trainer:
        trainer.train()
        folder = HuggingFaceOperator.save_pretrained(trainer, tmp_path / "adapter", lab.tokenizer())
        trained = adapter_of(trainer)
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json"} <= {
        each.name for each in folder.iterdir()
    }
    theirs = PeftModel.from_pretrained(LlamaForCausalLM(lab.llama()), folder)
    assert equal({name: each for name, each in theirs.state_dict().items() if "lora" in name}, trained)
    with local(remade) as other:
        HuggingFaceOperator.load_pretrained(other, folder)
        assert equal(adapter_of(other), trained)
    with (
        local(lab.Task, "next words") as other,
        pytest.raises(ValueError, match="adapters need a whole `PeftModel`"),
    ):
        HuggingFaceOperator.load_pretrained(other, folder)


def test_an_adapter_of_another_size_is_refused(lab: Any, remade: Any, tmp_path: Path) -> None:
    with local(lab.Task, "adapter on bf16") as trainer:
        folder = HuggingFaceOperator.save_pretrained(trainer, tmp_path)

    class Larger(remade):  # type: ignore[valid-type, misc]
        def build_model(self, config: dict[str, Any]) -> Any:
            from peft import LoraConfig, get_peft_model
            from transformers import LlamaForCausalLM

            return get_peft_model(LlamaForCausalLM(lab.llama()), LoraConfig(task_type="CAUSAL_LM", r=config["r"]))

    for rank, finding in ((8, r"other shapes: \['base_model"), (4, "fits")):
        with local(Larger, config={"r": rank}) as trainer:
            if finding == "fits":
                HuggingFaceOperator.load_pretrained(trainer, folder)
            else:
                with pytest.raises(ValueError, match=finding):
                    HuggingFaceOperator.load_pretrained(trainer, folder)
