"""Puts off the import of PyTorch's compiler, `torch._dynamo`, until something needs it.

It takes nearly as long as that of PyTorch itself. Programs that compile nothing import it all the same: the first
optimizer, `DistributedDataParallel` and process groups ask it for things that mean nothing outside of compiled code. A
module that stands in for it answers those. Whatever else it is asked, it imports the real one, which takes its place
from then on, as if nobody had needed it before.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import FunctionType, ModuleType
from typing import Any

_NAME = "torch._dynamo"
_KEPT = "__dynamo_disable"  # where PyTorch keeps what `disable` made of one of its own functions


def put_off_compiler() -> None:
    """Lets the compiler be imported when it is needed; does nothing where it was imported already."""
    import torch

    spec = None if _NAME in sys.modules else importlib.util.find_spec(_NAME)
    if spec is None:
        return
    putting_off = _PuttingOff(spec)
    sys.modules[_NAME] = torch._dynamo = putting_off.stand_in
    sys.meta_path.insert(0, putting_off.finder)


class _PuttingOff:
    """The import that was put off.

    Args:
        spec: Of the real module.

    Attributes:
        module: The real module, once it was imported.
    """

    def __init__(self, spec: ModuleSpec) -> None:
        self.module: ModuleType | None = None
        self.stand_in = _StandIn(spec, self)
        self.finder = _FinderOfParts(self)
        self._disabled: weakref.WeakSet[_Disabled] = weakref.WeakSet()
        self._lock = threading.Lock()  # not held over the import, which has locks of its own

    def end(self) -> ModuleType:
        """The real module."""
        if self.module is None:
            self._put(None)
            try:
                module = importlib.import_module(_NAME)
            except BaseException:
                self._put(self.stand_in)
                raise
            if getattr(module.__spec__, "_initializing", False):  # its own import has led here
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
                sys.meta_path.remove(self.finder)
                for function in list(self._disabled):
                    function.renew(module)

    def disable(self, fn: Any = None, *args: Any, **options: Any) -> Any:
        """What `torch._dynamo.disable` makes of a function: one that compiled code does not enter."""
        if not isinstance(fn, FunctionType):
            return self.end().disable(fn, *args, **options)
        function = _Disabled(fn, args, options)
        self._disabled.add(function)
        return function.call


class _Disabled:
    """A function that compiled code would not enter, from before there could be any.

    Args:
        fn: The function.
        args: What else `disable` was given.
        options: The same, by name.
    """

    def __init__(self, fn: Callable[..., Any], args: Sequence[Any], options: Mapping[str, Any]) -> None:
        self._fn, self._args, self._options = fn, args, options
        self._target = fn

    @functools.cached_property
    def call(self) -> Any:
        """Goes on to whatever it is by then."""

        @functools.wraps(self._fn)
        def call(*args: Any, **kwargs: Any) -> Any:
            return self._target(*args, **kwargs)

        return call

    def renew(self, module: ModuleType) -> None:
        """Goes on to what the real module makes of it."""
        self._target = module.disable(self._fn, *self._args, **self._options)
        if getattr(self._fn, _KEPT, None) is self.call:
            setattr(self._fn, _KEPT, self._target)


class _StandIn(ModuleType):
    """Answers in place of the real module.

    Args:
        spec: Of the real one.
        putting_off: The import that was put off.
    """

    def __init__(self, spec: ModuleSpec, putting_off: _PuttingOff) -> None:
        vars(self).update(
            __name__=_NAME,
            __package__=_NAME,
            __spec__=spec,
            __loader__=spec.loader,
            __file__=spec.origin,
            __path__=spec.submodule_search_locations,
            _putting_off=putting_off,
            _answers={
                "graph_break": _do_nothing,
                "disable": putting_off.disable,
                "utils": _Part(putting_off, "utils", {"get_optimize_ddp_mode": lambda: "ddp_optimizer"}),
                "trace_rules": _Part(putting_off, "trace_rules", {"clear_lru_cache": _do_nothing}),
            },
        )

    def __getattr__(self, name: str) -> Any:
        putting_off = self._putting_off
        if putting_off.module is None:
            if name in self._answers:
                return self._answers[name]
            if name.startswith("__"):  # whoever looks through all modules
                raise AttributeError(name)
        return getattr(putting_off.end(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._putting_off.end(), name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._putting_off.end(), name)

    def __dir__(self) -> list[str]:
        return dir(self._putting_off.end())

    def __reduce__(self) -> tuple[Any, ...]:
        return importlib.import_module, (_NAME,)


class _Part:
    """Answers in place of a module inside the compiler.

    Args:
        putting_off: The import that was put off.
        name: The name of the module.
        answers: What is known without it.
    """

    def __init__(self, putting_off: _PuttingOff, name: str, answers: Mapping[str, Any]) -> None:
        vars(self).update(_putting_off=putting_off, _name=name, _answers=answers)

    def __getattr__(self, name: str) -> Any:
        if self._putting_off.module is None and name in self._answers:
            return self._answers[name]
        return getattr(self._real(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._real(), name, value)

    def _real(self) -> Any:
        return getattr(self._putting_off.end(), self._name)


class _FinderOfParts(MetaPathFinder):
    """Whoever imports a module inside the compiler imports the compiler first, as always.

    Args:
        putting_off: The import that was put off.
    """

    def __init__(self, putting_off: _PuttingOff) -> None:
        self._putting_off = putting_off

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        """Finds a module inside the compiler; it is imported later, because Python holds a lock over this."""
        if not fullname.startswith(f"{_NAME}.") or sys.modules.get(_NAME) is not self._putting_off.stand_in:
            return None
        return ModuleSpec(fullname, _LoaderOfPart(self._putting_off))


class _LoaderOfPart(Loader):
    """Loads a module inside the compiler, if importing the compiler has not done it.

    Args:
        putting_off: The import that was put off.
    """

    def __init__(self, putting_off: _PuttingOff) -> None:
        self._putting_off = putting_off
        self._spec: ModuleSpec | None = None
        self._is_loaded = True

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        real = self._putting_off.end()
        module = sys.modules.get(spec.name)
        if module is not None:
            self._spec = vars(module)["__spec__"]
            return module
        self._spec = PathFinder.find_spec(spec.name, real.__path__)
        if self._spec is None:
            raise ModuleNotFoundError(f"No module named {spec.name!r}", name=spec.name)
        self._is_loaded = False
        return importlib.util.module_from_spec(self._spec)

    def exec_module(self, module: ModuleType) -> None:
        vars(module)["__spec__"] = self._spec  # the import has given it the one that led here
        if not self._is_loaded:
            assert self._spec is not None
            assert self._spec.loader is not None
            self._spec.loader.exec_module(module)


def _do_nothing(*args: Any, **options: Any) -> None:
    """What has to be done outside of compiled code."""
