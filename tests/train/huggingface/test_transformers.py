"""Batches of Ray Data in a `transformers.Trainer`. A real run is a program of `tests/compat`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from tests.helpers.run_if import RunIf

pytestmark = RunIf(modules=["transformers", "accelerate"])


class Batches:
    """What `shard.iter_torch_batches(...)` returns: it can be gone through, and knows nothing else."""

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        for size in (3, 2):
            yield {"x": torch.ones(size, 1), "labels": torch.ones(size, 1)}


class Line(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": ((self.layer(x) - labels) ** 2).mean(), "logits": self.layer(x)}


def prepared(folder: Path, **data: Any) -> Any:
    import transformers

    from raysgd.train.huggingface.transformers import prepare_trainer

    options = {"report_to": [], "use_cpu": True, "max_steps": 4, "disable_tqdm": True, "remove_unused_columns": False}
    made = transformers.Trainer(model=Line(), args=transformers.TrainingArguments(str(folder), **options), **data)
    assert prepare_trainer(made) is made
    assert isinstance(made, transformers.Trainer)
    return made


def test_batches_that_are_made_already_stay_as_they_are(tmp_path: Path) -> None:
    trainer = prepared(tmp_path, train_dataset=Batches(), eval_dataset=Batches())
    assert [len(batch["x"]) for batch in trainer.get_train_dataloader()] == [3, 2]
    assert [len(batch["x"]) for batch in trainer.get_eval_dataloader()] == [3, 2]
    assert trainer.train().global_step == 4


def test_datasets_become_batches_as_ever(tmp_path: Path) -> None:
    rows = [{"x": torch.ones(1), "labels": torch.ones(1)}] * 10
    assert [len(batch["x"]) for batch in prepared(tmp_path, train_dataset=rows).get_train_dataloader()] == [8, 2]
