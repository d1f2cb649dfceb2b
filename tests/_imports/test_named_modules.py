from __future__ import annotations

import copyreg
import pickle
import sys
import types
from collections.abc import Callable
from typing import Any

import cloudpickle
import pytest
import torch
import torch.distributed as dist

from raysgd._imports.named_modules import pickle_modules_by_name


def of_script(source: str, **names: Any) -> Callable[..., Any]:
    """A function `use` that a script defines."""
    namespace = {"__name__": "__main__", **names}
    exec(source, namespace)
    found: Callable[..., Any] = namespace["use"]
    return found


def there_and_back(value: Any) -> Any:
    return pickle.loads(cloudpickle.dumps(value))


def test_a_function_of_a_script_may_set_an_option_of_cudnn() -> None:
    use = of_script("def use():\n    return torch.backends.cudnn", torch=torch)
    pickle_modules_by_name()
    assert there_and_back(use)() is torch.backends.cudnn


def test_a_method_of_a_script_may_use_its_config_beside_torch_distributed() -> None:
    use = of_script("def use(self):\n    return dist.is_initialized(), self.config", dist=dist)
    pickle_modules_by_name()
    assert there_and_back(use)(types.SimpleNamespace(config=3)) == (False, 3)


def test_a_module_that_no_import_finds_is_refused() -> None:
    pickle_modules_by_name()
    with pytest.raises(TypeError, match="which no import finds"):
        pickle.dumps(type(torch.backends.cudnn)(types.ModuleType("alone"), "alone"))


def test_what_a_class_of_modules_says_about_pickling_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    class Own(types.ModuleType):
        def __reduce__(self) -> tuple[Any, ...]:
            return str, ("by itself",)

    monkeypatch.setitem(sys.modules, "own_module", Own("own_module"))
    pickle_modules_by_name()
    assert there_and_back(Own("own_module")) == "by itself"
    assert types.ModuleType not in copyreg.dispatch_table
