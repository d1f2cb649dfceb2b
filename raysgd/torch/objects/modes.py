"""Training and evaluation mode of models: what user code has set, kept through evaluation.

Each module of a model has its own mode: a frozen batch norm, or a teacher inside it, stays in evaluation mode
while the rest trains. So `model.train()` does not undo `model.eval()`: the modes are noted and given back.

Why modes are given back: ADR 23.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch


class ModuleModes:
    """Puts models into evaluation mode, and gives every module in them its mode back later."""

    def __init__(self) -> None:
        self._before: list[tuple[torch.nn.Module, bool]] = []
        self._after: list[bool] = []

    def evaluate(self, models: Iterable[Any]) -> None:
        """Put all models into evaluation mode; what is no module is left alone."""
        self.give_back()
        modules = [model for model in models if isinstance(model, torch.nn.Module)]
        parts = {id(part): part for model in modules for part in model.modules()}
        self._before = [(part, part.training) for part in parts.values()]
        for model in modules:
            model.eval()
        self.note()

    def note(self) -> None:
        """Note how the evaluation leaves the modules: user code that changes a mode after that wants it so."""
        self._after = [part.training for part, _ in self._before]

    def give_back(self) -> None:
        """Give the modules the modes that they had, but for those that were changed since `note`."""
        if not self._before:
            return
        wanted = [
            (part, before if part.training == after else part.training)
            for (part, before), after in zip(self._before, self._after, strict=True)
        ]
        self._before, self._after = [], []
        for part, mode in wanted:  # parents come first, and what they do to their children is undone
            _set(part, mode)


def begin_training(model: torch.nn.Module) -> None:
    """Put a model into training mode if all of it is in evaluation mode, as pretrained ones come.

    A part in evaluation mode beside others in training mode was put there on purpose, and a model without anything to
    train has no use for the mode.
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
        part.train(mode)  # it has more to do than to note the mode: some merge weights for evaluation
