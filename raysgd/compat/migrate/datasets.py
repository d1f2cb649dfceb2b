"""Finds the variables and expressions in a program's source code whose values are Ray Data datasets."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Literal

import libcst as cst
from libcst import helpers
from libcst.metadata import Scope

Kind = Literal["dataset", "shard"]
"""The kind of a Ray Data expression: a whole dataset, in the driver, or one worker's shard of a dataset."""

_MADE_BY = ("ray.data.range", "ray.data.read_", "ray.data.from_")
_SHARD = ".get_dataset_shard"
_SAME = (
    "add_column cache drop_columns filter flat_map fully_executed lazy limit map map_batches materialize "
    "random_sample random_shuffle random_shuffle_each_window randomize_block_order rename_columns repartition repeat "
    "rewindow select_columns sort union window zip"
)
"""Methods of a Ray Data dataset that return a dataset."""
_PARTS = {"split", "split_at_indices", "split_proportionately", "train_test_split"}
"""Methods of a Ray Data dataset that return several datasets."""


class Datasets:
    """Tracks which variables of a program are Ray Data datasets, based on the assignments that were visited so far.

    Args:
        names_of: Function that returns the current dotted names that an expression may refer to.
        scope_of: Function that returns the scope (module, class or function) that contains an expression.
    """

    def __init__(
        self, names_of: Callable[[cst.BaseExpression], set[str]], scope_of: Callable[[cst.CSTNode], Scope | None]
    ) -> None:
        self._names_of = names_of
        self._scope_of = scope_of
        self._known: dict[tuple[Scope | None, str], Kind] = {}

    def note(self, targets: Iterable[cst.BaseExpression], value: cst.BaseExpression) -> None:
        """Record for an assignment whether its variables are now datasets, shards, or neither.

        Args:
            targets: The variables that are assigned to.
            value: The value that is assigned.
        """
        kind = self.kind_of(value)
        parts = self._kind_of_parts(value)
        for target in targets:
            if isinstance(target, cst.Tuple | cst.List):
                for element in target.elements:
                    self._note(element.value, parts)
            else:
                self._note(target, kind)

    def _note(self, target: cst.BaseExpression, kind: Kind | None) -> None:
        for key in self._keys_of(target):
            self._known.pop(key, None)
            if kind is not None:
                self._known[key] = kind

    def kind_of(self, value: cst.BaseExpression) -> Kind | None:
        """Return whether an expression is a dataset or a shard. Return None if the source code shows neither."""
        if not isinstance(value, cst.Call):
            return next((self._known[key] for key in self._keys_of(value) if key in self._known), None)
        names = self._names_of(value.func)
        if any(name.startswith(_MADE_BY) for name in names):
            return "dataset"
        if any(name.endswith(_SHARD) for name in names):
            return "shard"
        if isinstance(value.func, cst.Attribute) and value.func.attr.value in _SAME.split():
            return self.kind_of(value.func.value)
        return None

    def _kind_of_parts(self, value: cst.BaseExpression) -> Kind | None:
        if isinstance(value, cst.Call) and isinstance(value.func, cst.Attribute) and value.func.attr.value in _PARTS:
            return self.kind_of(value.func.value)
        return None

    def _keys_of(self, value: cst.BaseExpression) -> Iterator[tuple[Scope | None, str]]:
        """Yield the keys under which the kind of a variable or attribute is stored.

        The key of a variable consists of its scope and its name. The key of an attribute, such as `self.data`, has no
        scope, because methods in other scopes read the same attribute.
        """
        if isinstance(value, cst.Name):
            scope = self._scope_of(value)
            for assignment in scope[value.value] if scope is not None else ():
                yield assignment.scope, value.value
        elif isinstance(value, cst.Attribute) and (name := helpers.get_full_name_for_node(value)):
            yield None, name
