"""Loads changed files, one after the other, in a process that may not have much memory: a program for a test.

Says how many were refused and how many were taken, and ends with an error at the first file that does harm: that ends
the process, that changes a trainer by which it was refused, or that is refused by an error which is not documented.
"""

from __future__ import annotations

import collections
import faulthandler
import io
import json
import os
import pickle
import random
import resource
import shutil
import signal
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from raysgd.callbacks import EMA, SWA, Callback, Checkpointing, EarlyStopping
from raysgd.callbacks.sidecar import ENDING
from raysgd.exceptions import CallbackError
from raysgd.tf.checkpoints import checkpoint_file as array_file
from raysgd.torch import TorchTrainer, TrainingOperator
from raysgd.torch.checkpoints import checkpoint_file, divided
from raysgd.torch.objects import rng as random_states
from tests.torch import mutations
from tests.torch.mutations import Seed
from tests.torch.objects.optimizers import OPTIONS, classes, model_for, step
from tests.torch.operators_for_tests import DropoutOperator, ScheduledOperator

ROOM_BYTES = 2**30
PATIENCE_S = 120
DOCUMENTED = (ValueError, CallbackError)
NUM_STEPS = 5
NUM_OF_A_TRAINER = 25  # so many files in a row are loaded into the same trainer


class Rich(ScheduledOperator, DropoutOperator):
    """Has a state of its own with all that a file may hold."""

    def setup(self, config: dict[str, Any]) -> None:
        super().setup(config)
        self.own: Any = {
            "scores": np.arange(3.0), "seen": {1, 2},
            "bytes": b"\x00\xff", "buffer": bytearray(b"x"), "number": 1 + 2j, "size": torch.Size([2]),
            "kind": torch.float16, "counts": collections.Counter("aab"), "mask": torch.eye(2).to_sparse(),
        }  # fmt: skip

    def state_dict(self) -> Any:
        return self.own

    def load_state_dict(self, state_dict: Any) -> None:
        self.own = state_dict


class AnyOptimizer(TrainingOperator):
    """Trains a small model with an optimizer of PyTorch, and a scheduler."""

    def setup(self, config: dict[str, Any]) -> None:
        model = model_for(config["optimizer"])
        optimizer = config["optimizer"](model.parameters(), **config["options"])
        self.model, self.optimizer, _, self.schedulers = self.register(
            models=model, optimizers=optimizer, criterion=torch.nn.MSELoss(), schedulers=config["scheduler"](optimizer)
        )
        self.register_data(train_loader=torch.utils.data.DataLoader(torch.zeros(NUM_STEPS), batch_size=1))

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        step(self.model, self.optimizer)
        return {"num_samples": 1}


SCHEDULERS: list[Callable[[Any], Any]] = [
    lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2),
    lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10),
    lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.9**epoch),
    lambda optimizer: torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4]),
    lambda optimizer: torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [torch.optim.lr_scheduler.ConstantLR(optimizer), torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)],
        [3],
    ),
]  # fmt: skip


class Two(TrainingOperator):
    """Two models, whose names in a file of weights have numbers."""

    def setup(self, config: dict[str, Any]) -> None:
        models = [torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(3)]
        self.models, self.optimizer, _ = self.register(
            models=models, optimizers=torch.optim.Adam(models[0].parameters()), criterion=torch.nn.MSELoss()
        )
        self.model = self.models[0]
        self.register_data(train_loader=torch.utils.data.DataLoader(torch.ones(20, 3), batch_size=4))

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        loss = self.models[0](self.models[1](batch)).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return {"train_loss": loss.item(), "num_samples": len(batch)}


# ------------------------------------------------------------------------------------------------ kinds of files


class Files:
    """Checkpoints and folders whose bytes are changed, and files of arrays."""

    def __init__(self, chance: random.Random, folder: Path) -> None:
        self.folder = folder
        self.trainer = TorchTrainer(
            training_operator_cls=Rich, use_local=True, config={"optimizer": "adam"}, scheduler_step_freq="batch"
        )
        self.trainer.train(num_steps=2)
        self.trainer.save(folder / "real")
        write_folder(folder / "divided", self.trainer.state_dict())
        self._seeds = seeds_of_torch(self.trainer, folder)
        self._arrays = seeds_of_arrays(folder)

    def load(self, chance: random.Random) -> None:
        """Load a changed file into the trainer."""
        if chance.random() < 0.75:
            self.trainer.load(changed(chance, self._seeds, self.folder))
        else:
            seed = chance.choice(self._arrays)
            (self.folder / "changed").write_bytes(seed.change(chance, seed.content))
            array_file.read(self.folder / "changed")

    def train(self) -> None:
        """Train after a file was accepted."""
        self.trainer.train(num_steps=NUM_STEPS)

    def restore(self) -> None:
        """Undo what a file has changed in the trainer."""
        self.trainer.load(self.folder / "real")


