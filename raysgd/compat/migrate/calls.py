"""Rewrites outdated calls in a program, or reports them with advice on what to write.

These are calls to `TorchTrainer`, to functions of Ray, and to methods that Ray Data or Keras 3 has changed or removed.
This module also reports outdated method definitions, and outdated keys in the results of `train` and `validate`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Literal

import libcst as cst
from libcst import helpers
from libcst.metadata import Scope

from raysgd.core.tables import read_table

Kind = Literal["dataset", "shard"]
"""The kind of a Ray Data expression: a whole dataset, in the driver, or one worker's shard of a dataset."""

_TRAINERS = {
    f"{module}.TorchTrainer{method}"
    for module in ("raysgd", "raysgd.torch", "raysgd.torch.torch_trainer")
    for method in ("", ".as_trainable")
}
_OPERATORS = {f"{module}.TrainingOperator" for module in ("raysgd", "raysgd.torch", "raysgd.torch.training_operator")}
_OPTIMIZERS = ".keras.optimizers."
_REPORT = "ray.tune.report"
_TABLES = read_table(__file__)
ADVICE = _TABLES["advice"]


def _by_function(kind: str) -> dict[str, dict[str, str]]:
    """Return for each function the rows of the sections whose title has this kind and the function."""
    sections = ((title.removeprefix(kind).split(), rows) for title, rows in _TABLES.items() if title.startswith(kind))
    return {
        function: {name: value for names, value in rows.items() for name in names.split()}
        for functions, rows in sections
        for function in functions
    }


RENAMED = _by_function("renamed: ")
"""For each Ray function, the arguments that current Ray has renamed, each with its new name."""
RETIRED = _by_function("retired: ")
"""For each Ray function, the arguments that current Ray no longer accepts, each with advice on what to do instead."""
_TRIALS, _ABSOLUTE = (set(_TABLES["names"][title].split()) for title in ("trials", "absolute"))
_REMOTE = "ray.remote"

_CREATORS = ("model_creator", "optimizer_creator", "data_creator", "loss_creator", "scheduler_creator")
_FROM_CREATORS = "raysgd.TrainingOperator.from_creators"
_BATCH_SIZE = "raysgd.utils.BATCH_SIZE"
_FIRST_TRAINERS = re.compile(
    r"ray\.(util|experimental)\.sgd|PyTorchTrainer|from raysgd(\.torch)? import .*TorchTrainer"
)
_ENDINGS = (".keras", ".h5")
_COMMA = cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))
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


def methods_to_change(
    node: cst.ClassDef, names_of: Callable[[cst.BaseExpression], set[str]]
) -> Iterator[tuple[cst.CSTNode, str]]:
    """Yield the methods of a class that a person must change, each with advice.

    These are methods of Ray Tune trainables that Ray Tune has renamed, and two kinds of constructors of training
    operators: those that raysgd cannot call, and those that read `"world_rank"` from their keyword arguments.

    Args:
        node: The class.
        names_of: Function that returns the current dotted names that an expression may refer to.
    """
    bases = {name for base in node.bases for name in names_of(base.value)}
    for method in node.body.body:
        if not isinstance(method, cst.FunctionDef):
            continue
        name = method.name.value
        if bases & _TRIALS and (now := _TABLES["methods of trials"].get(name)):
            yield method, f"Ray Tune does not call this: rename `{name}` to `{now}`"
        if bases & _OPERATORS and name == "__init__":
            passes_on = method.params.star_kwarg is not None or any(
                param.name.value == "context" for param in method.params.params
            )
            if not passes_on or '"world_rank"' in cst.Module([method]).code.replace("'", '"'):
                yield method, ADVICE["constructor"]


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
        kind, parts = self.kind_of(value), None
        if isinstance(value, cst.Call) and isinstance(value.func, cst.Attribute) and value.func.attr.value in _PARTS:
            parts = self.kind_of(value.func.value)
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


