"""Rewrites the text of one program."""

from __future__ import annotations

import ast
from dataclasses import dataclass

import libcst as cst
from libcst.codemod import CodemodContext
from libcst.codemod.visitors import AddImportsVisitor
from libcst.metadata import MetadataWrapper

from raysgd.compat.migrate.arguments import Arguments
from raysgd.compat.migrate.findings import Finding, Findings
from raysgd.compat.migrate.keras_calls import KerasCalls
from raysgd.compat.migrate.names import ImportedNames
from raysgd.compat.paths import Paths

_MARKS = ("ray.util.sgd", "ray.tune.integration")
_PIPELINES = ("DatasetPipeline", "dataset_pipeline", "predict_pipelined")


@dataclass(frozen=True)
class MigratedProgram:
    """A program after it was rewritten.

    Attributes:
        text: The new text; the old one where nothing is to be done, or where it could not be read.
        findings: What a person has to look at.
    """

    text: bytes
    findings: list[Finding]

    def or_nothing(self, before: bytes) -> MigratedProgram:
        """The same, with the old text if something is left for a person."""
        return MigratedProgram(before, self.findings) if self.has_failed else self

    @property
    def has_failed(self) -> bool:
        """True if something is left that only a person can rewrite."""
        return any(finding.is_error for finding in self.findings)


def migrate(text: bytes, ray_train: bool = False) -> MigratedProgram:
    """Rewrites a program. A line that only a person can rewrite gets a comment.

    Args:
        text: The file, as it is on the disk.
        ray_train: Whether `ray.train` and `ray.air` mean the old library, and not today's Ray.
    """
    findings = Findings()
    try:
        ast.parse(text)  # first, because the other parser ends the process where code is nested very deeply
        module = cst.parse_module(text)
    except SyntaxError as error:
        findings.add(error.lineno or 1, f"this is no valid Python: {error.msg}", is_error=True)
        return MigratedProgram(text, findings.sorted())
    except (cst.ParserSyntaxError, ValueError, LookupError, RecursionError, MemoryError) as error:
        findings.add(1, f"it cannot be read as Python: {error}", is_error=True)
        return MigratedProgram(text, findings.sorted())
    try:
        new = _rewritten(module, Paths(ray_train, _is_of_sgd(module)), findings)
    except RecursionError:
        findings = Findings()
        findings.add(1, "its code is nested too deeply, or joins too many parts in one expression", is_error=True)
        return MigratedProgram(text, findings.sorted())
    return MigratedProgram(new.bytes, findings.sorted())


def _is_of_sgd(module: cst.Module) -> bool:
    return any(mark in module.code for mark in (*_MARKS, "ray.util.data", "raysgd"))


def _rewritten(module: cst.Module, paths: Paths, findings: Findings) -> cst.Module:
    _report_texts(module, paths, findings)
    names, arguments = ImportedNames(paths, findings), Arguments(findings)
    renamed = MetadataWrapper(module).visit(names)
    changed = MetadataWrapper(renamed).visit(arguments)
    if "keras" in module.code:
        changed = MetadataWrapper(changed).visit(KerasCalls(findings))
    context = CodemodContext()
    for needed in sorted(names.needs | arguments.needs):
        AddImportsVisitor.add_needed_import(context, needed)
    _warn_of_pipelines(module, findings)
    if names.dropped_ray and _uses_ray(changed):
        AddImportsVisitor.add_needed_import(context, "ray")
    return AddImportsVisitor(context).transform_module(changed)


def _warn_of_pipelines(module: cst.Module, findings: Findings) -> None:
    for line, text in enumerate(module.code.splitlines(), 1):
        if any(name in text for name in _PIPELINES):
            findings.add(
                line, "Ray Data has no `DatasetPipeline` any more: pass the dataset, which is read while it is used"
            )


def _report_texts(module: cst.Module, paths: Paths, findings: Findings) -> None:
    """Reports old names in strings, such as those that are patched in tests."""
    for node in ast.walk(ast.parse(module.bytes)):
        if not isinstance(node, ast.Constant) or not isinstance(node.value, str) or not node.value.startswith("ray."):
            continue
        if (place := paths.find(node.value)) is not None:
            now = f"it is `{place.new}` now" if place.new else f"it has no successor: {place.reason}"
            findings.add(node.lineno, f"the string {node.value!r} is unchanged: {now}")


def _uses_ray(module: cst.Module) -> bool:
    """Returns whether the name `ray` is used outside of imports."""
    return any(isinstance(node, ast.Name) and node.id == "ray" for node in ast.walk(ast.parse(module.bytes)))
