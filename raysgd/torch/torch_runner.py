"""`TorchRunner`: the object that runs a user's PyTorch operator in each worker."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from raysgd.core.engine.shared.types import World
from raysgd.core.state.state_codec import EncodedState, lend
from raysgd.exceptions import NotRegisteredError
from raysgd.torch.checkpoints import divided
from raysgd.torch.checkpoints.divided import WrittenPart
from raysgd.torch.hosting.torch_hosted import TorchHostedOperator
from raysgd.torch.objects.models import packed
from raysgd.torch.operator.settings import TorchSettings
from raysgd.torch.parallel.tensors import unwrap
from raysgd.torch.training_operator import TrainingOperator
from raysgd.trainer.worker.runner import ClassRunner


class TorchRunner(ClassRunner):
    """Creates one PyTorch operator in a worker, and runs the driver's calls on the operator."""

    _hosted: TorchHostedOperator

    def _make_hosted(self, settings: TorchSettings, world: World) -> TorchHostedOperator:
        return TorchHostedOperator(settings, world, self._ledger)

    @property
    def operator(self) -> TrainingOperator:
        """The user's `TrainingOperator` in this worker."""
        return self._hosted.operator

    def write_part(self, folder: str) -> WrittenPart:
        """Write this rank's shards of the models and optimizers into a checkpoint folder.

        All ranks must call this method with the same folder.
        """
        state = self._hosted.state
        return divided.write_part(folder, state.read_divided(), state.own(), self._hosted.world.rank)

    def remade_tensors(self) -> EncodedState:
        """Return the frozen parameters that snapshots and checkpoints omit because `setup` recreates them.

        The result is an encoded list of dicts, one for each model, then one for a criterion with trainable parameters.
        The keys are parameter names. The list is empty without `excludes_frozen_from_state`.
        """
        tensors = self._hosted.state.remade_tensors()
        return lend([{name: each.cpu() for name, each in part.items()} for part in tensors])

    def models(self, copied: bool) -> list[torch.nn.Module | None]:
        """Return the models without wrappers such as `DistributedDataParallel`.

        Args:
            copied: True to return picklable copies on the CPU. If models are sharded, all ranks must call this method
                together. Rank 0 then gets the copies, and other ranks get None instead of each sharded model. False to
                return the models themselves.
        """
        parallel, models = self._hosted.parallel, self._hosted.state.registered.original_models
        if not copied:
            return [unwrap(model) for model in models]
        copies = [parallel.plain_model(model) for model in models]
        return [each if each is None else packed(each) for each in copies]

    def update_schedulers(self, metric: Any) -> None:
        """Call `step(metric)` of every scheduler that the operator registered.

        Raises:
            NotRegisteredError: The operator registered no scheduler.
        """
        schedulers = self._hosted.internals.registered.schedulers
        if not schedulers:
            raise NotRegisteredError("`update_scheduler` was called, but `setup` registered no scheduler.")
        for scheduler in schedulers:
            scheduler.step(metric)

    def step_plateaus(self, values: Mapping[str, float]) -> None:
        """Step each `ReduceLROnPlateau` scheduler that is due after the latest epoch, if its metric is in `values`.

        Args:
            values: Metrics of the epoch and its validation, by name.
        """
        for metric, step in self.operator._plateaus(self.epochs_done):
            if metric in values:
                step(values[metric])
