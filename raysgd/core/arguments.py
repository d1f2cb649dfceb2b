"""Checks the arguments that users pass to trainers, so that mistakes raise an error before any worker starts.

This module also parses the command-line arguments of the example programs.
"""

from __future__ import annotations

import copy
import difflib
import inspect
import logging
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import fields
from functools import wraps
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, TypeVar

from raysgd.core.synonyms import FUNCTION, METHOD, OPERATOR, PLACES, instead_of
from raysgd.core.text.secrets import masked
from raysgd.exceptions import InvalidCountError

if TYPE_CHECKING:
    import argparse

logger = logging.getLogger(__name__)

MethodT = TypeVar("MethodT", bound=Callable[..., Any])

MAX_WORKERS = 10_000
"""Largest accepted number of workers. A larger number is a mistake, such as a batch size in the wrong argument."""

MIN_HEARTBEAT_S = 0.1
"""Smallest accepted `heartbeat_s`. A live process may be silent for this long, for example in garbage collection."""

_MAX_SECONDS = 10**9
"""Largest accepted duration, about 30 years. Clocks and timeouts of operating systems cannot represent much more."""

_PART_OF_NODE = 0.001  # each node has one `accelerator_type:...` resource, which all its workers share


def is_integer(value: Any) -> bool:
    """Return True for a Python or NumPy integer, but not for a bool.

    Hyperparameter search libraries often pass NumPy integers.
    """
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_saved_count(value: Any) -> bool:
    """Return True for a value in a file that can be a count: a non-negative integer that is not too large."""
    return is_integer(value) and 0 <= value < 2**53


def check_count(name: str, value: Any, hint: str) -> int:
    """Return `value` as a Python `int` if it is a positive integer. Otherwise raise an error that ends with `hint`."""
    if not is_integer(value) or value <= 0:
        raise InvalidCountError(f"`{name}={masked(value)!r}`: need an integer of at least 1. {hint}")
    return int(value)


def check_num_workers(name: str, value: Any, hint: str, least: int = 1) -> int:
    """Return a valid number of workers as a Python `int`.

    Args:
        name: Name of the argument.
        value: The argument's value.
        hint: Advice to append to the error message.
        least: Lower bound.

    Raises:
        InvalidCountError: `value` is not an integer, or is too small or too large.
    """
    if not is_integer(value) or not least <= value <= MAX_WORKERS:
        raise InvalidCountError(f"`{name}={masked(value)!r}`: need an integer from {least} to {MAX_WORKERS}. {hint}")
    return int(value)


def is_number(value: Any) -> bool:
    """Return True for a finite real number of Python or NumPy, but not for a bool."""
    try:
        return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # an integer that is too large for a float
        return False


def check_seconds(name: str, value: Any, least: float = 0.0, *, may_be_least: bool = True) -> float:
    """Return a valid duration in seconds as a Python `int` or `float`. Raise an error for any other value.

    Args:
        name: Name of the argument.
        value: The argument's value.
        least: Lower bound.
        may_be_least: True to accept `least` itself.
    """
    is_long_enough = is_number(value) and (value >= least if may_be_least else value > least)
    if not is_long_enough or value > _MAX_SECONDS:
        limit = f"{least:g} or more" if may_be_least else f"more than {least:g}"
        raise ValueError(f"`{name}={masked(value)!r}`: need a number of seconds, {limit} and at most {_MAX_SECONDS}.")
    return value if isinstance(value, int | float) else float(value)


def integer_from_environment(name: str, default: int, unit: str = "") -> int:
    """Return the integer in an environment variable, or `default` if the variable is not set.

    Raises:
        ValueError: The variable's value is not an integer.
    """
    text = os.environ.get(name, str(default))
    try:
        return int(text)
    except ValueError:
        raise ValueError(
            f"environment variable `{name}={text}`: need a whole number{unit}. Unset it for the default, {default}."
        ) from None


