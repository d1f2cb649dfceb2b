"""Tiny models of `transformers`, trained in this process; and `transformers.Trainer` beside them."""

from __future__ import annotations

import math
from dataclasses import fields
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version

from raysgd import TorchTrainer
from raysgd.journal.journal import Journal
from raysgd.operators import HuggingFaceOperator, hugging_face
from tests.torch.lab import validate_on_spare

pytestmark = pytest.mark.usefixtures("keeps_the_environment")


STEPS = {
    "constant": ({}, {}, {"lr_scheduler_type": "constant"}),
    "usual": (
        {"scheduler": "linear", "num_warmup_steps": 2, "num_training_steps": 12, "weight_decay": 0.1},
        {"scheduler_step_freq": "batch"},
        {"lr_scheduler_type": "linear", "warmup_steps": 2, "weight_decay": 0.1},
    ),
    "accumulated": (
        {"optimizer": "sgd"},  # Adam makes a step of a gradient that is only rounding errors
        {"accumulate_grad_batches": 3, "clip_grad_norm": 1.0},
        {"optim": "sgd", "lr_scheduler_type": "constant", "gradient_accumulation_steps": 3},
    ),
}


@pytest.mark.parametrize(
    ("task", "steps"),
    [
        ("classify texts", "usual"),
        ("a number", "usual"),
        ("label words", "constant"),
        ("text to text", "usual"),
        ("adapter", "constant"),
        ("next words", "accumulated"),
    ],
)
def test_one_process_trains_what_the_trainer_of_transformers_trains(
    lab: Any, task: str, steps: str, tmp_path: Path
) -> None:
    if task in ("adapter", "next words") and Version(metadata.version("transformers")) < Version("5.23"):
        pytest.skip("their mean over the words counts the first word of each text, for which there is no loss")
    config, options, arguments = STEPS[steps]
    theirs = lab.train_with_theirs(task, tmp_path, **arguments)
    _, ours, _ = lab.train(task, config=config, **{"clip_grad_norm": 1.0, **options})
    torch.testing.assert_close(lab.weights(ours), lab.weights(theirs), rtol=0, atol=1e-6)
    assert (lab.weights(ours) - lab.weights(lab.model_of(task))).abs().max() > 1e-3, "they were trained"


def test_a_spare_measures_what_the_worker_whose_state_it_has_does(lab: Any) -> None:
    before, inline, beside = validate_on_spare(lab.Task, {"task": "classify texts"})
    assert beside == inline != before


@pytest.mark.parametrize("task", ["label words", "next words of GPT-2", "label pixels", "tell pixels apart"])
def test_small_batches_make_the_step_of_a_large_one_whatever_the_lengths_of_texts(lab: Any, task: str) -> None:
    _, small, _ = lab.train(task, config={"optimizer": "sgd"}, accumulate_grad_batches=6)
    _, large, _ = lab.train(task, config={"optimizer": "sgd", "batch_size": lab.NUM_SAMPLES})
    torch.testing.assert_close(lab.weights(small), lab.weights(large), rtol=0, atol=1e-6)
    assert not torch.allclose(lab.weights(small), lab.weights(lab.model_of(task)), atol=1e-4), "they were trained"


@pytest.mark.parametrize("task", ["a number", "masked words", "label pixels"])
def test_it_learns(lab: Any, task: str) -> None:
    losses, _, validated = lab.train(task, num_epochs=6)
    assert losses[-1] < losses[0] * 0.97
    assert validated["num_samples"] == lab.NUM_SAMPLES
    assert ("val_accuracy" in validated) == (task not in ("a number", "label pixels"))


@pytest.mark.parametrize("task", ["a number", "adapter"])
def test_a_guard_leaves_a_bad_batch_out(lab: Any, task: str, tmp_path: Path) -> None:
    from raysgd.callbacks import Guard

    class Task(lab.Task):  # type: ignore[misc]
        """Has a batch whose loss is NaN, or lacks this batch."""

        def build_data(self, config: dict[str, Any]) -> Any:
            train, validation = super().build_data(config)
            if not config["is_bad"]:
                del train.dataset[2 * lab.BATCH_SIZE : 3 * lab.BATCH_SIZE]
            return train, validation

        def forward(self, *parts: Any) -> Any:
            output, loss, *more = super().forward(*parts)
            return output, loss * (math.nan if self.config["is_bad"] and self.global_step == 2 else 1), *more

    found = []
    for is_bad in (True, False):
        config = {"task": task, "lr": lab.LR, "is_bad": is_bad}
        with TorchTrainer(training_operator_cls=Task, config=config, use_local=True) as trainer:
            (result,) = trainer.fit(1, callbacks=[Guard()], folder=tmp_path, progress=False)
            found.append((result["train_loss"], lab.weights(trainer.get_model())))
        assert [each.step for each in Journal(tmp_path).left_out] == [3] * is_bad
    assert found[0][0] == found[1][0]
    assert torch.equal(found[0][1], found[1][1])


