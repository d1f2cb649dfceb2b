"""The base of the replicas of operators: what the engine and the driver call by name.

`hosted` has the operator and its framework, `training` its calls, and `state` copies of the state. Why: ADR 115.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

from raysgd.engine.shared.replica import Capture
from raysgd.engine.shared.time_spent import DRIVER
from raysgd.engine.shared.types import StateHandover, World
from raysgd.exceptions import NotRegisteredError
from raysgd.messages.epochs import EpochAnswer, EpochRequest
from raysgd.messages.facts import RunnerFacts
from raysgd.worker.data.epoch_run import RunState
from raysgd.worker.hosted import Hosted
from raysgd.worker.state.state_checks import check_parts
from raysgd.worker.training import ReplicaCalls

logger = logging.getLogger(__name__)


class ClassRunner(ReplicaCalls, ABC):
    """Hosts one operator at a time; a `RegroupingReplica`.

    Args:
        settings: What the operator is made from, and what belongs to it.
        world: The place among the replicas.
    """

    _candidate: Hosted | None = None

    def __init__(self, settings: Any, world: World) -> None:
        super().__init__(settings.recovery.snapshot_every_n_steps)
        self._last_left = 0
        self._settings, self._first_world = settings, world
        self._host(self._make_hosted(settings.after(0), world))

    @abstractmethod
    def _make_hosted(self, settings: Any, world: World) -> Hosted:
        """The hosted operator that these settings make in this framework; its `build` was not called yet."""

    def setup(self) -> Any:
        """Build the operator, which runs the user's `setup`, and tell it what changed later. Return its facts.

        Raises:
            NotRegisteredError: That registers nothing.
        """
        facts = self._hosted.build()
        if not facts.num_models:
            raise NotRegisteredError(
                f"`{type(self._hosted.operator).__name__}.setup` never called `register`: register models and "
                "optimizers there, so that the library can train, save and restore them."
            )
        if self._settings.config_changes:
            self._hosted.follow(self._settings)
            facts = self._hosted.facts()
        self._ledger.enter(DRIVER)
        return facts

    def renew(self, settings: Any, world: World | None = None) -> Any:
        """Make a new operator, from other settings, in the group that there is. Return facts, like `setup`."""
        self.shutdown()
        self.drop_reload()
        self._settings = settings
        self._host(self._make_hosted(settings.after(0), world or self._hosted.world))
        return self.setup()

    def follow(self, settings: Any) -> None:
        """Tell the operator what has changed in the settings since it was made; see `Hosted.follow`."""
        self._hosted.follow(settings)

    def warm_up(self) -> None:
        """Take a step in advance, before this replica has a place among others."""
        self._ledger.stand_by()
        try:
            self._hosted.warm_up()
        except Exception as error:  # in a real step the user gets it
            logger.warning("warm-up of a new worker failed: %r", error)

    @property
    def epoch(self) -> int:
        """The number of passes over the train data that were begun."""
        return self._hosted.feed.epoch

    @property
    def epochs_done(self) -> int:
        """The number of passes over the train data that were completed."""
        feed = self._hosted.feed
        position = feed.position()
        is_mid_pass = position is not None and (position.get("is_mid_pass") or position.get("is_unknown"))
        return feed.epoch - bool(is_mid_pass)

    def change_config(self, settings: Any) -> list[str]:
        """Change entries of the config in the operator; see `Hosted.change_config`."""
        return self._hosted.change_config(settings)

    # What follows changes a live replica without a new process. ADR 72 says why a class is edited in two steps.

    def prepare_reload(self, settings: Any) -> tuple[RunnerFacts, Any]:
        """Make an operator of another class with the state of this one, which goes on until `finish_reload`.

        Returns:
            Its facts, and the hyperparameters that its `setup` chooses differently.

        Raises:
            ValueError: The state does not fit.
        """
        hosted = self._hosted
        self._candidate, own = None, hosted.state.own()
        with hosted.giving_back_random_numbers():
            candidate = self._make_hosted(settings, hosted.world)
            facts: RunnerFacts = candidate.build()
            state = hosted.state.read()
            check_parts(state, facts.counts)
            candidate.restore(state, own)
        candidate.has_trained = hosted.has_trained
        self._candidate = candidate
        return facts, hosted.edited_by(candidate)

    def finish_reload(self, revision: int, edited: Any) -> RunnerFacts | None:
        """Go on with the operator that `prepare_reload` made; None where there is none."""
        if self._hosted.settings.revision != revision:  # else it was made with the new class
            candidate = self._candidate
            if candidate is None or candidate.settings.revision != revision:
                return None
            self._hosted.feed.close()
            self._host(candidate)
            self.drop_reload()
        self._hosted.take_edited(edited)
        facts: RunnerFacts = self._hosted.facts()
        return facts

    def drop_reload(self) -> None:
        """Forget what `prepare_reload` made."""
        self._candidate = None

    def follow_config(self) -> None:
        """Give the optimizers the hyperparameters of `setup` again, after a state of another config was loaded."""
        self._hosted.follow_config()

    # ------------------------------------------------------------------------------------------------ the state

    def state(self) -> dict[str, Any]:
        """The state; copy before anything else runs."""
        return self._hosted.state.read()

    def capture(self, landed_token: int | None) -> Capture:
        """Copy the state once: rank 0 what all ranks share, every rank what is its own."""
        return self._copies.after_call(self._hosted.state, self._hosted.world.rank, landed_token)

    def fetch(self, token: int) -> Any:
        """The copy of the state that `token` names."""
        return self._copies.fetch(token)

    def part_of_snapshot(self, number: int) -> Capture | None:
        """This rank's part of the snapshot taken inside the running call after `number` steps."""
        return self._copies.part_of_snapshot(number)

    def restore(self, shared_state: Any, own_state: Any) -> None:
        """Take over a snapshot or a checkpoint; nothing is changed if it does not fit. See `ReplicaState.restore`."""
        self._hosted.restore(shared_state, own_state)
        self._forget_call()

    def restore_inside(self, shared_state: Any, own_state: Any, first: RunState, parts: Iterable[RunState]) -> None:
        """Take over a snapshot that was taken inside a training call, ready to continue the call."""
        self.restore(shared_state, own_state)
        self._go_on_from(first, parts)

    def shutdown(self) -> None:
        """Drop the iterators, and with them the processes of loaders. The operator itself stays usable."""
        self._hosted.close()
        self._forget_call()
        self._copies.clear()

    def regroup(self, world: World, handover: StateHandover) -> Any:
        """Continue in the new group; take over the state of `handover.source` if it is among the takers."""
        hosted = self._hosted
        with self._ledger.regrouping(goes_on=lambda: self._unfinished is not None):
            self._leave_group()
            self.drop_reload()  # what was made for the group before
            if handover.make_replica is not None:  # it was made ready earlier
                hosted.follow(handover.make_replica.settings)
            hosted.world = world
            hosted.take_place(world)
            if world.rank == handover.source and handover.takers:
                hosted.send(self._handed_over(), handover.takers)
            elif world.rank in handover.takers:
                self._take_over(*hosted.receive(handover.source, handover.takers))
            hosted.settle_in()
            self._settle_run(hosted.names_of_all(self._name), handover.orphans)
            hosted.operator.world_changed()
            return hosted.facts()

    def validate_on_loan(
        self, number: int, settings: Any, state: Any, request: EpochRequest, share: Any = None
    ) -> EpochAnswer | None:
        """Validate a state of the workers that train, on a spare that is in no group; None where this loan was ended.

        A spare that has to be made again for settings from before is made again for its own afterwards.
        """

        def has_left() -> bool:
            return self._last_left >= number

        own = self._hosted.settings
        if settings.follow(own):
            self.follow(settings)
        else:
            self.renew(settings, self._first_world)
        self.regroup(World(0, 1), StateHandover(0, ()))
        self._has_left = has_left
        try:
            self.restore(state, None)
            answer = self.validate(request, share)
        finally:
            self._has_left = None
            if not settings.follow(own):
                self.renew(own, self._first_world)
                self.warm_up()
        return None if has_left() else answer

    def leave_call(self, number: int) -> None:
        """End this loan and all before it; called from a second thread."""
        self._last_left = max(self._last_left, number)
