"""The import of PyTorch's compiler is deferred until something needs it; nothing but the time shows that.

Each of the first functions has a process of its own, because this one may have imported the compiler long ago.

    python -m tests.core.connections.test_compiler

reads the names of such functions, one in each line, and prints what became of each, as JSON: nothing, or the traceback.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import pickle
import pkgutil
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from raysgd.core.connections import _compiler
from raysgd.core.connections._compiler import defer_compiler
from raysgd.core.connections.torch import end_process_group
from tests.helpers.stories import ROOT

NAME = "torch._dynamo"


def _is_imported() -> bool:
    return "torch._dynamo.eval_frame" in sys.modules


def _model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))


def _step(net: torch.nn.Module, optimizer: torch.optim.Optimizer) -> float:
    optimizer.zero_grad()
    loss = net(torch.ones(3, 4) * torch.arange(3.0)[:, None]).square().sum()
    loss.backward()
    optimizer.step()
    return loss.item()


def _num_compiled() -> int:
    from torch._dynamo.utils import counters

    return int(counters["frames"]["ok"])


# ------------------------------------------------------------------------------------------------ not needed


def training_does_not_import_it() -> None:
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    net = torch.nn.parallel.DistributedDataParallel(_model())
    for optimizer_cls in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop):
        optimizer = optimizer_cls(net.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        _step(net, optimizer)
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        scheduler.step()
        optimizer.load_state_dict(optimizer.state_dict())
    end_process_group()  # PyTorch's own hangs now and then
    assert not _is_imported()


def looking_through_all_modules_does_not_import_it() -> None:
    for module in list(sys.modules.values()):
        getattr(module, "__version__", None)
        getattr(module, "__warningregistry__", None)
    assert not _is_imported()
    assert sys.modules[NAME].__file__ == importlib.util.find_spec("torch").origin.replace(
        "__init__", os.path.join("_dynamo", "__init__")
    )


# ------------------------------------------------------------------------------------------------ needed


def a_model_is_compiled_as_always() -> None:
    net = _model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    _step(net, optimizer)
    compiled = torch.compile(net, backend="eager")
    assert torch.equal(compiled(torch.ones(3, 4)), net(torch.ones(3, 4)))
    assert _is_imported()
    assert _num_compiled() == 1
    assert type(sys.modules[NAME]) is type(sys)
    before = torch._dynamo
    defer_compiler()  # once it is there, nothing is deferred
    assert torch._dynamo is sys.modules[NAME] is before


def a_step_is_compiled_around_what_compiled_code_does_not_enter() -> None:
    net = _model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    expected = _step(net, optimizer)
    kept = torch.optim.Optimizer.zero_grad.__wrapped__.__dynamo_disable  # type: ignore[attr-defined]
    compiled = torch.compile(_step, backend="eager")
    assert compiled(net, optimizer) < expected
    renewed = torch.optim.Optimizer.zero_grad.__wrapped__.__dynamo_disable  # type: ignore[attr-defined]
    assert kept is not renewed, "whoever was called before is what the compiler knows to leave alone"
    assert renewed._torchdynamo_disable


def importing_a_part_imports_the_whole_once() -> None:
    import torch._dynamo.config
    from torch._dynamo.utils import counters

    modules = {name: sys.modules[name] for name in list(sys.modules) if name.startswith(f"{NAME}.")}
    assert sys.modules["torch._dynamo.convert_frame"].counters is counters
    assert len(modules) > 50
    torch.compile(_model(), backend="eager")(torch.ones(3, 4))
    assert _num_compiled() == 1
    for name, module in modules.items():
        assert sys.modules[name] is module
        assert module.__spec__ is not None
    assert not [finder for finder in sys.meta_path if "raysgd.core.connections" in type(finder).__module__]


def settings_reach_the_real_one() -> None:
    import torch._dynamo as taken_before

    torch._dynamo.config.suppress_errors = True
    assert sys.modules["torch._dynamo.config"].suppress_errors
    taken_before.anything = 1  # type: ignore[attr-defined]
    assert torch._dynamo.anything == 1  # type: ignore[attr-defined]
    del taken_before.anything  # type: ignore[attr-defined]
    assert not hasattr(torch._dynamo, "anything")
    assert dir(taken_before) == dir(torch._dynamo)
    assert taken_before.optimize is torch._dynamo.optimize
    assert taken_before.utils.counters is torch._dynamo.utils.counters
    assert taken_before.utils.get_optimize_ddp_mode is torch._dynamo.utils.get_optimize_ddp_mode
    assert taken_before.disable is torch._dynamo.disable


def a_function_that_was_disabled_before_stays_so() -> None:
    calls: list[int] = []

    def note(x: Any) -> Any:
        calls.append(1)
        return x + 1

    disabled = torch._dynamo.disable(note)
    assert disabled.__name__ == "note"
    assert not _is_imported()
    disabled(torch.ones(1))
    compiled = torch.compile(lambda x: disabled(x * 2), backend="eager")
    assert [compiled(torch.ones(1)).item() for _ in range(2)] == [3.0, 3.0]
    assert len(calls) == 3, "a function that was traced would be called once"


def a_class_is_for_the_real_one_to_disable() -> None:
    torch._dynamo.disable(_model())
    assert _is_imported()


def it_travels_by_name() -> None:
    import cloudpickle

    assert pickle.loads(pickle.dumps(torch._dynamo)) is torch._dynamo
    module = torch._dynamo
    assert cloudpickle.loads(cloudpickle.dumps(lambda: module))() is torch._dynamo
    assert not _is_imported()


def threads_that_need_it_at_once_wait_for_one_of_them() -> None:
    stand_in, errors, found = torch._dynamo, [], []
    begin = threading.Barrier(8)

    def use() -> None:
        begin.wait()
        try:
            found.append((stand_in.optimize, stand_in.config))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=use) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert found == [(torch._dynamo.optimize, torch._dynamo.config)] * 8


def a_part_that_the_whole_does_not_import_is_found_too() -> None:
    names = {module.name for module in pkgutil.iter_modules(sys.modules[NAME].__path__)}
    name = next(name for name in ("test_dont_skip_tracing_functions", "hooks") if name in names)
    part = importlib.import_module(f"{NAME}.{name}")
    assert _is_imported()
    assert part.__name__ == f"{NAME}.{name}"
    assert part.__spec__.loader.path == part.__file__
    with pytest.raises(ModuleNotFoundError, match=r"torch\._dynamo\.there_is_no_such_part"):
        importlib.import_module(f"{NAME}.there_is_no_such_part")


def an_import_that_fails_may_be_tried_again() -> None:
    stand_in = torch._dynamo
    sys.modules["torch._dynamo.config"] = None  # type: ignore[assignment]
    for _ in range(2):
        with pytest.raises(ImportError):
            _ = stand_in.optimize
        assert torch._dynamo is sys.modules[NAME] is stand_in
    _step(net := _model(), torch.optim.SGD(net.parameters(), lr=0.1))
    for name in [name for name in sys.modules if name.startswith(f"{NAME}.")]:
        del sys.modules[name]
    assert stand_in.config is sys.modules["torch._dynamo.config"]


SCENARIOS: dict[str, Callable[[], None]] = {
    name: value
    for name, value in globals().items()
    if getattr(value, "__module__", "") == __name__ and not name.startswith("_")
}


@pytest.fixture(scope="module")
def runner() -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "tests.core.connections.test_compiler"]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process


@pytest.mark.program
@pytest.mark.parametrize("name", SCENARIOS)
def test_a_process_in_which_the_compiler_is_deferred(name: str, runner: subprocess.Popen[str]) -> None:
    assert runner.stdin is not None
    assert runner.stdout is not None
    runner.stdin.write(f"{name}\n")
    runner.stdin.flush()
    traceback = json.loads(runner.stdout.readline())
    assert not traceback, traceback


def test_where_it_is_turned_off_everything_stays_and_the_log_says_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(_compiler.SWITCH, "1")
    before, finders = sys.modules.get("torch._dynamo"), list(sys.meta_path)
    with caplog.at_level(logging.DEBUG, "raysgd"):
        _compiler.defer_compiler()
    assert (sys.modules.get("torch._dynamo"), sys.meta_path) == (before, finders)
    assert _compiler.SWITCH in caplog.text


def _in_child(scenario: Callable[[], None]) -> str:
    """Runs it in a copy of this process; returns the traceback, if there is one."""
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        text = ""
        try:
            defer_compiler()
            scenario()
        except BaseException:
            text = traceback.format_exc()
        os.write(writer, text.encode()[:60000])
        os._exit(0)
    os.close(writer)
    with open(reader, "rb") as stream:
        text = stream.read().decode()
    _, status = os.waitpid(pid, 0)
    return text if status == 0 else f"ended with status {status}\n{text}"


if __name__ == "__main__":
    importlib.import_module("torch.fx.experimental.symbolic_shapes")  # what the compiler imports first, once for all
    assert NAME not in sys.modules, "nothing could be deferred"
    while line := sys.stdin.readline():
        print(json.dumps(_in_child(SCENARIOS[line.strip()])), flush=True)
