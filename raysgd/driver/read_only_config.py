"""The config of a trainer, to look at."""

from __future__ import annotations

from typing import Any, NoReturn

from raysgd._text.secrets import masked


class ReadOnlyConfig(dict[str, Any]):
    """A copy of a config, as `trainer.config` returns it, which refuses changes. Change `dict(config)` instead."""

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
