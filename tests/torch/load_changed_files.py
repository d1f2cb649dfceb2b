"""Loads changed files, one after the other, in a process that may not have much memory: a program for a test.

Says how many were refused and how many were taken, and ends with an error at the first file that does harm: that ends
the process, that changes a trainer by which it was refused, or that is refused by an error which is not documented.
"""

from __future__ import annotations

import collections
import faulthandler
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
from pathlib import Path
from typing import Any

import numpy as np
import torch

from raysgd.tf.checkpoints import checkpoint_file as array_file
from raysgd.torch import TorchTrainer
from raysgd.torch.checkpoints import checkpoint_file, divided_folder
from raysgd.torch.objects import rng as random_states
from tests.torch import mutations
from tests.torch.mutations import Seed
from tests.torch.operators_for_tests import DropoutOperator, ScheduledOperator

ROOM_BYTES = 300 * 2**20
PATIENCE_S = 60
DOCUMENTED = (ValueError, KeyError)


class Rich(ScheduledOperator, DropoutOperator):
    """Has a state of its own with all that a file may hold."""

    def setup(self, config: dict[str, Any]) -> None:
        super().setup(config)
        self.own: Any = {
            "scores": np.arange(3.0), "seen": {1, 2},
            "bytes": b"\x00\xff", "buffer": bytearray(b"x"), "number": 1 + 2j, "size": torch.Size([2]),
            "kind": torch.float16, "counts": collections.Counter("aab"),
        }  # fmt: skip

    def state_dict(self) -> Any:
        return self.own

    def load_state_dict(self, state_dict: Any) -> None:
        self.own = state_dict


def main(num_files: int, first_seed: int) -> None:
    """Goes through so many files."""
    faulthandler.enable()
    warnings.simplefilter("ignore")
    folder = Path(tempfile.mkdtemp())
    trainer = TorchTrainer(
        training_operator_cls=Rich, use_local=True, config={"optimizer": "adam"}, scheduler_step_freq="batch"
    )
    trainer.train(num_steps=2)
    trainer.save(folder / "real")
    write_folder(folder / "divided", trainer.state_dict())
    seeds = seeds_of_torch(trainer, folder)
    seeds_for_arrays = seeds_of_arrays(folder)
    refused, taken = collections.Counter[str](), 0
    _limit_memory()
    for number in range(first_seed, first_seed + num_files):
        chance = random.Random(number)
        signal.alarm(PATIENCE_S)
        try:
            if chance.random() < 0.75:
                is_taken, error = load(trainer, folder, changed(chance, seeds, folder))
            else:
                is_taken, error = read(chance, chance.choice(seeds_for_arrays), folder)
        except BaseException:
            print(f"file number {number}:", file=sys.stderr)
            raise
        taken += is_taken
        refused.update([] if is_taken else [error])
    print(json.dumps({"taken": taken, "refused": dict(refused)}))
    sys.stdout.flush()
    trainer.shutdown()


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
    part = divided_folder.write_part(str(path), checkpoint_file.packed(state), None, rank=0)
    divided_folder.finish(path, [part], dict(part.rest or {}))


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


def load(trainer: TorchTrainer, folder: Path, path: Path) -> tuple[bool, str]:
    """Loads a changed file into the trainer. One that fits is trained on, before the real one comes back."""
    before = fingerprint(trainer)
    try:
        trainer.load(path)
    except DOCUMENTED as error:
        _check(error)
        if fingerprint(trainer) != before:
            raise AssertionError("the file was refused, and the trainer has changed") from error
        return False, type(error).__name__
    _train_on(trainer)
    trainer.load(folder / "real")
    return True, ""


def _train_on(trainer: TorchTrainer) -> None:
    try:
        trainer.train(num_steps=1)
    except Exception as error:  # a learning rate of another training, say: an error is no harm
        if isinstance(error, MemoryError):
            raise


def read(chance: random.Random, seed: Seed, folder: Path) -> tuple[bool, str]:
    """Reads a changed file of arrays."""
    (folder / "changed").write_bytes(seed.change(chance, seed.content))
    try:
        array_file.read(folder / "changed")
    except DOCUMENTED as error:
        _check(error)
        return False, type(error).__name__
    return True, ""


def _check(error: BaseException | None) -> None:
    """An error is documented only if no fault of an interpreter is behind it."""
    first = error
    while error is not None:
        if isinstance(error, SystemError):
            raise AssertionError("".join(traceback.format_exception(first)))
        error = error.__cause__ or error.__context__


def fingerprint(trainer: TorchTrainer) -> bytes:
    """Everything that loading replaces."""
    operator = trainer.get_local_operator()
    parts = [
        operator.model.state_dict(),
        operator.optimizer.state_dict(),
        operator._schedulers[0].state_dict(),
        operator.own,
        operator.global_step,
        random_states.capture(),
    ]
    return pickle.dumps([_plain(part) for part in parts])


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.dtype, tuple(value.shape), bytes(value.detach().numpy().tobytes())
    if isinstance(value, dict):
        return [(key, _plain(item)) for key, item in value.items()]
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return repr(value)


def _limit_memory() -> None:
    num_pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = num_pages * os.sysconf("SC_PAGE_SIZE") + ROOM_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
