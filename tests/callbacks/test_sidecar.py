from __future__ import annotations

import math
from pathlib import Path

import pytest

from raysgd.callbacks.sidecar import Sidecar, location
from raysgd.replicas.history import CallRecord, History


def written(checkpoint: Path) -> Sidecar:
    history = History()
    history.add(CallRecord("train", 1, {"train_loss": 0.5, "other": math.nan}, 1.0, 2.0, 4))
    sidecar = Sidecar(1, history, [{"name": "EarlyStopping", "state": {"best": 0.5}}])
    sidecar.write(str(checkpoint))
    return sidecar


def test_what_is_written_is_read(tmp_path: Path) -> None:
    before = written(tmp_path / "last.pt")
    after = Sidecar.read(str(tmp_path / "last.pt"))
    assert after is not None
    assert (after.epoch, after.callbacks) == (1, before.callbacks)
    assert after.history[0]["train_loss"] == 0.5
    assert math.isnan(after.history[0]["other"])
    assert after.history.records[0].num_workers == 4


def test_a_file_without_one_has_none(tmp_path: Path) -> None:
    assert Sidecar.read(str(tmp_path / "last.pt")) is None


def test_a_damaged_one_is_named_with_what_to_do(tmp_path: Path) -> None:
    written(tmp_path / "last.pt")
    beside = Path(location(str(tmp_path / "last.pt")))
    beside.write_text(beside.read_text()[:40])
    with pytest.raises(ValueError, match=r"last\.pt\.run\.json` is damaged: .* Delete it to resume without it"):
        Sidecar.read(str(tmp_path / "last.pt"))


def test_it_is_beside_the_file_also_in_a_store() -> None:
    assert location("s3://bucket/last.pt?region=eu") == "s3://bucket/last.pt.run.json?region=eu"
