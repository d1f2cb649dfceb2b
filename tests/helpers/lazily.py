"""Modules that are imported once a test uses them, so that whoever only collects tests need not wait for them."""

from __future__ import annotations

import importlib
from functools import reduce
from typing import Any


class imported:
    """Stands for a module, or for something in it.

    Args:
        module: Its name.
        names: What to take out of it, from the outside in.
    """

    def __init__(self, module: str, *names: str) -> None:
        self._path = (module, *names)

    def __getattr__(self, name: str) -> Any:
        if name.startswith(("__", "_mock_")):  # pytest asks all that a test module has for these, before any test
            raise AttributeError(name)
        module, *names = self._path
        return getattr(reduce(getattr, names, importlib.import_module(module)), name)