def test_validation_is_the_mean_over_the_words_of_all_batches(lab: Any) -> None:
    _, model, validated = lab.train("next words", num_epochs=1)
    batch = lab.TASKS["next words"][2](lab.tokenizer())(lab.samples("none"))
    with torch.no_grad():
        output = model.eval()(**batch)
    target = batch["labels"][:, 1:]
    is_right = output.logits[:, :-1].argmax(-1) == target
    assert validated["val_loss"] == pytest.approx(output.loss.item(), rel=1e-5)
    assert validated["val_accuracy"] == pytest.approx((is_right.sum() / (target != -100).sum()).item(), rel=1e-6)


def test_only_the_adapter_is_trained_and_it_can_be_saved_alone(lab: Any, tmp_path: Path) -> None:
    import peft

    config = {"task": "adapter", "lr": lab.LR}
    with TorchTrainer(training_operator_cls=lab.Task, config=config, use_local=True) as trainer:
        trainer.train()
        folder = HuggingFaceOperator.save_pretrained(trainer, tmp_path / "adapter", lab.tokenizer())
        trained = trainer.get_model().eval()
    assert "adapter_model.safetensors" in {path.name for path in folder.iterdir()}
    base = lab.model_of("adapter").unload()
    loaded = peft.PeftModel.from_pretrained(base, str(folder)).eval()
    words = torch.arange(3, 9).reshape(1, -1)
    torch.testing.assert_close(loaded(words).logits, trained(words).logits)
    for name, parameter in lab.model_of("adapter").named_parameters():
        is_same = torch.equal(parameter, trained.get_parameter(name))
        assert is_same != ("lora" in name), name


def test_what_is_saved_is_what_transformers_loads(lab: Any, tmp_path: Path) -> None:
    import transformers

    with TorchTrainer(training_operator_cls=lab.Task, config={"task": "next words"}, use_local=True) as trainer:
        trainer.train()
        HuggingFaceOperator.save_pretrained(trainer, tmp_path, lab.tokenizer())
        trained = lab.weights(trainer.get_model())
    assert torch.equal(lab.weights(transformers.AutoModelForCausalLM.from_pretrained(str(tmp_path))), trained)
    assert transformers.PreTrainedTokenizerFast.from_pretrained(str(tmp_path)).vocab_size == lab.SIZE


def test_predictions_are_what_the_trained_model_says_of_each_text(lab: Any) -> None:
    texts = {
        "input_ids": torch.randint(2, lab.SIZE, (7, 12)),
        "attention_mask": (torch.arange(12) < torch.arange(5, 12)[:, None]).long(),
    }
    with local(lab.Task) as trainer:
        trainer.train()
        found, model = trainer.predict(texts, batch_size=3), trainer.get_model().eval()
    with torch.no_grad():
        expected = model(**texts).logits
    scores = found if not isinstance(found, dict) else found["prediction"]
    torch.testing.assert_close(torch.as_tensor(scores), expected, rtol=0, atol=1e-6)


def local(operator_cls: Any, **options: Any) -> TorchTrainer:
    config = {"task": "classify texts", **options.pop("config", {})}
    return TorchTrainer(training_operator_cls=operator_cls, config=config, use_local=True, **options)


def test_a_constant_schedule_needs_no_length(lab: Any) -> None:
    config = {"task": "classify texts", "lr": 0.1, "scheduler": "constant"}
    with local(lab.Task, config=config, scheduler_step_freq="batch") as trainer:
        assert trainer.apply_all_operators(lambda operator: operator.scheduler.get_last_lr()[0]) == [0.1]


