"""Trains a LoRA adapter on spot machines or under Slurm: stop it, start it again, and it continues.

At SIGTERM, which Slurm and spot machines send, the run saves its step and ends with status 143. If a worker is lost,
the others continue. Workers use GPUs if there are any. Texts are packed into rows of 128 tokens. The base is frozen and
read from a folder, so checkpoints contain only the adapter.

Data: about 600 English sentences from the source files of Python, about networks (for the base) or numbers (for the
adapter). Model: the folder `base`, as `save_pretrained` writes it. If it is missing, a small Llama is trained first.
Packages: the extra `hf`.
"""

import importlib.util
import re
from pathlib import Path

import transformers
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from raysgd import TorchTrainer
from raysgd.callbacks import Checkpointing
from raysgd.operators import HuggingFaceOperator, collate_packs, pack

FOLDER = Path("lora").resolve()  # on a cluster: where every node can read, and what outlives the machines
BASE = FOLDER / "base"
TOPICS = {"base": "http.client urllib.request socket ssl smtplib ftplib", "adapter": "_pydecimal statistics datetime"}


class Base(HuggingFaceOperator):
    topic = "base"

    def build_model(self, config):
        sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
        llama = transformers.LlamaConfig(vocab_size=len(tokenizer), bos_token_id=None, eos_token_id=None, **sizes)
        return transformers.AutoModelForCausalLM.from_config(llama)

    def build_collator(self, config):
        return collate_packs

    def build_data(self, config):
        samples = [tokenizer(text, truncation=True, max_length=128) for text in sentences(self.topic)]
        return pack(samples[40:], num_tokens=128), pack(samples[:40], num_tokens=128)


class Adapted(Base):
    topic = "adapter"
    excludes_frozen_from_state = True  # `build_model` reads the same base on every worker and in every run

    def build_model(self, config):
        base = transformers.AutoModelForCausalLM.from_pretrained(BASE)
        layers = ["q_proj", "v_proj", "up_proj", "down_proj", "lm_head"]
        return get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", r=8, lora_alpha=32, target_modules=layers))


def sentences(topic):
    sources = [Path(importlib.util.find_spec(name).origin).read_text("utf-8") for name in TOPICS[topic].split()]
    found = [re.findall(r"[A-Z][a-z]+(?:,?\s+[a-z'-]+){4,}\.", source) for source in sources]
    return list(dict.fromkeys(" ".join(text.split()) for each in found for text in each))


def make_tokenizer():
    words = Tokenizer(models.BPE(unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    texts = [text for topic in TOPICS for text in sentences(topic)]
    words.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=1000, special_tokens=["[PAD]", "[UNK]"]))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]")


def train(operator_cls, epochs, folder):
    """Train for `epochs` in total, however often the program starts. Then save the model, or the adapter."""
    config = {"lr": 0.005, "batch_size": 4, "seed": 0}  # four packs per step, over all workers
    with TorchTrainer(  # with `num_workers`, one for each GPU of the job
        training_operator_cls=operator_cls, config=config, num_workers=2, split_batches=True, precision="bf16"
    ) as trainer:
        saving = Checkpointing(FOLDER / f"{operator_cls.topic}-run", every_minutes=15, keep_last=2)
        history = trainer.fit(epochs, callbacks=[saving], resume_from="auto", progress=True)
        HuggingFaceOperator.save_pretrained(trainer, folder, tokenizer)
        return history, trainer.get_model(to_cpu=True)


tokenizer = make_tokenizer()
if not BASE.exists():
    train(Base, 3, FOLDER / "new")
    (FOLDER / "new").rename(BASE)  # a folder of this name is complete
history, model = train(Adapted, 5, FOLDER / "adapter")
print(f"loss {history[0]['train_loss']:.2f} to {history[-1]['train_loss']:.2f}; the model is in {FOLDER / 'merged'}")
model.merge_and_unload().save_pretrained(FOLDER / "merged")
tokenizer.save_pretrained(FOLDER / "merged")