def check_auto_seconds(name: str, value: Any, none_means: str) -> None:
    """Raise an error unless the value is "auto", None or a number of seconds.

    Args:
        name: Name of the argument.
        value: The argument's value.
        none_means: Meaning of None, for the error message.
    """
    if isinstance(value, str) and value != "auto":
        raise ValueError(
            f'`{name}={masked(value)!r}`: allowed are "auto", a number of seconds, and None for {none_means}.'
            f"{did_you_mean(value, ('auto',))}"
        )
    if value is not None and value != "auto":
        check_seconds(name, value)


def check_seed(value: Any) -> None:
    """Raise an error unless the value is a valid random seed, an integer from 0 to 2**31 - 1."""
    if not is_integer(value) or not 0 <= value < 2**31:
        raise ValueError(f"`seed={masked(value)!r}`: need an integer from 0 to {2**31 - 1}, or None.")


def check_amount(name: str, value: Any) -> None:
    """Raise an error unless the value is a valid amount of a resource: a finite number, 0 or more."""
    if not is_number(value) or value < 0:
        raise ValueError(f"`{name}={masked(value)!r}`: need a number, 0 or more, and not infinite.")


def refuse_text(**switches: Any) -> None:
    """Raise an error if any option in `switches` is a string. Any non-empty string, even "no", would count as True."""
    for name, value in switches.items():
        if isinstance(value, str | bytes):
            raise ValueError(f"`{name}={masked(value)!r}`: need True or False; any string would count as True.")


def check_switch(name: str, value: Any, *others: Any) -> None:
    """Raise an error unless the option's value is True, False or one of `others`."""
    if not isinstance(value, bool) and value not in others:
        allowed = ", ".join(['"auto"' if other == "auto" else repr(other) for other in others] + ["True and False"])
        raise ValueError(f"`{name}={masked(value)!r}`: allowed are {allowed}.")


def check_kind(name: str, value: Any, kind: Any, needed: str | None = None) -> None:
    """Raise an error unless the argument's value is an instance of `kind`.

    Args:
        name: Name of the argument.
        value: The value of the argument.
        kind: A class, or a union of classes.
        needed: Description of `kind` for the error. None if `kind` is one of raysgd's public classes.
    """
    if not isinstance(value, kind):
        raise TypeError(f"`{name}={masked(value)!r}`: need {needed or f'a `raysgd.{kind.__name__}`'}.")


def check_operator_class(operator_cls: Any, base: type[Any], shown: str) -> None:
    """Raise an error unless the value is an operator class that workers can instantiate.

    Also log a warning for each public method that raysgd never calls, if its name looks like a misspelled method of the
    base class or like a callback's method, or is another library's name for a method of the base class.

    Args:
        operator_cls: Value of the user's argument `training_operator_cls`.
        base: Class that the operator class must subclass.
        shown: Name of the base class in error messages.

    Raises:
        TypeError: The value is not an operator class, or its `__init__` does not accept the arguments that workers
            pass.
    """
    if not (isinstance(operator_cls, type) and issubclass(operator_cls, base)):
        is_object = isinstance(operator_cls, base)
        what = f"an instance of `{type(operator_cls).__name__}`" if is_object else repr(operator_cls)
        kind = operator_cls if isinstance(operator_cls, type) else type(operator_cls)
        ways = [way for each in _bases_of(kind) if (way := instead_of(each, OPERATOR))]
        way = f" {ways[0].format(name=kind.__name__)}" if ways else ""
        raise TypeError(f"`training_operator_cls` is {what}: need a subclass of `{shown}`, the class itself.{way}")
    name = operator_cls.__name__
    try:
        inspect.signature(operator_cls).bind(config={}, context=None)
    except TypeError:
        raise TypeError(
            f"`{name}.__init__{inspect.signature(operator_cls)}` does not accept the arguments that workers "
            f"pass, `config` and `context`. Rename it to `setup(self, config)`, and pass values as `config={{...}}` to "
            "the trainer."
        ) from None
    rungs = [rung for rung in dir(base) if not rung.startswith("_") and callable(getattr(base, rung))]
    own = {rung for rung in rungs if getattr(operator_cls, rung) is not getattr(base, rung)}
    for method in _own_methods(operator_cls, base):
        if re.fullmatch(r"on_\w+_(begin|start|end)", method) and "train_epoch" not in own:
            advice = "callbacks have such methods: `trainer.fit(5, callbacks=[...])`"
        else:
            meant = instead_of(method, METHOD)
            near = [meant] if meant else difflib.get_close_matches(method, rungs, 1, cutoff=0.85)
            loops = {"train_batch": "train_epoch", "validate_batch": "validate"}
            if not near or own & {near[0], loops.get(near[0], "")}:
                # Either no method of the base class has a similar name, or the operator overrides the similar method or
                # the loop that calls it. Such an override may call `method`, so do not warn.
                continue
            advice = f"did you mean `{near[0]}`?"
        logger.warning("the library never calls `%s.%s`: %s", name, method, advice)


