"""Random edits of the engine's code: which there could be, some of them drawn, and a module with one in it.

An edit is small, as a slip of the hand is: a comparison, a number, a condition, a statement. What cannot matter is left
out: docstrings, types, decorators, assertions, errors' texts, lines of the log, and functions that return text.
"""

from __future__ import annotations

import ast
import copy
import functools
import hashlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import CodeType

PACKAGE = "raysgd.core.engine"
FOLDER = Path(__file__).resolve().parents[2] / "raysgd" / "core" / "engine"

KINDS = ("comparison", "condition", "and, or", "constant", "order", "removed", "left early")
"""What is edited: see `_OF`."""

_FLIPPED = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,  # codespell:ignore notin
    ast.NotIn: ast.In,  # codespell:ignore notin
}
_OPPOSITE = {"min": "max", "max": "min", "any": "all", "all": "any"}
_NOT_REORDERED = {"isinstance", "os.kill"}  # of the second, the signal would be taken for a process
_LOGS = {"logger", "warnings", "logging"}
_MOST_SHOWN = 90


@dataclass(frozen=True)
class Edit:
    """One edit of one module.

    Attributes:
        module: The module's name in the engine.
        kind: One of `KINDS`.
        where: The function, or the class, or the module.
        before: What is replaced, or its beginning.
        after: What takes its place.
        lines: The first and the last line of what is replaced.
        number: Which of the edits of the module it is, in the order of its text.
        copy: Which of those that look the same.
    """

    module: str
    kind: str
    where: str
    before: str
    after: str
    lines: tuple[int, int]
    number: int
    copy: int = 0

    def __str__(self) -> str:
        again = f" ({self.copy + 1})" if self.copy else ""
        return f"{self.module}.{self.where}: `{self.before}` -> `{self.after}`{again}"


@dataclass(frozen=True)
class _Place:
    """A node, and how another one takes its place."""

    kind: str
    where: str
    old: ast.AST
    new: ast.AST
    put: Callable[[ast.AST], None]


@cache
def edits_of(module: str) -> tuple[Edit, ...]:
    """All edits of a module of the engine that there could be, in the order of its text."""
    return tuple(edits_in(module, _source(module)))


def edits_in(module: str, source: str) -> list[Edit]:
    """All edits of a text that there could be."""
    seen: Counter[str] = Counter()
    found = []
    for number, place in enumerate(_places(ast.parse(source))):
        if ast.unparse(place.old) == ast.unparse(place.new):  # two arguments that are the same
            continue
        lines = place.old.lineno, place.old.end_lineno or place.old.lineno  # type: ignore[attr-defined]
        edit = Edit(module, place.kind, place.where, _shown(place.old), _shown(place.new), lines, number)
        found.append(replace(edit, copy=seen[str(edit)]))
        seen[str(edit)] += 1
    return found


def drawn(num: int, seed: int) -> list[Edit]:
    """So many edits, of each kind about equally many. A change of one module leaves those of the others as they are."""
    of_kind: defaultdict[str, list[Edit]] = defaultdict(list)
    for module in sorted(paths()):
        for edit in edits_of(module):
            of_kind[edit.kind].append(edit)
    ordered = [sorted(of_kind[kind], key=lambda edit: _lot(edit, seed)) for kind in KINDS]
    rounds = (edits[index] for index in range(max(map(len, ordered))) for edits in ordered if index < len(edits))
    return [edit for edit, _ in zip(rounds, range(num), strict=False)]


def _lot(edit: Edit, seed: int) -> bytes:
    return hashlib.sha256(f"{seed} {edit}".encode()).digest()


def put_in(edit: Edit) -> None:
    """From now on, this process imports the engine with this edit. It must not have imported the engine before."""
    loaded = [name for name in sys.modules if name.startswith(PACKAGE)]
    assert not loaded, f"already imported: {loaded}"
    sys.meta_path.insert(0, _EditedFinder(edit))


class _EditedFinder(importlib.abc.MetaPathFinder):
    """Finds the module that is edited."""

    def __init__(self, edit: Edit) -> None:
        self._edit = edit

    def find_spec(self, fullname: str, path: object, target: object = None) -> importlib.machinery.ModuleSpec | None:
        if not fullname.startswith(f"{PACKAGE}.") or fullname.rpartition(".")[2] != self._edit.module:
            return None
        file = str(paths()[self._edit.module])
        return importlib.util.spec_from_file_location(fullname, file, loader=_EditedLoader(fullname, file, self._edit))


class _EditedLoader(importlib.machinery.SourceFileLoader):
    """Loads it, from its text and never from what was compiled."""

    def __init__(self, fullname: str, path: str, edit: Edit) -> None:
        super().__init__(fullname, path)
        self._edit = edit

    def get_code(self, fullname: str) -> CodeType:
        return compile(edited(self._edit), self.path, "exec", dont_inherit=True)


def edited(edit: Edit) -> ast.Module:
    """The module with the edit in it."""
    tree = ast.parse(_source(edit.module))
    place = list(_places(tree))[edit.number]
    place.put(ast.copy_location(place.new, place.old))
    return ast.fix_missing_locations(tree)


def _source(module: str) -> str:
    return paths()[module].read_text(encoding="utf-8")


@functools.cache
def paths() -> dict[str, Path]:
    """Return the modules of the engine by name, in whichever of its packages they are."""
    return {path.stem: path for path in FOLDER.rglob("*.py") if path.stem != "__init__"}


def _shown(node: ast.AST) -> str:
    text = ast.unparse(node).partition("\n")[0]
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


# ------------------------------------------------------------------------------------ where something can be edited


def _places(tree: ast.Module) -> Iterator[_Place]:
    yield from _in_block(tree, "body", "module")


