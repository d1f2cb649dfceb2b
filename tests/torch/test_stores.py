"""A trainer that saves to a store and loads from it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from raysgd.exceptions import CheckpointCorruptedError, StorageError
from raysgd.storage import open_folder
from raysgd.testing.faults import fail_save
from raysgd.torch import TorchTrainer
from tests.helpers.s3_server import BUCKET, KEYS, S3Server

MakeTrainer = Callable[..., TorchTrainer]


def weights(trainer: TorchTrainer) -> torch.Tensor:
    return torch.cat([each.flatten() for each in trainer.state_dict()["models"][0].values()])


@pytest.mark.parametrize("kind", ["s3", "file", "memory", "mangled"])
def test_a_state_is_saved_anywhere(kind: str, s3_server: S3Server, tmp_path: Path, make_local: MakeTrainer) -> None:
    places = {
        "s3": s3_server.uri("torch/last.pt"),
        "file": (tmp_path / "last.pt").as_uri(),
        "memory": "memory://torch/last.pt",
        "mangled": Path("memory://torch/mangled.pt"),
    }
    trainer = make_local()
    trainer.train()
    assert trainer.save(places[kind]) is places[kind]
    fresh = make_local(config={"seed": 1})
    assert not torch.equal(weights(fresh), weights(trainer))
    fresh.load(places[kind])
    assert torch.equal(weights(fresh), weights(trainer))
    assert fresh.train()["epoch"] == 2


def test_states_are_saved_in_the_background(
    s3_server: S3Server, make_local: MakeTrainer, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = make_local()
    kept = []
    with caplog.at_level(logging.INFO):
        for epoch in range(2):
            trainer.train()
            trainer.save(s3_server.uri(f"background/{epoch}.pt"), blocking=False)
            kept.append(weights(trainer))
        trainer.shutdown()
    assert "wrote checkpoint s3://***@bucket/background/1.pt" in caplog.text
    assert KEYS[1] not in caplog.text
    for epoch in range(2):
        fresh = make_local(config={"seed": 1})
        fresh.load(s3_server.uri(f"background/{epoch}.pt"))
        assert torch.equal(weights(fresh), kept[epoch])


def test_a_store_that_takes_nothing_costs_no_state(
    s3_server: S3Server, tmp_path: Path, make_local: MakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAYSGD_STORAGE_TIMEOUT_S", "0")
    nowhere = s3_server.uri("last.pt").replace(f"@{BUCKET}/", "@no-such-bucket/")
    trainer = make_local()
    trainer.train()
    before = weights(trainer)
    told = r"could not write `s3://\*\*\*@no-such-bucket/last\.pt.*The trainer still has its state"
    with pytest.raises(StorageError, match=told) as caught:
        trainer.save(nowhere)
    assert KEYS[1] not in str(caught.value)
    assert torch.equal(weights(trainer), before)
    trainer.save(nowhere, blocking=False)
    with pytest.raises(StorageError, match=told):
        trainer.save(tmp_path / "last.pt")
    trainer.save(tmp_path / "last.pt")
    trainer.train()
    trainer.load(tmp_path / "last.pt")
    assert torch.equal(weights(trainer), before)


def test_a_missing_file_is_not_found(s3_server: S3Server, make_local: MakeTrainer) -> None:
    with pytest.raises(FileNotFoundError, match=r"s3://\*\*\*@bucket/nothing\.pt"):
        make_local().load(s3_server.uri("nothing.pt"))


def test_a_damaged_file_is_called_by_its_address(s3_server: S3Server, make_local: MakeTrainer) -> None:
    trainer = make_local()
    folder = open_folder(s3_server.uri("damaged"))
    trainer.save(s3_server.uri("damaged/last.pt"))
    folder.write("last.pt", folder.read("last.pt")[:-10])
    with pytest.raises(
        CheckpointCorruptedError, match=r"`s3://\*\*\*@bucket/damaged/last\.pt.*is not an intact checkpoint"
    ):
        trainer.load(s3_server.uri("damaged/last.pt"))
    trainer.train()


def test_a_disk_that_is_full_on_the_way_to_a_store_leaves_the_former_file(
    s3_server: S3Server, make_local: MakeTrainer
) -> None:
    trainer = make_local()
    uri = s3_server.uri("full/last.pt")
    trainer.save(uri)
    before = open_folder(s3_server.uri("full")).read("last.pt")
    trainer.train()
    with fail_save(trainer, after_bytes=100), pytest.raises(OSError, match="No space left"):
        trainer.save(uri)
    assert open_folder(s3_server.uri("full")).read("last.pt") == before
