"""An adapter on a frozen base of a billion numbers on a GPU: memory, bytes of files, and digests."""

from __future__ import annotations

import gc
import importlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from raysgd import TorchTrainer
from raysgd.operators import HuggingFaceOperator, collate_packs
from raysgd.torch.objects.remade import RemadeParameters, digest_of
from tests.helpers.run_if import RunIf

pytestmark = [pytest.mark.gpu, pytest.mark.integration, RunIf(cuda=True)]

NUM_STEPS, BATCH_SIZE, NUM_TOKENS, VOCABULARY = 8, 4, 512, 32000
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.uint8)


@pytest.fixture(autouse=True)
def frees_the_gpu() -> Iterator[None]:
    yield
    gc.collect()
    torch.cuda.empty_cache()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_digest_is_the_same_on_a_gpu(dtype: torch.dtype) -> None:
    for shape in ((), (7,), (1000, 33), (4096, 4096)):
        tensor = (torch.randn(shape) * 50).to(dtype)
        assert digest_of(tensor.cuda()) == digest_of(tensor)


def test_what_changes_on_a_gpu_is_found() -> None:
    layer = torch.nn.Linear(1000, 1000, device="cuda").requires_grad_(False)
    found = RemadeParameters([layer], type(layer), num_models=1)
    found.check_unchanged()
    layer.weight.data.mul_(0.99)
    with pytest.raises(ValueError, match="`weight` of model 0"):
        found.check_unchanged()


def llama() -> Any:
    """A Llama of 1.2 billion random numbers in bf16 with an adapter, made on the GPU."""
    peft, transformers = importlib.import_module("peft"), importlib.import_module("transformers")
    sizes = {"hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 16, "intermediate_size": 8192}
    torch.manual_seed(0)
    with torch.device("cuda"):
        base = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=VOCABULARY, **sizes)).bfloat16()
    return peft.get_peft_model(base, peft.LoraConfig(task_type="CAUSAL_LM", r=16))


def rows() -> list[dict[str, list[int]]]:
    draw = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, VOCABULARY, (NUM_STEPS * BATCH_SIZE, NUM_TOKENS), generator=draw).tolist()
    return [{"input_ids": each, "labels": each, "position_ids": [*range(NUM_TOKENS)]} for each in tokens]


class Adapted(HuggingFaceOperator):
    excludes_frozen_from_state = True

    def build_model(self, config: dict[str, Any]) -> Any:
        return llama()

    def build_data(self, config: dict[str, Any]) -> Any:
        return torch.utils.data.DataLoader(rows(), BATCH_SIZE, collate_fn=collate_packs), None  # type: ignore[arg-type, var-annotated]


def plain_peak() -> int:
    """Return the most memory that a plain loop takes."""
    torch.cuda.reset_peak_memory_stats()
    model = llama().train()
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], 1e-4)
    for start in range(0, NUM_STEPS * BATCH_SIZE, BATCH_SIZE):
        batch = {name: each.cuda() for name, each in collate_packs(rows()[start : start + BATCH_SIZE]).items()}
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(**batch, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.cuda.max_memory_allocated()


def test_an_adapter_takes_the_memory_of_a_plain_loop_and_its_file_is_small(tmp_path: Path) -> None:
    plain = plain_peak()
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    config = {"lr": 1e-4}
    with TorchTrainer(
        training_operator_cls=Adapted, config=config, use_local=True, use_gpu=True, precision="bf16"
    ) as trainer:
        trainer.train()
        ours = torch.cuda.max_memory_allocated()
        trainer.save(tmp_path / "adapter.pt")
        num_bytes = sum(each.nbytes for each in trainer.get_model().parameters())
    assert ours <= 1.02 * plain, (ours, plain)
    assert os.path.getsize(tmp_path / "adapter.pt") <= num_bytes / 50
