"""Rewrites imports of the old library, and the dotted names that they bind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import libcst as cst
from libcst import helpers
from libcst.metadata import PositionProvider, QualifiedNameProvider, QualifiedNameSource

from raysgd.compat.migrate.findings import Findings
from raysgd.compat.paths import NewPlace, Paths

_COMMENT = "# raysgd:"
_STATEMENTS = (cst.SimpleStatementLine, cst.BaseCompoundStatement)


class ImportedNames(cst.CSTTransformer):
    """The first walk through a program.

    Args:
        paths: Where names are now.
        findings: What a person has to know goes there.

    Attributes:
        needs: Modules that have to be imported for what was rewritten.
        dropped_ray: Whether an import that bound `ray` binds `raysgd` instead.
    """

    METADATA_DEPENDENCIES = (PositionProvider, QualifiedNameProvider)

    def __init__(self, paths: Paths, findings: Findings) -> None:
        super().__init__()
        self._paths = paths
        self._findings = findings
        self.needs: set[str] = set()
        self.dropped_ray = False
        self._for_a_person: list[list[str]] = []
        self._comments: set[str] = set()

    def visit_Module(self, node: cst.Module) -> None:
        self._comments = {line.strip() for line in node.code.splitlines() if line.lstrip().startswith(_COMMENT)}

    def on_visit(self, node: cst.CSTNode) -> bool:
        """Notes in which statement what follows stands."""
        if isinstance(node, _STATEMENTS):
            self._for_a_person.append([])
        return super().on_visit(node)

    def on_leave(self, original_node: Any, updated_node: Any) -> Any:
        """Says in a comment above a statement what only a person can rewrite in it."""
        left = super().on_leave(original_node, updated_node)
        if not isinstance(original_node, _STATEMENTS):
            return left
        comments = dict.fromkeys(f"{_COMMENT} {text}" for text in self._for_a_person.pop())
        new = [cst.EmptyLine(comment=cst.Comment(text)) for text in comments if text not in self._comments]
        lines: list[Any] = [*left] if isinstance(left, cst.FlattenSentinel) else [left]
        if not new:
            return left
        where = next((at for at, line in enumerate(lines) if "ray." in cst.Module([line]).code), 0)
        lines[where] = lines[where].with_changes(leading_lines=[*lines[where].leading_lines, *new])
        return cst.FlattenSentinel(lines)

    def visit_Import(self, node: cst.Import) -> bool:
        return False

    def visit_ImportFrom(self, node: cst.ImportFrom) -> bool:
        return False

    def leave_SimpleStatementLine(
        self, original_node: cst.SimpleStatementLine, updated_node: cst.SimpleStatementLine
    ) -> cst.SimpleStatementLine | cst.FlattenSentinel[cst.SimpleStatementLine]:
        """An import that brings names from several modules becomes several lines; comments stay where they are."""
        body: list[cst.BaseSmallStatement] = []
        for statement in updated_node.body:
            body += self._rewritten(statement, self._line(original_node))
        if len(body) == len(updated_node.body):
            return updated_node.with_changes(body=body)
        first, *others = (each.with_changes(semicolon=cst.MaybeSentinel.DEFAULT) for each in body)
        return cst.FlattenSentinel(
            [updated_node.with_changes(body=[first]), *(cst.SimpleStatementLine([each]) for each in others)]
        )

    def _rewritten(self, statement: cst.BaseSmallStatement, line: int) -> Sequence[cst.BaseSmallStatement]:
        if isinstance(statement, cst.Import):
            return self._rewritten_import(statement, line)
        if isinstance(statement, cst.ImportFrom) and not statement.relative and statement.module is not None:
            return self._rewritten_from(statement, helpers.get_full_name_for_node(statement.module) or "", line)
        return [statement]

    def _rewritten_import(self, statement: cst.Import, line: int) -> Sequence[cst.BaseSmallStatement]:
        aliases, changed = [], False
        for alias in statement.names:
            place = self._place(helpers.get_full_name_for_node(alias.name) or "", line)
            if place is None:
                aliases.append(alias)
            else:
                changed = True
                self.dropped_ray |= alias.asname is None
                aliases.append(alias.with_changes(name=_dotted(place)))
        return [statement.with_changes(names=_unique(aliases))] if changed else [statement]

    def _rewritten_from(self, statement: cst.ImportFrom, module: str, line: int) -> Sequence[cst.BaseSmallStatement]:
        if isinstance(statement.names, cst.ImportStar):
            place = self._place(module, line)
            return [statement.with_changes(module=_dotted(place))] if place is not None else [statement]
        by_module: dict[str, list[cst.ImportAlias]] = {}
        for alias in statement.names:
            target, new = self._target_of(module, alias, line)
            by_module.setdefault(target, []).append(new)
        if list(by_module) == [module]:
            return [statement]
        if len(by_module) == 1 and "" not in by_module:
            [(target, names)] = by_module.items()
            return [statement.with_changes(module=_dotted(target), names=names)]
        return [_import_of(target, names) for target, names in by_module.items()]

    def _target_of(self, module: str, alias: cst.ImportAlias, line: int) -> tuple[str, cst.ImportAlias]:
        name = helpers.get_full_name_for_node(alias.name) or ""
        place = self._place(f"{module}.{name}", line)
        if place is None:
            return module, alias
        target, _, new = place.rpartition(".")
        if new == name:
            return target, alias
        asname = alias.asname or cst.AsName(cst.Name(name))
        return target, alias.with_changes(name=cst.Name(new), asname=asname)

    def visit_Attribute(self, node: cst.Attribute) -> bool:
        return self._old_name(node) is None

    def leave_Attribute(self, original_node: cst.Attribute, updated_node: cst.Attribute) -> cst.BaseExpression:
        old = self._old_name(original_node)
        place = self._place(old, self._line(original_node)) if old is not None else None
        if place is None:
            return updated_node
        self.needs.add(self._module_of(old or "", place))
        return _dotted(place).with_changes(lpar=updated_node.lpar, rpar=updated_node.rpar)

    def _old_name(self, node: cst.Attribute) -> str | None:
        """The dotted name, if it belongs to the old library and no import that is rewritten brings it.

        It is written out from `ray` on, or a name of a module that stays Ray's, such as `tune.Tuner`.
        """
        written = helpers.get_full_name_for_node(node)
        for found in self.get_metadata(QualifiedNameProvider, node, set()):
            if found.source is not QualifiedNameSource.IMPORT or self._paths.find(found.name) is None:
                continue
            if found.name == written or self._paths.find(found.name.rpartition(".")[0]) is None:
                return found.name
        return None

    def _module_of(self, old: str, new: str) -> str:
        """The module to import for a name that was rewritten."""
        parts = old.split(".")
        for end in range(len(parts), 0, -1):
            place = self._paths.find(".".join(parts[:end]))
            if place is not None and place.is_module:
                return place.new or new
        return new.rpartition(".")[0]

    def _place(self, old: str, line: int) -> str | None:
        place: NewPlace | None = self._paths.find(old)
        if place is None:
            return None
        if place.new is None:
            text = f"`{old}` has no successor: {place.reason}"
            self._findings.add(line, text, is_error=True)
            self._for_a_person[-1].append(text)
        return place.new

    def _line(self, node: cst.CSTNode) -> int:
        line: int = self.get_metadata(PositionProvider, node).start.line
        return line


def _dotted(name: str) -> cst.Name | cst.Attribute:
    expression = cst.parse_expression(name)
    assert isinstance(expression, cst.Name | cst.Attribute)
    return expression


def _import_of(module: str, names: Sequence[cst.ImportAlias]) -> cst.BaseSmallStatement:
    """An import statement for some of the names of another one."""
    names = [name.with_changes(comma=cst.MaybeSentinel.DEFAULT) for name in names]
    if module:
        return cst.ImportFrom(module=_dotted(module), names=names)
    return cst.Import(names=[name if name.asname is not None else name.with_changes(asname=None) for name in names])


def _unique(aliases: Sequence[cst.ImportAlias]) -> list[cst.ImportAlias]:
    """Each module once; `import raysgd, raysgd` says nothing more."""
    seen: dict[str, cst.ImportAlias] = {}
    for alias in aliases:
        seen.setdefault(cst.Module([]).code_for_node(alias.with_changes(comma=cst.MaybeSentinel.DEFAULT)), alias)
    found = list(seen.values())
    return [*found[:-1], found[-1].with_changes(comma=cst.MaybeSentinel.DEFAULT)]
