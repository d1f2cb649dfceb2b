"""The state of a replica: what it is made of, whether another one fits, and how that is taken over."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from raysgd.exceptions import NotRegisteredError
from raysgd.torch.feed import Feed
from raysgd.torch.parallel import NoParallel
from raysgd.torch.precision import saved_state
from raysgd.torch.training_operator import TrainingOperator

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

    def read(self) -> dict[str, Any]:
        """The live state; copy before anything else runs."""
        operator = self._operator
        state = {"epoch": self._feed.epoch, "operator": operator.state_dict(), **self.read_parts()}
        if operator._schedulers:
            state["schedulers"] = [scheduler.state_dict() for scheduler in operator._schedulers]
        if operator._precision.state_key:
            state[operator._precision.state_key] = operator._precision.state_dict()
        state[RESUME] = {"global_step": operator.global_step, "position": self._feed.position()}
        return state

    def read_parts(self) -> dict[str, Any]:
        """The state of models and optimizers. Where these are sharded, all ranks have to ask at the same time."""
        read = self._parallel.state_of
        return {
            "models": [read(model) for model in self.registered("_original_models")],
            "optimizers": [read(optimizer) for optimizer in self.registered("_optimizers")],
        }

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

    def check(self, state: Mapping[str, Any]) -> None:
        """Refuses a state that does not fit.

        Raises:
            KeyError: A part is missing.
            ValueError: A part does not fit what is registered.
        """
        models, optimizers = self.registered("_original_models"), self.registered("_optimizers")
        for model, saved in zip(models, state["models"], strict=True):
            _check_tensors(model.state_dict(), saved)
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            _check_groups(optimizer, saved)
        if self._operator._schedulers:
            _check_schedulers(self._operator._schedulers, state["schedulers"])
        state["operator"], state["epoch"]

    def apply(self, state: Mapping[str, Any]) -> None:
        """Takes over a state that fits. Nothing of it is kept.

        What the user's own `load_state_dict` of an operator or a scheduler refuses is found out here: what came before
        it has been loaded by then.
        """
        operator = self._operator
        for model, saved in zip(self.registered("_original_models"), state["models"], strict=True):
            self._parallel.load_model(model, saved)
        for optimizer, saved in zip(self.registered("_optimizers"), state["optimizers"], strict=True):
            self._parallel.load_optimizer(optimizer, saved)
        for scheduler, saved in zip(operator._schedulers, state.get("schedulers", ()), strict=False):
            scheduler.load_state_dict(copy.deepcopy(saved))
        precision_state = saved_state(operator._precision, dict(state))
        if precision_state is not None:
            operator._precision.load_state_dict(copy.deepcopy(precision_state))
        self._feed.epoch = state["epoch"]
        operator.load_state_dict(copy.deepcopy(state["operator"]))
        resume = state.get(RESUME) or {}
        operator.global_step = resume.get("global_step", operator.global_step)
        self._feed.go_to(state["epoch"], resume.get("position"))


def _check_tensors(own: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    missing, extra = sorted(own.keys() - saved.keys()), sorted(saved.keys() - own.keys())
    shapes = [
        f"{name}: {tuple(saved[name].shape)} instead of {tuple(tensor.shape)}"
        for name, tensor in own.items()
        if isinstance(tensor, torch.Tensor)
        and name in saved
        and not is_lazy(tensor)  # takes its shape from what is loaded
        and saved[name].shape != tensor.shape
    ]
    if missing or extra or shapes:
        raise ValueError(
            "The state of a model does not fit the registered model, nothing was loaded. "
            f"Missing: {missing or 'nothing'}; unknown: {extra or 'nothing'}; shapes: {shapes or 'all fit'}."
        )


def _check_schedulers(schedulers: Sequence[Any], states: Any) -> None:
    strangers = [type(state).__name__ for state in states if not isinstance(state, Mapping)]
    if strangers or len(states) != len(schedulers):
        raise ValueError(
            f"The state of the schedulers does not fit, nothing was loaded: {len(schedulers)} are registered, and it "
            f"holds {len(states)}{f', of them a `{strangers[0]}`, which is no state' if strangers else ''}."
        )


def _check_groups(optimizer: Any, saved: Mapping[str, Any]) -> None:
    sizes = [len(group["params"]) for group in optimizer.state_dict().get("param_groups", ())]
    saved_sizes = [len(group["params"]) for group in saved.get("param_groups", ())]
    if sizes != saved_sizes:
        raise ValueError(
            f"The state of an optimizer does not fit, nothing was loaded: its groups have {saved_sizes} "
            "parameters, the "
            f"registered optimizer's {sizes}."
        )
    settings = {
        name
        for name, value in getattr(optimizer, "defaults", {}).items()
        if isinstance(value, int | float | tuple) and not isinstance(value, bool)
    }  # others come and go with the versions of PyTorch, which sets those that are missing
    for group in saved.get("param_groups", ()):
        if missing := sorted(settings - group.keys()):
            raise ValueError(
                "The state of an optimizer does not fit, nothing was loaded: it is that of another kind, without "
                f"{', '.join(missing)}, which `{type(optimizer).__name__}` needs."
            )