class States(Files):
    """Checkpoints with a right checksum in which values are others, for any optimizer of PyTorch."""

    def __init__(self, chance: random.Random, folder: Path) -> None:
        self.folder = folder
        kind = chance.choice(classes())
        config = {
            "optimizer": kind,
            "options": chance.choice(OPTIONS.get(kind.__name__, [{}])),
            "scheduler": chance.choice(SCHEDULERS),
        }
        self.trainer = TorchTrainer(
            training_operator_cls=AnyOptimizer, use_local=True, config=config, scheduler_step_freq="batch"
        )
        self.trainer.train(num_steps=2)
        self.trainer.save(folder / "real")
        self._state = checkpoint_file.read(folder / "real")

    def load(self, chance: random.Random) -> None:
        state = dict(self._state)
        part = chance.choice(("optimizers", "optimizers", "optimizers", "schedulers", "models", "resume", None))
        if part is None:
            state = mutations.changed_state(chance, state)
        else:
            state[part] = mutations.changed_state(chance, state[part])
        _write(self.folder / "changed", state)
        self.trainer.load(self.folder / "changed")


class Folders(States):
    """Folders of divided models in which values are others."""

    def __init__(self, chance: random.Random, folder: Path) -> None:
        super().__init__(chance, folder)
        shutil.rmtree(folder / "divided", ignore_errors=True)
        write_folder(folder / "divided", self.trainer.state_dict())

    def load(self, chance: random.Random) -> None:
        changed_folder = self.folder / "changed folder"
        shutil.rmtree(changed_folder, ignore_errors=True)
        shutil.copytree(self.folder / "divided", changed_folder)
        if chance.random() < 0.5:
            mutations.change_folder(chance, changed_folder)
        else:
            rest = checkpoint_file.read(changed_folder / divided.REST)
            _write(changed_folder / divided.REST, mutations.changed_state(chance, rest))
        self.trainer.load(changed_folder)


class Weights(Files):
    """Files of weights (safetensors)."""

    def __init__(self, chance: random.Random, folder: Path) -> None:
        self.folder = folder
        self.trainer = TorchTrainer(training_operator_cls=Two, use_local=True)
        self.trainer.train()
        self.trainer.save(folder / "real")
        self._content = self.trainer.save(folder / "weights", format="safetensors").read_bytes()

    def load(self, chance: random.Random) -> None:
        (self.folder / "changed").write_bytes(mutations.changed_weights(chance, self._content))
        self.trainer.load(self.folder / "changed", strict=chance.random() < 0.7)


class Averages(Files):
    """The states of `EMA` and `SWA` in a checkpoint, from which a run goes on."""

    def __init__(self, chance: random.Random, folder: Path) -> None:
        self.folder = folder
        self.trainer = TorchTrainer(training_operator_cls=Two, use_local=True)
        self.trainer.fit(1, callbacks=self._callbacks(), progress=False)
        self.trainer.save(folder / "real")
        self._state = checkpoint_file.read(folder / "real")

    def _callbacks(self) -> list[Any]:
        return [EMA(0.9), SWA()]

    def load(self, chance: random.Random) -> None:
        callbacks = mutations.changed_state(chance, self._state["callbacks"])
        _write(self.folder / "changed", {**self._state, "callbacks": callbacks})
        self._go_on(self.folder / "changed")

    def _go_on(self, path: Path) -> None:
        """Resume a run. What it does then is seen by `train`."""
        loads = Watching()
        try:
            self.trainer.fit(2, callbacks=[*self._callbacks(), loads], resume_from=path, progress=False)
        except DOCUMENTED:
            if loads.are_done:
                raise AssertionError("a file was accepted, and training failed") from sys.exception()
            raise

    def train(self) -> None:
        for callback in self._callbacks():
            if isinstance(callback, EMA | SWA):
                callback.get_model(self.trainer)


class Watching(Callback):
    """Sees that a run has begun to train."""

    are_done = False

    def on_epoch_begin(self, run: Any) -> None:
        self.are_done = True


class RunFiles(Averages):
    """The files beside checkpoints (`.run.json`)."""

    def __init__(self, chance: random.Random, folder: Path) -> None:
        super().__init__(chance, folder)
        self.run = folder / "run"
        shutil.rmtree(self.run, ignore_errors=True)
        self.trainer.fit(1, callbacks=self._callbacks(), progress=False)
        [self._sidecar] = self.run.glob(f"*{ENDING}")
        self._content = self._sidecar.read_bytes()

    def _callbacks(self) -> list[Any]:
        run = getattr(self, "run", self.folder / "run")
        return [Checkpointing(run), EarlyStopping("train_loss", patience=9), EMA(0.9)]

    def load(self, chance: random.Random) -> None:
        shutil.rmtree(self.folder / "changed run", ignore_errors=True)
        shutil.copytree(self.run, self.folder / "changed run")
        place = self.folder / "changed run" / self._sidecar.name
        place.write_bytes(mutations.changed_text(chance, self._content))
        self._go_on(Path(str(place).removesuffix(ENDING)))


KINDS: dict[str, type[Files]] = {
    "files": Files,
    "states": States,
    "folders": Folders,
    "weights": Weights,
    "averages": Averages,
    "sidecars": RunFiles,
}


