"""What happens in one simulated run, drawn from a seed: a plain value that can be written down, cut, and run again."""

from __future__ import annotations

import json
import random
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from raysgd.core.engine.policies import AUTO
from raysgd.core.engine.shared.interface import EverySeconds

POINTS = {
    # where: about how often a run comes there
    "prepare": 6,
    "open": 8,
    "join": 8,
    "joined": 8,
    "built": 5,
    "warm up": 3,
    "called": 20,
    "step": 40,
    "merge": 20,
    "stepped": 40,
    "half": 20,
    "last": 10,
    "answer": 20,
    "leave": 6,
    "regroup": 6,
    "sent": 3,
    "taking": 4,
    "taken": 4,
    "send": 3,
    "on its way": 3,
    "note": 6,
    "noted": 6,
    "look": 6,
    "load": 4,
    "loaded": 4,
    "wait": 150,
}
"""The places at which something may happen: most of them in a worker, "wait" wherever the driver waits."""

LOSSES = ("die", "die with another", "die but one", "lose node", "freeze", "stall", "lose connection")
"""What costs workers, or connections between them."""

OTHERS = ("raise", "slow", "drain", "room goes", "room comes", "poison", "repeat", "load long")
LOADING = ("prepare", "warm up")
"""Where a library may be loaded."""

SIMPLER = (
    "num_spares",
    "is_large",
    "has_halves",
    "undo",
    "joins_late",
    "snapshot_every",
    "resize_interval_s",
    "tells",
    "min_workers",
    "use_local",
    "snapshot_every_s",
    "copy_s",
    "late_s",
)
"""What of a schedule is simplest as it is by itself."""

IN_DRIVER = ("interrupt", "stop")
UNDO = (False, None, True)

NUM_FAULTS = (1, 2, 3, 4, 6, 9, 12)
"""How many a schedule has. Chosen by how soon one half of the faults in `mutations` is found: see `rates`."""


@dataclass(frozen=True)
class Fault:
    """Something that happens when the run comes to a place for the `nth` time."""

    kind: str
    point: str
    nth: int
    which: int = 0

    def __str__(self) -> str:
        return f"{self.kind} at {self.point!r} number {self.nth} ({self.which})"


@dataclass(frozen=True)
class Op:
    """One call of the user's program."""

    kind: str
    argument: int | None = None
    max_retries: int = 3
    thread: int = 0


@dataclass(frozen=True)
class Schedule:
    """One run: what the trainer is, what is called, and what befalls it.

    Attributes:
        seed: Decides how long everything takes, and who is first.
        use_local: Whether rank 0 is the driver.
        snapshot_every_s: As for `GroupSpec`.
        joins_late: Whether the first training call of a group connects its ranks once more before it begins.
        copy_s: How long a copy of the state takes.
        late_s: How long what is asked of a worker beside its work waits at most.
    """

    seed: int
    num_workers: int = 2
    min_workers: int = 1
    nodes: tuple[int, ...] = (4,)
    num_spares: int = 0
    num_samples: int = 24
    batch_size: int = 4
    continues: bool = True
    regroups: bool = True
    renews: bool = False
    is_large: bool = False
    has_halves: bool = False
    undo: bool | None = False
    joins_late: bool = False
    snapshot_every: int | None = None
    resize_interval_s: float | Literal["auto"] | None = None
    tells: bool = True
    heartbeat_s: float = 5.0
    use_local: bool = False
    snapshot_every_s: EverySeconds = 0.0
    copy_s: float = 0.0
    late_s: float = 0.0
    ops: tuple[Op, ...] = ()
    faults: tuple[Fault, ...] = field(default=())

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Schedule:
        """Raises `ValueError` for what is no schedule."""
        try:
            values = json.loads(text)
            ops, faults = values.pop("ops"), values.pop("faults")
            return cls(
                **{**values, "nodes": tuple(values["nodes"])},
                ops=tuple(Op(**op) for op in ops),
                faults=tuple(Fault(**fault) for fault in faults),
            )
        except (TypeError, KeyError, json.JSONDecodeError) as error:
            raise ValueError(f"this is no schedule: {error}") from error


def drawn(seed: int) -> Schedule:
    """The schedule of a seed."""
    rng = random.Random(seed)
    num_workers = rng.choice([1, 2, 2, 3, 3, 4])
    num_spares = rng.choice([0, 0, 0, 1, 2])
    num_nodes = rng.choice([1, 2, 2, 3])
    extra = rng.choice([0, 0, 1, 3])
    regroups = rng.random() < 0.8
    num_samples = rng.choice([8, 16, 23, 40])
    is_rare = rng.random() < 0.4
    schedule = Schedule(
        seed=seed,
        num_workers=num_workers,
        min_workers=rng.choice([1, 1, 1, max(1, num_workers - 1)]),
        nodes=_nodes(rng, num_nodes, num_workers + num_spares + extra),
        num_spares=num_spares if regroups else 0,
        num_samples=num_samples,
        batch_size=rng.choice([2, 4, 6]),
        continues=regroups and rng.random() < 0.85,
        regroups=regroups,
        renews=not regroups and seed % 2 == 1,
        is_large=rng.random() < 0.5,
        has_halves=rng.random() < 0.2,
        undo=UNDO[seed % 3],
        snapshot_every=rng.choice([None, None, 1, 2, 3]),
        resize_interval_s=rng.choice([AUTO if seed % 3 == 0 else None, 0.5, 2.0]),
        tells=rng.random() < 0.75,
        heartbeat_s=rng.choice([3.0, 5.0, 10.0]),
        use_local=num_workers > 1 and rng.random() < 0.2,
        snapshot_every_s=rng.choice(["auto", "auto", 1.0, 3.0, 10.0, None]) if is_rare else 0.0,
        copy_s=rng.choice([0.0005, 0.02, 0.1, 0.5]) if is_rare else 0.0,
        late_s=rng.choice([0.0, 0.0, 0.0, 0.4, 1.2, 2.5]),
    )
    schedule = replace(schedule, ops=_ops(rng), faults=_faults(rng))
    schedule = _with_late_joins(schedule) if seed % 4 == 1 else schedule
    schedule = _with_other_processes(schedule) if seed % 4 == 3 else schedule
    schedule = _with_leaving(schedule) if seed % 5 == 4 else schedule
    return _with_validations(schedule) if schedule.num_spares and seed % 3 == 2 else schedule


