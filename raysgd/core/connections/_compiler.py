"""Defers the import of PyTorch's compiler, `torch._dynamo`, until something needs it.

That import takes nearly as long as the import of PyTorch itself. Even programs that compile nothing trigger it, because
the first optimizer, `DistributedDataParallel` and process groups access attributes of the compiler that matter only in
compiled code. A stand-in, a module object registered as `torch._dynamo`, provides these attributes. Accessing any other
attribute imports the real module, which replaces the stand-in for good.

`torch._dynamo` is private to PyTorch. If another version accesses an attribute that the stand-in lacks, the real module
is imported: no time is saved, but nothing breaks. `RAYSGD_EAGER_COMPILER=1` turns the stand-in off.
docs/adr/0008-lazy-ray-and-frameworks.md says how much time this saves, and what would make the stand-in unnecessary.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
import os
import sys
import threading
import weakref
from collections.abc import Mapping
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import FunctionType, ModuleType
from typing import Any

from raysgd.exceptions import OnFailure

logger = logging.getLogger(__name__)

SWITCH = "RAYSGD_EAGER_COMPILER"
"""The environment variable that disables the stand-in for PyTorch's compiler."""

_NAME = "torch._dynamo"
# PyTorch caches the result of `torch._dynamo.disable(function)` in this attribute of the function.
_KEPT = "__dynamo_disable"


def defer_compiler() -> None:
    """Register a stand-in for PyTorch's compiler, so that importing PyTorch does not import the real compiler.

    Do nothing if the compiler is already imported or is missing, or if the user turned the stand-in off. Also do
    nothing if Python does not show whether a module is still being imported. Log at debug level whether the stand-in
    was registered.
    """
    import torch

    switch = os.environ.get(SWITCH, "")
    obstacle = "" if switch in ("", "0") else f"{SWITCH}={switch}"
    spec = importlib.util.find_spec(_NAME) if not obstacle and _NAME not in sys.modules else None
    if spec is None or not hasattr(torch.__spec__, "_initializing"):
        reason = obstacle or "it is imported already, or not there, or it cannot be seen when its import ends"
        logger.debug("the import of PyTorch's compiler is left to PyTorch %s: %s", torch.__version__, reason)
        return
    deferred = _DeferredImport(spec)
    sys.modules[_NAME] = torch._dynamo = deferred.stand_in
    sys.meta_path.insert(0, deferred)
    logger.debug("the import of PyTorch's compiler is deferred until something needs it (%s=1 turns this off)", SWITCH)


