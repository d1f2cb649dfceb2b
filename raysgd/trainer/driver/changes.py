"""Changes of the config and the operator class in running workers: what can be changed, and how it is sent."""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

from raysgd.core import arguments as checks
from raysgd.core.config_keys import BATCH_SIZE
from raysgd.core.sending import is_sendable
from raysgd.core.text.secrets import masked
from raysgd.exceptions import UnpicklableError


class ReadOnlyConfig(dict[str, Any]):
    """Read-only copy of a config, returned by `trainer.config`. `dict(config)` returns a copy that you can change."""

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError(
            "`trainer.config` is a copy, so a change to it would not reach the workers. Begin again with the new "
            "config: `trainer.reset_config(config)`; or change the running operators, and anything that they computed "
            "from it: `trainer.apply_all_operators(lambda operator: operator.config.update(lr=0.1))`."
        )

    __setitem__ = __delitem__ = __ior__ = clear = pop = popitem = setdefault = update = _refuse

    def __repr__(self) -> str:
        return repr(masked(dict(self)))

    def __reduce__(self) -> tuple[Any, ...]:
        return ReadOnlyConfig, (dict(self),)


def refuse_changes(config: Mapping[str, Any], names: Collection[str]) -> None:
    """Check that entries of the config can be changed in running operators.

    Args:
        config: The trainer's config.
        names: The names of the entries to change.

    Raises:
        ValueError: The config has no such entry, or the entry is `BATCH_SIZE`, from which `setup` created the loaders.
    """
    for name in names:
        if name == BATCH_SIZE:
            raise ValueError(
                f"`update_config({name}=...)`: loaders are made with it. Use `reset_config`, or load the state "
                "into a new trainer."
            )
        if name not in config:
            guess = checks.did_you_mean(name, map(str, config))
            raise ValueError(
                f"`update_config({name}=...)`: the config has no `{name}`.{guess} "
                f"It has {', '.join(f'`{each}`' for each in config) or 'no entries'}."
            )


@contextmanager
def naming_config_entries(config: Mapping[str, Any]) -> Iterator[None]:
    """If the block raises an error because a config entry cannot be pickled, add the entry's name to the error."""
    try:
        yield
    except UnpicklableError as error:
        names = [name for name, value in config.items() if not is_sendable(value)]
        raise (UnpicklableError(f"`config[{names[0]!r}]`: {error}") if names else error) from error.__cause__


def send_by_value(operator_cls: type[Any]) -> None:
    """Make pickle send the operator class itself to the workers, instead of only the names of its module and class.

    The workers may have imported an older version of the module, before the user edited it. Classes of raysgd and
    of installed packages are still sent by name.
    """
    module = sys.modules.get(operator_cls.__module__)
    path = getattr(module, "__file__", None)
    if module is None or path is None or module.__name__.partition(".")[0] in ("__main__", "raysgd"):
        return
    if not path.startswith(tuple(sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib"))):
        import ray.cloudpickle

        ray.cloudpickle.register_pickle_by_value(module)
