"""`ClassRunner`: the object in each worker that holds the training operator and runs the driver's calls.

The driver calls its methods by name. The work is split over modules: `hosted` connects the operator with its framework,
`training` runs the calls, and `state` copies the training state. ADR 115 explains the split.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from raysgd.core.engine.shared.replica import Capture
from raysgd.core.engine.shared.types import StateHandover, World
from raysgd.core.numbers.meters import MetricSummary
from raysgd.core.numbers.time_spent import DRIVER
from raysgd.exceptions import NotRegisteredError
from raysgd.trainer.messages.epochs import EpochAnswer, EpochRequest
from raysgd.trainer.messages.facts import RunnerFacts
from raysgd.trainer.worker.data.epoch_run import RunState
from raysgd.trainer.worker.hosted import HostedOperator
from raysgd.trainer.worker.state.state_checks import check_parts
from raysgd.trainer.worker.training import ReplicaCalls

logger = logging.getLogger(__name__)


class ClassRunner(ReplicaCalls, ABC):
    """The object in a worker that holds the current training operator and runs the driver's calls.

    This class implements the engine's interface `RegroupingReplica`. Each framework has a subclass.

    Args:
        settings: Settings with which to create the operator.
        world: This worker's rank and the number of workers in its group.
    """

    _candidate: HostedOperator | None = None

    def __init__(self, settings: Any, world: World) -> None:
        super().__init__(settings.recovery.snapshot_every_n_steps)
        self._last_left = 0
        self._settings, self._first_world = settings, world
        self._host(self._make_hosted(settings.after(0), world))

    @abstractmethod
    def _make_hosted(self, settings: Any, world: World) -> HostedOperator:
        """Return a `HostedOperator` of this framework for these settings, without creating its operator yet."""

    def setup(self) -> Any:
        """Create the operator, which runs the user's `setup`, and apply later changes of the config.

        Return the facts about the operator that the driver needs, a `RunnerFacts`.

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
        """Replace the operator by a new one that is created from new settings, in the same process and group.

        Return the facts about the new operator that the driver needs, as `setup` does.

        Args:
            settings: The new settings.
            world: This worker's rank and the number of workers. Default: as before.
        """
        self.shutdown()
        self.drop_reload()
        self._settings = settings
        self._host(self._make_hosted(settings.after(0), world or self._hosted.world))
        return self.setup()

    def follow(self, settings: Any) -> None:
        """Apply the config and the worker callbacks of newer settings to the operator. See `HostedOperator.follow`."""
        self._hosted.follow(settings)

    def warm_up(self) -> None:
        """Train on a batch or two before this worker joins a group, so that its first step in the group is fast."""
        self._ledger.stand_by()
        try:
            self._hosted.warm_up()
        except Exception as error:  # only log the error, because a step in the group will raise it again
            logger.warning("warm-up of a new worker failed: %r", error)

    @property
    def epoch(self) -> int:
        """Number of passes over the training data that this worker has started."""
        return self._hosted.feed.epoch

    @property
    def epochs_done(self) -> int:
        """Number of passes over the training data that this worker has completed."""
        feed = self._hosted.feed
        position = feed.position()
        is_mid_pass = position is not None and (position.get("is_mid_pass") or position.get("is_unknown"))
        return feed.epoch - bool(is_mid_pass)

    def change_config(self, settings: Any) -> list[str]:
        """Change entries of the operator's config. See `HostedOperator.change_config`."""
        return self._hosted.change_config(settings)

    # The following methods implement `reload`: they replace the operator with an instance of the edited class that has
    # the same state. ADR 72 explains why this takes two steps.

    def prepare_reload(self, settings: Any) -> tuple[RunnerFacts, Any]:
        """Create an operator of the user's edited class, and load the current training state into it.

        The old operator stays in use until `finish_reload`.

        Args:
            settings: Settings with the edited class.

        Returns:
            The facts about the new operator that the driver needs, and the hyperparameters that its `setup` sets to
            other values than the old operator's `setup`.

        Raises:
            ValueError: The training state does not match the new operator.
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
        """Switch to the operator that `prepare_reload` created. Return the facts about it that the driver needs.

        Return None if this worker has neither the edited class nor an operator that `prepare_reload` created from it.

        Args:
            revision: The `revision` of the settings with the edited class.
            edited: The hyperparameters that the edited class sets to other values.
        """
        if self._hosted.settings.revision != revision:  # if equal, this worker already has the edited class
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
        """Discard the operator that `prepare_reload` created."""
        self._candidate = None

    def follow_config(self) -> None:
        """Set the hyperparameters of the optimizers back to the values that `setup` chose.

        Called after the state of a trainer with another config was loaded. See `HostedOperator.follow_config`.
        """
        self._hosted.follow_config()

    # ------------------------------------------------------------------------------------------------ the state

    def state(self) -> dict[str, Any]:
        """Return the training state without copying it. Callers must copy the state before they run anything else."""
        return self._hosted.state.read()

    def capture(self, landed_token: int | None) -> Capture:
        """Copy the training state between two calls, and return this rank's part of the snapshot.

        Rank 0 copies the state that all ranks share. If this state is sharded over the ranks, every rank copies its
        shard instead. In addition, every rank copies the state that only it has.

        Args:
            landed_token: Token of the last copy that has arrived in the driver, or None if no copy has.
        """
        return self._copies.after_call(self._hosted.state, self._hosted.world.rank, landed_token)

    def fetch(self, token: int) -> Any:
        """Return the copy of the training state that this token identifies. A second thread calls this method."""
        return self._copies.fetch(token)

    def part_of_snapshot(self, number: int) -> Capture | None:
        """Return this rank's part of the snapshot that was taken after `number` steps of the running call.

        Return None if this rank has discarded its part, or the copy of the state to which the part refers.
        """
        return self._copies.part_of_snapshot(number)

    def restore(self, shared_state: Any, own_state: Any) -> None:
        """Load the training state of a snapshot or a checkpoint. See `ReplicaState.restore`.

        Args:
            shared_state: The state that all ranks share.
            own_state: The state that only this rank has. None to leave that state unchanged.
        """
        self._hosted.restore(shared_state, own_state)
        self._forget_call()

    def restore_inside(
        self,
        shared_state: Any,
        own_state: Any,
        first: RunState,
        parts: Sequence[RunState],
        everyones: Sequence[RunState],
    ) -> None:
        """Load a snapshot that was taken inside a training call, so that the call can continue from there.

        Args:
            shared_state: The state that all ranks share.
            own_state: The state that only this rank has. None to leave that state unchanged.
            first: Progress of the call on rank 0 when the snapshot was taken.
            parts: Progress of those old ranks whose metrics this rank adds to its own.
            everyones: Progress of every old rank, without metric objects.
        """
        self.restore(shared_state, own_state)
        self._go_on_from(first, *([each.metrics or MetricSummary() for each in some] for some in (parts, everyones)))

    def shutdown(self) -> None:
        """Drop the iterators over data, which ends the worker processes of data loaders. The operator stays usable."""
        self._hosted.close()
        self._forget_call()
        self._copies.clear()

    def regroup(self, world: World, handover: StateHandover) -> Any:
        """Continue in a new group of workers. Return the facts about the operator that the driver needs.

        Args:
            world: This worker's rank in the new group, and the number of workers.
            handover: Says which rank sends its training state to which other ranks.
        """
        hosted = self._hosted
        with self._ledger.regrouping(goes_on=lambda: self._unfinished is not None):
            self._suspend_call()
            self.drop_reload()  # the operator from `prepare_reload` belongs to the old group
            if handover.make_replica is not None:  # this standby worker was started with older settings
                hosted.follow(handover.make_replica.settings)
            hosted.world = world
            hosted.take_rank(world)
            if world.rank == handover.source and handover.takers:
                hosted.send(self._handed_over(), handover.takers)
            elif world.rank in handover.takers:
                self._take_over(*hosted.receive(handover.source, handover.takers))
            hosted.finish_regroup()
            names, call = hosted.names_of_all(), self._training
            if call is not None:
                call.keep_lost(names, handover.orphans)
            hosted.operator.world_changed()
            return hosted.facts()

    def validate_on_loan(
        self, number: int, settings: Any, state: Any, request: EpochRequest, share: Any = None
    ) -> EpochAnswer | None:
        """Validate the training state of the training workers on this spare worker.

        If config changes cannot turn this worker's settings into `settings`, create an operator with `settings` for the
        validation. This happens, for example, if the state was trained with older settings. Afterward, create an
        operator with this worker's own settings again.

        Args:
            number: Number of this call on the spare worker. `leave_call` ends the call if the spare worker is needed to
                replace a lost worker.
            settings: Settings of the trainer when the state was copied.
            state: The training state to validate.
            request: The driver's request to validate.
            share: The validation data for this worker, if the driver provides it. Otherwise, None.

        Returns:
            The answer. None if `leave_call` has ended the call, because the validation may then be incomplete.
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
            self._ledger.stand_by()
        return None if has_left() else answer

    def leave_call(self, number: int) -> None:
        """End the `validate_on_loan` call with this number, and all earlier ones. A second thread calls this method."""
        self._last_left = max(self._last_left, number)