class Calls:
    """Rewrites and checks the calls of a program.

    Args:
        source: The program's source code.
        names_of: Function that returns the current dotted names that an expression may refer to.
        tell: Function that reports a call to the user. Takes the call, advice for a person, and `is_error`, which is
            True if the call cannot work.
        scope_of: Function that returns the scope (module, class or function) that contains an expression.

    Attributes:
        datasets: Tracks which variables of the program are Ray Data datasets.
        needs: Names of the modules that the rewritten program must import. The rewritten calls use full names such as
            `raysgd.utils.BATCH_SIZE`, because the program may define its own `BATCH_SIZE`.
    """

    def __init__(
        self,
        source: str,
        names_of: Callable[[cst.BaseExpression], set[str]],
        tell: Callable[..., None],
        scope_of: Callable[[cst.CSTNode], Scope | None],
    ) -> None:
        self._names_of = names_of
        self.datasets = Datasets(names_of, scope_of)
        self._tell = tell
        self._has_keras = "keras" in source
        self._is_distributed = "DistributedTrainableCreator" in source
        self._has_remote_trainer = False
        self._is_first = _FIRST_TRAINERS.search(source) is not None
        self._keys = _keys_of_results(source) if self._is_first else {}
        self._with_parameters = _with_parameters(source) if "initialization_hook" in source else set()
        self.needs: set[str] = set()

    def rewritten(self, old: cst.Call, new: cst.Call) -> cst.Call:
        """Return the expression that replaces a call in the program. Report the call if a person must change it.

        Args:
            old: The call in the original program.
            new: The same call with the names in it already rewritten.
        """
        names = self._names_of(old.func)
        if names & _TRAINERS:
            return self._of_trainer(old, new)
        if _REPORT in names:
            return self._of_report(old, new)
        for function in names & {*RETIRED, *RENAMED}:
            return self._of_ray(function, old, new)
        self._look_for_remote_trainer(old, names)
        if isinstance(old.func, cst.Attribute):
            if self._is_first and _is_call_of(old, "trainer", "restore"):
                return new.with_changes(func=new.func.with_changes(attr=cst.Name("load")))
            self._look_at_method(old, old.func)
        if self._has_keras:
            if any(_OPTIMIZERS in f".{name}" for name in names):
                return new.with_changes(args=[_renamed(arg, "lr", "learning_rate") for arg in new.args])
            self._look_at_keras(old)
        return new

    def _of_ray(self, function: str, old: cst.Call, new: cst.Call) -> cst.Call:
        """In a call to a Ray function, rename the arguments in `RENAMED`, and report the arguments in `RETIRED`."""
        passed = {name_of(arg) for arg in old.args}
        for name, advice in RETIRED.get(function, {}).items():
            if name in passed:
                self._tell(old, f"today's `{function}` takes no `{name}`: {advice}", is_error=True)
        changed = new
        for before, after in RENAMED.get(function, {}).items():
            if before in passed and after in passed:
                self._tell(old, f"today's `{function}` takes `{after}` and no `{before}`: leave it out", is_error=True)
            elif before in passed:
                changed = changed.with_changes(args=[_renamed(arg, before, after) for arg in changed.args])
                if after == "storage_path":
                    changed = changed.with_changes(args=[self._with_absolute(arg) for arg in changed.args])
        return changed

    def _with_absolute(self, arg: cst.Arg) -> cst.Arg:
        """Make the path in an argument `storage_path` absolute, because current Ray takes no relative paths."""
        value = arg.value
        text = value.evaluated_value if isinstance(value, cst.SimpleString) else None
        is_absolute = isinstance(text, str) and (text.startswith("/") or "://" in text)
        functions = self._names_of(value.func) if isinstance(value, cst.Call) else set()
        if name_of(arg) != "storage_path" or is_absolute or functions & _ABSOLUTE or _is_none(value):
            return arg
        self.needs.add("os")
        may_be_none = isinstance(value, cst.Name | cst.Attribute | cst.Subscript)
        expanded = "{value}" if "os.path.expanduser" in functions else "os.path.expanduser({value})"
        template = "{value} and " * may_be_none + f"os.path.abspath({expanded})"
        return arg.with_changes(value=helpers.parse_template_expression(template, value=value))

    def _of_trainer(self, old: cst.Call, new: cst.Call) -> cst.Call:
        args: Sequence[cst.Arg] = new.args
        for arg in args:
            if advice := _TABLES["arguments of TorchTrainer"].get(name_of(arg) or ""):
                text = f"`{name_of(arg)}` is no argument of `TorchTrainer` any more: {advice}"
                self._tell(old, text, is_error=True)
            hook = arg.value if name_of(arg) == "initialization_hook" else None
            if isinstance(hook, cst.Name) and hook.value in self._with_parameters:
                self._tell(old, ADVICE["hook"].format(name=hook.value), is_error=True)
        if any(arg.star == "**" for arg in args):
            self._tell(old, "`TorchTrainer(**...)`: look whether it holds arguments that were retired")
        if any(not arg.star and arg.keyword is None for arg in args):
            advice = "`TorchTrainer` takes its arguments by name only: name each, and run this again"
            self._tell(old, advice, is_error=True)
            return new
        if _named(args, "num_workers") is None:
            args = [_renamed(arg, "num_replicas", "num_workers") for arg in args]
        return new.with_changes(args=self._with_batch_size(self._with_operator(args)))

    def _with_operator(self, args: Sequence[cst.Arg]) -> Sequence[cst.Arg]:
        """Replace a trainer's creator functions, such as `model_creator`, with the argument `training_operator_cls`.

        The value of the new argument is a call to `from_creators`, which takes the creator functions. `from_creators`
        is called on the operator class that the program passes to the trainer. If the program passes none, it is called
        on `TrainingOperator`.
        """
        taken = [arg for arg in args if name_of(arg) in (*_CREATORS, "serialize_data_creation")]
        if not any(name_of(arg) in _CREATORS for arg in taken):
            return args
        own = _named(args, "training_operator_cls")
        if own is None or _is_none(own.value):
            self.needs.add("raysgd")
            method = cst.parse_expression(_FROM_CREATORS)
        else:
            method = cst.Attribute(own.value, cst.Name("from_creators"))
        call = cst.Call(
            method,
            [cst.Arg(arg.value, arg.keyword, arg.equal, _COMMA) for arg in taken[:-1]]
            + [cst.Arg(taken[-1].value, taken[-1].keyword, taken[-1].equal)],
        )
        return _replaced(args, taken[0], "training_operator_cls", call, without=[*taken[1:], own])

    def _with_batch_size(self, args: Sequence[cst.Arg]) -> Sequence[cst.Arg]:
        """Replace a trainer's argument `batch_size` with an entry in its argument `config`."""
        size, config = _named(args, "batch_size"), _named(args, "config")
        if size is None:
            return args
        self.needs.add("raysgd.utils")
        entry = cst.DictElement(cst.parse_expression(_BATCH_SIZE), size.value)
        if config is None:
            return _replaced(args, size, "config", _with_entry(None, entry))
        return _replaced(args, config, "config", _with_entry(config.value, entry), without=[size])

    def _look_for_remote_trainer(self, call: cst.Call, names: set[str]) -> None:
        """Report creator functions that the program passes to a trainer in a Ray actor.

        Such a program first turns the trainer's class into an actor class. It then passes the arguments in a call to
        `remote`.
        """
        makes_actor = isinstance(call.func, cst.Call) and _REMOTE in self._names_of(call.func.func)
        if (makes_actor or _REMOTE in names) and any(self._names_of(arg.value) & _TRAINERS for arg in call.args):
            self._has_remote_trainer = True
        is_remote = isinstance(call.func, cst.Attribute) and call.func.attr.value == "remote"
        if self._has_remote_trainer and is_remote and any(name_of(arg) in _CREATORS for arg in call.args):
            self._tell(call, ADVICE["remote trainer"], is_error=True)

    def look_at_key(self, node: cst.CSTNode, key: cst.BaseExpression) -> None:
        """Report an expression if its key has been renamed in the results of `train` and `validate`.

        Args:
            node: The expression to report.
            key: The key in this expression.
        """
        name = key.evaluated_value if isinstance(key, cst.SimpleString) else None
        if isinstance(name, str) and name in self._keys:
            self._tell(node, f"results have no `{name}`: it is {self._keys[name]}", is_error=True)

    def _look_at_method(self, call: cst.Call, func: cst.Attribute) -> None:
        name = func.attr.value
        if name == "get" and call.args:
            self.look_at_key(call, call.args[0].value)
        of_datasets = _TABLES["methods of datasets"]
        if advice := _TABLES["methods"].get(name):
            self._tell(call, advice, is_error=True)
        elif name in of_datasets and (kind := self.datasets.kind_of(func.value)) is not None:
            works = kind == "shard" and name == "to_torch"
            self._tell(call, of_datasets[name], is_error=not works)

    def _of_report(self, old: cst.Call, new: cst.Call) -> cst.Call:
        """Rewrite a call to `ray.tune.report` from `report(loss=...)` to `report({"loss": ...})`, the current form.

        A call that already has the current form is left unchanged. A call with an unnamed metric is only reported, as
        is every call in a program that uses `DistributedTrainableCreator`.
        """
        if self._is_distributed:
            self._tell(old, ADVICE["distributed"], is_error=True)
            return new
        passed = {name_of(arg) for arg in new.args if not arg.star}
        if passed <= {None, "metrics", "checkpoint"} and not any(arg.star for arg in new.args):
            return new
        if None in passed or any(arg.star == "*" for arg in new.args):
            self._tell(old, ADVICE["metric"], is_error=True)
            return new
        return _with_dict(new)

    def _look_at_keras(self, call: cst.Call) -> None:
        if _is_call_of(call, "opt", "get_weights", "set_weights"):
            self._tell(call, ADVICE["weights"], is_error=True)
        is_function = (helpers.get_full_name_for_node(call.func) or "").endswith("save_model")
        path = call.args[:1] if _is_call_of(call, "model", "save") else call.args[1:2] if is_function else []
        if _is_without_ending(path):
            self._tell(call, ADVICE["save"], is_error=True)


