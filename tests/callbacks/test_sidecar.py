from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from raysgd.callbacks.sidecar import Sidecar, Sidecars, location, place_of
from raysgd.core.engine.shared.interface import GroupEvent
from raysgd.core.history.history import CallRecord, History


def written(checkpoint: Path) -> Sidecar:
    history = History()
    history.add(CallRecord("train", 1, {"train_loss": 0.5, "other": math.nan}, 1.0, 2.0, 4))
    sidecar = Sidecar(1, history, [{"name": "EarlyStopping", "state": {"best": 0.5}}])
    Sidecars().write(str(checkpoint), sidecar)
    return sidecar


@pytest.mark.parametrize("damage", [lambda text: text[:40], lambda text: "[" * 100_000], ids=["cut", "deep"])
def test_a_damaged_one_is_named_with_what_to_do(tmp_path: Path, damage: Callable[[str], str]) -> None:
    written(tmp_path / "last.pt")
    beside = Path(location(str(tmp_path / "last.pt")))
    beside.write_text(damage(beside.read_text()))
    with pytest.raises(ValueError, match=r"last\.pt\.run\.json` is damaged: .* Delete it to resume without it"):
        Sidecars().read(str(tmp_path / "last.pt"))


@pytest.mark.parametrize(
    "damage",
    [
        *(
            {name: value}
            for name in ("epoch", "callbacks", "pending", "history", "begun")
            for value in ("x", 1.5, [None])
        ),
        {"epoch": -1},
        {"epochs": -1},
        {"max_step": 2**60},
        {"begun": {"num_steps": -3}},
    ],
    ids=str,
)
@pytest.mark.parametrize("read", [Sidecars().read, place_of])
def test_one_with_another_value_is_damaged_too(
    tmp_path: Path, damage: dict[str, Any], read: Callable[[str], object]
) -> None:
    written(tmp_path / "last.pt")
    beside = Path(location(str(tmp_path / "last.pt")))
    content = json.loads(beside.read_text())
    beside.write_text(json.dumps({**content, **damage}))
    with pytest.raises(ValueError, match=r"is damaged: .* Delete it"):
        read(str(tmp_path / "last.pt"))
    del content["callbacks"]
    beside.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="is damaged: `callbacks` is 'None'"):
        read(str(tmp_path / "last.pt"))


def test_it_is_beside_the_file_also_in_a_store() -> None:
    assert location("s3://bucket/last.pt?region=eu") == "s3://bucket/last.pt.run.json?region=eu"


class TestALongRun:
    def run(self, folder: Path, epochs: range, sidecars: Sidecars, history: History) -> None:
        for epoch in epochs:
            history.add(CallRecord("train", epoch, {"train_loss": 1 / epoch}, 1.0, 2.0, 4))
            history.add(CallRecord("validation", epoch, {"accuracy": 1 - 1 / epoch}, 1.0, 2.0, 4))
            if epoch % 100 == 7:
                history.events.append(GroupEvent("continued", 4, 4, 0.5, f"in {epoch}"))
            if epoch % 10 == 0:
                sidecars.write(str(folder / "last.pt"), Sidecar(epoch, history))

    def read(self, folder: Path) -> History:
        found = Sidecars().read(str(folder / "last.pt"))
        return found.history

    def test_writes_each_part_of_its_history_once(self, tmp_path: Path) -> None:
        history = History()
        self.run(tmp_path, range(1, 1001), Sidecars(), history)
        parts = sorted(tmp_path.glob("history-*.json"))
        assert len(parts) == 4
        assert all(len(History.from_json(part.read_text())) in (200, 209, 210) for part in parts)
        rest = json.loads((tmp_path / "last.pt.run.json").read_text())["history"]["rows"]
        assert len(rest) <= 200
        assert self.read(tmp_path).to_json() == history.to_json()

    def test_goes_on_with_its_parts_where_it_is_resumed(self, tmp_path: Path) -> None:
        self.run(tmp_path, range(1, 301), Sidecars(), History())
        again, history = Sidecars(), History()
        found = again.read(str(tmp_path / "last.pt"))
        history.take_over(found.history)
        first = set(tmp_path.glob("history-*.json"))
        self.run(tmp_path, range(301, 601), again, history)
        assert first < set(tmp_path.glob("history-*.json"))
        assert self.read(tmp_path)["epoch"] == [*range(1, 601)]
        assert self.read(tmp_path).to_json() == history.to_json()

    def test_is_not_mixed_with_another_one_in_the_same_folder(self, tmp_path: Path) -> None:
        self.run(tmp_path, range(1, 301), Sidecars(), History())
        history = History()
        self.run(tmp_path, range(1, 401), Sidecars(), history)
        assert self.read(tmp_path).to_json() == history.to_json()

    def test_says_what_to_do_where_a_part_is_missing(self, tmp_path: Path) -> None:
        self.run(tmp_path, range(1, 301), Sidecars(), History())
        next(tmp_path.glob("history-*.json")).unlink()
        with pytest.raises(
            ValueError, match=r"history-\w+\.json`, a part .* is missing .* delete `.*last\.pt\.run\.json`"
        ):
            self.read(tmp_path)

    @pytest.mark.parametrize("name", ["history-*.json", "last.pt.run.json"])
    def test_reads_nothing_through_links_that_lead_out_of_its_folder(self, tmp_path: Path, name: str) -> None:
        self.run(tmp_path / "run", range(1, 301), Sidecars(), History())
        (file,) = (tmp_path / "run").glob(name)
        file.symlink_to(file.rename(tmp_path / "outside.json"))
        with pytest.raises(OSError, match=r"a link.*leads out of the run's folder: remove the link"):
            self.read(tmp_path / "run")
        self.run(tmp_path / "run", range(1, 301), Sidecars(), History())
        assert not file.is_symlink()
        assert self.read(tmp_path / "run")["epoch"] == [*range(1, 301)]

    @pytest.mark.parametrize("name", ["../secret.json", "history-x.json", 3, None])
    def test_reads_no_other_files(self, tmp_path: Path, name: Any) -> None:
        self.run(tmp_path, range(1, 301), Sidecars(), History())
        beside = Path(location(str(tmp_path / "last.pt")))
        beside.write_text(json.dumps({**json.loads(beside.read_text()), "parts": [name]}))
        with pytest.raises(ValueError, match="is damaged: `parts` is"):
            self.read(tmp_path)
