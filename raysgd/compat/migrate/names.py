"""Rewrites a program's imports of old modules, such as `ray.util.sgd`, and the uses of the imported names."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import libcst as cst
from libcst import helpers, matchers
from libcst.metadata import (
    MetadataWrapper,
    PositionProvider,
    QualifiedName,
    QualifiedNameSource,
    ScopeProvider,
)

from raysgd.compat.migrate.calls import Calls, methods_to_change
from raysgd.compat.paths import NewPlace, Paths

_COMMENT = "# raysgd:"
_STATEMENTS = (cst.SimpleStatementLine, cst.BaseCompoundStatement)


@dataclass(frozen=True, order=True)
class Finding:
    """A line of a program that a person must check.

    Attributes:
        line: Number of the line in the original program, starting at 1.
        text: Description of the problem, and advice for the person.
        is_error: True if the program cannot run until the problem is solved.
    """

    line: int
    text: str
    is_error: bool = False


class OldNames(cst.CSTTransformer):
    """Replaces old names, such as `ray.util.sgd.TorchTrainer`, and outdated calls while it visits a syntax tree.

    Args:
        program: The program's syntax tree, with libcst's metadata.
        source: The program's source code.
        paths: The table of old and new names.
        findings: A set. The visit adds a `Finding` for each line that a person must check.

    Attributes:
        needs: Names of modules that the rewritten program must import, because it now uses names in them.
        dropped_ray: True if an import that defined the name `ray` in the program was replaced.
        trainers_of_ray: The program's trainers that only Ray has. Maps each trainer's old name to its line number.
        has_trainers: True if the program uses a trainer that raysgd has.
    """

    METADATA_DEPENDENCIES = (ScopeProvider,)

    def __init__(self, program: MetadataWrapper, source: str, paths: Paths, findings: set[Finding]) -> None:
        super().__init__()
        self._program = program
        self._paths = paths
        self._findings = findings
        scope_of = partial(self.get_metadata, ScopeProvider, default=None)
        self._calls = Calls(source, self._todays_names, self._tell, scope_of)
        self.needs: set[str] = self._calls.needs
        self.dropped_ray = False
        self.trainers_of_ray: dict[str, int] = {}
        self.has_trainers = False
        self._for_a_person: list[list[str]] = []
        self._comments = {line.strip() for line in source.splitlines() if line.lstrip().startswith(_COMMENT)}
        self._methods: dict[cst.CSTNode, str] = {}

    def on_visit(self, node: cst.CSTNode) -> bool:
        """When the visit enters a statement, start to collect the comments that will be inserted above it."""
        if isinstance(node, _STATEMENTS):
            self._for_a_person.append([])
            if node in self._methods:
                self._tell(node, self._methods[node], is_error=True)
        return super().on_visit(node)

    def on_leave(self, original_node: Any, updated_node: Any) -> Any:
        """When the visit leaves a statement, insert the comments that were collected for it on the lines above it.

        Some of these comments say what a person must rewrite. Others are the program's own comments, which would
        otherwise be lost with the code that was replaced around them.
        """
        left = super().on_leave(original_node, updated_node)
        if not isinstance(original_node, _STATEMENTS):
            return left
        comments = dict.fromkeys(f"{_COMMENT} {text}" for text in self._for_a_person.pop())
        said = [text for text in comments if text not in self._comments]
        lines: list[Any] = [*left] if isinstance(left, cst.FlattenSentinel) else [left]
        lost = (_comments_in(original_node) - _comments_in(*lines)).elements()
        new = [cst.EmptyLine(comment=cst.Comment(text)) for text in [*lost, *said]]
        if not new:
            return left
        where = next((at for at, line in enumerate(lines) if "ray." in cst.Module([line]).code), 0)
        lines[where] = lines[where].with_changes(leading_lines=[*lines[where].leading_lines, *new])
        return cst.FlattenSentinel(lines) if len(lines) > 1 else lines[0]

    def visit_Import(self, node: cst.Import) -> bool:
        return False

    def visit_ImportFrom(self, node: cst.ImportFrom) -> bool:
        return False

    def leave_SimpleStatementLine(
        self, original_node: cst.SimpleStatementLine, updated_node: cst.SimpleStatementLine
    ) -> cst.SimpleStatementLine | cst.FlattenSentinel[cst.SimpleStatementLine]:
        """Rewrite the imports in a line. Split an import into several lines if its names are now in several modules."""
        body: list[cst.BaseSmallStatement] = []
        for statement in updated_node.body:
            body += self._rewritten(statement, original_node)
        if len(body) == len(updated_node.body):
            return updated_node.with_changes(body=body)
        first, *others = (each.with_changes(semicolon=cst.MaybeSentinel.DEFAULT) for each in body)
        return cst.FlattenSentinel(
            [updated_node.with_changes(body=[first]), *(cst.SimpleStatementLine([each]) for each in others)]
        )

    def leave_SimpleStatementSuite(
        self, original_node: cst.SimpleStatementSuite, updated_node: cst.SimpleStatementSuite
    ) -> cst.SimpleStatementSuite:
        """Rewrite the imports that follow a colon on the same line, as in `try: import ray`."""
        body = [each for statement in updated_node.body for each in self._rewritten(statement, original_node)]
        if len(body) > len(updated_node.body):
            body = [each.with_changes(semicolon=cst.MaybeSentinel.DEFAULT) for each in body]
        return updated_node.with_changes(body=body)

    def _rewritten(self, statement: cst.BaseSmallStatement, line: cst.CSTNode) -> Sequence[cst.BaseSmallStatement]:
        if isinstance(statement, cst.Import):
            return self._rewritten_import(statement, line)
        if isinstance(statement, cst.ImportFrom) and not statement.relative and statement.module is not None:
            module = helpers.get_full_name_for_node(statement.module) or ""
            names = [] if isinstance(statement.names, cst.ImportStar) else statement.names
            self._look_for(module, line, [helpers.get_full_name_for_node(each.name) or "" for each in names])
            return self._rewritten_from(statement, module, line)
        return [statement]

    def _look_for(self, module: str, line: cst.CSTNode, names: Sequence[str] = ()) -> None:
        """Report an imported module of Ray, or imported names in it, if the installed Ray does not have them.

        Only the files of Ray are searched. Ray is not imported.

        Args:
            module: Name of the module.
            line: The line that imports the module, or an expression that refers to it.
            names: Names in the module that the program imports or refers to. Old names are skipped.
        """
        unknown = [name for name in names if self._paths.find(f"{module}.{name}") is None]
        if not self._is_of_ray(module) or (names and not unknown):
            return
        for root in _folders_of_ray():
            path = Path(root, *module.split(".")[1:])
            file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
            if not path.is_dir() and not any(path.parent.glob(f"{path.name}.*")):
                self._tell(line, f"today's Ray has no module `{module}`", is_error=True)
            elif file.exists() and "import *" not in (text := file.read_text(encoding="utf-8")):
                for name in unknown:
                    if not any(path.glob(f"{name}*")) and not re.search(rf"\b{name}\b", text):
                        self._tell(line, f"today's Ray has no `{name}` in `{module}`", is_error=True)

    def _look_for_attribute(self, node: cst.Attribute) -> None:
        """Report an expression such as `ray.data.range_table` if the installed Ray does not have this name."""
        for meaning in self._meanings(node):
            if meaning.source is QualifiedNameSource.IMPORT and self._is_of_ray(meaning.name):
                module, name = _behind_module_of_ray(meaning.name)
                self._look_for(module, node, [] if name.startswith("_") else [name])

    def _is_of_ray(self, name: str) -> bool:
        return f"{name}.".startswith("ray.") and (name == "ray" or self._paths.is_of_ray(name))

    def _rewritten_import(self, statement: cst.Import, line: cst.CSTNode) -> Sequence[cst.BaseSmallStatement]:
        aliases, changed = [], False
        for alias in statement.names:
            name = helpers.get_full_name_for_node(alias.name) or ""
            self._look_for(name, line)
            new = self._new_name(self._paths.find(name), line)
            if new is None:
                aliases.append(alias)
            else:
                changed = True
                self.dropped_ray |= alias.asname is None and not new.startswith("ray.")
                aliases.append(alias.with_changes(name=_dotted(new)))
        return [statement.with_changes(names=_unique(aliases))] if changed else [statement]

    def _rewritten_from(
        self, statement: cst.ImportFrom, module: str, line: cst.CSTNode
    ) -> Sequence[cst.BaseSmallStatement]:
        if isinstance(statement.names, cst.ImportStar):
            new = self._new_name(self._paths.find(module), line)
            return [statement.with_changes(module=_dotted(new))] if new is not None else [statement]
        by_module: dict[str, list[cst.ImportAlias]] = {}
        for alias in statement.names:
            target, changed = self._target_of(module, alias, line)
            by_module.setdefault(target, []).append(changed)
        if list(by_module) == [module]:
            return [statement]
        if len(by_module) == 1 and "" not in by_module:
            [(target, names)] = by_module.items()
            return [statement.with_changes(module=_dotted(target), names=names)]
        return [_import_of(target, names) for target, names in by_module.items()]

    def _target_of(self, module: str, alias: cst.ImportAlias, line: cst.CSTNode) -> tuple[str, cst.ImportAlias]:
        name = helpers.get_full_name_for_node(alias.name) or ""
        place = self._new_name(self._paths.find(f"{module}.{name}"), line)
        if place is None:
            return module, alias
        target, _, new = place.rpartition(".")
        if new == name:
            return target, alias
        asname = alias.asname or cst.AsName(cst.Name(name))
        return target, alias.with_changes(name=cst.Name(new), asname=asname)

    def visit_ClassDef(self, node: cst.ClassDef) -> None:
        self._methods.update(methods_to_change(node, self._todays_names))

    def visit_Subscript(self, node: cst.Subscript) -> None:
        for element in node.slice:
            if isinstance(element.slice, cst.Index):
                self._calls.look_at_key(node, element.slice.value)

    def leave_Assign(self, original_node: cst.Assign, updated_node: cst.Assign) -> cst.Assign:
        self._calls.datasets.note([each.target for each in original_node.targets], original_node.value)
        return updated_node

    def leave_AnnAssign(self, original_node: cst.AnnAssign, updated_node: cst.AnnAssign) -> cst.AnnAssign:
        if original_node.value is not None:
            self._calls.datasets.note([original_node.target], original_node.value)
        return updated_node

    def visit_Attribute(self, node: cst.Attribute) -> bool:
        return not _is_dotted(node)

    def leave_Attribute(self, original_node: cst.Attribute, updated_node: cst.Attribute) -> cst.BaseExpression:
        place = self._moved(original_node)
        new = self._new_name(place, original_node)
        if place is None:
            self._look_for_attribute(original_node)
        if place is None or new is None:
            return updated_node
        self.needs.add(place.module)
        return _dotted(new).with_changes(lpar=updated_node.lpar, rpar=updated_node.rpar)

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> cst.Call:
        return self._calls.rewritten(original_node, updated_node)

    def _moved(self, node: cst.Attribute) -> NewPlace | None:
        """Return the table's entry for an old name if the dotted name itself must be rewritten.

        Usually it is enough to rewrite the import of the name's first part. The dotted name must be rewritten too if

        * the program writes the full name, starting with `ray`;
        * the import is of a module that Ray still has, such as `tune` in `tune.Tuner`; or
        * the import is of a package whose submodules are now in different places, such as `v2.backends.torch`.

        In other cases, return None.
        """
        num_attributes = (helpers.get_full_name_for_node(node) or "").count(".")
        for meaning in sorted(self._meanings(node), key=lambda meaning: meaning.name):
            place = self._paths.find(meaning.name) if meaning.source is QualifiedNameSource.IMPORT else None
            if place is None:
                continue
            imported = meaning.name.rsplit(".", num_attributes)[0]
            brought = self._paths.find(imported)
            if brought is None or (brought.new and brought.new + meaning.name[len(imported) :] != place.new):
                return place
        return None

    def _meanings(self, node: cst.BaseExpression) -> set[QualifiedName]:
        """Return the full names of the objects that a dotted name in the program may refer to.

        Return an empty set for other expressions, such as an attribute of a call's result.
        """
        scope = self.get_metadata(ScopeProvider, node, None) if _is_dotted(node) else None
        return set(scope.get_qualified_names_for(node)) if scope is not None else set()

    def _todays_names(self, node: cst.BaseExpression) -> set[str]:
        return {self._paths.today(meaning.name) for meaning in self._meanings(node)}

    def _new_name(self, place: NewPlace | None, node: cst.CSTNode) -> str | None:
        """Return the current name for an old name. If the old name has no successor, report this and return None.

        Args:
            place: The old name's entry in the table. None if the name is not an old name.
            node: The node of the program that uses the old name.
        """
        if place is None:
            return None
        if place.new is None:
            self._tell(node, f"`{place.old}` has no successor: {place.reason}", is_error=True)
        if place.is_trainer_of_ray:
            self.trainers_of_ray.setdefault(place.old, self._line_of(node))
        self.has_trainers |= place.new is not None and place.new.endswith("Trainer")
        return place.new

    def _line_of(self, node: cst.CSTNode) -> int:
        return self._program.resolve(PositionProvider)[node].start.line

    def _tell(self, node: cst.CSTNode, text: str, is_error: bool = False) -> None:
        self._findings.add(Finding(self._line_of(node), text, is_error))
        if is_error:
            self._for_a_person[-1].append(text)


def _comments_in(*nodes: cst.CSTNode) -> Counter[str]:
    comments = (comment for node in nodes for comment in matchers.findall(node, matchers.Comment()))
    return Counter(cst.ensure_type(comment, cst.Comment).value for comment in comments)


@cache
def _folders_of_ray() -> Sequence[str]:
    ray = find_spec("ray")
    return (ray and ray.submodule_search_locations) or ()


def _behind_module_of_ray(name: str) -> tuple[str, str]:
    """Split a dotted name into the longest prefix that is a module of the installed Ray, and the next part.

    The next part is an empty string if the whole name is a module.
    """
    parts = name.split(".")
    for end in range(len(parts), 1, -1):
        for root in _folders_of_ray():
            path = Path(root, *parts[1:end])
            if path.is_dir() or path.with_suffix(".py").exists():
                return ".".join(parts[:end]), ".".join(parts[end : end + 1])
    return parts[0], parts[1]


def _is_dotted(node: cst.BaseExpression) -> bool:
    while isinstance(node, cst.Attribute):
        node = node.value
    return isinstance(node, cst.Name)


def _dotted(name: str) -> cst.Name | cst.Attribute:
    expression = cst.parse_expression(name)
    assert isinstance(expression, cst.Name | cst.Attribute)
    return expression


def _import_of(module: str, names: Sequence[cst.ImportAlias]) -> cst.BaseSmallStatement:
    """Return an import statement for some of the names of a longer statement. An empty `module` means `import NAME`."""
    names = [name.with_changes(comma=cst.MaybeSentinel.DEFAULT) for name in names]
    return cst.ImportFrom(module=_dotted(module), names=names) if module else cst.Import(names=names)


def _unique(aliases: Sequence[cst.ImportAlias]) -> list[cst.ImportAlias]:
    """Return the names of an import statement, and remove duplicates such as in `import raysgd, raysgd`."""
    seen: dict[str, cst.ImportAlias] = {}
    for alias in aliases:
        seen.setdefault(cst.Module([]).code_for_node(alias.with_changes(comma=cst.MaybeSentinel.DEFAULT)), alias)
    kept = list(seen.values())
    return [*kept[:-1], kept[-1].with_changes(comma=cst.MaybeSentinel.DEFAULT)]