def _nodes(rng: random.Random, count: int, room: int) -> tuple[int, ...]:
    share = [1] * count
    for _ in range(room - count):
        share[rng.randrange(count)] += 1
    return tuple(share)


def _ops(rng: random.Random) -> tuple[Op, ...]:
    kinds = [
        "train",
        "train",
        "train",
        "steps",
        "steps",
        "note",
        "look",
        "look",
        "apply",
        "load",
        "save",
        "snapshot",
        "landed",
        "status",
        "rest",
        "kill",
    ]
    ops = []
    for _ in range(rng.randint(2, 5)):
        kind = rng.choice(kinds)
        argument = rng.randint(1, 6) if kind == "steps" else rng.randint(1, 99)
        thread = int(rng.random() < 0.08)
        ops.append(Op(kind, argument, rng.choice([0, 1, 3, 3, 3, 6]), thread))
    return (*ops, Op("train", None, 6))


def _with_late_joins(schedule: Schedule) -> Schedule:
    """The same with calls that connect the ranks before they begin, and what befalls them there."""
    rng = random.Random(schedule.seed)
    ops = [each for op in schedule.ops for each in ([Op("lose", rng.randrange(6)), op] if rng.random() < 0.4 else [op])]
    kinds = rng.choices([*LOSSES, "die", "die", "raise"], k=rng.randint(0, 4))
    faults = [_at_beginning(rng, kind) for kind in kinds]
    return replace(schedule, joins_late=True, ops=tuple(ops), faults=(*schedule.faults, *faults))


def _with_other_processes(schedule: Schedule) -> Schedule:
    """The same with workers that go on with another process of the driver, before some calls."""
    rng = random.Random(schedule.seed)
    ops = [each for op in schedule.ops for each in ([Op("take_over"), op] if rng.random() < 0.4 else [op])]
    return replace(schedule, ops=tuple(ops))


def _with_leaving(schedule: Schedule) -> Schedule:
    """The same with passes that are left, and gone on with later."""
    rng = random.Random(schedule.seed)
    ops = [
        replace(op, kind="leave", argument=rng.randint(1, 99))
        if op.kind in ("train", "steps") and rng.random() < 0.7
        else op
        for op in schedule.ops
    ]
    return replace(schedule, ops=tuple(ops))


def _at_beginning(rng: random.Random, kind: str) -> Fault:
    point = "called" if kind == "raise" or rng.random() < 0.3 else "begin"
    return Fault(kind, point, rng.randint(1, 12), rng.randrange(8))


def _with_validations(schedule: Schedule) -> Schedule:
    """The same with validations on the spares, and what befalls them there."""
    rng = random.Random(schedule.seed)
    ops = [
        op
        for each in schedule.ops
        for op in ([Op("validate", rng.randint(1, 40))] * (each.kind in ("train", "steps")) + [each])
    ]
    kinds = rng.choices(["die", "die", "freeze", "stall", "slow", "raise", "lose node"], k=rng.randint(0, 2))
    faults = [Fault(kind, "validate", rng.randint(1, 30), rng.randrange(8)) for kind in kinds]
    return replace(schedule, ops=tuple(ops), faults=(*schedule.faults, *faults))


def _faults(rng: random.Random) -> tuple[Fault, ...]:
    return tuple(_fault(rng) for _ in range(rng.choice(NUM_FAULTS)))


def _fault(rng: random.Random) -> Fault:
    drawn = rng.random()
    if drawn < 0.62:
        kind = rng.choice([*LOSSES, "die", "die", "die"])
    elif drawn < 0.88:
        kind = rng.choice([*OTHERS, "drain", "drain", "room comes"])
    else:
        return Fault(rng.choice(IN_DRIVER), "wait", rng.randint(1, 2 * POINTS["wait"]), rng.randrange(4))
    point = rng.choice(LOADING if kind == "load long" else [*POINTS, "merge", "merge", "step"])
    nth = 1 + int(rng.random() ** 1.5 * POINTS[point])  # early ones more often: not every run comes far
    return Fault(kind, point, nth, rng.randrange(8))


def size(schedule: Schedule) -> tuple[Any, ...]:
    """How much there is to a schedule: smaller is easier to understand."""
    plain = Schedule(schedule.seed)
    num_special = sum(getattr(schedule, name) != getattr(plain, name) for name in SIMPLER)
    sizes = schedule.num_workers, schedule.num_samples, len(schedule.nodes)
    return len(schedule.faults), len(schedule.ops), num_special, *sizes
