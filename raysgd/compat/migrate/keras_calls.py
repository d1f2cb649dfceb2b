"""Rewrites calls of Keras that today's Keras refuses, and says the way for those that only a person can change."""

from __future__ import annotations

import libcst as cst
from libcst import helpers
from libcst.metadata import PositionProvider, QualifiedNameProvider

from raysgd.compat.migrate.findings import Findings

_OPTIMIZERS = ".keras.optimizers."
_GET_WEIGHTS = (
    "optimizers of Keras 3 have no `get_weights` and `set_weights`: read `[each.numpy() for each in "
    "optimizer.variables]`, and `assign` to these variables"
)
_SAVE = (
    "Keras 3 saves a model under a path that ends in `.keras`, or its weights with `save_weights` under one in "
    "`.weights.h5`; `model.export(path)` writes a SavedModel"
)
_ENDINGS = (".keras", ".h5")


class KerasCalls(cst.CSTTransformer):
    """The third walk, over a program that mentions Keras.

    Args:
        findings: What a person has to know goes there.
    """

    METADATA_DEPENDENCIES = (PositionProvider, QualifiedNameProvider)

    def __init__(self, findings: Findings) -> None:
        super().__init__()
        self._findings = findings

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> cst.Call:
        names = {each.name for each in self.get_metadata(QualifiedNameProvider, original_node.func, set())}
        if any(_OPTIMIZERS in f".{name}" for name in names):
            return updated_node.with_changes(args=[_with_learning_rate(arg) for arg in updated_node.args])
        self._look_at(original_node)
        return updated_node

    def _look_at(self, call: cst.Call) -> None:
        owner, _, method = (helpers.get_full_name_for_node(call.func) or "").rpartition(".")
        line: int = self.get_metadata(PositionProvider, call).start.line
        if method in ("get_weights", "set_weights") and "opt" in owner.rpartition(".")[2].lower():
            self._findings.add(line, _GET_WEIGHTS)
        if method == "save" and "model" in owner.rpartition(".")[2].lower() and _is_without_ending(call):
            self._findings.add(line, _SAVE)


def _with_learning_rate(arg: cst.Arg) -> cst.Arg:
    is_old = arg.keyword is not None and arg.keyword.value == "lr"
    return arg.with_changes(keyword=cst.Name("learning_rate")) if is_old else arg


def _is_without_ending(call: cst.Call) -> bool:
    """Tell whether the path is written out and ends in nothing that Keras knows."""
    path = call.args[0].value if call.args else None
    value = path.evaluated_value if isinstance(path, cst.SimpleString) else None
    return isinstance(value, str) and not value.endswith(_ENDINGS)