def name_of(arg: cst.Arg) -> str | None:
    """Return the keyword of an argument, or None for a positional or starred argument."""
    return arg.keyword.value if arg.keyword is not None else None


def _named(args: Sequence[cst.Arg], name: str) -> cst.Arg | None:
    return next((arg for arg in args if name_of(arg) == name), None)


def _replaced(
    args: Sequence[cst.Arg],
    old: cst.Arg,
    keyword: str,
    value: cst.BaseExpression,
    without: Collection[cst.Arg | None] = (),
) -> list[cst.Arg]:
    """Return the arguments of a call with another keyword and value in the place of one, and without some others.

    What stays keeps its line and its comments. Comments beside what is left out are not in the result.
    """
    changed = old.with_changes(keyword=cst.Name(keyword), value=value)
    kept = [changed if arg is old else arg for arg in args if arg not in without]
    end = {"comma": args[-1].comma, "whitespace_after_arg": args[-1].whitespace_after_arg}
    return [*kept[:-1], kept[-1].with_changes(**end)]


def _is_call_of(call: cst.Call, owner: str, *methods: str) -> bool:
    """Return True if a call is one of these methods of an object, not of a class, whose name contains `owner`."""
    *_, name, method = ("", "", *(helpers.get_full_name_for_node(call.func) or "").split("."))
    return method in methods and owner in name.lower() and not name[:1].isupper()


