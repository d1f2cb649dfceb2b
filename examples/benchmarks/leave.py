"""SIGTERM in the middle of an epoch: lost and repeated steps, and how long the checkpoint takes.

    python examples/benchmarks/leave.py [--smoke-test] [--repetitions 7] [--peers transformers,lightning]

One process (with raysgd, and one worker) trains an epoch on the CPU. Model and Adam state are 200 MiB together. The
model counts in a buffer how often each sample was used in a step, so its final weights show what was lost or
repeated. In the middle of the epoch, the program gets SIGTERM. After its end it is started again, and runs to the end
of the epoch.

Each library uses its own feature for this: raysgd `Checkpointing` and `resume_from="auto"`, Lightning
`OnExceptionCheckpoint` and `ckpt_path`, `transformers.Trainer` `enable_jit_checkpoint` and `resume_from_checkpoint`.
"Signal to checkpoint" is the time to the last write of the checkpoint; "signal to end" is the time to the end of the
program.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from _common import ENVIRONMENT, OWN, Report, Target, choose_peers, dispatch, make_parser, run_job, take_turns
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader, Dataset

from raysgd.torch import TrainingOperator

PEERS = {"transformers": "transformers", "lightning": "lightning"}
BATCH_SIZE, NUM_STEPS, LEFT_AT = 4, 72, 9  # so many steps that each program is still training seconds after the signal
_FIGURES = {
    "checkpoint_s": "signal to checkpoint, s",
    "beyond_two_steps_s": "of it beyond two steps, s",
    "end_s": "signal to end, s",
    "step_s": "a step, s",
    "checkpoint_mib": "checkpoint, MiB",
    "lost": "samples lost",
    "repeated": "samples repeated",
}


class Numbers(Dataset):
    """Samples that contain their index."""

    def __len__(self) -> int:
        return BATCH_SIZE * NUM_STEPS

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        features = torch.randn(64, generator=torch.Generator().manual_seed(index))
        return {"features": features, "labels": features.sum().reshape(1), "number": torch.tensor(index)}


class Counting(torch.nn.Module):
    """A model that counts how often its optimizer took a step for each sample."""

    def __init__(self, width: int, note: Path) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(64, width), torch.nn.ReLU(), torch.nn.Linear(width, width), torch.nn.Linear(width, 1)
        )
        self.register_buffer("used", torch.zeros(BATCH_SIZE * NUM_STEPS))
        self.note = note
        register_optimizer_step_post_hook(lambda optimizer, args, kwargs: self._count())

    def _count(self) -> None:
        self.used[self._numbers] += 1
        with open(self.note, "a") as file:
            file.write(f"{time.time()}\n")

    def forward(self, features: torch.Tensor, labels: torch.Tensor, number: torch.Tensor) -> dict[str, torch.Tensor]:
        if self.training:
            self._numbers = number
        output = self.layers(features)
        return {"loss": torch.nn.functional.mse_loss(output, labels), "logits": output}


def loader(shuffle: bool = True) -> DataLoader[Any]:
    order = torch.Generator().manual_seed(0)
    return DataLoader(Numbers(), BATCH_SIZE, shuffle=shuffle, generator=order)


# ------------------------------------------------------------------------------------------------ programs


class CountingOperator(TrainingOperator):
    """The model as a raysgd operator."""

    def setup(self, config: dict[str, Any]) -> None:
        model = Counting(config["width"], Path(config["note"]))
        self.model, self.optimizer = self.register(models=model, optimizers=torch.optim.Adam(model.parameters(), 1e-4))
        self.register_data(train_loader=loader())

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        loss = self.model(**batch)["loss"]
        self.backward(loss)
        self.optimizer_step()
        return {"train_loss": loss.detach(), "num_samples": len(batch["number"])}


def train_with_raysgd(folder: Path, width: int) -> torch.Tensor:
    import ray

    from raysgd import TorchTrainer
    from raysgd.callbacks import Checkpointing

    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    config = {"width": width, "note": str(folder / "steps")}
    with TorchTrainer(training_operator_cls=CountingOperator, num_workers=1, config=config) as trainer:
        trainer.fit(1, callbacks=[Checkpointing(folder / "files")], resume_from="auto", progress=False)
        used: torch.Tensor = trainer.state_dict()["models"][0]["used"]
    return used


def train_with_lightning(folder: Path, width: int) -> torch.Tensor:
    import lightning
    from lightning.pytorch.callbacks import OnExceptionCheckpoint

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Counting(width, folder / "steps")

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss: torch.Tensor = self.net(**batch)["loss"]
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters(), 1e-4)

    module, file = Module(), folder / "files" / "left.ckpt"
    trainer = lightning.Trainer(
        max_epochs=1,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_progress_bar=False,
        callbacks=[OnExceptionCheckpoint(file.parent, file.stem)],
    )
    trainer.fit(module, loader(), ckpt_path=str(file) if file.exists() else None, weights_only=False)
    return module.net.used


def train_with_transformers(folder: Path, width: int) -> torch.Tensor:
    from transformers import Trainer, TrainingArguments

    model = Counting(width, folder / "steps")
    arguments = TrainingArguments(
        output_dir=str(folder / "files"),
        num_train_epochs=1,
        per_device_train_batch_size=BATCH_SIZE,
        learning_rate=1e-4,
        use_cpu=True,
        remove_unused_columns=False,
        enable_jit_checkpoint=True,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=Numbers())
    trainer.train(resume_from_checkpoint=any((folder / "files").glob("checkpoint-*")))
    if trainer.state.global_step < NUM_STEPS:  # it returns at the step where it was stopped
        sys.exit(143)
    return model.used


PROGRAMS: dict[str, Callable[[Path, int], torch.Tensor]] = {
    OWN: train_with_raysgd,
    "lightning": train_with_lightning,
    "transformers": train_with_transformers,
}

# ------------------------------------------------------------------------------------------------ measured


def run_left(name: str, width: int) -> dict[str, float]:
    """Stop a program in the middle of its epoch, and start it again."""
    with tempfile.TemporaryDirectory(prefix="leave-") as place:
        folder = Path(place)
        (folder / "files").mkdir()
        program = _started(name, folder, width)
        while len(_steps(folder)) < LEFT_AT:
            assert program.poll() is None, (folder / "log").read_text()[-2000:]
            time.sleep(0.005)
        told_at = time.time()
        program.send_signal(signal.SIGTERM)
        program.wait()
        ended_at, steps = time.time(), _steps(folder)
        files = [each for each in (folder / "files").rglob("*") if each.is_file() and each.stat().st_mtime >= told_at]
        written_at = max((each.stat().st_mtime for each in files), default=None)
        size = sum(each.stat().st_size for each in files) / 2**20
        for _ in range(3):
            if (folder / "used.json").exists():
                break
            _started(name, folder, width).wait()
        used = json.loads((folder / "used.json").read_text())
    step_s = median(after - before for before, after in itertools.pairwise(steps[2:]))
    found = {"end_s": ended_at - told_at, "step_s": step_s, "checkpoint_mib": size}
    found |= {"lost": sum(each == 0 for each in used), "repeated": sum(each > 1 for each in used)}
    if written_at is not None:
        found |= {"checkpoint_s": written_at - told_at, "beyond_two_steps_s": written_at - told_at - 2 * step_s}
    return found


def _started(name: str, folder: Path, width: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, __file__, "--train", name, str(folder), str(width)]
    with open(folder / "log", "ab") as log:
        return subprocess.Popen(command, env={**os.environ, **ENVIRONMENT}, stdout=log, stderr=subprocess.STDOUT)


def _steps(folder: Path) -> list[float]:
    path = folder / "steps"
    return [float(line) for line in path.read_text().splitlines() if len(line) > 10] if path.exists() else []


def main() -> None:
    dispatch({"left": run_left})
    arguments = make_parser(__doc__.partition("\n")[0], repetitions=7, peers=PEERS).parse_args()
    peers = choose_peers(arguments, PEERS)
    width = 64 if arguments.smoke_test else 4096  # 17 M parameters
    report = Report("leave", arguments, peers)
    jobs = {name: partial(run_job, __file__, "left", name=name, width=width) for name in (OWN, *peers.selected)}
    medians = report.figures("Left by SIGTERM", _FIGURES, take_turns(jobs, arguments.repetitions, report))
    report.finish(
        [
            Target("samples lost or repeated", 0, True, medians[OWN, "lost"] + medians[OWN, "repeated"]),
            Target("signal to checkpoint beyond two steps, s", 0.5, True, medians.get((OWN, "beyond_two_steps_s"))),
        ]
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--train"]:
        _, _, program, place, size = sys.argv
        counted = PROGRAMS[program](Path(place), int(size))
        Path(place, "used.json").write_text(json.dumps(counted.int().tolist()))
    else:
        main()
