"""Fine-tunes a Hugging Face text classifier on two workers. Reads the model from a folder.

Data: about 600 English sentences from the source files of Python, about networks or about numbers. Model: the folder
`model`, as `save_pretrained` writes it. If it is missing, a small BERT with random weights is written there.
Packages: the extra `hf`.
"""

import importlib.util
import random
import re
from pathlib import Path

import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from raysgd import TorchTrainer
from raysgd.operators import HuggingFaceOperator

MODEL = Path("model").resolve()  # on a cluster: a folder that every node can read
TOPICS = ("http.client urllib.request socket ssl smtplib ftplib", "_pydecimal fractions statistics datetime calendar")


class Topics(HuggingFaceOperator):
    def build_model(self, config):
        return transformers.AutoModelForSequenceClassification.from_pretrained(MODEL, num_labels=len(TOPICS))

    def build_collator(self, config):
        return transformers.DataCollatorWithPadding(tokenizer)

    def build_data(self, config):
        data = [{**tokenizer(text, truncation=True, max_length=64), "labels": label} for text, label in rows]
        return data[100:], data[:100]


def sentences(module):
    text = Path(importlib.util.find_spec(module).origin).read_text(encoding="utf-8")
    return {" ".join(found.split()): None for found in re.findall(r"[A-Z][a-z]+(?:,?\s+[a-z'-]+){4,}\.", text)}


def make_model():
    base = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    base.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    base.train_from_iterator([text for text, _ in rows], trainers.WordPieceTrainer(special_tokens=["[PAD]", "[UNK]"]))
    words = transformers.PreTrainedTokenizerFast(tokenizer_object=base, pad_token="[PAD]", unk_token="[UNK]")
    words.save_pretrained(MODEL)
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    transformers.BertModel(transformers.BertConfig(vocab_size=len(words), **sizes)).save_pretrained(MODEL)


rows = [(text, label) for label, names in enumerate(TOPICS) for name in names.split() for text in sentences(name)]
random.Random(0).shuffle(rows)
if not MODEL.exists():
    make_model()
tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL)
config = {"lr": 5e-4, "batch_size": 16, "seed": 0}  # 16 sentences per step, over all workers
with TorchTrainer(training_operator_cls=Topics, config=config, num_workers=2, split_batches=True) as trainer:
    print(trainer.fit(6))
    HuggingFaceOperator.save_pretrained(trainer, "fine-tuned", tokenizer)
    print(trainer.predict([tokenizer("The server closes the connection."), tokenizer("The mean of two integers.")]))
