"""Workers that validate while others train: in a group of their own, or spares, one at a time."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from raysgd.driver.calls import EpochCalls
from raysgd.driver.sharing import DataSharing
from raysgd.engine.controller import ElasticController
from raysgd.engine.processes.snapshots import NewestSnapshot, Snapshot
from raysgd.engine.shared.types import World
from raysgd.exceptions import WorkersLostError
from raysgd.messages.epochs import EpochAnswer, EpochRequest
from raysgd.messages.replica_maker import ReplicaMaker
from raysgd.messages.settings import GroupSettings

logger = logging.getLogger(__name__)

Validation = Callable[[EpochRequest, Any, Callable[[], None]], list[EpochAnswer]]
"""Validates a state: gets what is asked, what takes the place of the registered data, and what to call meanwhile."""


def settings_of_validators(group: GroupSettings) -> GroupSettings:
    """Return what the group of validators is started with, beside workers that are started with `group`."""
    return replace(
        group,
        num_workers=group.validation_workers,
        min_workers=1,
        spare_workers=0,
        validation_workers=0,
        use_local=False,
        resize_check_s=None,  # the others wait for a new one: nothing waits for them
    )


class Validators:
    """The validators of one trainer. They start with the first validation.

    Args:
        controller: Has them. A validation that loses one is run again there.
        training: Has the workers that train.
        calls: Puts the calls to the validators.
        replicas: Makes the replicas of both groups, from the settings of the time.
        new_sharing: Makes what divides data over them.
        num_workers: How many there are.
    """

    def __init__(
        self,
        controller: ElasticController,
        training: ElasticController,
        calls: EpochCalls,
        replicas: ReplicaMaker,
        new_sharing: Callable[[], DataSharing],
        num_workers: int = 1,
    ) -> None:
        self.controller = controller
        self.num_workers = num_workers
        self._training, self._calls, self._replicas, self._new_sharing = training, calls, replicas, new_sharing
        self._made_from: Any = None

    def begin(self, newest: NewestSnapshot) -> Validation:
        """Begins to validate a state."""
        return lambda asked, dataset, on_wait: self.validate(asked, dataset, newest)

    def validate(self, asked: EpochRequest, dataset: Any, newest: NewestSnapshot) -> list[EpochAnswer]:
        """Validates a state; to be called within a turn of `controller`.

        Args:
            asked: What every replica is asked.
            dataset: What takes the place of the registered data; None if nothing does.
            newest: The state.
        """
        snapshot = arrived(newest, self._training)
        self._follow_settings()
        return self._calls.validate(asked, dataset, snapshot)

    def _follow_settings(self) -> None:
        """Starts the validators, again where the trainer makes other replicas by now."""
        settings = self._replicas.settings
        if settings is self._made_from:
            return
        self.controller.kill_group()
        self._calls.sharing = self._new_sharing()
        self.controller.start()
        self._made_from = settings


class ValidatingSpares:
    """The spares of one trainer, which validate until they are needed: each validation runs on one of them.

    Args:
        training: Has them, and the workers that train.
        calls: Puts the calls to the latter, which validate where no spare is left.
        function: What a spare runs, with the number of its loan, the state and the request.
        new_sharing: Makes what divides data over the workers of a group.
    """

    controller = None
    num_workers = 1

    def __init__(
        self,
        training: ElasticController,
        calls: EpochCalls,
        function: Callable[..., Any],
        new_sharing: Callable[[], DataSharing],
    ) -> None:
        self._training, self._calls, self._function, self._new_sharing = training, calls, function, new_sharing

    def begin(self, newest: NewestSnapshot) -> Validation:
        """Begins to validate a state, within a turn of the training. The validation needs no turn."""
        loan, coming = self._training.lend_spare(), [newest]

        def validate(asked: EpochRequest, dataset: Any, on_wait: Callable[[], None]) -> list[EpochAnswer]:
            def args() -> list[Any]:
                coming[0] = NewestSnapshot(arrived(coming[0], self._training))
                state = coming[0].result()
                requests = self._calls.requests("validation", asked, dataset, [World(0, 1)], self._new_sharing())
                return [state.shared_state if state.reference is None else state.reference, *requests[0]]

            answer = self._training.run_on_spare(loan, self._function, args, on_wait)
            if answer is not None:
                return [answer]
            logger.warning("no spare is left to validate: the workers that train validate the current weights")
            return self._calls.validate(asked, dataset)

        return validate


def arrived(newest: NewestSnapshot, training: ElasticController) -> Snapshot:
    """Return the snapshot, once it has left the worker that has the only copy."""
    while True:
        try:
            return newest.result()
        except WorkersLostError:  # those that are left have trained on
            newest = training.newest_snapshot()
            logger.warning(
                "the weights to validate were lost with the worker that had copied them: the current ones are "
                "validated instead"
            )
