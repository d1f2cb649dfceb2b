"""Starts, attaches to, lists and stops the detached trainers of a Ray cluster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from raysgd._version import __version__
from raysgd.core.cluster.keeper import NAMESPACE
from raysgd.core.cluster.ray_cluster import init_ray
from raysgd.core.private_names import find_name
from raysgd.core.text import log_lines
from raysgd.core.text.tracebacks import hides_library_frames
from raysgd.detached.handle import ANSWER_S, DetachedTrainer, actor_name, find, is_answering, kill
from raysgd.detached.process import TrainerProcess
from raysgd.detached.protocol import Detached, packed_arguments, unpacked_answer
from raysgd.exceptions import OnFailure, TrainerLostError, UnknownTrainerError

_NOT_ANSWERING = "not answering"
_RESTARTS = 100  # maximum number of restarts by Ray, because a trainer's process may die on every start
_NO_RAY = (
    "{}, and a Ray that a program starts ends with it. A detached trainer needs one that stays: run `ray start --head` "
    "in a shell, and this program again, which finds it. `ray stop` ends it."
)


_PREFIX = actor_name("")


@dataclass(frozen=True)
class DetachedStatus:
    """The status of a detached trainer.

    Attributes:
        name: The trainer's name, which `attach` takes.
        trainer: One-line description of the trainer. "not answering" if the trainer's process does not answer.
        running: Description of the call that is running. None if no call is running.
        programs: Descriptions of the programs that are attached to the trainer.
        ends_in_s: Number of seconds after which the trainer ends if no program attaches. None if the trainer is in
            use, or has no such limit (`keep_alive_s=None`).
    """

    name: str
    trainer: str
    running: str | None = None
    programs: tuple[str, ...] = ()
    ends_in_s: float | None = None

    def __str__(self) -> str:
        if self.trainer == _NOT_ANSWERING:
            return f"{self.name}: {_NOT_ANSWERING}; `raysgd stop {self.name} --force` ends it"
        running = f"running {self.running}" if self.running else "no call is running"
        attached = f"attached: {'; '.join(self.programs)}" if self.programs else "no program is attached"
        ends = "" if self.ends_in_s is None else f", ends in {self.ends_in_s:.0f} s"
        return f"{self.name}: {self.trainer}\n  {running}, {attached}{ends}"


@hides_library_frames
def start(
    trainer_cls: type[Any],
    detached: str | Detached,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> DetachedTrainer:
    """Start an actor process, create a trainer in it, and return a handle to the detached trainer.

    Args:
        trainer_cls: The class of the trainer, a `Detachable`.
        detached: The user's argument `detached`: a name, or a `Detached`.
        args: The user's positional arguments for the trainer.
        kwargs: The user's keyword arguments for the trainer.

    Raises:
        ValueError: The name is invalid or in use, or an argument of the trainer is invalid.
        UnpicklableError: An argument of the trainer cannot be pickled. Nothing was started.
        RuntimeError: There is no Ray cluster that outlives this program. Nothing was started.
    """
    settings = detached if isinstance(detached, Detached) else Detached(detached)
    if kwargs.get("use_local"):
        raise ValueError(
            "`use_local=True` runs a worker in this program, and `detached` is for trainers that outlive it."
        )
    packed = packed_arguments(trainer_cls.__name__, (trainer_cls, *args), kwargs)
    connect()
    if (settled := trainer_cls._settle(kwargs)) is not kwargs:
        packed = packed_arguments(trainer_cls.__name__, (trainer_cls, *args), settled)
    if not settings.replace:
        _check_free(settings.name)
    elif (running := find(settings.name)) is not None:
        _stop(settings.name, running)
    try:
        actor = _new_actor(settings, trainer_cls._outlives_its_process(kwargs))
    except ValueError:  # another program may have taken the name since the check
        _check_free(settings.name)
        raise
    handle = DetachedTrainer(settings.name, actor)
    with OnFailure(handle.shutdown):
        handle._run("start", trainer_cls.__name__, packed)
    return handle


def _check_free(name: str) -> None:
    """Raise `ValueError` if a detached trainer has this name."""
    if find(name) is not None:
        raise ValueError(
            f'`detached="{name}"`: there is a trainer of this name. Go on with it by `raysgd.attach("{name}")`, or end '
            f'it: `detached=raysgd.Detached("{name}", replace=True)`.'
        )


def _new_actor(settings: Detached, is_lasting: bool) -> Any:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    options: dict[str, Any] = {
        "name": actor_name(settings.name),
        "namespace": NAMESPACE,
        "lifetime": "detached",
        "num_cpus": 0,
        "max_restarts": _RESTARTS if is_lasting else 0,
        # With -1, Ray sends each unanswered request again, to the restarted process.
        "max_task_retries": -1 if is_lasting else 0,
    }
    if settings.resources:
        options["resources"] = dict(settings.resources)
    else:  # run on the program's node, so that files are written where the user expects them
        node = ray.get_runtime_context().get_node_id()
        options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(node, soft=True)
    plain = replace(settings, replace=False)
    return ray.remote(TrainerProcess).options(**options).remote(plain, log_lines.level(), is_lasting)


def attach(name: str) -> DetachedTrainer:
    """Return a handle to a detached trainer, which this or another program has created.

    If this program is not connected to a Ray cluster yet, connect to the one that Ray finds.

    Args:
        name: The trainer's name.

    Raises:
        ValueError: The name is invalid.
        UnknownTrainerError: No detached trainer has this name. The message lists the existing ones. This error is also
            a `LookupError`.
        TrainerLostError: The trainer's process does not answer, or has just ended.
        RuntimeError: The trainer's process has another version of raysgd, or there is no Ray cluster that outlives
            this program.
    """
    import ray

    actor = _existing(name)
    try:
        version = ray.get(actor.describe.remote(), timeout=ANSWER_S)["version"]
    except ray.exceptions.GetTimeoutError as error:
        raise TrainerLostError(
            f"Detached trainer `{name}` is {_NOT_ANSWERING}: its process is stopped or busy, or starts again. Try "
            f"again, or end it with `raysgd stop {name} --force`."
        ) from error
    except ray.exceptions.RayActorError as error:
        raise TrainerLostError(f"Detached trainer `{name}` has just ended.") from error
    if version != __version__:
        raise RuntimeError(
            f"Detached trainer `{name}` has raysgd {version}, and this program {__version__}: use the same version, or "
            f"end it with `raysgd stop {name}`."
        )
    return DetachedTrainer(name, actor)


def detached_trainers() -> list[DetachedStatus]:
    """Return the status of each detached trainer in the Ray cluster, sorted by name.

    Raises:
        RuntimeError: There is no Ray cluster that outlives this program.
    """
    import ray

    connect()
    asked = {name: actor.describe.remote() for name in _names() if (actor := find(name)) is not None}
    if asked:
        ray.wait(list(asked.values()), num_returns=len(asked), timeout=ANSWER_S)
    return [_status(name, reference) for name, reference in asked.items()]


def _status(name: str, reference: Any) -> DetachedStatus:
    import ray

    try:
        facts = ray.get(reference, timeout=0.1)
    except ray.exceptions.RayError:
        return DetachedStatus(name, _NOT_ANSWERING)
    return DetachedStatus(name, facts["trainer"], facts["running"], tuple(facts["programs"]), facts["ends_in_s"])


def stop(name: str, *, force: bool = False) -> str:
    """End a detached trainer and its process, even during a call.

    If no call is running and the trainer has a folder (`Detached(folder=...)`), it is saved there first.

    Args:
        name: The trainer's name.
        force: True to kill the process immediately, without saving the trainer and without waiting until it has shut
            down its workers.

    Returns:
        A phrase that says where the trainer was saved, or why it was not. An empty string if the trainer has no folder,
        if trainers of its class cannot be saved this way, or if `force` is True.

    Raises:
        ValueError: The name is invalid.
        UnknownTrainerError: No detached trainer has this name.
        RuntimeError: There is no Ray cluster that outlives this program.
        OSError: The trainer could not be saved, and is still running.
    """
    actor = _existing(name)
    words = "" if force else _saved(actor)
    _stop(name, actor, force)
    return words


def _saved(actor: Any) -> str:
    """Make a trainer save itself, and return a phrase that says where it was saved, or why it was not.

    Wait until the trainer has been saved, but give up if its process no longer answers.
    """
    import ray

    asked = actor.save_left.remote()
    while is_answering(actor):
        with suppress(ray.exceptions.GetTimeoutError):
            place, running = unpacked_answer(ray.get(asked, timeout=ANSWER_S)).result()
            return f"saved as {place}" if place else f"not saved, because it was running {running}" if running else ""
    return "not saved, because its process is not answering"


def _existing(name: str) -> Any:
    """Connect to Ray, and return the actor of the detached trainer with this name.

    Raises:
        ValueError: The name is invalid.
        UnknownTrainerError: No detached trainer has this name.
        RuntimeError: There is no Ray cluster that outlives this program.
    """
    Detached(name)  # raises an error if the name is invalid
    connect()
    actor = find(name)
    if actor is None:
        names = ", ".join(f"`{each}`" for each in _names()) or "none"
        raise UnknownTrainerError(f"There is no detached trainer `{name}`. There are: {names}.")
    return actor


def _stop(name: str, actor: Any, force: bool = False) -> None:
    import ray

    if not force and is_answering(actor):
        with suppress(ray.exceptions.RayError):  # raised if the trainer has already ended
            ray.get(actor.end.remote(False), timeout=60.0)
    kill(name, actor)


def _names() -> list[str]:
    import ray

    actors = ray.util.list_named_actors(all_namespaces=True)
    names = [each["name"] for each in actors if each["namespace"] == NAMESPACE]
    return sorted(name.removeprefix(_PREFIX) for name in names if name.startswith(_PREFIX))


def connect() -> None:
    """Connect to a Ray cluster that outlives this program, unless this program is connected to one already.

    Raises:
        RuntimeError: There is no Ray cluster, or this program started the cluster, which would end with the program.
        PermissionError: The Ray cluster rejects the token of this program.
    """
    import ray

    if not ray.is_initialized():
        try:
            init_ray(address="auto")
        except ConnectionError as error:
            raise RuntimeError(_NO_RAY.format("There is no Ray cluster here")) from error
    elif _ends_with_program():
        raise RuntimeError(_NO_RAY.format("This program has started Ray itself"))


def _ends_with_program() -> bool:
    """Return True if the Ray cluster ends with this program, because the program started it. False if unknown."""
    node = find_name("ray._private.worker:_global_node")
    return node is not None and bool(node.is_head())
