"""Seconds that the files of tests take, so that the long ones begin first: `tests/seconds.json`.

`make test-times` writes the table again. A file that is not in it begins first: it is short, or newer than the table. A
new file that takes minutes must not begin last, when the other processes have nothing left to do.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

TABLE = Path(__file__).resolve().parents[1] / "seconds.json"
LEAST_S = 0.5
"""Files that take less are not in the table."""


def seconds_of_files() -> Mapping[str, float]:
    """The committed table: paths below the root, longest first."""
    return dict(json.loads(TABLE.read_text(encoding="utf-8")))


def longest_first(items: list[pytest.Item], seconds: Mapping[str, float]) -> None:
    """Sort tests by the seconds of their files; those of a file stay in order."""
    items.sort(key=lambda item: -seconds.get(file_of(item.nodeid), math.inf))


def write(reports: Iterable[pytest.TestReport]) -> None:
    """Write the table from the reports of a run: set-up and teardown count, too."""
    counted: Counter[str] = Counter()
    for report in reports:
        counted[file_of(report.nodeid)] += report.duration
    rows = {path: round(seconds, 1) for path, seconds in counted.most_common() if seconds >= LEAST_S}
    TABLE.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


def file_of(nodeid: str) -> str:
    return nodeid.partition("::")[0]
