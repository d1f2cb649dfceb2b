"""`ClassRunner`: base class of replicas that host operators. The engine and the driver call its methods by name.

The work is split over modules: `hosted` connects the operator with its framework, `training` runs the calls, and
`state` copies the state. ADR 115 explains the split.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

from raysgd.core.engine.shared.replica import Capture
from raysgd.core.engine.shared.time_spent import DRIVER
from raysgd.core.engine.shared.types import StateHandover, World
from raysgd.exceptions import NotRegisteredError
from raysgd.trainer.messages.epochs import EpochAnswer, EpochRequest
from raysgd.trainer.messages.facts import RunnerFacts
from raysgd.trainer.worker.data.epoch_run import RunState
from raysgd.trainer.worker.hosted import HostedOperator
from raysgd.trainer.worker.state.state_checks import check_parts
from raysgd.trainer.worker.training import ReplicaCalls

logger = logging.getLogger(__name__)


class ClassRunner(ReplicaCalls, ABC):
    """A `RegroupingReplica` that hosts one operator at a time.

    Args:
        settings: Settings to build the operator from.
        world: This worker's rank and the size of its group.
    """

    _candidate: HostedOperator | None = None

    def __init__(self, settings: Any, world: World) -> None:
        super().__init__(settings.recovery.snapshot_every_n_steps)
        self._last_left = 0
        self._settings, self._first_world = settings, world
        self._host(self._make_hosted(settings.after(0), world))

    @abstractmethod
    def _make_hosted(self, settings: Any, world: World) -> HostedOperator:
        """Return a `HostedOperator` of this framework for these settings, without calling its `build`."""

    def setup(self) -> Any:
        """Build the operator, which runs the user's `setup`, and apply later config changes. Return its facts.

        Raises:
            NotRegisteredError: `setup` did not register a model.
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
        """Build a new operator from new settings, in the same process and group. Return its facts, as `setup` does."""
        self.shutdown()
        self.drop_reload()
        self._settings = settings
        self._host(self._make_hosted(settings.after(0), world or self._hosted.world))
        return self.setup()

    def follow(self, settings: Any) -> None:
        """Apply settings changes made since the operator was built; see `HostedOperator.follow`."""
        self._hosted.follow(settings)

    def warm_up(self) -> None:
        """Run a training step in advance, before this replica joins a group."""
        self._ledger.stand_by()
        try:
            self._hosted.warm_up()
        except Exception as error:  # a real step will raise the same error
            logger.warning("warm-up of a new worker failed: %r", error)

    @property
    def epoch(self) -> int:
        """Number of passes over the train data that have started."""
        return self._hosted.feed.epoch

    @property
    def epochs_done(self) -> int:
        """Number of completed passes over the train data."""
        feed = self._hosted.feed
        position = feed.position()
        is_mid_pass = position is not None and (position.get("is_mid_pass") or position.get("is_unknown"))
        return feed.epoch - bool(is_mid_pass)

    def change_config(self, settings: Any) -> list[str]:
        """Change entries of the operator's config; see `HostedOperator.change_config`."""
        return self._hosted.change_config(settings)

    # The following methods replace the operator class of a live replica. ADR 72 explains why this takes two steps.

    def prepare_reload(self, settings: Any) -> tuple[RunnerFacts, Any]:
        """Build an operator from the user's edited class and load the current state into it.

        The old operator is used until `finish_reload`.

        Returns:
            Facts of the new operator, and the hyperparameters that its `setup` sets to other values than before.

        Raises:
            ValueError: The state does not match the new operator.
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
        """Switch to the operator that `prepare_reload` built, and return its facts.

        Return None if there is no such operator.
        """
        if self._hosted.settings.revision != revision:  # if they are equal, this replica already has the new class
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
        """Discard the operator that `prepare_reload` built."""
        self._candidate = None

    def follow_config(self) -> None:
        """Reset optimizers' hyperparameters to the values from `setup`, after loading a state from another config."""
        self._hosted.follow_config()

    # ------------------------------------------------------------------------------------------------ the state

    def state(self) -> dict[str, Any]:
        """Return the live state. The caller must copy it before running anything else."""
        return self._hosted.state.read()

    def capture(self, landed_token: int | None) -> Capture:
        """Copy the state between two calls: rank 0 copies the shared state, and every rank copies its own state.

        Args:
            landed_token: Token of the last copy that the driver has fetched; None if the driver has not fetched any.
        """
        return self._copies.after_call(self._hosted.state, self._hosted.world.rank, landed_token)

    def fetch(self, token: int) -> Any:
        """Return the copy of the state with this token."""
        return self._copies.fetch(token)

    def part_of_snapshot(self, number: int) -> Capture | None:
        """Return this rank's part of the snapshot taken in a call after `number` steps; None if it was discarded."""
        return self._copies.part_of_snapshot(number)

    def restore(self, shared_state: Any, own_state: Any) -> None:
        """Restore a snapshot or a checkpoint. If it does not match the operator, nothing changes."""
        self._hosted.restore(shared_state, own_state)
        self._forget_call()

    def restore_inside(self, shared_state: Any, own_state: Any, first: RunState, parts: Iterable[RunState]) -> None:
        """Restore a snapshot that was taken inside a training call, so that the call can continue from there."""
        self.restore(shared_state, own_state)
        self._go_on_from(first, parts)

    def shutdown(self) -> None:
        """Discard the iterators, which stops the loaders' worker processes. The operator stays usable."""
        self._hosted.close()
        self._forget_call()
        self._copies.clear()

    def regroup(self, world: World, handover: StateHandover) -> Any:
        """Continue in the new group. Each rank in `handover.takers` receives the state of rank `handover.source`."""
        hosted = self._hosted
        with self._ledger.regrouping(goes_on=lambda: self._unfinished is not None):
            self._leave_group()
            self.drop_reload()  # the operator from `prepare_reload` was built for the old group
            if handover.make_replica is not None:  # this standby worker was built with older settings
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
        """Validate a training worker's state on a spare worker, which belongs to no group.

        If the state belongs to older settings, rebuild the operator for those settings. Afterwards, rebuild it for the
        spare's own settings.

        Args:
            number: Number of the loan. A loan is a call that a spare worker runs until the group needs the spare.
            settings: Settings that the state belongs to.
            state: The state to validate.
            request: The validation request.
            share: This worker's shard, if the driver shards the validation data; otherwise None.

        Returns:
            The answer; None if the loan ended before the validation was complete.
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
        """End this call on a spare worker, and all earlier calls on it. Called from a second thread."""
        self._last_left = max(self._last_left, number)
