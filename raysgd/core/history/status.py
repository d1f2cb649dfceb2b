"""The result of `trainer.status()`. It prints as plain text, and notebooks display it as a card."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from raysgd.core.engine.controller import ElasticController
from raysgd.core.engine.gathering import quiet_s
from raysgd.core.engine.monitor import ask_heartbeats
from raysgd.core.engine.shared.interface import GroupEvent
from raysgd.core.engine.shared.types import Heartbeat, SamplesUsed
from raysgd.core.history.readable import counted, event_lines
from raysgd.core.numbers.timing import BINS, TimeLedger
from raysgd.core.text.cards import card, fitted, folded, grid, named_lines, two_column_table
from raysgd.core.text.log_lines import listed

_STRAGGLES = 1.2  # a straggler's time without waiting is more than this multiple of the other ranks' median
_MOST_ALONE = 16  # with more workers than this, similar workers share a row


@dataclass(frozen=True)
class WorkerStatus:
    """The state of one worker, as shown in a trainer's status.

    Attributes:
        rank: The worker's rank.
        node: Address of the worker's node.
        pid: ID of the worker's process.
        heartbeat: The worker's last heartbeat. None if the worker did not answer.
    """

    rank: int
    node: str
    pid: int
    heartbeat: Heartbeat | None

    @property
    def own_s(self) -> float | None:
        """Seconds of the current or last training call in which the worker did not wait for other workers.

        The value is None if this time was not measured or the worker did not answer.
        """
        return self.heartbeat.own_s if self.heartbeat is not None else None


@dataclass(frozen=True)
class SnapshotStatus:
    """The snapshot that a restart would start from, as shown in a trainer's status.

    Attributes:
        age_s: Seconds since the snapshot arrived in the driver.
        num_calls_since: Number of completed calls that a restart would repeat after restoring the snapshot.
        is_inside: True if the snapshot was taken inside a call.
        replay_s: Total seconds that the calls to be repeated took when they first ran.
        has_newer: True if a newer snapshot is in transit. Until it arrives, only the workers have the newer state.
    """

    age_s: float
    num_calls_since: int
    is_inside: bool
    replay_s: float = 0.0
    has_newer: bool = False

    def __str__(self) -> str:
        where = "inside a call" if self.is_inside else "between calls"
        calls = "1 call" if self.num_calls_since == 1 else f"{self.num_calls_since} calls"
        behind = f", {calls} ({self.replay_s:.1f} s) since" if self.num_calls_since else ""
        newer = ", a newer one is on its way" if self.has_newer else ""
        return f"{self.age_s:.0f} s old, taken {where}{behind}{newer}"


@dataclass(frozen=True, repr=False)
class TrainerStatus:
    """The state of a trainer at one moment.

    Attributes:
        workers: The workers, in rank order.
        num_wanted: Number of workers that the trainer should have.
        num_spares: Number of spare workers that are ready.
        samples_per_s: Throughput of the current or last training call. None before the first training call.
        straggler: The rank that the other ranks wait for. None if no rank is clearly slower, or if not measured.
        data: Samples used in the current epoch. None if raysgd does not shard the data.
        failures: For each failure, oldest first, a description of its effect on the training. If survivors continued,
            it says where, and what happened to the samples. After a restart, it says what the restart started from. If
            neither was possible, it says which state remained. Failures without a description are omitted, for example
            failures between two training calls after which the survivors continued.
        num_failures: Number of failures from which the trainer recovered.
        num_continued: Number of failures after which survivors kept their processes and continued.
        num_restored: Number of failures after which all workers started again from the last snapshot.
        num_resizes: Number of times that the number of workers changed.
        events: The history of the worker groups, oldest first.
        snapshot: The last snapshot. None if no snapshot has arrived yet.
        snapshot_pace: A description of how often snapshots are taken.
        ledger: How the ranks spent their time, such as on steps or loading data. None if not measured.
        global_batch: A description of the global batch, if its size depends on the number of workers. Otherwise empty.
        has_session_ended: True if the workers ended with their Ray session.
        recovery: The state of the running recovery, such as "Regrouping": see `docs/architecture.md`. Otherwise empty.
    """

    workers: tuple[WorkerStatus, ...]
    num_wanted: int
    num_spares: int
    samples_per_s: float | None
    straggler: int | None
    data: SamplesUsed | None
    failures: tuple[str, ...]
    num_failures: int
    num_continued: int
    num_restored: int
    num_resizes: int
    events: tuple[GroupEvent, ...]
    snapshot: SnapshotStatus | None
    snapshot_pace: str = ""
    ledger: TimeLedger | None = None
    global_batch: str = ""
    has_session_ended: bool = False
    recovery: str = ""

    @property
    def state(self) -> str:
        """The trainer's state: "running" during a call, "idle" between calls, "ended" once its Ray session is over."""
        phases = {each.heartbeat.phase for each in self.workers if each.heartbeat is not None}
        return "ended" if self.has_session_ended else "running" if phases - {"idle", "between calls"} else "idle"

    def __str__(self) -> str:
        lines = [f"  rank {row[0]}: {', '.join(row[1:])}" for row in self._worker_rows()]
        lines += [f"  {line}" for line in event_lines(self.events, hidden=())]
        return "\n".join([*named_lines(self._rows()), *(fitted(line, indent=4) for line in lines)])

    def __repr__(self) -> str:
        """Return `str(self)`.

        Python prompts show the `repr`, and the default `repr` would list all fields over several pages.
        """
        return str(self)

    def _repr_html_(self) -> str:
        return self.as_card("Trainer")

    def as_card(self, title: str) -> str:
        """Return the status as an HTML card with a title."""
        workers = grid(
            ("rank", "node", "process", "doing", "own time"), self._worker_rows(), "raysgd-grid raysgd-words"
        )
        history = folded(f"history ({len(self.events)})", event_lines(self.events, hidden=()))
        return card(title, two_column_table(self._rows()), workers, history)

    def _rows(self) -> list[tuple[str, str]]:
        speed = "not measured yet" if self.samples_per_s is None else f"{self.samples_per_s:.0f} samples/s"
        workers = f"{len(self.workers)} of {self.num_wanted}, {self.num_spares} spare"
        rows = [
            ("state", f"recovering ({self.recovery})" if self.recovery else self.state),
            ("workers", "its Ray session has ended" if self.has_session_ended else workers),
            ("throughput", speed if self.straggler is None else f"{speed}; the others wait for rank {self.straggler}"),
            (
                "recoveries",
                f"{counted(self.num_failures, 'failure')}: {self.num_continued} continued in place, "
                f"{self.num_restored} restored",
            ),
        ]
        if self.global_batch:
            rows.append(("batch", self.global_batch))
        if self.data is not None:
            rows.append(("data", str(self.data)))
        snapshot = "; ".join(filter(None, [str(self.snapshot or ""), self.snapshot_pace]))
        if snapshot:
            rows.append(("snapshot", snapshot))
        if self.ledger is not None:
            rows.append(("time", str(self.ledger)))
        return rows

    def _worker_rows(self) -> list[tuple[str, ...]]:
        """Return the rows of the status. With more than 16 workers, workers in the same phase share a row.

        Workers in different epochs don't share a row, and the straggler always has a separate row.
        """
        alike: dict[Any, list[WorkerStatus]] = {}
        for worker in self.workers:
            place = (worker.heartbeat.phase, worker.heartbeat.epoch) if worker.heartbeat is not None else None
            is_alone = len(self.workers) <= _MOST_ALONE or worker.rank == self.straggler
            alike.setdefault(worker.rank if is_alone else place, []).append(worker)
        return [_row(workers) for workers in alike.values()]


