"""Finds Python programs, rewrites each of them in memory, and collects the lines that a person must check."""

from __future__ import annotations

import ast
import difflib
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import libcst as cst
from libcst.codemod import CodemodContext
from libcst.codemod.visitors import AddImportsVisitor, ImportItem
from libcst.metadata import MetadataWrapper

from raysgd.compat.migrate.calls import ADVICE
from raysgd.compat.migrate.names import Finding, OldNames
from raysgd.compat.paths import Paths
from raysgd.core.files import replacing

_ANY_OF = re.compile(rb"\b(ray|horovod|keras)")
"""Matches the source code of every program that may need changes. Other programs are not parsed with libcst."""
_WRITABLE = 0o222
_OLD = re.compile(r"ray\.util(\.| import .*\b)(sgd|data)|ray\.tune\.integration|ray\.experimental\.sgd|raysgd")
"""Matches the source code of programs that use `ray.util.sgd`, or another module that only raysgd still has.

In these programs, `ray.util.iter` is replaced with `raysgd.util.iter`, although Ray still has a module of that name.
"""
_SKIPPED = {"__pycache__", "node_modules", "site-packages", "build", "dist"}
_OLD_PACKAGES = (b"ray.util.sgd", b"ray.experimental.sgd")
_TWICE = (b"ray.train", b"ray.air", b"ray.ml")


@dataclass(frozen=True)
class MigratedProgram:
    """The result of rewriting a program, in memory.

    Attributes:
        before: The source code before rewriting.
        text: The source code after rewriting. Equal to `before` if nothing changed or the program could not be parsed.
        findings: The lines that a person must check.
        path: The program's file.
    """

    before: bytes
    text: bytes
    findings: list[Finding]
    path: Path = Path()

    @property
    def has_failed(self) -> bool:
        """True if a person must rewrite some of the program, or if the program could not be read or parsed."""
        return any(finding.is_error for finding in self.findings)

    @property
    def has_changed(self) -> bool:
        """True if rewriting has changed the program's source code."""
        return self.before != self.text

    def diff(self) -> bytes:
        """Return the changes to the program as a diff that `git apply` accepts, in the encoding of the program."""
        texts, name = (_lines(self.before), _lines(self.text)), os.fsencode(self.path).lstrip(b"/")
        return b"".join(difflib.diff_bytes(difflib.unified_diff, *texts, b"a/" + name, b"b/" + name))

    def replace_file(self) -> None:
        """Write the new source code to the program's file, and keep the permissions of the file.

        Raises:
            OSError: The file could not be written and is unchanged.
        """
        if not self.path.stat().st_mode & _WRITABLE:
            raise PermissionError(f"`{self.path}` is read-only")
        with replacing(str(self.path.resolve())) as file:
            file.write(self.text)


def _lines(text: bytes) -> list[bytes]:
    """Return the lines of a program as `git` counts them. A last line without a line break is marked."""
    *lines, last = text.split(b"\n")
    marked = [last + b"\n\\ No newline at end of file\n"] if last else []
    return [*(line + b"\n" for line in lines), *marked]


def files_of(paths: Sequence[Path]) -> Iterator[Path]:
    """Yield each path that is not a folder, and for each folder, the Python files and notebooks inside it.

    Hidden subfolders, and subfolders such as `build` and `site-packages`, are skipped.

    Raises:
        FileNotFoundError: A path is neither a regular file nor a folder, or a folder contains neither Python files
            nor notebooks.
    """
    for path in paths:
        if not path.exists():
            raise FileNotFoundError(f"`{path}` does not exist: pass a file or a folder of Python files.")
        if not path.is_dir():
            yield path
            continue
        files = sorted(_inside(path))
        if not files:
            raise FileNotFoundError(f"there is no Python file in the folder `{path}`.")
        yield from files


def migrate_file(path: Path, ray_train: bool) -> MigratedProgram:
    """Rewrite one program in memory, without changing its file.

    Symbolic links and special files, such as pipes, are skipped. Notebooks are not rewritten, but are reported if they
    use old names. Files that cannot be read are reported, too.

    Args:
        path: The program's file.
        ray_train: True if the program was written for the former `ray.train` and `ray.air`, not those of current Ray.
    """
    reason = _obstacle(path)
    if reason is not None:
        return MigratedProgram(b"", b"", [Finding(1, f"left alone: {reason}", is_error=False)], path)
    try:
        before = path.read_bytes()
    except OSError as error:
        return MigratedProgram(b"", b"", [Finding(1, f"it cannot be read: {error}", is_error=True)], path)
    if path.suffix == ".ipynb":
        is_old = any(name in before for name in (*_OLD_PACKAGES, *_TWICE * ray_train))
        text = ADVICE["notebook"].format(path=path, code=path.with_suffix(".py"))
        return MigratedProgram(before, before, [Finding(1, text, is_error=True)] * is_old, path)
    return replace(migrate(before, ray_train), path=path)