def _with_dict(call: cst.Call) -> cst.Call:
    """Return a call with all its keyword arguments in one dict. Line breaks and comments are preserved."""
    elements: list[cst.BaseDictElement] = [
        cst.StarredDictElement(arg.value, comma=arg.comma)
        if arg.keyword is None
        else cst.DictElement(cst.SimpleString(f'"{arg.keyword.value}"'), arg.value, comma=arg.comma)
        for arg in call.args
    ]
    braces = cst.Dict(
        elements,
        lbrace=cst.LeftCurlyBrace(call.whitespace_before_args),
        rbrace=cst.RightCurlyBrace(call.args[-1].whitespace_after_arg),
    )
    return call.with_changes(args=[cst.Arg(braces)], whitespace_before_args=cst.SimpleWhitespace(""))


def _with_entry(config: cst.BaseExpression | None, entry: cst.DictElement) -> cst.Dict:
    """Return the value of a trainer's argument `config` with one more entry.

    Args:
        config: The value in the program. None if the program passes no config.
        entry: The entry to add.
    """
    if config is None or _is_none(config):
        return cst.Dict([entry])
    if isinstance(config, cst.Dict):
        elements = [*config.elements]
        if elements and isinstance(elements[-1].comma, cst.MaybeSentinel):
            elements[-1] = elements[-1].with_changes(comma=_COMMA)
        return config.with_changes(elements=[*elements, entry])
    return cst.Dict([cst.StarredDictElement(config, comma=_COMMA), entry])


def _with_parameters(source: str) -> set[str]:
    """Return the names of the functions in a program that have required parameters.

    Methods, whose first parameter is `self`, are left out.
    """
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    needing = [node for node in functions if len(node.args.args) > len(node.args.defaults)]
    return {node.name for node in needing if node.args.args[0].arg != "self"}


def _keys_of_results(source: str) -> dict[str, str]:
    """Return the keys in results of `train` and `validate` that were renamed, each with its new name.

    Keys that the program also uses for its own values are left out.
    """
    keys = _TABLES["keys of results"].items()
    return {name: now for name, now in keys if not re.search(rf"\b{name}(=|[\"']\s*:)", source)}


def _renamed(arg: cst.Arg, old: str, new: str) -> cst.Arg:
    return arg.with_changes(keyword=cst.Name(new)) if name_of(arg) == old else arg


def _is_none(value: cst.BaseExpression) -> bool:
    return isinstance(value, cst.Name) and value.value == "None"


def _is_without_ending(args: Sequence[cst.Arg]) -> bool:
    """Return True if a path argument is a string literal whose ending Keras 3 does not accept for saved models."""
    path = args[0].value if args else None
    value = path.evaluated_value if isinstance(path, cst.SimpleString) else None
    return isinstance(value, str) and not value.endswith(_ENDINGS)
