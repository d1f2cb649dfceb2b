"""Which rows of the table of a recovery a run visits, and the table with one row or command less."""

from __future__ import annotations

import ast
import inspect
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from types import CodeType
from typing import Any

from raysgd.core.engine.recovery import machine
from tests.simulator.transitions import Visit

SOURCE = inspect.getsource(machine)


# ------------------------------------------------------------------------------------ rows


def _functions(tree: ast.Module) -> Iterator[ast.FunctionDef]:
    yield from (each for each in tree.body if isinstance(each, ast.FunctionDef))


@cache
def rows() -> dict[int, str]:
    """The rows of the table, by line: what is returned, and under which conditions."""
    found = {}

    def walk(node: ast.AST, path: tuple[str, ...]) -> None:
        if isinstance(node, ast.Return) and node.value is not None:
            found[node.lineno] = " | ".join((*path, ast.unparse(node.value)))
        for child in ast.iter_child_nodes(node):
            if isinstance(node, ast.If) and child in node.body:
                walk(child, (*path, f"if {ast.unparse(node.test)}"))
            elif isinstance(node, ast.match_case) and child in node.body:
                guard = f" if {ast.unparse(node.guard)}" if node.guard else ""
                walk(child, (*path, ast.unparse(node.pattern) + guard))
            else:
                walk(child, path)

    for function in _functions(ast.parse(SOURCE)):
        walk(function, (function.name,))
    return found


def rows_of(visits: Iterable[Visit]) -> Counter[int]:
    """How often each row was visited."""
    counts: Counter[int] = Counter()
    lines = rows().keys()

    def trace(frame: Any, what: str, argument: Any) -> Any:
        if frame.f_code.co_filename != machine.__file__:
            return None
        if what == "line" and frame.f_lineno in lines:
            counts[frame.f_lineno] += 1
        return trace

    before = sys.gettrace()
    for visit in visits:
        sys.settrace(trace)
        try:
            machine.transition(*visit)
        finally:
            sys.settrace(before)
    return counts


# ------------------------------------------------------------------------------------ mutants


def mutants() -> Iterator[tuple[str, Callable[[], CodeType]]]:
    """The table with a row less, a condition that always or never holds, or a command less: what is wrong, and how."""
    for index, (function, node) in enumerate(_nodes(ast.parse(SOURCE))):
        for words, change in _changes(node):
            yield f"{function.name}: {words}", partial(_changed, index, change)


def _changed(index: int, change: Callable[[Any], None]) -> CodeType:
    tree = ast.parse(SOURCE)
    change(_nodes(tree)[index][1])
    return compile(ast.fix_missing_locations(tree), machine.__file__, "exec")


def _nodes(tree: ast.Module) -> list[tuple[ast.FunctionDef, ast.AST]]:
    return [(function, node) for function in _functions(tree) for node in ast.walk(function)]


def _changes(node: ast.AST) -> Iterator[tuple[str, Callable[[Any], None]]]:
    if isinstance(node, ast.Match):
        for index, case in enumerate(node.cases):
            guard = f" if {ast.unparse(case.guard)}" if case.guard else ""
            yield f"no row {ast.unparse(case.pattern)}{guard}", lambda twin, index=index: twin.cases.pop(index)
    if isinstance(node, (ast.If, ast.IfExp)):
        for value in (True, False):
            yield f"{ast.unparse(node.test)} is {value}", lambda twin, value=value: _set_test(twin, value)
    if isinstance(node, (ast.Tuple, ast.List)):
        for index, element in enumerate(node.elts):
            if _is_command(element):
                yield f"no {ast.unparse(element)}", lambda twin, index=index: twin.elts.pop(index)
    if isinstance(node, ast.Call) and ast.unparse(node.func).endswith((".after", "commands.append")):
        for index, argument in enumerate(node.args):
            if _is_command(argument):
                yield f"no {ast.unparse(argument)}", lambda twin, index=index: _drop_argument(twin, index)


def _is_command(node: ast.AST) -> bool:
    return ast.unparse(node).startswith(("Do.", "Record("))


def _set_test(twin: Any, value: bool) -> None:
    twin.test = ast.Constant(value)


def _drop_argument(twin: Any, index: int) -> None:
    twin.args.pop(index)
    if twin.func.attr == "append":
        twin.func, twin.args = ast.Name("list", ast.Load()), []


def mutated(make: Callable[[], CodeType]) -> dict[str, Any]:
    """The functions of a mutant, over the classes of the table itself."""
    space: dict[str, Any] = {"__name__": machine.__name__, "__file__": machine.__file__}
    exec(make(), space)
    functions = {name: value for name, value in space.items() if inspect.isfunction(value)}
    functions = {name: value for name, value in functions.items() if value.__module__ == machine.__name__}
    space.update({name: value for name, value in vars(machine).items() if name not in functions})
    return functions


def differs(functions: dict[str, Any], visit: Visit) -> bool:
    """Whether a mutant goes another way."""
    try:
        return bool(functions["transition"](*visit) != machine.transition(*visit))
    except Exception:
        return True