def _obstacle(path: Path) -> str | None:
    """Return the reason to skip a path, or None if it is a regular file or does not exist.

    A symbolic link is skipped because it leads to a file that the user did not name. A special file, such as a pipe, is
    skipped because reading it may never end.
    """
    if path.is_symlink():
        return f"it is a link to `{path.resolve()}`, which you can pass by itself"
    return None if path.is_file() or not path.exists() else "it is not a regular file"


def _inside(folder: Path) -> Iterator[Path]:
    for root, folders, names in os.walk(folder):
        folders[:] = [each for each in folders if each not in _SKIPPED and not each.startswith(".")]
        yield from (Path(root, name) for name in names if name.endswith((".py", ".ipynb")))


def migrate(text: bytes, ray_train: bool = False) -> MigratedProgram:
    """Rewrite the source code of a program. Insert a comment above each line that only a person can rewrite.

    Args:
        text: The contents of the program's file.
        ray_train: True if the program was written for the former `ray.train` and `ray.air`, not those of current Ray.
    """
    try:
        tree = ast.parse(text)  # raises an error for very deeply nested code, which would crash libcst below
        if not _ANY_OF.search(text):
            return MigratedProgram(text, text, [])
        module = cst.parse_module(text)
        source = text.decode(module.encoding)
    except SyntaxError as error:
        return _unchanged(text, error.lineno or 1, f"this is no valid Python: {error.msg}")
    except (cst.ParserSyntaxError, ValueError, LookupError, RecursionError, MemoryError) as error:
        return _unchanged(text, 1, f"it cannot be read as Python: {error}")
    uses_sgd = _OLD.search(source) is not None
    paths, findings = Paths(ray_train, uses_sgd), set[Finding]()
    try:
        names, new = _rewritten(module, source, paths, findings)
        if names.trainers_of_ray:
            paths, findings = Paths(beside_sgd=uses_sgd, keeps_ray_train=True), set(_left_to_ray(names))
            _, new = _rewritten(module, source, paths, findings)
    except RecursionError:
        return _unchanged(text, 1, "its code is nested too deeply, or joins too many parts in one expression")
    if not _keeps_its_top(tree, new.bytes):
        reason = (
            "its docstring or an import of `__future__` shares a line with another statement: give each its own line"
        )
        return _unchanged(text, 1, reason)
    _report_texts(tree, paths, findings)
    return MigratedProgram(text, new.bytes, sorted(findings))


def _keeps_its_top(before: ast.Module, after: bytes) -> bool:
    """Return True if new imports stand behind the docstring and the imports of `__future__`."""
    new = ast.parse(after)
    docstring = ast.get_docstring(new)
    is_future = [isinstance(each, ast.ImportFrom) and each.module == "__future__" for each in new.body]
    is_future = is_future[docstring is not None :]
    return docstring == ast.get_docstring(before) and is_future == sorted(is_future, reverse=True)


def _unchanged(text: bytes, line: int, reason: str) -> MigratedProgram:
    return MigratedProgram(text, text, [Finding(line, reason, is_error=True)])


def _left_to_ray(names: OldNames) -> Iterator[Finding]:
    """Yield a finding for each trainer that only Ray has. The finding says why `ray.train` is not rewritten.

    Such a trainer accepts only Ray's own configs, so the program must continue to import these from Ray.
    """
    ours = f". {ADVICE['trainers beside']}" if names.has_trainers else ""
    for name, line in names.trainers_of_ray.items():
        yield Finding(line, f"`{name}` is Ray's own: {ADVICE['left to Ray']}{ours}")


def _rewritten(module: cst.Module, source: str, paths: Paths, findings: set[Finding]) -> tuple[OldNames, cst.Module]:
    # Skipping the copy is safe for a tree that the parser made, because no node occurs in it twice.
    program = MetadataWrapper(module, unsafe_skip_copy=True)
    names = OldNames(program, source, paths, findings)
    changed = program.visit(names)
    uses_ray = names.dropped_ray and any(
        isinstance(node, ast.Name) and node.id == "ray" for node in ast.walk(ast.parse(changed.bytes))
    )
    needed = [ImportItem(name) for name in names.needs | ({"ray"} if uses_ray else set())]
    return names, AddImportsVisitor(CodemodContext(), needed).transform_module(changed)


def _report_texts(tree: ast.Module, paths: Paths, findings: set[Finding]) -> None:
    """Add a finding for each string in the program that is an old name, such as the target of a patch in a test."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Constant) or not isinstance(node.value, str) or not node.value.startswith("ray."):
            continue
        if (place := paths.find(node.value)) is not None:
            now = f"it is `{place.new}` now" if place.new else f"it has no successor: {place.reason}"
            findings.add(Finding(node.lineno, f"the string {node.value!r} is unchanged: {now}"))
