"""What the objects of a step hold is set by the objects themselves."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2] / "raysgd"
PARTS = ("torch", "trainer/worker", "tf/hosting", "tf/data")

STEP = {"accumulation", "added", "batch", "cursor", "leg", "loop", "parts", "record", "flight_recorder", "saved"}
"""How the code calls the objects of a step."""

OWN = {f"torch/parallel/{name}.py" for name in ("leg", "sync", "undo")}
"""Their classes. A `Leg` has its records and an `Accumulation`, and `Undo` fills what it has saved."""


def set_from_outside(source: str) -> Iterator[str]:
    """The attributes of a step's objects that a module sets."""
    for node in ast.walk(ast.parse(source)):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        for target in targets:
            for each in target.elts if isinstance(target, ast.Tuple | ast.List) else [target]:
                if isinstance(each, ast.Attribute):
                    owner = each.value
                    name = owner.attr if isinstance(owner, ast.Attribute) else getattr(owner, "id", "")
                    if name in STEP:
                        yield f"{name}.{each.attr}"


def test_nobody_but_a_steps_object_itself_sets_its_attributes() -> None:
    files = [file for part in PARTS for file in sorted((ROOT / part).rglob("*.py"))]
    assert len(files) > 60
    by_file = {file.relative_to(ROOT).as_posix(): file.read_text("utf-8") for file in files}
    found = {
        f"{name}: {each}" for name, source in by_file.items() if name not in OWN for each in set_from_outside(source)
    }
    assert not found, found


def test_the_ways_to_set_an_attribute_are_seen() -> None:
    source = "leg.a = 1; self.sync.leg.b, c = 2, 3; self.batch.d |= True; batch.e: int = 4; self.leg = leg"
    assert [*set_from_outside(source)] == ["leg.a", "leg.b", "batch.d", "batch.e"]