def find_straggler(own_s: Sequence[float | None]) -> int | None:
    """Return the rank that takes clearly longer than the other ranks, or None if no rank does. Waiting does not count.

    Args:
        own_s: For each rank, the seconds in which it did not wait for other ranks. If any value is None, the result is
            None.
    """
    known = [seconds for seconds in own_s if seconds is not None]
    if len(known) < len(own_s) or len(known) < 2:
        return None
    slowest = max(range(len(known)), key=known.__getitem__)
    others = known[:slowest] + known[slowest + 1 :]
    return slowest if known[slowest] > _STRAGGLES * median(others) else None


def ask_status(controller: ElasticController, samples_per_s: float | None) -> TrainerStatus:
    """Request heartbeats from a trainer's workers and return the trainer's status.

    Args:
        controller: Runs the trainer's calls.
        samples_per_s: Throughput of the last training call. Used if no training call is running, or if the
            throughput of the running call is not known yet.

    Raises:
        TrainerShutdownError: The trainer was stopped.
    """
    if controller.stopped.is_set() or not controller.has_session_ended:
        controller.check_active()
    group = None if controller.has_session_ended else controller.group
    asked = ask_heartbeats(group, quiet_s(controller.spec.heartbeat_s)) if group is not None else {}
    return compose(controller, asked, samples_per_s)


