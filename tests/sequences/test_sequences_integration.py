"""Sequences of calls and deaths, of which none may lose or repeat a sample: a few, and thousands under `make soak`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.forked import SWITCH
from tests.helpers.stories import run_story
from tests.sequences.grammar import read
from tests.sequences.kinds import KINDS, subject_class
from tests.sequences.running import Runner, Sums

pytestmark = pytest.mark.integration

NUM_SEQUENCES = 500
CHOSEN = {
    "collate": (
        "train lose:1 validate kill:1 train",
        "train kill:1 train grow kill:1 train model",
        "train:5 call:1,200 train kill:0,2 predict hook:0,collate,2 train",
    ),
    "own-loop": ("train:6 hook:1,end,1 train:3 train model", "train:9 hook:1,model,2 train hook:0,end,1 train:3 train"),
    "dataset-stream": ("train lose:1 data kill:1 validate kill:1 data train",),
    "ends": ("load end:trainer-ray", "background end:ray", "load end:ray"),
    "functions": ("run:1 kill:1 range:1 hook:0,step,2 run:1",),
}
"""What was once wrong, and a way to die of each sort."""


@pytest.mark.parametrize("kind", CHOSEN)
def test_no_epoch_is_left_out_or_trained_twice(ray_cluster: None, tmp_path: Path, kind: str) -> None:
    runner = Runner(kind, subject_class(kind), tmp_path, Sums())
    try:
        wrong = [line for words in CHOSEN[kind] if (line := runner.run(read(words))) is not None]
    finally:
        runner.close()
    assert not wrong, "\n".join(wrong)


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("kind", KINDS)
def test_no_sequence_is_wrong(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.delenv(SWITCH, raising=False)  # thousands of workers start
    options = ("--sequences", str(NUM_SEQUENCES), "--processes", "2")
    print(run_story("tests.sequences", "--kind", kind, *options, timeout_s=7000).stdout)
