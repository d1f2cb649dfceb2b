"""Rewrites calls of `TorchTrainer` that pass what it no longer takes."""

from __future__ import annotations

from collections.abc import Sequence

import libcst as cst
from libcst import helpers
from libcst.metadata import PositionProvider, QualifiedNameProvider

from raysgd.compat.migrate.findings import Findings

_TRAINERS = ("raysgd.TorchTrainer", "raysgd.torch.TorchTrainer", "raysgd.torch.torch_trainer.TorchTrainer")
_CREATORS = ("model_creator", "optimizer_creator", "data_creator", "loss_creator", "scheduler_creator")
_BY_HAND = {
    "apex_args": "pass it to `self.register(apex_args=...)` in the operator's `setup`",
    "data_loader_args": "make the `DataLoader` with these options in the operator's `setup`",
}
_FROM_CREATORS = "raysgd.TrainingOperator.from_creators"
_BATCH_SIZE = "raysgd.utils.BATCH_SIZE"


class Arguments(cst.CSTTransformer):
    """The second walk, over a program whose names are today's.

    Args:
        findings: What a person has to know goes there.

    Attributes:
        needs: Modules to import. Written out, because programs have constants of their own called `BATCH_SIZE`.
    """

    METADATA_DEPENDENCIES = (PositionProvider, QualifiedNameProvider)

    def __init__(self, findings: Findings) -> None:
        super().__init__()
        self._findings = findings
        self.needs: set[str] = set()

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> cst.Call:
        names = {each.name for each in self.get_metadata(QualifiedNameProvider, original_node.func, set())}
        if not names & set(_TRAINERS):
            return updated_node
        line: int = self.get_metadata(PositionProvider, original_node).start.line
        args = list(updated_node.args)
        self._report(args, line)
        changed = self._with_batch_size(_with_num_workers(self._with_operator(args)))
        return updated_node.with_changes(args=changed) if changed != args else updated_node

    def _report(self, args: Sequence[cst.Arg], line: int) -> None:
        for name, advice in _BY_HAND.items():
            if _value_of(args, name) is not None:
                self._findings.add(line, f"`{name}` is no argument of `TorchTrainer` any more: {advice}")
        if any(arg.star == "**" for arg in args):
            self._findings.add(line, "`TorchTrainer(**...)`: look whether it holds arguments that were retired")
        if any(not arg.star and arg.keyword is None for arg in args):
            self._findings.add(line, "`TorchTrainer` takes its arguments by name only")

    def _with_operator(self, args: Sequence[cst.Arg]) -> list[cst.Arg]:
        """Creator functions become an operator class."""
        creators = [arg for arg in args if _name_of(arg) in _CREATORS]
        if not creators or _value_of(args, "training_operator_cls") is not None:
            return list(args)
        taken = [arg for arg in args if _name_of(arg) in (*_CREATORS, "serialize_data_creation")]
        self.needs.add("raysgd")
        call = cst.Call(cst.parse_expression(_FROM_CREATORS), _on_one_line(taken))
        operator = taken[0].with_changes(keyword=cst.Name("training_operator_cls"), value=call)
        return _tidy(
            args, [operator if arg is taken[0] else arg for arg in args if arg is taken[0] or arg not in taken]
        )

    def _with_batch_size(self, args: Sequence[cst.Arg]) -> list[cst.Arg]:
        """The batch size moves into the config."""
        size = _value_of(args, "batch_size")
        if size is None:
            return list(args)
        self.needs.add("raysgd.utils")
        config = _value_of(args, "config")
        entry = cst.DictElement(cst.parse_expression(_BATCH_SIZE), size)
        new = _with_entry(config, entry)
        kept = "config" if config is not None else "batch_size"
        changed = [
            arg.with_changes(keyword=cst.Name("config"), value=new) if _name_of(arg) == kept else arg
            for arg in args
            if _name_of(arg) != "batch_size" or kept == "batch_size"
        ]
        return _tidy(args, changed)


def _with_num_workers(args: Sequence[cst.Arg]) -> list[cst.Arg]:
    if _value_of(args, "num_workers") is not None:
        return list(args)
    return [
        arg.with_changes(keyword=cst.Name("num_workers")) if _name_of(arg) == "num_replicas" else arg for arg in args
    ]


def _with_entry(config: cst.BaseExpression | None, entry: cst.DictElement) -> cst.Dict:
    """The config with one more entry."""
    if config is None or helpers.get_full_name_for_node(config) == "None":
        return cst.Dict([entry])
    if isinstance(config, cst.Dict):
        elements = [*config.elements]
        if elements and isinstance(elements[-1].comma, cst.MaybeSentinel):
            elements[-1] = elements[-1].with_changes(comma=_COMMA)
        return config.with_changes(elements=[*elements, entry])
    return cst.Dict([cst.StarredDictElement(config, comma=_COMMA), entry])


_COMMA = cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))


def _name_of(arg: cst.Arg) -> str | None:
    return arg.keyword.value if arg.keyword is not None else None


def _value_of(args: Sequence[cst.Arg], name: str) -> cst.BaseExpression | None:
    return next((arg.value for arg in args if _name_of(arg) == name), None)


def _on_one_line(args: Sequence[cst.Arg]) -> list[cst.Arg]:
    plain = [arg.with_changes(comma=_COMMA, whitespace_after_arg=cst.SimpleWhitespace("")) for arg in args]
    return [*plain[:-1], plain[-1].with_changes(comma=cst.MaybeSentinel.DEFAULT)]


def _tidy(before: Sequence[cst.Arg], after: Sequence[cst.Arg]) -> list[cst.Arg]:
    """The last argument ends as the last one did before."""
    last = before[-1]
    ended = after[-1].with_changes(comma=last.comma, whitespace_after_arg=last.whitespace_after_arg)
    return [*after[:-1], ended]
