"""The state of a replica: what it is made of, whether another one fits, and how that is taken over."""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from raysgd._fitting import check_progress
from raysgd.exceptions import NotRegisteredError
from raysgd.torch._fitting import check_model, check_optimizer, check_precision, check_schedulers
from raysgd.torch.feed import Feed
from raysgd.torch.parallel import NoParallel
from raysgd.torch.precision import saved_state
from raysgd.torch.training_operator import TrainingOperator

logger = logging.getLogger(__name__)

CRITERION = "criterion"  # key of the state of a criterion with parameters; files of before have none
FROZEN = "frozen"  # key in it of what only snapshots carry: parameters that were frozen or unfrozen since `setup`
RESUME = "resume"  # key of what only snapshots and files carry: the position in the data and the step counter


class ReplicaState:
    """Reads and replaces the state of one replica.

    Args:
        operator: Has what is registered, and a state of its own.
        parallel: Knows how to read and load a part of it.
        feed: Has the position in the data.
    """

    def __init__(self, operator: TrainingOperator, parallel: NoParallel, feed: Feed) -> None:
        self._operator = operator
        self._parallel = parallel
        self._feed = feed
        self._flags = self._read_flags()

    def read(self) -> dict[str, Any]:
        """The live state; copy before anything else runs."""
        operator = self._operator
        state = {"epoch": self._feed.epoch, "operator": operator.state_dict(), **self.read_parts()}
        if operator._schedulers:
            state["schedulers"] = [scheduler.state_dict() for scheduler in operator._schedulers]
        if operator._precision.state_key:
            state[operator._precision.state_key] = operator._precision.state_dict()
        frozen = [_changes(before, now) for before, now in zip(self._flags, self._read_flags(), strict=False)]
        position = self._feed.position()
        state[RESUME] = {"global_step": operator.global_step, "position": position, FROZEN: frozen}
        return state

    def _read_flags(self) -> list[dict[str, bool]]:
        """For each model, and the criterion, which parameters are frozen."""
        trained = self._operator._trained
        return [{name: not each.requires_grad for name, each in part.named_parameters()} for part in trained]

    def _freeze(self, changes: Sequence[Mapping[str, bool]]) -> None:
        """Freezes what `setup` has frozen, but for the changes since then."""
        for part, before, changed in zip(self._operator._trained, self._flags, changes, strict=False):
            for name, parameter in part.named_parameters():
                parameter.requires_grad_(not changed.get(name, before.get(name, not parameter.requires_grad)))

    def read_parts(self) -> dict[str, Any]:
        """The state of what is trained, and of optimizers. Where these are sharded, all ranks ask at the same time."""
        read, criterion = self._parallel.state_of, self._criterion
        return {
            "models": [read(model) for model in self.registered("_original_models")],
            "optimizers": [read(optimizer) for optimizer in self.registered("_optimizers")],
            **({} if criterion is None else {CRITERION: read(criterion)}),
        }

    @property
    def _criterion(self) -> Any:
        """The criterion, if it is trained."""
        return getattr(self._operator, "_original_criterion", None)

    def registered(self, name: str) -> list[Any]:
        """What `register` was given, under its name in the operator.

        Raises:
            NotRegisteredError: It was never called.
        """
        found = getattr(self._operator, name, None)
        if found is None:
            raise NotRegisteredError(
                f"`{type(self._operator).__name__}.setup` never called `register`: register models and optimizers "
                "there, so that the library can save and restore them."
            )
        return list(found)

    def objects(self) -> list[Any]:
        """All that a state has a place for, down to the tensors."""
        operator, models = self._operator, self.registered("_original_models")
        tensors = [tensor for model in models for tensor in (*model.parameters(), *model.buffers())]
        return [*tensors, *self.registered("_optimizers"), *operator._schedulers]

    def check(self, state: Mapping[str, Any]) -> None:
        """Refuses a state that does not fit.

        Raises:
            KeyError: A part is missing.
            ValueError: A part does not fit what is registered.
        """
        operator = self._operator
        check_progress(state["epoch"], state.get(RESUME))
        for model, saved in zip(self.registered("_original_models"), state["models"], strict=True):
            check_model(model, saved)
        for optimizer, saved in zip(self.registered("_optimizers"), state["optimizers"], strict=True):
            check_optimizer(optimizer, saved)
        if self._criterion is not None and CRITERION in state:
            check_model(self._criterion, state[CRITERION])
        if operator._schedulers:
            check_schedulers(operator._schedulers, state["schedulers"])
        precision_state = saved_state(operator._precision, dict(state))
        if precision_state is not None:
            check_precision(operator._precision.state_dict(), precision_state)
        state["operator"]

    def apply(self, state: Mapping[str, Any]) -> None:
        """Takes over a state that fits. Nothing of it is kept.

        What the user's own `load_state_dict` of an operator or a scheduler refuses shows only here: what came before
        it has been loaded by then.
        """
        operator = self._operator
        # What others are going to hold on to is copied first: no copy fails when something has been replaced.
        own_state = copy.deepcopy(state["operator"])
        schedulers = copy.deepcopy(list(state.get("schedulers", ())))
        precision_state = copy.deepcopy(saved_state(operator._precision, dict(state)))
        for model, saved in zip(self.registered("_original_models"), state["models"], strict=True):
            self._parallel.load_model(model, saved)
        if self._criterion is not None:
            self._load_criterion(self._criterion, state.get(CRITERION))
        for optimizer, saved in zip(self.registered("_optimizers"), state["optimizers"], strict=True):
            self._parallel.load_optimizer(optimizer, saved)
        for scheduler, saved in zip(operator._schedulers, schedulers, strict=False):
            scheduler.load_state_dict(saved)
        if precision_state is not None:
            operator._precision.load_state_dict(precision_state)
        self._feed.epoch = state["epoch"]
        operator.load_state_dict(own_state)
        resume = state.get(RESUME) or {}
        if FROZEN in resume:
            self._freeze(resume[FROZEN])
        operator.global_step = resume.get("global_step", operator.global_step)
        self._feed.go_to(state["epoch"], resume.get("position"))

    def _load_criterion(self, criterion: Any, saved: Mapping[str, Any] | None) -> None:
        if saved is None:
            logger.warning("the state has none of the criterion, whose parameters stay as they are")
        else:
            self._parallel.load_model(criterion, saved)


def as_in_file(state: Mapping[str, Any]) -> dict[str, Any]:
    """A state without what no file carries."""
    resume = state.get(RESUME)
    if not isinstance(resume, Mapping):
        return dict(state)
    return {**state, RESUME: {name: value for name, value in resume.items() if name != FROZEN}}


def _changes(before: Mapping[str, bool], now: Mapping[str, bool]) -> dict[str, bool]:
    return {name: flag for name, flag in now.items() if before.get(name) != flag}
