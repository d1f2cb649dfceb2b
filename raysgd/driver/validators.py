"""Workers that validate while others train: in a group of their own, or spares, one at a time."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from raysgd.driver.calls import EpochCalls
from raysgd.driver.sharing import DataSharing
from raysgd.engine.controller import ElasticController
from raysgd.engine.shared.call import Call
from raysgd.engine.shared.types import World
from raysgd.engine.snapshots import NewestSnapshot
from raysgd.messages.epochs import EpochAnswer, EpochRequest
from raysgd.messages.settings import GroupSettings, ReplicaMaker, ReplicaSettings

logger = logging.getLogger(__name__)

Validation = Callable[[Callable[[], None]], list[EpochAnswer]]
"""Validates; gets what to call meanwhile."""


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
        calls: Puts the calls to them.
        replicas: Makes their replicas.
        follow: Lets a replica follow a change of its settings.
        num_workers: How many there are.
    """

    def __init__(
        self,
        controller: ElasticController,
        calls: EpochCalls,
        replicas: ReplicaMaker,
        follow: Callable[..., Any],
        num_workers: int = 1,
    ) -> None:
        self.controller = controller
        self.num_workers = num_workers
        self._calls, self._replicas, self._follow = calls, replicas, follow

    def begin(
        self, asked: EpochRequest, dataset: Any, settings: ReplicaSettings, sharing: DataSharing, newest: NewestSnapshot
    ) -> Validation:
        """Begins to validate a state. What it returns is to be called within a turn of `controller`.

        Args:
            asked: What every replica is asked.
            dataset: What takes the place of the registered data; None if nothing does.
            settings: Those of the workers that train.
            sharing: Divides data with these.
            newest: The state.
        """

        def validate(on_wait: Callable[[], None]) -> list[EpochAnswer]:
            state = newest.result()
            if settings is not self._replicas.settings:
                self._become(settings)
                self._calls.sharing = sharing
            return self._calls.validate(asked, dataset, state)

        return validate

    def _become(self, settings: ReplicaSettings) -> None:
        """Starts the validators with settings, or tells them what has changed."""
        before, self._replicas.settings = self._replicas.settings, settings
        try:
            if before is None or self.controller.group is None or not settings.follow(before):
                self.controller.kill_group()
                self.controller.start()
            else:
                self.controller.run(Call(self._follow, lambda worlds: [(settings,)] * len(worlds), keeps_alike=True))
        except BaseException:
            self._replicas.settings = None
            raise


class ValidatingSpares:
    """The spares of one trainer, which validate until they are needed: each validation runs on one of them.

    Args:
        training: Has them, and the workers that train.
        calls: Puts the calls to the latter, which validate where there is no spare.
        function: What a spare runs, with the number of its loan, the settings, the state and the request.
    """

    controller = None
    num_workers = 1

    def __init__(self, training: ElasticController, calls: EpochCalls, function: Callable[..., Any]) -> None:
        self._training, self._calls, self._function = training, calls, function

    def begin(
        self, asked: EpochRequest, dataset: Any, settings: ReplicaSettings, sharing: DataSharing, newest: NewestSnapshot
    ) -> Validation:
        """Does what that of `Validators` does, within a turn of the training. What it returns needs no turn."""
        loan, facts = self._training.lend_spare(), self._training.facts[0]
        if loan is None and not self._training.has_spares:
            logger.warning("there is no spare to validate: the workers that train do, which wait for it")
            answers = self._calls.validate(asked, dataset)
            return lambda on_wait: answers
        arrived = functools.cache(newest.result)

        def make_args() -> list[Any]:
            state = arrived()
            sharing.forget()
            requests = self._calls.requests("validation", asked, dataset, [World(0, 1)], sharing, facts)
            return [settings, state.shared_state if state.reference is None else state.reference, *requests[0]]

        return lambda on_wait: [self._training.run_on_spare(loan, self._function, make_args, on_wait)]
