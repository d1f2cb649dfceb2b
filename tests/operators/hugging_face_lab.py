"""Tiny models of `transformers`, made from configurations, and operators and `transformers.Trainer` for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch.utils.data import DataLoader, Dataset
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForPreTraining,
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
    SegformerConfig,
    SegformerForSemanticSegmentation,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainingArguments,
    Wav2Vec2Config,
    Wav2Vec2ForCTC,
    default_data_collator,
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
    """Texts of 2 to 12 words, or pixels, with the labels of one kind of task."""
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
        if labels == "pixels":
            left_out = torch.rand(16, 16, generator=rng) * 12 < len(words)
            pixels = torch.randint(0, 3, (16, 16), generator=rng).clamp(max=1).masked_fill(left_out, 255)
            sample = {"pixel_values": torch.randn(3, 16, 16, generator=rng), "labels": pixels}
        if labels == "words and text":
            sample = {"input_ids": [3, 4, 5], "labels": [-100, *words[:2]], "next_sentence_label": words[0] % 2}
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


def in_double() -> Any:
    """One that computes in double precision everywhere: in Llama, norms and positions are in fp32 always."""
    torch.manual_seed(5)
    layers = {"target_modules": ["c_attn", "c_fc"], "fan_in_fan_out": True}
    adapter = LoraConfig(task_type="CAUSAL_LM", r=4, init_lora_weights=False, **layers)
    return get_peft_model(GPT2LMHeadModel(gpt2()), adapter).double()


def with_short_base() -> Any:
    """One with a base in bf16, as `from_pretrained` loads most, and an adapter in fp32, as PEFT makes it."""
    base = LlamaForCausalLM(llama()).to(torch.bfloat16)
    return get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "v_proj"]))


def segformer(num_labels: int = 3) -> Any:
    """One without the batch norm, which sees the samples of one worker."""
    sizes = {"depths": [1, 1], "sr_ratios": [2, 1], "hidden_sizes": [8, 8], "patch_sizes": [7, 3], "strides": [4, 2]}
    heads = {"num_attention_heads": [1, 1], "mlp_ratios": [2, 2], "decoder_hidden_size": 8, "num_encoder_blocks": 2}
    dropouts = {"classifier_dropout_prob": 0.0, "drop_path_rate": 0.0}
    model = SegformerForSemanticSegmentation(SegformerConfig(num_labels=num_labels, **sizes, **heads, **dropouts))
    model.decode_head.batch_norm = torch.nn.Identity()
    return model


def wav2vec2(**more: Any) -> Any:
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    layers = {"conv_dim": [8], "conv_stride": [10], "conv_kernel": [10], "num_feat_extract_layers": 1}
    positions = {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "apply_spec_augment": False}
    return Wav2Vec2ForCTC(Wav2Vec2Config(vocab_size=5, **sizes, **layers, **positions, **more))


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
    "adapter on bf16": (with_short_base, "none", lambda words: DataCollatorForLanguageModeling(words, mlm=False)),
    "label pixels": (segformer, "pixels", lambda words: default_data_collator),
    "tell pixels apart": (lambda: segformer(num_labels=1), "pixels", lambda words: default_data_collator),
    "masked words and a label": (
        lambda: BertForPreTraining(bert()),
        "words and text",
        lambda words: default_data_collator,
    ),
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
        output_dir=str(folder), use_cpu=True, num_train_epochs=num_epochs, report_to=[],
        save_strategy="no", disable_tqdm=True, logging_strategy="no", **{"learning_rate": LR, **arguments},
    )  # fmt: skip
    collator = make_collator(tokenizer())
    their = TheirTrainer(model=model, args=chosen, train_dataset=samples(labels), data_collator=collator)
    their.train()
    return their.model


def weights(model: Any) -> torch.Tensor:
    """All but the biases of keys in attention: these change nothing, and so Adam makes steps of rounding errors."""
    return torch.cat([each.detach().flatten() for name, each in model.named_parameters() if "key.bias" not in name])