class TestRefused:
    def test_a_model_without_a_loss(self, lab: Any) -> None:
        class Headless(lab.Task):
            def build_model(self, config: dict[str, Any]) -> Any:
                return lab.BertForSequenceClassification(lab.bert()).bert

        expected = pytest.raises(TypeError, match=r"`BertModel` returned no loss for .*'input_ids', .*`labels`")
        with local(Headless) as trainer, expected:
            trainer.train()

    def test_a_loss_that_adds_up_several_means(self, lab: Any) -> None:
        expected = pytest.raises(ValueError, match=r"adds up means over 'labels', 'next_sentence_label', .*`forward`")
        with local(lab.Task, config={"task": "masked words and a label"}) as trainer, expected:
            trainer.train()

    def test_a_loss_that_is_the_sum_over_recordings_but_not_the_mean(self, lab: Any) -> None:
        class Spoken(lab.Task):
            def build_model(self, config: dict[str, Any]) -> Any:
                return lab.wav2vec2(ctc_loss_reduction=config["reduction"])

            def build_data(self, config: dict[str, Any]) -> Any:
                return [{"input_values": torch.randn(200), "labels": torch.tensor([1, 2])} for _ in range(2)], None

        with local(Spoken, config={"reduction": "mean"}) as trainer:
            assert trainer.train()["num_samples"] == 2
        expected = pytest.raises(ValueError, match=r"ctc_loss_reduction='sum'.*config.ctc_loss_reduction = 'mean'")
        with local(Spoken, config={"reduction": "sum"}) as trainer, expected:
            trainer.train()

    def test_a_batch_that_is_no_dict(self, lab: Any) -> None:
        class Pairs(lab.Task):
            def build_data(self, config: dict[str, Any]) -> Any:
                return [(torch.ones(2, dtype=torch.long), 0)] * 4, None

        expected = pytest.raises(TypeError, match="A batch is a `list`: return a dict from `build_collator`")
        with local(Pairs) as trainer, expected:
            trainer.train()

    @pytest.mark.parametrize("encodes", [True, False])
    @pytest.mark.parametrize("pads", [True, False])
    def test_texts_beside_or_instead_of_numbers(self, lab: Any, pads: bool, encodes: bool) -> None:
        class Texts(lab.Task):
            def build_data(self, config: dict[str, Any]) -> Any:
                encoded = {"input_ids": [5, 6, 7], "attention_mask": [1, 1, 1]} if encodes else {}
                return [{"review": "w1 w2 w3", **encoded, "labels": 0}] * 4, None

            def build_collator(self, config: dict[str, Any]) -> Any:
                return transformers.DataCollatorWithPadding(lab.tokenizer()) if pads else None

        said = r"texts under 'review'.*\n?.*tokenizer\(row\['review'\], truncation=True\), remove_columns=\['review'\]"
        expected = pytest.raises(TypeError, match=said)
        with local(Texts, config={"task": "classify texts"}) as trainer, expected:
            trainer.train()

    def test_a_schedule_of_steps_that_is_stepped_by_epochs(self, lab: Any) -> None:
        with pytest.raises(ValueError, match='scheduler_step_freq="batch"'):
            local(lab.Task, config={"scheduler": "linear", "num_training_steps": 3}, scheduler_step_freq="epoch")

    def test_a_schedule_without_a_length(self, lab: Any) -> None:
        with pytest.raises(ValueError, match="requires `num_training_steps`"):
            local(lab.Task, config={"scheduler": "linear"}, scheduler_step_freq="batch")
        with pytest.raises(ValueError, match=r"config\['num_training_steps'\]=0`.* The default is None"):
            local(lab.Task, config={"scheduler": "linear", "num_training_steps": 0}, scheduler_step_freq="batch")

    def test_a_warm_up_that_is_a_share_of_the_steps(self, lab: Any) -> None:
        config = {"scheduler": "linear", "num_training_steps": 25, "num_warmup_steps": 0.1}
        with pytest.raises(ValueError, match=r"not a fraction of all steps. Write `math.ceil\(0.1 \* .*\)`, here 3"):
            local(lab.Task, config=config, scheduler_step_freq="batch")

    def test_a_model_with_nothing_to_train(self, lab: Any) -> None:
        class Frozen(lab.Task):
            def build_model(self, config: dict[str, Any]) -> Any:
                return super().build_model(config).requires_grad_(False)

        with pytest.raises(ValueError, match=r"no parameter with `requires_grad`.*is_trainable=True"):
            local(Frozen)


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("learning_rate", r'write `"lr"`'),
        ("lr_scheduler_type", r'write `"scheduler"`'),
        ("gradient_accumulation_steps", r"accumulate_grad_batches="),
        ("per_device_eval_batch_size", "that of the validation, too"),
    ],
)
def test_names_of_the_trainer_of_transformers_are_answered_with_ours(lab: Any, name: str, ours: str) -> None:
    with pytest.raises(ValueError, match=rf"`config\['{name}'\]` is for `transformers.TrainingArguments`: .*{ours}"):
        lab.train("a number", config={name: 1})


def test_a_rung_that_is_overridden_reads_what_it_likes(lab: Any) -> None:
    class Own(lab.Task):  # type: ignore[name-defined, misc]
        def build_optimizer(self, model: Any, config: dict[str, Any]) -> Any:
            return torch.optim.SGD(model.parameters(), lr=config["learning_rate"])

    config = {"task": "a number", "learning_rate": 0.25}
    with TorchTrainer(training_operator_cls=Own, config=config, use_local=True) as trainer:
        assert trainer.apply_all_operators(lambda operator: operator.optimizer.param_groups[0]["lr"]) == [0.25]


def test_texts_that_a_model_takes_are_left_to_it(lab: Any) -> None:
    class Reading(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)

        def forward(self, text: list[str], labels: torch.Tensor) -> dict[str, torch.Tensor]:
            lengths = torch.tensor([[float(len(each))] for each in text])
            return {"loss": torch.nn.functional.mse_loss(self.layer(lengths), labels)}

    class Own(lab.Task):  # type: ignore[name-defined, misc]
        def build_model(self, config: dict[str, Any]) -> Any:
            return Reading()

        def build_data(self, config: dict[str, Any]) -> Any:
            return [{"text": "a" * index, "labels": torch.zeros(1)} for index in range(4)], None

    with TorchTrainer(training_operator_cls=Own, use_local=True) as trainer:
        assert trainer.train()["num_samples"] == 4


def test_each_name_that_is_answered_is_one_of_transformers() -> None:
    names = {each.name for each in fields(transformers.TrainingArguments)}
    assert {*names, "warmup_ratio"}.issuperset(hugging_face._ARGUMENTS)  # that one until transformers 5
