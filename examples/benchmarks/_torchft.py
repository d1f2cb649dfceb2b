"""The peer torchft: replica groups of one process each, their lighthouse, and restarts of groups that die.

torchft has its own environment, `.venv-torchft`, which `make bench` creates. The functions that start processes run
in the benchmark's environment; the class `ReplicaGroup` runs in torchft's.

The defaults are those of the lighthouse command in torchft's README and of `Manager`. The tuned values notice a dead
worker after 0.3 s, which is how late a heartbeat may be on two busy cores. A group that dies is started again at
once, and continues reading where it stopped. torchft leaves both to the user, and this is the best that a user can
do.

Gradients are summed with `Manager.allreduce`. torchft 0.2.0 also wraps `DistributedDataParallel`, but if a connection
breaks while DDP waits for gloo, an `AssertionError` (`assert fut._fut`) ends the survivor too, and the training is
lost.
"""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

ENVIRONMENT = Path(__file__).resolve().parents[2] / ".venv-torchft"
PYTHON = ENVIRONMENT / "bin" / "python"
_MOST_RESTARTS = 1000
_LOOK_S = 0.01


@dataclass(frozen=True)
class TimeOuts:
    """Time-outs of the lighthouse and of the managers.

    Attributes:
        heartbeat_timeout_ms: A group without a heartbeat for this long counts as dead.
        heartbeat_interval_ms: Time between two heartbeats.
        quorum_tick_ms: How often the lighthouse checks whether the groups can continue.
        join_timeout_ms: How long the lighthouse waits for a live group that has not reached its next step.
    """

    heartbeat_timeout_ms: int = 5000
    heartbeat_interval_ms: int = 100
    quorum_tick_ms: int = 100
    join_timeout_ms: int = 10000


TIME_OUTS = {
    "torchft": TimeOuts(),
    "torchft_tuned": TimeOuts(
        heartbeat_timeout_ms=300, heartbeat_interval_ms=50, quorum_tick_ms=10, join_timeout_ms=1000
    ),
}


# ------------------------------------------------------------------------------------------------------ processes


def run_groups(peer: str, num_groups: int, command: Sequence[str]) -> str:
    """Run a script in groups of one process, which get `RANK`, until one of them has reached its end.

    Args:
        peer: One of `TIME_OUTS`.
        num_groups: Number of groups. A group that dies is started again.
        command: The script and its arguments.

    Returns:
        The end of their output.
    """
    with tempfile.TemporaryFile("w+") as log:
        with _lighthouse(TIME_OUTS[peer]) as address, ExitStack() as stack:
            groups = [_Process(command, rank, address, log) for rank in range(num_groups)]
            for group in groups:
                stack.callback(group.end)
            for _ in range(_MOST_RESTARTS):
                code, group = _first_to_end(groups)
                if code == 0:
                    break
                group.start()
        log.seek(0)
        return log.read()[-4000:]


def _first_to_end(groups: Sequence[_Process]) -> tuple[int, _Process]:
    while True:
        for group in groups:
            code = group.code()
            if code is not None:
                return code, group
        time.sleep(_LOOK_S)


class _Process:
    def __init__(self, command: Sequence[str], rank: int, lighthouse: str, log: IO[str]) -> None:
        self._command, self._log = [str(PYTHON), *command], log
        self._environment = {**os.environ, "RANK": str(rank), "TORCHFT_LIGHTHOUSE": lighthouse}
        self.start()

    def start(self) -> None:
        self._process = subprocess.Popen(
            self._command, env=self._environment, stdout=self._log, stderr=subprocess.STDOUT
        )

    def code(self) -> int | None:
        return self._process.poll()

    def end(self) -> None:
        if self.code() is None:
            self._process.send_signal(signal.SIGKILL)
        self._process.wait()


@contextmanager
def _lighthouse(time_outs: TimeOuts) -> Iterator[str]:
    """Run the lighthouse until the end of the block; yield its address."""
    options = [time_outs.join_timeout_ms, time_outs.quorum_tick_ms, time_outs.heartbeat_timeout_ms]
    command = [str(PYTHON), __file__, *map(str, options)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, text=True, **pipes) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.kill()