def _own_methods(operator_cls: type[Any], base: type[Any]) -> list[str]:
    """Return the names of public methods that the user's classes define and the base class lacks."""
    own = [each for each in operator_cls.__mro__ if not each.__module__.startswith(("raysgd.", "builtins"))]
    names = dict.fromkeys(name for each in own for name, value in vars(each).items() if inspect.isroutine(value))
    return [name for name in names if not name.startswith("_") and not hasattr(base, name)]


def check_config(config: Any) -> dict[str, Any]:
    """Return a copy of the user's config, made by `with_entries`. Return an empty dict for None.

    Raises:
        TypeError: The config is not a dict.
    """
    what = "a dict, which the operator's `setup` or the creator functions get"
    check_kind("config", config, Mapping | None, what)
    return {} if config is None else with_entries(config)


def with_entries(config: Mapping[str, Any], changes: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return a shallow copy of a config with changed entries.

    If the config is mutable, the copy has the same class. For example, the entries of a copied OmegaConf `DictConfig`
    can still be read as attributes. A read-only mapping is copied to a dict.
    """
    copied: Any = copy.copy(config) if isinstance(config, MutableMapping) else dict(config)
    for name, value in (changes or {}).items():
        copied[name] = value
    return copied


def _bases_of(kind: type[Any]) -> list[str]:
    """Return the package and name, such as `torch.Module`, of a class and of each of its base classes."""
    return [f"{each.__module__.partition('.')[0]}.{each.__name__}" for each in kind.__mro__]


def check_hook(hook: Any) -> None:
    """Raise an error unless the `initialization_hook` is None or a function that can be called without arguments."""
    if hook is None:
        return
    check_kind("initialization_hook", hook, Callable, "a function without parameters")
    if not takes(hook):
        name = getattr(hook, "__name__", repr(hook))
        line = f"def {name}():" if name.isidentifier() else "def hook():"
        raise TypeError(f"`initialization_hook={name}`: each worker calls the hook without arguments. Write `{line}`.")


def takes(function: Callable[..., Any], *arguments: Any) -> bool:
    """Return True if the function can be called with these arguments, or if its signature is unknown."""
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError:
        return False
    except ValueError:
        return True
    return True


_NO_FUNCTIONS = ("torch.Module", "keras.Layer", "tf_keras.Layer")
"""Package and name of classes whose instances are callable, but not creator functions."""


def check_creator(name: str, creator: Any, *parameters: str) -> None:
    """Raise an error unless the user passed a function that each worker can call to create its own object.

    Args:
        name: Name of the argument.
        creator: The argument's value.
        parameters: Names of the arguments that workers pass to the function.

    Raises:
        ValueError: `creator` is not a function with these parameters.
    """
    is_class = isinstance(creator, type)
    kind = creator if is_class else type(creator)
    is_object = not callable(creator) or (not is_class and any(base in _NO_FUNCTIONS for base in _bases_of(kind)))
    taken = ", ".join(parameters)
    is_plain = isinstance(creator, int | float | str | bytes | None)
    made = f"return {kind.__name__}(...)" if is_class or (is_object and not is_plain) else "..."
    lines = f"Write:\n    def {name}({taken}):\n        {made}"
    if is_object:
        what = f"`{name}={masked(creator)!r}`" if is_plain else f"`{name}` is an object of `{kind.__name__}`"
        raise ValueError(f"{what}: need a function of `{taken}`, because each worker makes its own. {lines}")
    is_optimizer = is_class and kind.__module__.startswith("torch.optim")
    if is_optimizer or not takes(creator, *parameters):
        what = f"the class `{kind.__name__}`" if is_class else f"`{getattr(creator, '__name__', creator)}`"
        raise ValueError(f"`{name}` is {what}, which does not accept what workers pass: `{taken}`. {lines}")


def check_num_steps(num_steps: Any) -> int | None:
    """Return a call's `num_steps` as a Python `int`, or None if it is None.

    Raises:
        InvalidCountError: `num_steps` is neither None nor an integer of at least 0.
    """
    if num_steps is None:
        return None
    if not is_integer(num_steps) or num_steps < 0:
        raise InvalidCountError(
            f"`num_steps={num_steps!r}`: need the number of batches per worker, 0 or more, or None for one pass."
        )
    return int(num_steps)


def check_info(info: Any) -> dict[str, Any]:
    """Return a copy of the `info` dict that the user passed to a call. Return an empty dict for None.

    Raises:
        TypeError: `info` is neither None nor a dict.
    """
    check_kind("info", info, Mapping | None, "a dict; the operator gets its entries with each batch")
    return dict(info or {})


def refuse_unknown(trainer: str, unknown: Iterable[str], known: Iterable[str], **objects: type[Any]) -> None:
    """Raise an error for the first keyword argument that a trainer class does not accept, if there is one.

    The message says where the keyword belongs or what was probably meant.

    Args:
        trainer: Name of the trainer class that the user called.
        unknown: Keywords in the user's call that the class does not accept.
        known: Keywords that the class accepts.
        **objects: Keywords whose value is an options object, such as `scaling_config`, each with that object's class.
    """
    place = trainer if "training_operator_cls" in known else FUNCTION
    for name in unknown:
        for option, kind in objects.items():
            if name in [field.name for field in fields(kind)]:
                raise TypeError(f"`{trainer}` takes `{name}` as `{option}={kind.__name__}({name}=...)`.")
        line = instead_of(name, place)
        if line is not None:
            raise TypeError(f"`{trainer}` does not know `{name}`: {line}.")
        raise TypeError(f"`{trainer}` does not know `{name}`.{did_you_mean(name, known)}")


def answer_mistakes(line: str, *, unnamed: str = "", shown: str = "") -> Callable[[MethodT], MethodT]:
    """Return a decorator for methods. A call with unknown arguments then raises an error with advice on what to write.

    Args:
        line: Advice for calls for which there is no more specific advice. It follows the word "write" in the message.
        unnamed: Warning to log once if the first argument is passed by position. `%(given)s` stands for its value.
        shown: Name of the method in error messages. Default: its actual name.
    """

    def decorate(method: MethodT) -> MethodT:
        parameters = list(inspect.signature(method).parameters.values())[1:]
        names = {parameter.name for parameter in parameters}
        num_unnamed = len([each for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD])
        said: list[str] = []

        @wraps(method)
        def answering(self: Any, *args: Any, **kwargs: Any) -> Any:
            unknown = [name for name in kwargs if name not in names]
            if unknown or len(args) > num_unnamed:
                listed = ", ".join(f"`{name}`" for name in unknown)
                what = f"does not know {listed}" if unknown else f"got {len(args)} arguments without names"
                raise TypeError(f"`{shown or method.__name__}` {what}: {_line_for(self, unknown) or f'write {line}'}.")
            if unnamed and args and args[0] is not None and not said:
                said.append(unnamed)
                logger.warning(unnamed, {"given": args[0]})
            return method(self, *args, **kwargs)

        return answering  # type: ignore[return-value]

    return decorate


def _line_for(owner: Any, unknown: Sequence[str]) -> str | None:
    """Return advice on what to write instead of a method's first unknown keyword. Return None if there is no advice.

    The advice completes a sentence in an error message.

    Args:
        owner: Object whose method the user called.
        unknown: Keywords in the user's call that the method does not accept.
    """
    places = [each for each in type(owner).__mro__ if each.__name__ in PLACES]
    if not unknown or not places:
        return None
    place, name = places[0], unknown[0]
    if name in inspect.signature(place).parameters:
        return f"pass it to `{place.__name__}({name}=...)`"
    return instead_of(name, place.__name__)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a question that suggests the most similar known name, to append to an error message.

    Return an empty string if no known name is similar.

    >>> did_you_mean("val_los", ["val_loss", "epoch"])
    ' Did you mean `val_loss`?'
    """
    close = difflib.get_close_matches(name, [*known], n=1)
    return f" Did you mean `{close[0]}`?" if close else ""


def check_max_retries(max_retries: Any) -> None:
    """Raise an error unless `max_retries` is an integer of at least 0."""
    if not is_integer(max_retries) or max_retries < 0:
        raise InvalidCountError(f"`max_retries={max_retries!r}`: need 0 (fail at the first loss of a worker) or more.")


def warn_of_obstacle(obstacle: str | None, **options: Any) -> None:
    """Log a warning about options that have no effect inside an epoch that cannot be resumed in the middle.

    Args:
        obstacle: Why the epoch cannot be resumed in the middle. None if it can be resumed: nothing is then logged.
        **options: The values of these options, by name. None for an option that the user did not set.
    """
    named = ", ".join(f"`{name}={masked(value)!r}`" for name, value in options.items() if value is not None)
    if obstacle is not None and named:
        logger.warning(
            "%s: no effect inside an epoch, because %s. After a failure, the call restarts from its beginning, and "
            "the group grows only with the next call. Shorter calls (`num_steps`) lose less progress",
            named,
            obstacle,
        )


def accelerator(kind: Any) -> dict[str, float]:
    """Return the resource request that makes Ray place a worker on a node with a GPU of type `kind`.

    Return an empty dict for None.

    >>> accelerator("A100"), accelerator(None)
    ({'accelerator_type:A100': 0.001}, {})

    Raises:
        TypeError: `kind` is neither None nor a non-empty string.
    """
    if kind is None:
        return {}
    if not isinstance(kind, str) or not kind:
        raise TypeError(f'`accelerator_type={kind!r}`: need the name that Ray has for it, such as "A100", or None.')
    return {f"accelerator_type:{kind}": _PART_OF_NODE}


def check_runtime_env(name: str, value: Any) -> None:
    """Raise an error unless the argument's value is None or a dict, as Ray requires for a runtime environment.

    Raises:
        TypeError: `value` is neither None nor a dict.
    """
    what = 'a dict as Ray accepts it, such as `{"env_vars": {"NAME": "value"}}`, or None'
    check_kind(name, value, Mapping | None, what)


def parse_arguments(description: str | None) -> argparse.Namespace:
    """Parse the options `--num-workers`, `--use-gpu`, `--smoke-test` and `--address`.

    With `--address`, also connect to that Ray cluster.
    """
    import argparse

    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=description, formatter_class=formatter)
    parser.add_argument("--num-workers", type=int, default=1, help="processes that train together (default: 1)")
    parser.add_argument("--use-gpu", action="store_true", help="give each worker a GPU")
    parser.add_argument("--smoke-test", action="store_true", help="train briefly on made-up data")
    parser.add_argument("--address", help="a running Ray cluster, for example `auto` (default: start one)")
    args = parser.parse_args()
    if args.address is not None:
        import ray

        ray.init(address=args.address)
    return args
