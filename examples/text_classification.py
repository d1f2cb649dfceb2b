"""Trains a small BERT to tell topics of sentences, with `HuggingFaceOperator`, in one process and on two workers.

Data: some 8,000 real English sentences, from the docstrings in Python's standard library; how many depends on the
version of Python. The label of a sentence is the topic of its module: concurrency, networking, numbers and dates, or
tools. 80 % are trained on, the others only test the result. The model starts from random weights, because nothing is
downloaded, so it knows no English beforehand. A model that always names the most frequent topic reaches about 0.35.
"""

from __future__ import annotations

import ast
import importlib.util
import re
from pathlib import Path
from typing import Any

import torch
from _common import one_process_then_workers, parse_arguments, print_result, ray_running
from sklearn.model_selection import train_test_split
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import BertConfig, BertForSequenceClassification, DataCollatorWithPadding, PreTrainedTokenizerFast

from raysgd import TorchTrainer
from raysgd.operators import HuggingFaceOperator
from raysgd.utils import BATCH_SIZE

TOPICS = {
    "concurrency": "threading multiprocessing concurrent asyncio queue sched subprocess signal contextvars",
    "networking": "http urllib socket socketserver ssl email smtplib ftplib imaplib poplib xmlrpc selectors ipaddress",
    "numbers": "decimal fractions statistics random datetime calendar numbers zoneinfo _pydatetime _pydecimal",
    "tools": "argparse unittest logging pdb doctest inspect ast tokenize typing pydoc trace profile optparse dis",
}
MOST_WORDS = 48


def load_sentences() -> tuple[list[str], list[int]]:
    """Returns sentences without repetitions, and the index of the topic of each."""
    found: dict[str, int] = {}
    for topic, names in enumerate(TOPICS.values()):
        for sentence in (each for name in names.split() for each in sentences_of(name)):
            found.setdefault(sentence, topic)
    return list(found), list(found.values())


def sentences_of(name: str) -> list[str]:
    """The sentences in all docstrings of a module, or of all modules in a package. Nothing is imported."""
    spec = importlib.util.find_spec(name)
    if spec is None or not (spec.origin or "").endswith(".py"):
        return []
    path = Path(spec.origin)
    files = sorted(path.parent.rglob("*.py")) if path.name == "__init__.py" else [path]
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for file in files if "test" not in file.parts for node in ast.walk(ast.parse(file.read_bytes()))]
    docstrings = [ast.get_docstring(node) or "" for node in nodes if isinstance(node, kinds)]
    texts = [" ".join(part.split()) for text in docstrings for part in re.split(r"(?<=[.!?])\s|\n\s*\n", text)]
    return [text for text in texts if len(re.findall("[a-zA-Z]{2,}", text)) >= 4]


def make_tokenizer(sentences: list[str]) -> PreTrainedTokenizerFast:
    """Learns a vocabulary of word pieces from the sentences."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]"]
    trainer = trainers.WordPieceTrainer(vocab_size=3000, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(sentences, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]")


class Topics(HuggingFaceOperator):
    """What each worker trains, and on what."""

    def build_model(self, config: dict[str, Any]) -> torch.nn.Module:
        sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
        vocab_size, num_labels = len(config["tokenizer"]), len(TOPICS)
        return BertForSequenceClassification(BertConfig(vocab_size=vocab_size, num_labels=num_labels, **sizes))

    def build_collator(self, config: dict[str, Any]) -> Any:
        return DataCollatorWithPadding(config["tokenizer"])

    def build_data(self, config: dict[str, Any]) -> Any:
        return config["train"], config["test"]


def make_config(num_sentences: int | None) -> dict[str, Any]:
    """What the workers are given: the tokenizer, and sentences as numbers."""
    sentences, labels = load_sentences()
    parts = train_test_split(sentences, labels, test_size=0.2, stratify=labels, random_state=0)
    tokenizer = make_tokenizer(parts[0])

    def encoded(texts: list[str], topics: list[int]) -> list[dict[str, Any]]:
        found = tokenizer(texts, truncation=True, max_length=MOST_WORDS)["input_ids"]
        return [{"input_ids": ids, "labels": topic} for ids, topic in zip(found, topics, strict=True)]

    train, test = encoded(parts[0], parts[2])[:num_sentences], encoded(parts[1], parts[3])
    return {"tokenizer": tokenizer, "train": train, "test": test, "lr": 0.001, BATCH_SIZE: 32, "seed": 0}


def train(config: dict[str, Any], num_epochs: int, **options: Any) -> dict[str, Any]:
    """Trains with these options of a trainer, and returns the metrics of the sentences that test."""
    with TorchTrainer(
        training_operator_cls=Topics, config=config, clip_grad_norm=1.0, split_batches=True, **options
    ) as trainer:
        for row in trainer.epochs(num_epochs):
            scores = f"test loss {row['val_loss']:.3f}, accuracy {row['val_accuracy']:.3f}"
            print(f"epoch {row['epoch']:2d}: train loss {row['train_loss']:.3f}, {scores}", flush=True)
        return trainer.validate()


def main() -> None:
    args = parse_arguments(__doc__)
    num_epochs, config = (2, make_config(2000)) if args.smoke_test else (5, make_config(None))
    labels = torch.tensor([sample["labels"] for sample in config["test"]])
    most_frequent = labels.bincount().max().item() / len(labels)
    print(f"{len(config['train'])} sentences to train on, {len(labels)} to test with", flush=True)
    with ray_running(args):
        found = [train(config, num_epochs, **options) for options in one_process_then_workers(args)]
    print(f"accuracy {found[-1]['val_accuracy']:.3f}; always the most frequent topic: {most_frequent:.3f}")
    print_result(
        args,
        test_accuracy=found[-1]["val_accuracy"],
        test_accuracy_of_one_process=found[0]["val_accuracy"],
        accuracy_of_most_frequent=most_frequent,
        num_sentences=len(config["train"]) + len(labels),
        epochs=num_epochs,
    )


if __name__ == "__main__":
    main()
