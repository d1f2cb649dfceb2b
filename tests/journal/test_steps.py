"""The records of steps and their checksums: damage is found, and a kill at any moment leaves what can be read."""

from __future__ import annotations

import random
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raysgd.journal import steps as module
from raysgd.journal.steps import CHECKS_FILE, NO_NORM, STEPS, STEPS_FILE, cut_steps, read_steps, write_steps


def change_byte(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 0x10
    path.write_bytes(content)


def records(numbers: Any, loss: float = 0.5) -> Any:
    return np.array([(loss + number, NO_NORM, 4) for number in numbers], STEPS)


def write(folder: Path, numbers: Any, loss: float = 0.5) -> None:
    write_steps(folder, np.array(numbers), records(numbers, loss))


@pytest.mark.parametrize("place", [0, 4095, 4096, 9999])
def test_a_changed_byte_is_found_in_its_block(tmp_path: Path, place: int) -> None:
    cut_steps(tmp_path, 0)
    write(tmp_path, range(1, 701))
    change_byte(tmp_path / STEPS_FILE, place)
    first = place // 4096 * 256 + 1
    with pytest.raises(
        ValueError, match=rf"steps {first} to {first + 255} do not have their checksum.*delete `steps.crc`"
    ):
        read_steps(tmp_path)
    (tmp_path / CHECKS_FILE).unlink()
    assert len(read_steps(tmp_path)) == 700


def test_steps_that_are_missing_at_the_end_of_the_file_are_found(tmp_path: Path) -> None:
    cut_steps(tmp_path, 0)
    write(tmp_path, range(1, 601))
    write(tmp_path, range(601, 701))
    content = (tmp_path / STEPS_FILE).read_bytes()
    (tmp_path / STEPS_FILE).write_bytes(content[: 512 * 16])
    with pytest.raises(ValueError, match="steps 513 to 768 do not have"):
        read_steps(tmp_path)


def test_a_later_write_does_not_hide_a_damaged_block(tmp_path: Path) -> None:
    cut_steps(tmp_path, 0)
    write(tmp_path, range(1, 11))
    change_byte(tmp_path / STEPS_FILE, 3)
    write(tmp_path, [11])
    with pytest.raises(ValueError, match="steps 1 to 256 do not have"):
        read_steps(tmp_path)


def test_files_hold_what_was_written_last_in_any_order_of_writes_and_cuts(tmp_path: Path) -> None:
    chance, expected = random.Random(5), dict[int, float]()
    cut_steps(tmp_path, 0)
    for loss in range(300):
        if chance.random() < 0.1:
            end = chance.randrange(1500)
            cut_steps(tmp_path, end)
            expected = {step: value for step, value in expected.items() if step <= end}
            continue
        first = chance.randrange(1, 1500)
        numbers = sorted(chance.sample(range(first, first + 400), chance.randrange(1, 50)))
        write(tmp_path, numbers, loss)
        expected |= {step: loss + step for step in numbers}
        found = read_steps(tmp_path)
        places = np.flatnonzero(found["weight"])
        assert dict(zip((places + 1).tolist(), found["loss"][places].tolist(), strict=True)) == expected


class Killed(BaseException):
    """The end of the process."""


@pytest.mark.parametrize("num_writes", range(4))
def test_a_kill_between_two_writes_leaves_steps_that_can_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_writes: int
) -> None:
    cut_steps(tmp_path, 0)
    write(tmp_path, range(1, 300))
    before, left = read_steps(tmp_path).tolist(), [num_writes]
    original = module._write

    def write_or_die(*arguments: Any) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise Killed
        original(*arguments)

    monkeypatch.setattr(module, "_write", write_or_die)
    with suppress(Killed):
        write(tmp_path, range(200, 600), 7.0)
        write(tmp_path, range(500, 700), 9.0)
    assert left == [-1]
    monkeypatch.undo()
    assert read_steps(tmp_path)[:199].tolist() == before[:199]
    write(tmp_path, range(200, 700), 9.0)
    assert len(read_steps(tmp_path)) == 699


def test_a_full_disk_leaves_the_records_from_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cut_steps(tmp_path, 0)
    write(tmp_path, range(1, 11))
    before, original = read_steps(tmp_path).tolist(), module._write

    def write_half(file: Any, start: int, content: Any) -> None:
        original(file, start, content[: len(content) // 2] if len(content) > 160 else content)
        if len(content) > 160:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "_write", write_half)
    with pytest.raises(OSError, match="No space left"):
        write(tmp_path, range(5, 40), 7.0)
    assert read_steps(tmp_path).tolist() == before


def test_a_weight_that_no_step_has_is_refused(tmp_path: Path) -> None:
    (tmp_path / STEPS_FILE).write_bytes(np.array([(0.5, 1.0, 4), (0.5, 1.0, -3)], STEPS).tobytes())
    with pytest.raises(ValueError, match=r"steps.bin` is damaged: step 2 has the weight -3.0"):
        read_steps(tmp_path)


def test_a_file_that_is_larger_than_any_run_is_refused(tmp_path: Path) -> None:
    with (tmp_path / STEPS_FILE).open("wb") as file:
        file.truncate(2**40)  # of zeros, which take no room
    with pytest.raises(ValueError, match="more than 134217728 steps"):
        read_steps(tmp_path)
