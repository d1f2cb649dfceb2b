"""Tiny models of `transformers`, made from configurations, in this process; and `transformers.Trainer` beside them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch.utils.data import DataLoader, Dataset
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    BertForTokenClassification,
    DataCollatorForLanguageModeling,
    DataCollatorForSeq2Seq,
    DataCollatorForTokenClassification,
    DataCollatorWithPadding,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainingArguments,
)

from raysgd import TorchTrainer
from raysgd.operators import HuggingFaceOperator

VOCABULARY = {name: index for index, name in enumerate(["[PAD]", "[UNK]", "[MASK]", *"abcdefghijklmnopq"])}
SIZE = len(VOCABULARY)
NUM_SAMPLES, BATCH_SIZE, LR = 22, 4, 0.01


def tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(WordLevel(VOCABULARY, unk_token="[UNK]"))
    words.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]", mask_token="[MASK]", padding_side="right"
    )


def samples(labels: str) -> list[dict[str, Any]]:
    """Texts of 2 to 12 words, with the labels of one kind of task."""
    rng = torch.Generator().manual_seed(3)
    made: list[dict[str, Any]] = []
    for _ in range(NUM_SAMPLES):
        words = torch.randint(3, SIZE, (int(torch.randint(2, 13, (1,), generator=rng)),), generator=rng).tolist()
        sample: dict[str, Any] = {"input_ids": words}
        if labels == "text":
            sample["labels"] = words[0] % 3
        if labels == "number":
            sample["labels"] = float(words[0])
        if labels == "words":
            sample["labels"] = [word % 3 if word % 4 else -100 for word in words]
        if labels == "other text":
            sample["labels"] = words[::-1][: 1 + len(words) // 2]
        made.append(sample)
    return made


def bert(**more: Any) -> BertConfig:
    dropouts = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    return BertConfig(vocab_size=SIZE, **{"num_labels": 3, **sizes, **dropouts, **more})


def llama() -> LlamaConfig:
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    return LlamaConfig(vocab_size=SIZE, max_position_embeddings=16, bos_token_id=None, eos_token_id=None, **sizes)


def gpt2() -> GPT2Config:
    dropouts = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2Config(
        vocab_size=SIZE,
        n_embd=16,
        n_layer=2,
        n_head=2,
        n_positions=16,
        bos_token_id=None,
        eos_token_id=None,
        **dropouts,
    )


def with_adapter() -> Any:
    adapter = LoraConfig(task_type="CAUSAL_LM", r=4, init_lora_weights=False, target_modules=["q_proj", "v_proj"])
    return get_peft_model(LlamaForCausalLM(llama()), adapter)


def t5() -> Any:
    sizes = {"d_model": 16, "d_ff": 24, "d_kv": 8, "num_layers": 1, "num_heads": 2}
    return T5ForConditionalGeneration(
        T5Config(vocab_size=SIZE, dropout_rate=0.0, decoder_start_token_id=0, pad_token_id=0, **sizes)
    )


TASKS: dict[str, tuple[Any, str, Any]] = {
    "classify texts": (lambda: BertForSequenceClassification(bert()), "text", DataCollatorWithPadding),
    "a number": (lambda: BertForSequenceClassification(bert(num_labels=1)), "number", DataCollatorWithPadding),
    "label words": (lambda: BertForTokenClassification(bert()), "words", DataCollatorForTokenClassification),
    "next words": (
        lambda: LlamaForCausalLM(llama()),
        "none",
        lambda words: DataCollatorForLanguageModeling(words, mlm=False),
    ),
    "next words of GPT-2": (
        lambda: GPT2LMHeadModel(gpt2()),
        "none",
        lambda words: DataCollatorForLanguageModeling(words, mlm=False),
    ),
    "masked words": (
        lambda: BertForMaskedLM(bert()),
        "none",
        lambda words: DataCollatorForLanguageModeling(words, mlm_probability=0.5, seed=7),
    ),
    "adapter": (with_adapter, "none", lambda words: DataCollatorForLanguageModeling(words, mlm=False)),
    "text to text": (t5, "other text", DataCollatorForSeq2Seq),
}


class Task(HuggingFaceOperator):
    """One of the tasks, in the order of the data unless the config has `shuffle`."""

    def build_model(self, config: dict[str, Any]) -> torch.nn.Module:
        return model_of(config["task"])

    def build_data(self, config: dict[str, Any]) -> Any:
        _, labels, make_collator = TASKS[config["task"]]
        data: Dataset[Any] = samples(labels)  # type: ignore[assignment]
        collator = make_collator(tokenizer())
        train = DataLoader(data, config.get("batch_size", BATCH_SIZE), collate_fn=collator)
        return train, DataLoader(data, 5, collate_fn=collator)


def model_of(task: str) -> Any:
    torch.manual_seed(5)
    return TASKS[task][0]()


def train(task: str, num_epochs: int = 2, **options: Any) -> tuple[list[float], Any, dict[str, Any]]:
    """Train a task in this process; give losses, the model and what validation says."""
    config = {"task": task, "lr": LR, **options.pop("config", {})}
    with TorchTrainer(training_operator_cls=Task, config=config, use_local=True, **options) as trainer:
        losses = [trainer.train()["train_loss"] for _ in range(num_epochs)]
        return losses, trainer.get_model(), trainer.validate()


class TheirTrainer(Trainer):
    """That of `transformers`, on the batches of the operator."""

    def get_train_dataloader(self) -> Any:
        return DataLoader(self.train_dataset, BATCH_SIZE, collate_fn=self.data_collator)


def train_with_theirs(task: str, folder: Path, num_epochs: int = 2, **arguments: Any) -> Any:
    model = model_of(task)
    _, labels, make_collator = TASKS[task]
    chosen = TrainingArguments(
        output_dir=str(folder), use_cpu=True, learning_rate=LR, num_train_epochs=num_epochs, report_to=[],
        save_strategy="no", disable_tqdm=True, logging_strategy="no", **arguments,
    )  # fmt: skip
    collator = make_collator(tokenizer())
    their = TheirTrainer(model=model, args=chosen, train_dataset=samples(labels), data_collator=collator)
    their.train()
    return their.model


def weights(model: Any) -> torch.Tensor:
    """All but the biases of keys in attention: these change nothing, and so Adam makes steps of rounding errors."""
    return torch.cat([each.detach().flatten() for name, each in model.named_parameters() if "key.bias" not in name])


@pytest.fixture(autouse=True)
def keeps_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """`TrainingArguments` writes into it."""
    for name, value in list(os.environ.items()):
        monkeypatch.setenv(name, value)


STEPS = {
    "constant": ({}, {}, {"lr_scheduler_type": "constant"}),
    "usual": (
        {"scheduler": "linear", "num_warmup_steps": 2, "num_training_steps": 12, "weight_decay": 0.1},
        {"scheduler_step_freq": "batch"},
        {"lr_scheduler_type": "linear", "warmup_steps": 2, "weight_decay": 0.1},
    ),
    "accumulated": (
        {"optimizer": "sgd"},  # Adam makes a step of a gradient that is only rounding errors
        {"accumulate_grad_batches": 3},
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
def test_one_process_trains_what_the_trainer_of_transformers_trains(task: str, steps: str, tmp_path: Path) -> None:
    config, options, arguments = STEPS[steps]
    theirs = train_with_theirs(task, tmp_path, **arguments)
    _, ours, _ = train(task, config=config, clip_grad_norm=1.0, **options)
    torch.testing.assert_close(weights(ours), weights(theirs), rtol=0, atol=1e-6)
    assert (weights(ours) - weights(model_of(task))).abs().max() > 1e-3, "they were trained"


@pytest.mark.parametrize("task", ["label words", "next words", "next words of GPT-2", "text to text"])
def test_small_batches_make_the_step_of_a_large_one_whatever_the_lengths_of_texts(task: str) -> None:
    _, small, _ = train(task, config={"optimizer": "sgd"}, accumulate_grad_batches=6)
    _, large, _ = train(task, config={"optimizer": "sgd", "batch_size": NUM_SAMPLES})
    torch.testing.assert_close(weights(small), weights(large), rtol=0, atol=1e-6)
    assert not torch.allclose(weights(small), weights(model_of(task)), atol=1e-4), "they were trained"


@pytest.mark.parametrize("task", ["classify texts", "a number", "masked words", "next words of GPT-2"])
def test_it_learns(task: str) -> None:
    losses, _, validated = train(task, num_epochs=6)
    assert losses[-1] < losses[0] * 0.97
    assert validated["num_samples"] == NUM_SAMPLES
    assert ("val_accuracy" in validated) == (task != "a number")


def test_validation_is_the_mean_over_the_words_of_all_batches() -> None:
    _, model, validated = train("next words", num_epochs=1)
    batch = TASKS["next words"][2](tokenizer())(samples("none"))
    with torch.no_grad():
        output = model.eval()(**batch)
    target = batch["labels"][:, 1:]
    is_right = output.logits[:, :-1].argmax(-1) == target
    assert validated["val_loss"] == pytest.approx(output.loss.item(), rel=1e-5)
    assert validated["val_accuracy"] == pytest.approx((is_right.sum() / (target != -100).sum()).item(), rel=1e-6)


def test_only_the_adapter_is_trained_and_it_can_be_saved_alone(tmp_path: Path) -> None:
    config = {"task": "adapter", "lr": LR}
    with TorchTrainer(training_operator_cls=Task, config=config, use_local=True) as trainer:
        trainer.train()
        folder = HuggingFaceOperator.save_pretrained(trainer, tmp_path / "adapter", tokenizer())
        trained = trainer.get_model().eval()
    assert "adapter_model.safetensors" in {path.name for path in folder.iterdir()}
    base = model_of("adapter").unload()
    loaded = PeftModel.from_pretrained(base, str(folder)).eval()
    words = torch.arange(3, 9).reshape(1, -1)
    torch.testing.assert_close(loaded(words).logits, trained(words).logits)
    for name, parameter in model_of("adapter").named_parameters():
        is_same = torch.equal(parameter, trained.get_parameter(name))
        assert is_same != ("lora" in name), name


def test_what_is_saved_is_what_transformers_loads(tmp_path: Path) -> None:
    with TorchTrainer(training_operator_cls=Task, config={"task": "next words"}, use_local=True) as trainer:
        trainer.train()
        HuggingFaceOperator.save_pretrained(trainer, tmp_path, tokenizer())
        trained = weights(trainer.get_model())
    assert torch.equal(weights(AutoModelForCausalLM.from_pretrained(str(tmp_path))), trained)
    assert PreTrainedTokenizerFast.from_pretrained(str(tmp_path)).vocab_size == SIZE


def local(operator_cls: type[Task], **options: Any) -> TorchTrainer:
    config = {"task": "classify texts", **options.pop("config", {})}
    return TorchTrainer(training_operator_cls=operator_cls, config=config, use_local=True, **options)


class TestRefused:
    def test_a_model_without_a_loss(self) -> None:
        class Headless(Task):
            def build_model(self, config: dict[str, Any]) -> Any:
                return BertForSequenceClassification(bert()).bert

        expected = pytest.raises(TypeError, match=r"`BertModel` returned no loss for .*'input_ids', .*`labels`")
        with local(Headless) as trainer, expected:
            trainer.train()

    def test_a_batch_that_is_no_dict(self) -> None:
        class Pairs(Task):
            def build_data(self, config: dict[str, Any]) -> Any:
                return [(torch.ones(2, dtype=torch.long), 0)] * 4, None

        expected = pytest.raises(TypeError, match="A batch is a `list`: return a dict from `build_collator`")
        with local(Pairs) as trainer, expected:
            trainer.train()

    def test_a_schedule_of_steps_that_is_stepped_by_epochs(self) -> None:
        with pytest.raises(ValueError, match='scheduler_step_freq="batch"'):
            local(Task, config={"scheduler": "linear", "num_training_steps": 3}, scheduler_step_freq="epoch")

    def test_a_schedule_without_a_length(self) -> None:
        with pytest.raises(ValueError, match=r"config\['num_training_steps'\]"):
            local(Task, config={"scheduler": "linear"}, scheduler_step_freq="batch")

    def test_a_model_with_nothing_to_train(self) -> None:
        class Frozen(Task):
            def build_model(self, config: dict[str, Any]) -> Any:
                return super().build_model(config).requires_grad_(False)

        with pytest.raises(ValueError, match="no parameter with `requires_grad`"):
            local(Frozen)
