"""Random edits of the engine are ones that could matter, and the same ones every time."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.helpers.stories import ROOT
from tests.simulator.edits import KINDS, drawn, edited, edits_in, edits_of, paths

pytestmark = pytest.mark.soak

MATTERS = """
class Budget:
    most: int = 3

    def spend(self, count, other):
        if count > self.most and other:
            self.most -= 1
        self.told(count, other)
        return [each for each in other if each]
"""

EDITS_OF_IT = {
    "Budget: `3` -> `4`",
    "Budget.spend: `count > self.most` -> `count >= self.most`",
    "Budget.spend: `count > self.most and other` -> `count > self.most or other`",
    "Budget.spend: `count > self.most and other` -> `not (count > self.most and other)`",
    "Budget.spend: `self.most -= 1` -> `pass`",
    "Budget.spend: `1` -> `2`",
    "Budget.spend: `self.told(count, other)` -> `pass`",
    "Budget.spend: `self.told(count, other)` -> `return`",
    "Budget.spend: `self.told(count, other)` -> `self.told(other, count)`",
    "Budget.spend: `each` -> `not each`",
}

CANNOT_MATTER = '''
"""Words."""
import os, sys
if TYPE_CHECKING:
    from nowhere import Nothing

class Asked(Protocol):
    def answer(self, first: int = 1) -> int: ...

@decorated(1, 2)
def told(first: list[Literal[1]]) -> Literal[2]:
    """More words."""
    logger.warning("%s", first + 1)
    assert first > 1
    return f"{first + 1}"

asked = asked(first, first)

def words(first) -> str:
    return "one" if first == 1 else "more"

class Shown(Base[1]):
    def __repr__(self):
        return 1 + 2
'''


def test_each_kind_of_edit_is_found_in_the_code_that_it_is_of() -> None:
    assert {str(edit).removeprefix("sample.") for edit in edits_in("sample", MATTERS)} == EDITS_OF_IT
    assert {edit.kind for edit in edits_in("sample", MATTERS)} == set(KINDS)


def test_what_cannot_matter_is_not_edited() -> None:
    assert edits_in("sample", CANNOT_MATTER) == []


def test_an_edit_says_which_of_those_that_look_the_same_it_is() -> None:
    [first, second] = edits_in("sample", "x = 1\ny = 1\n")
    assert (str(first), str(second)) == ("sample.module: `1` -> `2`", "sample.module: `1` -> `2` (2)")
    assert (first.lines, second.lines) == ((1, 1), (2, 2))


def test_the_same_edits_are_drawn_every_time_and_each_kind_about_equally_often() -> None:
    edits = drawn(70, 1)
    assert edits == drawn(70, 1) == drawn(100, 1)[:70]
    assert len(set(map(str, edits))) == 70
    assert set(Counter(edit.kind for edit in edits).values()) == {10}
    assert len(set(edits) & set(drawn(70, 2))) < 35


@pytest.mark.parametrize("module", sorted(paths()))
def test_every_edit_can_be_put_in_and_changes_the_module(module: str) -> None:
    before = ast.dump(ast.parse(paths()[module].read_text(encoding="utf-8")))
    for edit in edits_of(module)[::50]:
        tree = edited(edit)
        assert ast.dump(tree) != before
        compile(tree, module, "exec")


def test_a_process_imports_the_engine_with_the_edit(tmp_path: Path) -> None:
    program = """
from tests.simulator.edits import edits_of, put_in
[edit] = [each for each in edits_of("policies") if str(each).startswith("policies.RetryBudget.is_spent: ")]
put_in(edit)
from raysgd.engine.policies import RetryBudget
print(edit, RetryBudget(0).is_spent)
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == (
        "policies.RetryBudget.is_spent: `self.num_spent >= self.num_restarts` -> "
        "`self.num_spent > self.num_restarts` False\n"
    )
