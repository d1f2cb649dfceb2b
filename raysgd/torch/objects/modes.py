"""Puts models into evaluation mode, and restores the modes that user code has set.

Each module inside a model has a separate mode. For example, a frozen batch norm or a teacher network stays in
evaluation mode during training. `model.train()` would put these into training mode as well, so the mode of each module
is stored before `model.eval()` and restored afterwards.

ADR 23 explains why modes are restored.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch


class ModuleModes:
    """Puts models into evaluation mode, and later restores the previous mode of each module in the models."""

    def __init__(self) -> None:
        self._before: list[tuple[torch.nn.Module, bool]] = []
        self._after: list[bool] = []

    def evaluate(self, models: Iterable[Any]) -> None:
        """Put all models into evaluation mode. Objects in `models` that are not modules are ignored."""
        self.give_back()
        modules = [model for model in models if isinstance(model, torch.nn.Module)]
        parts = {id(part): part for model in modules for part in model.modules()}
        self._before = [(part, part.training) for part in parts.values()]
        for model in modules:
            model.eval()
        self.note()

    def note(self) -> None:
        """Record the modes of all modules at the end of the evaluation.

        If user code changes the mode of a module after that, `give_back` does not restore the mode.
        """
        self._after = [part.training for part, _ in self._before]

    def give_back(self) -> None:
        """Restore the modes from before `evaluate`, except for modules whose mode user code changed after `note`."""
        if not self._before:
            return
        wanted = [
            (part, before if part.training == after else part.training)
            for (part, before), after in zip(self._before, self._after, strict=True)
        ]
        self._before, self._after = [], []
        for part, mode in wanted:  # modules come before their submodules, whose modes they may change
            _set(part, mode)


def begin_training(model: torch.nn.Module) -> None:
    """Put a model into training mode if all of its modules are in evaluation mode, as they are in pretrained models.

    If only some modules are in evaluation mode, the user must have done this on purpose, so the model does not change.
    A model without trainable parameters does not change either.
    """
    if model.training:
        return
    is_evaluating = not any(part.training for part in model.modules())
    if is_evaluating and any(parameter.requires_grad for parameter in model.parameters()):
        model.train()


def _set(part: torch.nn.Module, mode: bool) -> None:
    if part.training == mode:
        return
    if type(part).train is torch.nn.Module.train:
        part.training = mode
    else:
        part.train(mode)  # an overridden `train` does more, such as merging weights for evaluation
