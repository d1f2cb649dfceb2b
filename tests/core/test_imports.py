from __future__ import annotations

import copyreg
import os
import pickle
import re
import shlex
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
import torch.distributed as dist

from raysgd.core.imports import install_command, pickle_modules_by_name, require, require_installed


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose packages can be imported while the test runs."""
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_a_missing_package_names_the_command_and_who_needs_it() -> None:
    with pytest.raises(ModuleNotFoundError) as caught:
        require("no_such_package.tracking", extra="mlflow", purpose="`MLflowLogger`")
    words = "`MLflowLogger` needs `no_such_package`, which is not installed. Run: "
    assert str(caught.value) == words + install_command("mlflow")
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)
    assert caught.value.name == "no_such_package.tracking"


@pytest.mark.parametrize(
    ("extra", "package", "command"),
    [
        ("hf", "safetensors", r'pip install "safetensors>=[\d.]+"'),
        ("data", "pandas", r'pip install "pandas(>=[\d.]+)?"'),  # what Ray's own extra names
        ("tune", "pandas", r'pip install "pandas(>=[\d.]+)?"'),
        ("tf", "tensorflow", r'pip install "tensorflow>=[\d.]+"'),
        ("mlflow", "mlflow", r'pip install "mlflow-skinny>=[\d.]+"'),
        ("metrics", "torchmetrics", r'pip install "torchmetrics>=[\d.]+"'),
    ],
)
def test_the_command_installs_what_is_missing_and_nothing_else(extra: str, package: str, command: str) -> None:
    assert re.fullmatch(command, install_command(extra, package=package))


def test_what_a_package_needs_by_an_extra_is_called_missing(packages: Path) -> None:
    (packages / "like_tune.py").write_text(
        "try:\n    raise ModuleNotFoundError(name='pandas')\n"
        "except ImportError as error:\n    raise ImportError('some dependencies are missing') from error\n"
    )
    with pytest.raises(ModuleNotFoundError, match=r"^`as_trainable` needs `pandas`, which is not installed"):
        require("like_tune", extra="tune", purpose="`as_trainable`")


def test_a_package_can_be_missed_without_importing_it() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"^`this` needs `no_such_package`, which is not installed"):
        require_installed("no_such_package", extra="tf", purpose="`this`")


def test_a_purpose_is_not_needed() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"^this feature needs `no_such_package`"):
        require("no_such_package", extra="mlflow")


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("import no_such_dependency", "ModuleNotFoundError: No module named 'no_such_dependency'"),
        ("raise OSError('libmissing.so')", "OSError: libmissing.so"),
        ("from json import nonsense", "ImportError: cannot import name 'nonsense'"),
    ],
)
def test_a_package_that_is_broken_is_not_called_missing(packages: Path, source: str, reason: str) -> None:
    (packages / "fragile_package.py").write_text(source)
    with pytest.raises(ImportError) as caught:
        require("fragile_package", extra="tf")
    assert not isinstance(caught.value, ModuleNotFoundError)
    message = str(caught.value)
    assert "is installed, but importing it failed with " + reason in message
    assert "not installed. Run" not in message
    assert re.search(r'pip install --upgrade --force-reinstall .*"tensorflow>=[\d.]+" "tf_keras>=[\d.]+"$', message)
    assert caught.value.__cause__ is not None


def test_a_package_without_the_module_asked_for_is_not_called_missing(packages: Path) -> None:
    (packages / "older_package").mkdir()
    (packages / "older_package" / "__init__.py").touch()
    with pytest.raises(ImportError, match="`older_package` is installed, but importing it failed"):
        require("older_package.later_addition", extra="tf")


def test_the_command_works_without_an_index_that_has_raysgd() -> None:
    assert re.fullmatch(r'pip install "ray\[tune\]>=[\d.]+"', install_command("tune"))
    pip = [sys.executable, "-m", *shlex.split(install_command("tune")), "--no-index", "--no-deps", "--dry-run"]
    done = subprocess.run(pip, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Requirement already satisfied: ray" in done.stdout


def test_the_command_names_what_an_extra_takes_from_other_extras() -> None:
    assert re.fullmatch(r'pip install "torch>=[\d.]+" "lightning[!=>\d.,]+"', install_command("lightning"))


def test_sources_that_are_not_installed_are_named_by_their_folder(tmp_path: Path) -> None:
    """As with `PYTHONPATH`: without the packages of the environment, in a folder where there is no raysgd."""
    root = Path(__file__).resolve().parents[2]
    (tmp_path / "raysgd").symlink_to(root / "raysgd")  # beside the sources may be what an installation left
    code = "from raysgd.core.imports import require; require('no_such_package', extra='tune')"
    done = subprocess.run(
        [sys.executable, "-S", "-c", code],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        cwd="/",
        capture_output=True,
        text=True,
    )
    assert f'Run: pip install "{root}[tune]"' in done.stderr


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