def _serve(join_timeout_ms: int, quorum_tick_ms: int, heartbeat_timeout_ms: int) -> None:
    from torchft.coordination import LighthouseServer

    server = LighthouseServer("[::]:0", 1, join_timeout_ms, quorum_tick_ms, heartbeat_timeout_ms)
    print(server.address(), flush=True)
    sys.stdin.read()  # until the benchmark ends
    server.shutdown()


# ------------------------------------------------------------------------------------------------------ training


class ReplicaGroup:
    """One process of a training with torchft. It begins when all groups are alive.

    Args:
        peer: One of `TIME_OUTS`.
        model: Model to train; every group has the same initial weights.
        optimizer: Optimizer of its parameters.
        folder: Shared by all groups.
        num_groups: Number of groups.
        device: "cuda" to sum over NCCL, "cpu" for gloo.
    """

    def __init__(
        self,
        peer: str,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        folder: str,
        num_groups: int,
        device: str = "cpu",
    ) -> None:
        from torchft import Manager, Optimizer, ProcessGroupGloo, ProcessGroupNCCL

        self.rank, self._num_groups, self._folder = int(os.environ["RANK"]), num_groups, Path(folder)
        self._model, self._own_optimizer = model, optimizer
        self._store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        self._manager = Manager(
            pg=ProcessGroupNCCL() if device == "cuda" else ProcessGroupGloo(),
            load_state_dict=self._load,
            state_dict=self._state,
            min_replica_size=1,
            rank=0,
            world_size=1,
            store_addr="localhost",
            store_port=self._store.port,
            replica_id=str(self.rank),
            hostname="localhost",
            heartbeat_interval=timedelta(milliseconds=TIME_OUTS[peer].heartbeat_interval_ms),
        )
        self._optimizer = Optimizer(self._manager, optimizer)
        self._await_all()

    def _await_all(self) -> None:
        (self._folder / f"ready-{self.rank}").touch()
        while len(list(self._folder.glob("ready-*"))) < self._num_groups:
            time.sleep(_LOOK_S)

    def _state(self) -> dict[str, Any]:
        return {"model": self._model.state_dict(), "optimizer": self._own_optimizer.state_dict()}

    def _load(self, state: dict[str, Any]) -> None:
        self._model.load_state_dict(state["model"])
        self._own_optimizer.load_state_dict(state["optimizer"])

    def batches(self, data: TensorDataset, batch_size: int) -> Iterator[Any]:
        """Yield batches of this group's shard of the data, epoch after epoch, from where the last process stopped."""
        place = self._folder / f"position-{self.rank}"
        position = int(place.read_text()) if place.exists() else 0
        sampler: DistributedSampler[Any] = DistributedSampler(data, self._num_groups, self.rank, seed=0)
        num_batches = len(sampler) // batch_size
        for number in itertools.count(position // num_batches):
            sampler.set_epoch(number)
            mine = list(sampler)[(position - number * num_batches) * batch_size :]
            for batch in DataLoader(data, batch_size=batch_size, sampler=mine):
                yield batch
                position += 1
                place.write_text(str(position))

    @property
    def num_steps(self) -> int:
        """Return the number of steps in the weights."""
        return int(self._manager.current_step())

    @property
    def num_participants(self) -> int:
        """Return the number of groups whose gradients were in the last step."""
        return int(self._manager.num_participants())

    def step(self, loss_of: Callable[[], torch.Tensor]) -> bool:
        """Compute gradients, sum those of all groups, and step. Return whether torchft kept the step."""
        self._optimizer.zero_grad()
        loss_of().backward()  # type: ignore[no-untyped-call]
        for work in [self._manager.allreduce(each.grad) for each in self._model.parameters()]:
            work.wait()
        before = self._manager.batches_committed()
        self._optimizer.step()
        return bool(self._manager.batches_committed() > before)

    @property
    def took_part(self) -> bool:
        """Return whether this group's gradients were in the last step; a group that receives its state adds zeros."""
        return bool(self._manager.is_participating())


if __name__ == "__main__":
    _serve(*map(int, sys.argv[1:]))
