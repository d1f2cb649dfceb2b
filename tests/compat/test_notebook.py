"""`raysgd migrate` on notebooks: code cells change, and nothing else does.

Covers `raysgd.compat.migrate.notebook`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from raysgd.compat.migrate.notebook import Notebook, migrate_notebook
from raysgd.compat.migrate.source import MigratedProgram

ROOT = Path(__file__).resolve().parents[2]


def cell(*lines: str, kind: str = "code", **more: Any) -> dict[str, Any]:
    code = {"execution_count": 3, "outputs": [{"text": ["from ray.util.sgd import x\n"]}]} if kind == "code" else {}
    return (
        {"cell_type": kind, "metadata": {}, "source": [*(f"{line}\n" for line in lines[:-1]), lines[-1]]} | code | more
    )


def notebook(*cells: dict[str, Any], **more: Any) -> str:
    return json.dumps({"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 5} | more, indent=1) + "\n"


def migrated(text: str, ray_train: bool = False) -> str:
    found = migrate_notebook(text.encode(), ray_train)
    assert not found.has_failed, found.findings
    assert migrate_notebook(found.text, ray_train).text == found.text, "a second time changes nothing"
    return found.text.decode()


def sources(text: str) -> list[str]:
    return ["".join(each["source"]) for each in json.loads(text)["cells"]]


def failed(text: str | bytes) -> MigratedProgram:
    text = text.encode() if isinstance(text, str) else text
    found = migrate_notebook(text)
    assert found.has_failed
    assert found.or_nothing(text).text == text, "nothing is half-written"
    return found


def test_cells_change_and_all_else_stays_character_by_character() -> None:
    old = notebook(
        cell("# from ray.util.sgd import x", kind="markdown"),
        cell("import torch", "from ray.util.sgd.torch import TorchTrainer  # ü"),
        cell("from ray.util.sgd.utils import BATCH_SIZE"),
    )
    new = migrated(old)
    expected = old.replace('"from ray.util.sgd.torch import', '"from raysgd.torch import')
    assert new == expected.replace('"from ray.util.sgd.utils import', '"from raysgd.utils import')


def test_a_name_of_one_cell_is_followed_into_the_next() -> None:
    new = sources(
        migrated(
            notebook(
                cell("%matplotlib inline"),
                cell("import ray.util.sgd.torch", "ray.init()"),
                cell("trainer = ray.util.sgd.torch.TorchTrainer(training_operator_cls=None, num_replicas=2)"),
            )
        )
    )
    assert new[0] == "%matplotlib inline"
    assert sorted(new[1].splitlines()) == ["import ray", "import raysgd.torch", "ray.init()"]
    assert new[2] == "trainer = raysgd.torch.TorchTrainer(training_operator_cls=None, num_workers=2)"


def test_what_ipython_adds_to_python_stays() -> None:
    lines = [
        "from ray.util.sgd import TorchTrainer",
        "!pip install \\",
        "    torch",
        "files = !ls",
        "if files:",
        "    %time x = TorchTrainer",
        "TorchTrainer?",
    ]
    [new, timed, other] = sources(
        migrated(
            notebook(
                cell(*lines),
                cell("%%time", "from ray.util import sgd", "sgd.torch"),
                cell("%%html", "<b>ray</b>"),
            )
        )
    )
    assert new.splitlines() == ["from raysgd import TorchTrainer", *lines[1:]]
    assert timed.splitlines() == ["%%time", "import raysgd as sgd", "sgd.torch"]
    assert other == "%%html\n<b>ray</b>"


def test_imports_that_are_added_stand_behind_those_of_the_future() -> None:
    first = cell("from __future__ import annotations", "import ray.util.sgd as sgd, ray.util.sgd.torch", "ray.init()")
    [new] = sources(migrated(notebook(first)))
    assert new.startswith("from __future__ import annotations\nimport ray\n")
    compile(new, "cell", "exec")


def test_old_names_in_other_languages_are_reported() -> None:
    found = migrate_notebook(
        notebook(
            cell("%%writefile a.py", "import ray.util.sgd"),
            cell("x = 1", "!python -m ray.util.sgd.torch.examples.dcgan"),
            cell("import mock", "", "mock.patch('ray.util.sgd.torch.TorchTrainer')"),
        ).encode()
    )
    said = [finding.text for finding in found.findings]
    assert [text[: text.index(":")] for text in said] == ["cell 1, line 1", "cell 2, line 2", "cell 3, line 3"]
    assert "raysgd.torch.TorchTrainer" in said[2]


def test_a_finding_has_the_line_of_the_file() -> None:
    text = notebook(cell("x = 1"), cell("y = 'ray.util.sgd.torch'"))
    [finding] = migrate_notebook(text.encode()).findings
    assert "source" in text.splitlines()[finding.line - 1]


@pytest.mark.parametrize("ascii_only", [True, False])
@pytest.mark.parametrize("indent", [None, 1, "\t"])
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_the_manner_of_the_file_is_kept(ascii_only: bool, indent: Any, newline: str) -> None:
    content = json.loads(notebook(cell("# ü", "import ray.util.sgd"), cell("x = 'ü'")))
    old = json.dumps(content, ensure_ascii=ascii_only, indent=indent).replace("\n", newline) + newline
    assert migrated(old) == old.replace("import ray.util.sgd", "import raysgd")


def test_a_source_may_be_one_string() -> None:
    old = notebook(cell("x") | {"source": "import ray.util.sgd\nx = 1"})
    assert migrated(old) == old.replace('"import ray.util.sgd\\n', '"import raysgd\\n')


def test_hostile_sources_come_back_as_they_were() -> None:
    hostile = [
        cell('"""', "# %%", "'cells': [", '"""', "import ray.util.sgd"),
        cell('s = "}]\\u2028 \\" \\\\"', "# ray \x0c \x1f \u2028"),
        cell("# -*- coding: latin-1 -*-", "x = 'ü'"),
        cell("_raysgd_cell_0_ = 1", "_raysgd_cell_0_"),
        cell("x = 1  # \\", "y = 2;"),
        cell("def f():", "\treturn 1\r", "z = 3 \t"),
        cell(""),
    ]
    old = notebook(*hostile)
    new = migrated(old)
    assert new == old.replace('"import ray.util.sgd"', '"import raysgd"')


def test_what_need_not_be_read_is_left_alone() -> None:
    broken = notebook(cell("this is no python"), cell("x ="))
    assert migrated(broken) == broken
    julia = notebook(cell("using ray.util.sgd"), metadata={"kernelspec": {"language": "julia"}})
    assert migrated(julia) == julia


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (notebook(cell("import ray.util.sgd"), cell("x = (")), "cell 2, line 1: this is no valid Python"),
        (notebook(cell("from ray.util.sgd.torch.torch_runner import TorchRunner")), "cell 1, line 1: "),
        (notebook(cell("x"), nbformat=3), "jupyter nbconvert"),
        ('{"cells": []}', "no `nbformat`"),
        ('{"nbformat": 4, "cells": [{"cell_type": "code", "source": [1]}]}', "not a list of cells"),
        ("[", "no JSON"),
        ("{} {}", "no JSON"),
        ("[" * 100_000, "no JSON"),
        (b"\xff\xfe{}", "UTF-8"),
        ('{"nbformat": 4, "cells": [{"cell_type": "code", "source": "ray\\ud800"}]}', ""),
        ('{"nbformat": 4, "cells": [{"cell_type": "code", "source": "ray\\u0000"}]}', "Python"),
    ],
)
def test_what_cannot_be_rewritten_is_named_with_its_reason(text: str | bytes, reason: str) -> None:
    assert reason in failed(text).findings[0].text


def test_a_line_for_a_person_gets_a_comment_in_its_cell() -> None:
    text = notebook(
        cell("import torch"), cell("import ray.util.sgd.torch.torch_runner", "from ray.util.sgd import utils")
    )
    found = migrate_notebook(text.encode())
    assert found.has_failed
    first, second = sources(found.text.decode())
    assert first == "import torch"
    assert second.startswith("# raysgd: `ray.util.sgd.torch.torch_runner` has no successor: it was")
    assert second.endswith("\nimport ray.util.sgd.torch.torch_runner\nfrom raysgd import utils")
    assert migrate_notebook(found.text).text == found.text


def test_cells_are_found_where_they_stand() -> None:
    found = Notebook(notebook(cell("a"), cell("b", kind="markdown"), cell("c", "d")))
    first, second = found.code_cells
    assert (first.number, first.source, second.number, second.source) == (1, "a", 3, "c\nd")
    assert sources(found.with_sources({3: "new\nd"})) == ["a", "b", "new\nd"]
    with pytest.raises(ValueError, match="this is no notebook"):
        Notebook("1")


def test_our_own_notebook_is_as_it_was() -> None:
    text = (ROOT / "examples" / "notebook.ipynb").read_bytes()
    found = migrate_notebook(text)
    assert (found.text, found.findings) == (text, [])
