"""A loader that repeats batches where they failed, divided over the workers that are left."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler

from raysgd.train._torch.joint_batches import JointBatches, JointStream
from raysgd.train._torch.joint_steps import JointSteps


class RepeatingLoader(DataLoader[Any]):
    """Another loader, over joint batches. Everything else is read from that one.

    Between two batches it waits until there is a group. So that is where the function stands while survivors of a loss
    form another one, and where others step in.

    Args:
        loader: The other one.
        steps: The steps that are taken on its batches.

    Attributes:
        is_open: Whether the function is in the middle of a pass with steps.
    """

    def __init__(self, loader: DataLoader[Any], steps: JointSteps) -> None:
        self.__dict__.update(loader.__dict__)
        self._loader, self._steps = loader, steps
        self._has_trained = self.is_open = False
        self._epoch = self._number = 0
        steps.number(self)

    @property
    def _joint(self) -> JointBatches | JointStream:
        return self._loader.batch_sampler  # type: ignore[return-value]

    @property
    def _sampler(self) -> DistributedSampler[Any] | JointStream:
        return self._loader.sampler  # type: ignore[return-value]

    @property
    def epoch(self) -> int:
        """The passes with steps that have come to their end or were left, in all workers together.

        A function that counts by it can be joined by others in the middle. You may set it, to what a checkpoint says.
        """
        self._steps.admit()
        return self._epoch

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def position(self) -> dict[str, Any]:
        """Returns where it is, for those that step in."""
        return {
            "epoch": self._epoch,
            "order": self._sampler.epoch,
            "size": self._joint.size,
            "number": self._number,
            "consumed": self._joint.consumed,
            "is_open": self.is_open,
        }

    def take_over(self, position: dict[str, Any]) -> None:
        """Goes on where others are."""
        self._epoch, self._number, self._joint.size = position["epoch"], position["number"], position["size"]
        self._sampler.set_epoch(position["order"])
        self._joint.consumed = position["consumed"]
        self._joint.note(0)
        self._has_trained = True

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        joint = self._joint
        self._number, self.is_open = 0, torch.is_grad_enabled()
        place, outcomes = self._steps.enter(self.is_open), set[str]()
        num_batches = joint.draw()
        while self._number < num_batches:
            joint.begin(self._number, place.world)
            for batch in iter(self._loader):
                weight = joint.weight(self._number, place.world)
                joint.note(self._number + 1)
                if not torch.is_grad_enabled():  # no step can follow, and each rank is elsewhere in the pass
                    if weight:
                        yield batch
                    self._number += 1
                    continue
                mark = self._steps.open_batch(place, weight, self._has_trained, self._number)
                try:
                    yield batch
                except GeneratorExit:
                    has_trained = self._steps.leave_batch(mark) or "done" in outcomes
                    self._leave(has_trained, is_last=self._number + 1 == num_batches)
                    raise
                outcome = self._steps.close_batch(mark)
                self._number += outcome != "failed"
                self._note(outcome, outcomes)
                before = place
                if outcome != "seen":
                    place = self._steps.enter()
                if outcome == "failed" or place is not before:
                    break
        joint.end()
        self._epoch += "done" in outcomes
        self.is_open = False

    def _leave(self, has_trained: bool, is_last: bool) -> None:
        """Counts the pass that the function leaves, unless it is of a stream, whose next pass goes on there."""
        self.is_open, self._has_trained = False, self._has_trained or has_trained
        if has_trained and (is_last or isinstance(self._joint, JointBatches)):
            self._joint.end()
            self._epoch += 1

    def _note(self, outcome: str, outcomes: set[str]) -> None:
        """Notes what became of a batch, and in a set what became of those of this pass."""
        outcomes.add(outcome)
        self._has_trained = self._has_trained or outcome != "seen"
        if {"seen", "done"} <= outcomes:
            self._steps.note_unstepped()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_loader"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)  # not as `DataLoader` does, which refuses some
