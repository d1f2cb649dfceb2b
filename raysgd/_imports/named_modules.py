"""Modules with a class of their own, such as `torch.backends.cudnn`, in what is pickled."""

from __future__ import annotations

import copyreg
import importlib
import sys
from collections.abc import Callable
from types import ModuleType


def pickle_modules_by_name() -> None:
    """Lets pickle take such modules by their names, as it takes others.

    A function or a class of a script is pickled with all modules that it uses, or may use: cloudpickle takes
    `self.config` for a use of `torch.distributed.config` where `torch.distributed` is used beside it.
    """
    own = {type(module) for module in list(sys.modules.values()) if isinstance(module, ModuleType)} - {ModuleType}
    for kind in own - copyreg.dispatch_table.keys():
        if kind.__reduce_ex__ is object.__reduce_ex__ and kind.__reduce__ is object.__reduce__:
            copyreg.pickle(kind, _by_name)


def _by_name(module: ModuleType) -> tuple[Callable[[str], ModuleType], tuple[str]]:
    if sys.modules.get(module.__name__) is not module:
        raise TypeError(f"cannot pickle '{type(module).__name__}' object, which no import finds")
    return importlib.import_module, (module.__name__,)
