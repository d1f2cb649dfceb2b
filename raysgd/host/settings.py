"""`Host`: the name of a host, and how long it waits for somebody."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from raysgd._arguments import checks

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


@dataclass(frozen=True)
class Host:
    """The place of a trainer that outlives its program.

    Args:
        name: The name to attach by. Letters, digits, `.`, `_` and `-`, as in the name of a file.
        keep_alive_s: How long the trainer waits with neither a program attached nor a call running. Then it is saved to
            `folder`, if there is one, and ends. None: for ever.
        folder: Where `<name>.pt` is saved before the trainer ends by itself: a path on the host's node, or a URI.
        replace: Whether a host that has this name already is ended first. Its trainer is not saved.
        resources: Ray's custom resources that the host's node has to have, such as `{"stays": 0.01}`. By default the
            host is on the node of the program, if there is one. It takes no CPU.

    Raises:
        ValueError, TypeError: A value cannot work.
    """

    name: str
    keep_alive_s: float | None = 3600.0
    folder: str | Path | None = None
    replace: bool = False
    resources: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not _NAME.fullmatch(self.name):
            raise ValueError(
                f"`host={self.name!r}`: need a name of letters, digits, `.`, `_` and `-` that begins with a letter or "
                'a digit, such as "run-7".'
            )
        checks.refuse_text(replace=self.replace)
        if self.keep_alive_s is not None:
            checks.check_seconds("keep_alive_s", self.keep_alive_s, may_be_least=False)

    @classmethod
    def of(cls, host: str | Host) -> Host:
        """Return the settings that a user passed as `host`: a name, or all of them."""
        return host if isinstance(host, Host) else cls(host)
