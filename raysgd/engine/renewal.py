"""New replicas in the processes that there are: as in new workers, without the time that these take to start."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from raysgd.engine.controller import ElasticController
from raysgd.engine.shared.call import Call


def renew(controller: ElasticController, function: Callable[..., Any], *args: Any) -> None:
    """Makes new replicas in the workers, in the group that they are in. What was trained is dropped.

    Workers that start later have to be made with the same arguments: see to it before you call this.

    Args:
        controller: Keeps the workers alive.
        function: Runs on each worker as `function(replica, *args)`, and returns facts as `Replica.setup` does.
        args: For it.

    Raises:
        WorkerError: The user's set-up failed. The workers are ended; the next call starts new ones.
        WorkersLostError: Workers were lost too often.
        TrainerShutdownError: After `stop`.
    """
    group = controller.group
    if group is None:
        restart(controller)
        return
    controller.landed_snapshot()  # one that is on its way would not find what it is to bring
    controller.snapshots.begin_again()
    group.standby.kill_all()
    call = Call(function, lambda worlds: [args] * len(worlds), changes_state=True, leaves_as_new=True)
    try:
        controller.take_facts(controller.run(call))
    except BaseException:  # Ctrl-C too: some replicas may be new, and others not
        controller.kill_group()
        raise


def restart(controller: ElasticController) -> None:
    """Does the same in new processes, for replicas that leave something behind in theirs."""
    controller.kill_group()
    controller.snapshots.begin_again()
    controller.ensure_group()