def main(kind: str, num_files: int, first_seed: int) -> None:
    """Goes through so many files."""
    faulthandler.enable()
    warnings.simplefilter("ignore")
    refused, taken = collections.Counter[str](), 0
    files: Any = None
    for number in range(first_seed, first_seed + num_files):
        print(f"file number {number}", file=sys.stderr)
        if files is None or not number % NUM_OF_A_TRAINER:
            if files is not None:
                files.trainer.shutdown()
            _limit_memory(resource.RLIM_INFINITY)
            files = KINDS[kind](random.Random(number // NUM_OF_A_TRAINER), Path(tempfile.mkdtemp()))
            _limit_memory()
        signal.alarm(PATIENCE_S)
        before = fingerprint(files.trainer)
        try:
            files.load(random.Random(number))
        except DOCUMENTED as error:
            _check(error)
            refused[type(error).__name__] += 1
            if fingerprint(files.trainer) != before:
                raise AssertionError("the file was refused, and the trainer has changed") from error
        else:
            taken += 1
            files.train()
            files.restore()
        signal.alarm(0)
    print(json.dumps({"taken": taken, "refused": dict(refused)}))
    sys.stdout.flush()
    files.trainer.shutdown()


def _write(path: Path, state: Any) -> None:
    """Write a file with a right checksum, whatever is in it."""
    stream = io.BytesIO()
    torch.save(state, stream)
    path.write_bytes(mutations.sealed(stream.getvalue()))


def seeds_of_torch(trainer: TorchTrainer, folder: Path) -> list[Seed]:
    """A file of ours, and two of the old library."""
    found = [Seed((folder / "real").read_bytes(), mutations.changed_archive)] * 3
    old = trainer.state_dict()
    old["optimizers"][0]["param_groups"][0]["lr"] = np.float64(0.1)
    old["operator"] = None
    torch.save(old, folder / "old", _use_new_zipfile_serialization=False)
    torch.save(old, folder / "zipped")
    found.append(Seed((folder / "old").read_bytes(), mutations.changed_pickle_file))
    found.append(Seed((folder / "zipped").read_bytes(), mutations.changed_archive))
    return found


def seeds_of_arrays(folder: Path) -> list[Seed]:
    """A file of the TensorFlow front end, and two of the old library's."""
    arrays = [np.ones((3, 2), np.float32), np.array(1.5), np.zeros((0, 3)), np.array(["a"])]
    array_file.write(
        folder / "arrays",
        {"epoch": 1, "models": [arrays], "optimizers": [[np.int64(3)]], "operator": {"a": (1, 2.5, b"x", {1: None})}},
    )
    old = {"epoch": 3, "weights": arrays, "optimizer_weights": [np.int64(7), np.ones(2)]}
    return [
        Seed((folder / "arrays").read_bytes(), mutations.changed_arrays),
        Seed(pickle.dumps(old, protocol=3), mutations.changed_pickle_file),
        Seed(pickle.dumps(old, protocol=4), mutations.changed_pickle_file),
    ]


def write_folder(path: Path, state: dict[str, Any]) -> None:
    """Writes a state as that of divided models, by one rank."""
    path.mkdir()
    part = divided.write_part(str(path), checkpoint_file.packed(state), None, rank=0)
    divided.finish_folder(path, [part], dict(part.rest or {}))


def changed(chance: random.Random, seeds: list[Seed], folder: Path) -> Path:
    """A changed file, or a changed folder."""
    if chance.random() < 0.25:
        shutil.rmtree(folder / "changed folder", ignore_errors=True)
        shutil.copytree(folder / "divided", folder / "changed folder")
        mutations.change_folder(chance, folder / "changed folder")
        return folder / "changed folder"
    seed = chance.choice(seeds)
    (folder / "changed").write_bytes(seed.change(chance, seed.content))
    return folder / "changed"


def _check(error: BaseException | None) -> None:
    """An error is documented only if no fault of an interpreter is behind it."""
    first = error
    while error is not None:
        if isinstance(error, SystemError):
            raise AssertionError("".join(traceback.format_exception(first)))
        error = error.__cause__ or error.__context__


def fingerprint(trainer: TorchTrainer) -> bytes:
    """Everything that loading replaces."""
    state = trainer.state_dict()
    state.pop("callbacks", None)  # those of the run that has ended
    operator = trainer.get_local_operator()
    return pickle.dumps([_plain(part) for part in (state, operator.global_step, random_states.capture())])


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        if value.layout != torch.strided or value.is_meta:
            return repr(value)
        content = value.detach().contiguous().reshape(-1).view(torch.uint8)
        return value.dtype, tuple(value.shape), bytes(content.numpy().tobytes())
    if isinstance(value, dict):
        return [(key, _plain(item)) for key, item in value.items()]
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return repr(value)


def _limit_memory(room_bytes: int = ROOM_BYTES) -> None:
    num_pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = num_pages * os.sysconf("SC_PAGE_SIZE") + room_bytes
    is_unlimited = room_bytes == resource.RLIM_INFINITY
    resource.setrlimit(resource.RLIMIT_AS, (room_bytes if is_unlimited else limit, resource.RLIM_INFINITY))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
