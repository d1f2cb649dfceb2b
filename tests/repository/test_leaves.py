"""What can be taken out of the library: `tests/leaves.py` does it, and runs the tests of the rest. These are quick."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import leaves
from tests.leaves import LEAVES, ROOT


@pytest.mark.parametrize("name", LEAVES)
def test_the_rest_of_the_library_imports_a_leaf_in_functions_only(name: str) -> None:
    together = [path for each in (name, *LEAVES[name].carries) for path in LEAVES[each].paths]
    missing = [path for path in together if not (ROOT / path).exists()]
    assert missing == [], "the list of `tests/leaves.py` names what is gone"
    of_leaf = {path for place in together for path in leaves.modules_at(ROOT / place)}
    modules = {leaves.module_of(path, ROOT) for path in of_leaf}
    rest = [path for path in leaves.files_in(ROOT, "raysgd", "operators") if path not in of_leaf]
    assert leaves.stuck(ROOT, rest, modules) == []


def test_what_uses_a_word_that_is_gone_is_found_through_helpers(tmp_path: Path) -> None:
    path = tmp_path / "test_some.py"
    path.write_text(
        "from raysgd import attach\nLATER = attach\n\ndef helper():\n    return LATER\n\n"
        "def test_with():\n    helper()\n\ndef test_without():\n    other.helper()\n",
        encoding="utf-8",
    )
    assert leaves.uses(str(path), ["attach"]) == {"LATER", "helper", "test_with"}