def _in_block(owner: ast.AST, field: str, where: str) -> Iterator[_Place]:
    """Edits of the statements of a block, and of what is in them."""
    block: list[ast.stmt] = getattr(owner, field)
    for index, statement in enumerate(block):
        if _cannot_matter(statement):
            continue

        def put(new: ast.AST, index: int = index) -> None:
            assert isinstance(new, ast.stmt)
            block[index] = new

        if _can_go(statement):
            yield _Place("removed", where, statement, ast.Pass(), put)
        if index and where != "module" and not isinstance(owner, ast.ClassDef) and _can_be_left_out(statement):
            yield _Place("left early", where, statement, ast.Return(None), put)
        yield from _inside(statement, where)


def _inside(node: ast.AST, where: str) -> Iterator[_Place]:
    """Edits of what is in a node."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        where = node.name if where == "module" else f"{where}.{node.name}"
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "decorator_list", "type_comment", "bases"):
            continue
        if isinstance(value, list) and value and isinstance(value[0], ast.stmt):
            yield from _in_block(node, field, where)
        elif isinstance(value, list):
            for index, each in enumerate(value):
                if isinstance(each, ast.AST):
                    yield from _at(each, where, lambda new, value=value, index=index: _set(value, index, new))
        elif isinstance(value, ast.AST):
            yield from _at(value, where, lambda new, field=field: setattr(node, field, new))
    if isinstance(node, ast.If | ast.While | ast.IfExp):
        yield _Place("condition", where, node.test, _negated(node.test), lambda new: setattr(node, "test", new))
    if isinstance(node, ast.comprehension):
        for index, test in enumerate(node.ifs):
            yield _Place("condition", where, test, _negated(test), lambda new, index=index: _set(node.ifs, index, new))


def _set(values: list[ast.AST], index: int, new: ast.AST) -> None:
    values[index] = new


def _negated(test: ast.expr) -> ast.expr:
    return ast.UnaryOp(ast.Not(), copy.deepcopy(test))


def _at(node: ast.AST, where: str, put: Callable[[ast.AST], None]) -> Iterator[_Place]:
    """Edits of a node itself, and of what is in it."""
    if isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Call) and _is_of_the_log(node)):
        return
    for kind, make in _OF.items():
        new = make(node)
        if new is not None:
            yield _Place(kind, where, node, new, put)
    yield from _inside(node, where)


def _compared(node: ast.AST) -> ast.AST | None:
    if not isinstance(node, ast.Compare) or len(node.ops) != 1:
        return None
    return ast.Compare(node.left, [_FLIPPED[type(node.ops[0])]()], node.comparators)


def _joined(node: ast.AST) -> ast.AST | None:
    if not isinstance(node, ast.BoolOp):
        return None
    return ast.BoolOp(ast.And() if isinstance(node.op, ast.Or) else ast.Or(), node.values)


def _other_constant(node: ast.AST) -> ast.AST | None:
    if not isinstance(node, ast.Constant) or not isinstance(node.value, bool | int):
        return None
    return ast.Constant(not node.value if isinstance(node.value, bool) else node.value + 1)


def _reordered(node: ast.AST) -> ast.AST | None:
    """The first two arguments change places; plus and minus, `min` and `max`, `any` and `all` do so."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub):
        return ast.BinOp(node.left, ast.Sub() if isinstance(node.op, ast.Add) else ast.Add(), node.right)
    if not isinstance(node, ast.Call):
        return None
    name = node.func.id if isinstance(node.func, ast.Name) else ""
    if name in _OPPOSITE:
        return ast.Call(ast.Name(_OPPOSITE[name], ast.Load()), node.args, node.keywords)
    if len(node.args) < 2 or any(isinstance(each, ast.Starred) for each in node.args[:2]):
        return None
    if ast.unparse(node.func) in _NOT_REORDERED:
        return None
    first, second, *others = node.args
    return ast.Call(node.func, [second, first, *others], node.keywords)


_OF = {"comparison": _compared, "and, or": _joined, "constant": _other_constant, "order": _reordered}


# ------------------------------------------------------------------------------------ what is left alone


def _cannot_matter(statement: ast.stmt) -> bool:
    """Whether no edit of this statement, nor of what is in it, changes what the engine does."""
    if isinstance(statement, ast.Expr):
        value = statement.value
        return isinstance(value, ast.Constant) or (isinstance(value, ast.Call) and _is_of_the_log(value))
    if isinstance(statement, ast.FunctionDef):
        returns = ast.unparse(statement.returns) if statement.returns is not None else ""
        return returns in ("str", "str | None") or statement.name in ("__repr__", "__str__")
    if isinstance(statement, ast.If):
        return isinstance(statement.test, ast.Name) and statement.test.id == "TYPE_CHECKING"
    is_protocol = isinstance(statement, ast.ClassDef) and "Protocol" in map(ast.unparse, statement.bases)
    is_name = isinstance(statement, ast.Import | ast.ImportFrom | ast.Assert | ast.Pass | ast.Global | ast.Nonlocal)
    return is_name or is_protocol


def _is_of_the_log(call: ast.Call) -> bool:
    function = call.func
    return isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name) and function.value.id in _LOGS


def _can_go(statement: ast.stmt) -> bool:
    """Whether the code without this statement is still one that would run; a name that is missing is found at once."""
    if isinstance(statement, ast.Assign):
        return not any(isinstance(target, ast.Name | ast.Tuple) for target in statement.targets)
    is_call = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call | ast.YieldFrom)
    return is_call or isinstance(statement, ast.AugAssign | ast.Delete | ast.Raise | ast.Continue | ast.Break)


def _can_be_left_out(statement: ast.stmt) -> bool:
    return not isinstance(statement, ast.Return | ast.Raise | ast.FunctionDef | ast.ClassDef | ast.Continue | ast.Break)