class _DeferredImport(MetaPathFinder, Loader):
    """Import hook for PyTorch's compiler, `torch._dynamo`. It imports the real compiler when something needs it.

    A submodule of the compiler is imported after the compiler itself.

    Attributes:
        module: The compiler's real module, or None until it is imported.
    """

    def __init__(self, spec: ModuleSpec) -> None:
        self.module: ModuleType | None = None
        self.stand_in = _StandIn(spec, self)
        self._disabled: weakref.WeakSet[Any] = weakref.WeakSet()
        # The real specs and loaders of submodules that are being imported. They are stored here, because Python
        # replaces each module's spec with the result of `find_spec` during the import.
        self._parts: dict[str, tuple[ModuleSpec, Loader | None]] = {}
        # Released during the import of the compiler, because the import takes Python's import locks.
        self._lock = threading.Lock()

    def real(self) -> ModuleType:
        """Return the compiler's real module. Import it first if necessary."""
        if self.module is None:
            self._put(None)
            with OnFailure(functools.partial(self._put, self.stand_in)):
                module = importlib.import_module(_NAME)
            # The compiler accesses itself during its own import. Return the incomplete module, and keep the stand-in.
            if module.__spec__ and module.__spec__._initializing:  # type: ignore[attr-defined]
                return module
            self._take(module)
        assert self.module is not None
        return self.module

    def _put(self, stand_in: ModuleType | None) -> None:
        import torch

        with self._lock:
            if stand_in is not None:
                sys.modules[_NAME] = torch._dynamo = stand_in
            elif sys.modules.get(_NAME) is self.stand_in:
                del sys.modules[_NAME], torch._dynamo

    def _take(self, module: ModuleType) -> None:
        with self._lock:
            if self.module is None:
                self.module = module
                self.stand_in._stop_answering()
                sys.meta_path.remove(self)
                for function in list(self._disabled):
                    function.renew(module)

    def disable(self, fn: Any = None, *args: Any, **options: Any) -> Any:
        """Return a wrapper of `fn` that `torch.compile` does not trace into, like `torch._dynamo.disable`.

        Until the compiler is imported, the wrapper calls `fn`. Afterwards, it calls the result of the real `disable`.
        If `fn` is not a Python function, import the compiler immediately and return the result of the real `disable`.
        """
        if not isinstance(fn, FunctionType):
            return self.real().disable(fn, *args, **options)
        target = [fn]

        @functools.wraps(fn)
        def call(*given: Any, **named: Any) -> Any:
            return target[0](*given, **named)

        def renew(module: ModuleType) -> None:
            target[0] = module.disable(fn, *args, **options)
            if getattr(fn, _KEPT, None) is call:
                setattr(fn, _KEPT, target[0])

        vars(call)["renew"] = renew
        self._disabled.add(call)
        return call

    # ------------------------------------------------------------------------------------ modules inside the compiler

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        """Return a spec for a submodule of the compiler, so that Python calls this hook to load the submodule.

        The real spec is looked up only during loading. Python holds an import lock during `find_spec`, so the compiler
        must not be imported here.
        """
        if not fullname.startswith(f"{_NAME}.") or sys.modules.get(_NAME) is not self.stand_in:
            return None
        return ModuleSpec(fullname, self)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Import the compiler and return its submodule.

        If importing the compiler has already loaded the submodule, return the loaded module. Otherwise, create the
        submodule from its real spec.
        """
        real = self.real()
        module = sys.modules.get(spec.name)
        if module is not None:
            self._parts[spec.name] = vars(module)["__spec__"], None
            return module
        own = PathFinder.find_spec(spec.name, real.__path__)
        if own is None:
            raise ModuleNotFoundError(f"No module named {spec.name!r}", name=spec.name)
        self._parts[spec.name] = own, own.loader
        return importlib.util.module_from_spec(own)

    def exec_module(self, module: ModuleType) -> None:
        own, loader = self._parts.pop(vars(module)["__name__"])
        vars(module)["__spec__"] = own  # replaces the spec from `find_spec`, which Python has just set
        if loader is not None:
            loader.exec_module(module)


class _StandIn(ModuleType):
    """Stand-in for the module `torch._dynamo`. Accessing any attribute that it lacks imports the real module."""

    def __init__(self, spec: ModuleSpec, deferred: _DeferredImport) -> None:
        # This must come first: in Python 3.10, attributes cannot be set before a module object is initialized.
        super().__init__(_NAME)
        answers = {
            "graph_break": _do_nothing,
            "disable": deferred.disable,
            "utils": _CompilerStandIn(deferred, "utils", {"get_optimize_ddp_mode": lambda: "ddp_optimizer"}),
            "trace_rules": _CompilerStandIn(deferred, "trace_rules", {"clear_lru_cache": _do_nothing}),
        }
        vars(self).update(
            # Plain attributes are faster than `__getattr__`. PyTorch reads some of them in each training step.
            answers,
            __name__=_NAME,
            __package__=_NAME,
            __spec__=spec,
            __loader__=spec.loader,
            __file__=spec.origin,
            __path__=spec.submodule_search_locations,
            _deferred=deferred,
            _answers=answers,
        )

    def _stop_answering(self) -> None:
        for name in self._answers:
            vars(self).pop(name, None)

    def __getattr__(self, name: str) -> Any:
        # Code that scans all modules reads names that begin with "__". This must not import the compiler.
        if self._deferred.module is None and name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._deferred.real(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._deferred.real(), name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._deferred.real(), name)

    def __dir__(self) -> list[str]:
        return dir(self._deferred.real())

    def __reduce__(self) -> tuple[Any, ...]:
        return importlib.import_module, (_NAME,)


class _CompilerStandIn:
    """Stand-in for a submodule of the compiler. Accessing any attribute that it lacks imports the real submodule."""

    def __init__(self, deferred: _DeferredImport, name: str, answers: Mapping[str, Any]) -> None:
        vars(self).update(_deferred=deferred, _name=name, _answers=answers)

    def __getattr__(self, name: str) -> Any:
        if self._deferred.module is None and name in self._answers:
            return self._answers[name]
        return getattr(self._real(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._real(), name, value)

    def _real(self) -> Any:
        return getattr(self._deferred.real(), self._name)


def _do_nothing(*args: Any, **options: Any) -> None:
    """Do nothing, as the compiler's real functions do when no compiled code is running."""