def glance(
    controller: ElasticController, last_heartbeats: Mapping[int, Heartbeat], samples_per_s: float | None
) -> TrainerStatus:
    """Return a trainer's status without contacting the workers.

    Args:
        controller: Runs the trainer's calls.
        last_heartbeats: The ranks' heartbeats at the end of the last training call. Used if no training call is
            running.
        samples_per_s: Throughput of the last training call. Used if no training call is running, or if the
            throughput of the running call is not known yet.
    """
    heartbeats = controller.monitor.heartbeats if controller.monitor.is_on else {}
    is_training = any(heartbeat.is_training for heartbeat in heartbeats.values())
    return compose(controller, heartbeats if is_training else last_heartbeats, samples_per_s)


def compose(
    controller: ElasticController, heartbeats: Mapping[int, Heartbeat], samples_per_s: float | None
) -> TrainerStatus:
    """Build a trainer's status from what its controller knows and the heartbeats of its workers."""
    monitor, history = controller.monitor, controller.history
    has_ended = controller.has_session_ended and not controller.stopped.is_set()
    group = None if has_ended else controller.group
    infos = group.infos if group is not None else ()
    workers = tuple(WorkerStatus(rank, info.node_ip, info.pid, heartbeats.get(rank)) for rank, info in enumerate(infos))
    records = [worker.heartbeat.data for worker in workers if worker.heartbeat is not None]
    present = monitor.samples_per_s if monitor.is_on else None
    snapshot, kept = None, controller.snapshots
    if kept.landed_at is not None:
        age_s = time.monotonic() - kept.landed_at
        snapshot = SnapshotStatus(age_s, len(kept.calls_since), kept.is_inside, kept.calls_since_s, kept.is_coming)
    return TrainerStatus(
        workers=workers,
        num_wanted=controller.scaling.max_workers,
        num_spares=group.standby.num_ready if group is not None else 0,
        samples_per_s=samples_per_s if present is None else present,
        straggler=find_straggler([worker.own_s for worker in workers]),
        data=records[0] if records else None,  # the ranks' records differ by at most one step
        failures=tuple(event.detail for event in history.events if event.is_failure and event.detail),
        num_failures=history.num_failures,
        num_continued=history.count("continued"),
        num_restored=history.count("restored"),
        num_resizes=sum(event.old_size != event.new_size for event in history.events if event.kind != "started"),
        events=tuple(history.events),
        snapshot=snapshot,
        snapshot_pace=kept.pace.words() if controller.spec.captures else "",
        has_session_ended=has_ended,
        recovery=controller.recovery.doing,
    )


def _row(workers: Sequence[WorkerStatus]) -> tuple[str, ...]:
    """Return a row of the status table for workers that share a row: ranks, nodes, processes, activity and own time."""
    nodes = list(dict.fromkeys(worker.node for worker in workers))
    own_s = sorted(worker.own_s for worker in workers if worker.own_s is not None)
    return (
        listed([worker.rank for worker in workers]),
        nodes[0] if len(nodes) == 1 else f"{len(nodes)} nodes",
        str(workers[0].pid) if len(workers) == 1 else f"{len(workers)} processes",
        _doing([worker.heartbeat for worker in workers if worker.heartbeat is not None]),
        f"{_span([f'{seconds:.2f}' for seconds in own_s])} s" if own_s else "-",
    )


