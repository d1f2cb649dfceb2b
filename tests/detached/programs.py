"""Programs in processes of their own, which are given one cell after the other, as a notebook is, and killed."""

from __future__ import annotations

import ast
import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import traceback
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.helpers.forked import to_lend

ROOT = Path(__file__).resolve().parents[2]
OPERATOR = """
import os, time
import torch
from torch.utils.data import DataLoader
from raysgd import Recovery, TorchTrainer, TrainingOperator
import raysgd

class Counting(TrainingOperator):
    def setup(self, config):
        self.step_s = config.get("step_s", 0.0)
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        data = [(torch.tensor([float(i)]), torch.tensor([0.0])) for i in range(config["num_samples"])]
        loader = DataLoader(data, batch_size=config.get("batch_size", 2))
        loss = torch.nn.MSELoss()
        self.model, self.optimizer, self.criterion = self.register(models=model, optimizers=optimizer, criterion=loss)
        self.register_data(train_loader=loader, validation_loader=loader)

    def _note(self, kind, batch):
        from torch import distributed
        size = distributed.get_world_size() if distributed.is_initialized() else 1
        line = f"{kind} {os.getpid()} {time.time()} {size} {[int(i) for i in batch[0].flatten()]}\\n"
        with open(self.config["log"], "a") as file:
            file.write(line)
        time.sleep(self.step_s)
        while os.path.exists(self.config["log"] + ".wait"):
            time.sleep(0.01)

    def train_batch(self, batch, batch_info):
        result = super().train_batch(batch, batch_info)
        self._note(f"train{batch_info['epoch_idx']}", batch)
        return result

    def validate_batch(self, batch, batch_info):
        self._note("validate", batch)
        return super().validate_batch(batch, batch_info)

def make(log, detached="run", **options):
    config = {"log": str(log), "num_samples": 40, **options.pop("config", {})}
    trainer = TorchTrainer(
        training_operator_cls=Counting, config=config, num_workers=options.pop("num_workers", 2), detached=detached,
        recovery=Recovery(wait_for_workers=True, resize_interval_s=None), **options
    )
    return trainer

def pace(step_s):
    def change(operator):
        operator.step_s = step_s
    return change

def shell(*words):
    import subprocess, sys
    return subprocess.run([sys.executable, "-m", "raysgd", *words], capture_output=True, text=True)

def pids(trainer):
    return sorted(trainer.apply_all_workers(os.getpid))
"""


class Program:
    """A program that lives until it is killed or ended.

    Args:
        address: The address of Ray; None for none.
    """

    def __init__(self, address: str | None) -> None:
        environment = {**os.environ, **to_lend()}
        environment.pop("RAY_ADDRESS", None)
        if address is not None:
            environment["RAY_ADDRESS"] = address
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.detached.programs"],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Program:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    def begin(self, source: str) -> None:
        """Give it a cell, and do not wait."""
        self.process.stdin.write(json.dumps(source) + "\n")
        self.process.stdin.flush()

    def found(self) -> dict[str, Any]:
        """Wait for the end of a cell: `value`, `error` (names of its classes), `text` (the traceback), `printed`."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                answer: dict[str, Any] = json.loads(line)
                return answer
        raise AssertionError(f"the program has ended with {self.process.wait()}")

    def run(self, source: str) -> Any:
        """Run a cell; return the value of its last line, which has to be plain."""
        self.begin(source)
        found = self.found()
        assert found["error"] is None, found["text"]
        return found["value"]

    def fail(self, source: str) -> dict[str, Any]:
        """Run a cell that raises."""
        self.begin(source)
        found = self.found()
        assert found["error"] is not None, f"it has returned {found['value']}"
        return found

    def interrupt(self) -> None:
        """Press Ctrl-C."""
        self.process.send_signal(signal.SIGINT)

    def end(self) -> int:
        """Let it end as a program does."""
        self.process.stdin.close()
        return self.process.wait(60)

    def kill(self) -> None:
        """End it at once."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


def _answer(source: str, names: dict[str, Any]) -> dict[str, Any]:
    printed = io.StringIO()
    answer: dict[str, Any] = {"value": None, "error": None, "text": ""}
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            *body, last = ast.parse(source).body
            if not isinstance(last, ast.Expr):
                body.append(last)
            exec(compile(ast.Module(body, []), "cell", "exec"), names)
            if isinstance(last, ast.Expr):
                answer["value"] = eval(compile(ast.Expression(last.value), "cell", "eval"), names)
    except BaseException as error:
        answer["error"] = [each.__name__ for each in type(error).__mro__]
        answer["text"] = traceback.format_exc()
    return {**answer, "printed": printed.getvalue()}


def main() -> None:
    """Run the cells that come in, each a line of JSON."""
    names: dict[str, Any] = {"__name__": "__main__"}
    output = sys.stdout
    for line in sys.stdin:
        answer = _answer(json.loads(line), names)
        output.write(json.dumps(answer, default=repr) + "\n")  # at once: Ray prints in a thread
        output.flush()


if __name__ == "__main__":
    main()
