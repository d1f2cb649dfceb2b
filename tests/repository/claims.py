"""Claims of two pages and what shows them: `python -m tests.repository.claims` runs what takes less than a minute.

`claims.toml` beside this file has a row for each sentence of the README, and of the page that compares libraries, that
states a fact or a figure. A claim holds if its command ends well. It is "not here" if this machine lacks what the
command needs, if the command takes longer, or if nothing shows the claim.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
TABLE = Path(__file__).with_suffix(".toml")
SHORT_S = 60
_PYTEST = "pytest "
_PATIENCE_S = 600


@dataclass(frozen=True)
class Claim:
    """A sentence, or a part of one.

    Attributes:
        text: As it stands in its page.
        page: The page: the README, or the one that compares libraries.
        command: What shows it, `pytest FILE::TEST` or `python SCRIPT`; "" if nothing does.
        takes_s: Seconds that the command takes, about.
        date: When it was shown last, or looked at.
        machine: Where, in words.
        figure: What came out, in words.
        refuted_by: What would show that the claim is wrong.
        shown: Whether anything shows it.
        pages: Sentences of other pages that say the same, by page.
    """

    text: str
    page: str
    command: str
    takes_s: float
    date: str
    machine: str
    figure: str
    refuted_by: str
    shown: bool
    pages: Mapping[str, str]

    @property
    def is_short(self) -> bool:
        """Whether `make claims` runs it."""
        return self.shown and self.takes_s < SHORT_S

    @property
    def test(self) -> str | None:
        """The test that shows it, as pytest names it."""
        return self.command.removeprefix(_PYTEST) if self.command.startswith(_PYTEST) else None


def claims() -> list[Claim]:
    """Read the table."""
    table: dict[str, Any] = tomllib.loads(TABLE.read_text(encoding="utf-8"))
    common = {"pages": {}, "shown": True, **table["common"]}
    return [Claim(**{**common, **row}) for row in table["claim"]]


def outcomes(rows: Sequence[Claim]) -> list[str]:
    """Run what is short; say of each claim whether it holds."""
    tests = _outcomes_of_tests({row.test for row in rows if row.is_short and row.test is not None})
    return [_outcome(row, tests) for row in rows]


def _outcome(row: Claim, tests: Mapping[str, str]) -> str:
    if not row.is_short:
        return "not here"
    return tests[row.test] if row.test is not None else _outcome_of_program(row.command)


def _outcome_of_program(command: str) -> str:
    _, *arguments = command.split()
    done = subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, timeout=_PATIENCE_S, check=False)
    return "does not" if done.returncode else "holds"


def _outcomes_of_tests(tests: Iterable[str]) -> dict[str, str]:
    with tempfile.NamedTemporaryFile(suffix=".xml") as report:
        options = ["-q", "-m", "", "--durations", "0", "-n", "0", "-p", "no:cacheprovider", f"--junitxml={report.name}"]
        subprocess.run([sys.executable, "-m", "pytest", *options, *sorted(tests)], cwd=ROOT, check=False)
        cases = list(ElementTree.parse(report.name).iter("testcase"))
    return {test: outcome_of(test, cases) for test in tests}


def outcome_of(test: str, cases: Iterable[ElementTree.Element]) -> str:
    """Say of a test whether it held, by pytest's report: with all its parameters, or in those that ran here."""
    path, *_, name = test.split("::")
    module = path.removesuffix(".py").replace("/", ".")
    mine = [
        case
        for case in cases
        if str(case.get("classname")).startswith(module) and str(case.get("name")).partition("[")[0] == name
    ]
    if any(case.find(ending) is not None for case in mine for ending in ("failure", "error")) or not mine:
        return "does not"
    return "not here" if all(case.find("skipped") is not None for case in mine) else "holds"


def table_of(rows: Sequence[Claim], found: Sequence[str]) -> str:
    """What to print: each claim with its outcome, and how many there are of each."""
    lines = [f"{outcome:9} {' '.join(row.text.split())}" for row, outcome in zip(rows, found, strict=True)]
    counts = [f"{found.count(outcome)} {outcome}" for outcome in ("holds", "does not", "not here")]
    return "\n".join([*lines, ", ".join(counts)])


def main() -> None:
    """Run, print, and fail if a claim does not hold."""
    rows = claims()
    found = outcomes(rows)
    print(table_of(rows, found))
    sys.exit("does not" in found)


if __name__ == "__main__":
    main()