def _doing(heartbeats: Sequence[Heartbeat]) -> str:
    """Describe what workers in the same phase of the same epoch are doing."""
    if not heartbeats:
        return "no answer"
    steps = sorted(heartbeat.step for heartbeat in heartbeats if heartbeat.step >= 0)
    step = f", step {_span([str(each) for each in steps])}" if steps else ""
    return f"{heartbeats[0].phase}, epoch {heartbeats[0].epoch}{step}"


def _span(numbers: Sequence[str]) -> str:
    """Return the first and last of sorted numbers as a range. Return a single number if they are equal."""
    return numbers[0] if numbers[0] == numbers[-1] else f"{numbers[0]} to {numbers[-1]}"


_PAUSE_S = 0.9  # shortest time between two exports, slightly less than the time between two polls of the workers
_NOBODY = -1


def numbers_in(status: TrainerStatus) -> dict[str, tuple[str, float | None]]:
    """Return the description and the value of each metric to export. The value is None if it is unknown."""
    data, snapshot, ledger = status.data, status.snapshot, status.ledger
    landed_at = None if snapshot is None else time.time() - snapshot.age_s
    goodput, total = (None, {}) if ledger is None else (ledger.goodput, ledger.total())
    return {
        "raysgd_workers": ("Workers of a trainer", len(status.workers)),
        "raysgd_workers_wanted": ("Workers that a trainer is meant to have", status.num_wanted),
        "raysgd_spare_workers": ("Workers that wait to step in", status.num_spares),
        "raysgd_samples_per_second": ("Throughput of the training call, running or last", status.samples_per_s),
        "raysgd_straggler": (
            "The rank that the others wait for, or -1",
            _NOBODY if status.straggler is None else status.straggler,
        ),
        "raysgd_samples_due": ("Samples of the epoch", None if data is None else data.due),
        "raysgd_samples_used": ("Samples used in the epoch", None if data is None else data.used),
        "raysgd_failures": ("Failures of workers that a trainer recovered from", status.num_failures),
        "raysgd_continued": ("Failures after which the survivors went on", status.num_continued),
        "raysgd_restored": ("Failures after which all workers restarted", status.num_restored),
        "raysgd_resizes": ("Changes of the number of workers", status.num_resizes),
        "raysgd_snapshot_timestamp_seconds": (
            "When the last snapshot reached the driver, in seconds since the epoch",
            landed_at,
        ),
        "raysgd_goodput": (
            "Share of the time in training calls that was not lost to failures or spent on guarding against them",
            goodput,
        ),
        **{
            f"raysgd_time_{name}_seconds": (f"Time of all ranks together: {words}", total.get(name))
            for name, words in BINS.items()
        },
    }


_ZERO_AT_THE_END = ("raysgd_workers", "raysgd_spare_workers", "raysgd_samples_per_second")


class Gauges:
    """Exports the status of one trainer as Ray metrics, at most about once a second, or sooner after a worker event.

    Args:
        trainer: Tag that identifies the trainer in the metrics.
    """

    def __init__(self, trainer: str) -> None:
        self._tags = {"trainer": trainer}
        self._gauges: dict[str, Any] = {}
        self._due = float("-inf")
        self._num_events = -1

    def report(self, num_events: int, read: Callable[[], TrainerStatus]) -> None:
        """Export the metrics, unless they were exported less than a second ago and there are no new events.

        Args:
            num_events: Number of worker events, such as failures and resizes, in the trainer's history so far.
            read: Returns the trainer's current status.
        """
        now = time.monotonic()
        if (now < self._due and num_events == self._num_events) or not _is_ray_up():
            return
        self._due, self._num_events = now + _PAUSE_S, num_events
        from ray.util.metrics import Gauge

        for name, (words, value) in numbers_in(read()).items():
            if value is not None:
                if name not in self._gauges:
                    self._gauges[name] = Gauge(name, description=words, tag_keys=("trainer",))
                self._gauges[name].set(value, self._tags)

    def report_end(self) -> None:
        """After the trainer's shutdown, set the exported numbers of workers and the throughput to 0."""
        if _is_ray_up():
            for name in _ZERO_AT_THE_END:
                if name in self._gauges:
                    self._gauges[name].set(0, self._tags)


def _is_ray_up() -> bool:
    ray = sys.modules.get("ray")
    return ray is not None and ray.is_initialized()
