"""Trains a LoRA adapter for a small Llama on two workers, kills one of them, and exports the merged model.

Texts are packed into rows of 128 tokens. The base is frozen, and every worker reads it from a folder. So checkpoints,
and the state that is sent to a new worker, contain only the adapter.

Data: about 600 English sentences from the source files of Python, as JSON lines. Model: the folder `base`, as
`save_pretrained` writes it. If it is missing, a Llama with random weights is written there. Packages: the extra `hf`.
"""

import importlib.util
import json
import re
from pathlib import Path

import transformers
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from raysgd import TorchTrainer
from raysgd.operators import HuggingFaceOperator, collate_packs, pack
from raysgd.testing import kill_worker

BASE, DATA = Path("base").resolve(), Path("sentences.jsonl").resolve()  # on a cluster: where every node can read
MODULES = "http.client urllib.request socket ssl smtplib ftplib _pydecimal fractions statistics datetime calendar"


class Adapted(HuggingFaceOperator):
    remakes_frozen = True  # `build_model` creates the same base on every worker and in every run

    def build_model(self, config):
        base = transformers.AutoModelForCausalLM.from_pretrained(BASE)
        layers = ["q_proj", "v_proj", "up_proj", "down_proj", "lm_head"]
        return get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", r=8, lora_alpha=32, target_modules=layers))

    def build_collator(self, config):
        return collate_packs

    def build_data(self, config):
        tokenizer = transformers.AutoTokenizer.from_pretrained(BASE)
        texts = [json.loads(line)["text"] for line in DATA.read_text().splitlines()]
        samples = [tokenizer(text, truncation=True, max_length=128) for text in texts]
        return pack(samples[100:], num_tokens=128), pack(samples[:100], num_tokens=128)


def write_data():
    sources = [Path(importlib.util.find_spec(name).origin).read_text(encoding="utf-8") for name in MODULES.split()]
    found = [re.findall(r"[A-Z][a-z]+(?:,?\s+[a-z'-]+){4,}\.", source) for source in sources]
    texts = dict.fromkeys(" ".join(text.split()) for each in found for text in each)
    DATA.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def write_base():
    texts = [json.loads(line)["text"] for line in DATA.read_text().splitlines()]
    words = Tokenizer(models.BPE(unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=1000, special_tokens=["[PAD]", "[UNK]"]))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]")
    tokenizer.save_pretrained(BASE)
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    llama = transformers.LlamaConfig(vocab_size=len(tokenizer), bos_token_id=None, eos_token_id=None, **sizes)
    transformers.LlamaForCausalLM(llama).save_pretrained(BASE)


if not DATA.exists():
    write_data()
if not BASE.exists():
    write_base()
config = {"lr": 0.01, "batch_size": 4, "seed": 0}  # four packs per step, over all workers
options = {"config": config, "split_batches": True, "clip_grad_norm": 1.0, "precision": "bf16"}
with TorchTrainer(training_operator_cls=Adapted, num_workers=2, **options) as trainer:
    trainer.train()
    kill_worker(trainer, 1, at="step:3")
    print(trainer.train())
    trainer.save("adapted.pt")
with TorchTrainer(training_operator_cls=Adapted, num_workers=2, **options) as trainer:
    trainer.load("adapted.pt")
    print(trainer.fit(6))
    HuggingFaceOperator.save_pretrained(trainer, "adapter")
    model = trainer.get_model(to_cpu=True)
size, base = Path("adapted.pt").stat().st_size, sum(each.stat().st_size for each in BASE.glob("*.safetensors"))
print(f"checkpoint: {size / 2**20:.2f} MiB; base: {base / 2**20:.2f} MiB")
merged = model.merge_and_unload()
merged.save_pretrained("merged")
transformers.AutoTokenizer.from_pretrained(BASE).save_pretrained("merged")
