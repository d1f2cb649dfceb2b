"""Each sentence of the README or the comparison with a figure is a claim, and each claim has a command that exists."""

from __future__ import annotations

import ast
import datetime
import re
from pathlib import Path

import pytest

from tests.repository.claims import ROOT, Claim, claims

PAGES = ("README.md", "docs/compare.md")
OTHER_PAGES = ("docs/install.md", "docs/parallel.md")
"""Pages of single claims, whose other figures are without a row."""
ROWS = claims()
FIGURE = re.compile(r"(?<![\w.\-/#])\d+(?:\.\d+)*(?![\w\-/]|\.x)")
SHOWN_ELSEWHERE = ("## Supported versions", "## License and history")
"""Parts whose numbers are versions, which `tests/test_packaging.py` compares with the settings."""


def flat(text: str) -> str:
    return re.sub(r"\s+", " ", text)


def text_without(page: str, *headings: str) -> str:
    """A page without its program, its commands, where its links lead, and these parts."""
    text = (ROOT / page).read_text(encoding="utf-8")
    for heading in headings:
        before, _, after = text.partition(f"\n{heading}\n")
        text = before + "\n## " + after.partition("\n## ")[2]
    text = re.sub(r"^```(?:python|bash).*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    return flat(re.sub(r"\]\([^)]*\)", "]", text))


def shown_in(command: str) -> bool:
    """Whether the script or the test that a command names exists."""
    kind, target, *_ = command.split()
    path, _, test = target.partition("::")
    if not (ROOT / path).is_file() or kind not in ("pytest", "python"):
        return False
    names = {node.name for node in ast.walk(ast.parse((ROOT / path).read_text())) if isinstance(node, ast.FunctionDef)}
    return kind == "python" or test.split("::")[-1] in names


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.text[:40])
def test_a_claim_is_in_its_page_and_can_be_refuted(row: Claim) -> None:
    assert row.page in PAGES + OTHER_PAGES
    assert flat(row.text) in flat((ROOT / row.page).read_text(encoding="utf-8"))
    assert len(row.refuted_by) > 10
    assert len(row.machine) > 3
    assert datetime.date.fromisoformat(row.date) <= datetime.date.today()
    assert row.takes_s > 0


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.text[:40])
def test_what_shows_a_claim_exists(row: Claim) -> None:
    assert row.shown == bool(row.command), "a claim that nothing shows has no command"
    assert not row.shown or shown_in(row.command), row.command


def test_there_are_as_many_claims_as_can_be_looked_through() -> None:
    assert 25 <= len(ROWS) <= 40
    assert len({row.text for row in ROWS}) == len(ROWS)
    assert not all(row.shown for row in ROWS), "no one has trained on GPUs yet"


@pytest.mark.parametrize("page", PAGES)
def test_every_figure_of_a_page_is_one_of_a_claim(page: str) -> None:
    text = text_without(page, *SHOWN_ELSEWHERE)
    for row in ROWS:
        text = text.replace(flat(re.sub(r"\]\([^)]*\)", "]", row.text)), " ")
    assert FIGURE.findall(text) == []


def test_the_figures_of_a_claim_are_those_that_were_measured() -> None:
    """Where a claim is shown by numbers with a dot, they are in its `figure`."""
    for row in ROWS:
        figures = {each for each in FIGURE.findall(row.text) if "." in each}
        assert figures <= set(FIGURE.findall(row.figure)), row.text


def test_the_seconds_after_a_loss_are_those_of_the_chart() -> None:
    """Which `tests/repository/test_tables.py` compares with the table."""
    [row] = [each for each in ROWS if "recovery.svg" in each.text]
    drawn = re.findall(r">([\d.]+) s</text>", (ROOT / "docs" / "images" / "recovery.svg").read_text(encoding="utf-8"))
    assert len(drawn) > 5
    assert set(drawn) <= set(FIGURE.findall(row.text))


@pytest.mark.parametrize(
    ("page", "text"), [(page, text) for row in ROWS for page, text in row.pages.items()], ids=lambda text: text[:40]
)
def test_other_pages_say_what_a_claim_says(page: str, text: str) -> None:
    assert flat(text) in flat((ROOT / page).read_text(encoding="utf-8"))


def test_a_command_that_does_not_exist_is_found() -> None:
    assert shown_in("pytest tests/repository/test_claims.py::test_a_command_that_does_not_exist_is_found")
    assert not shown_in("pytest tests/repository/test_claims.py::test_there_is_none")
    assert not shown_in("python examples/no_such_example.py")
    assert Path(__file__).name == "test_claims.py"
