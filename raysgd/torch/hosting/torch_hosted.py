"""`TorchHostedOperator`: a user's `TrainingOperator` inside a worker, with its data, training loop, state and rank."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from raysgd.core.arrays.user_data import BatchForm
from raysgd.core.connections.group import Gather
from raysgd.core.connections.torch import mesh_group
from raysgd.core.engine.shared.types import World
from raysgd.exceptions import OnFailure
from raysgd.streams.source import StreamData
from raysgd.torch.data import call_data
from raysgd.torch.data.call_data import PredictionLoader
from raysgd.torch.data.feed import DividedLoaderSource, TorchFeed
from raysgd.torch.data.sampling import ShardedLoader, UndividedLoader
from raysgd.torch.hosting.torch_state import TorchState
from raysgd.torch.hosting.torch_step import TorchParts, is_plain, make_undo
from raysgd.torch.objects import hyperparameters, metric_objects, rng
from raysgd.torch.objects.hyperparameters import Hyperparameters
from raysgd.torch.objects.models import ModuleModes
from raysgd.torch.objects.precision import make_precision
from raysgd.torch.operator.internals import TorchInternals
from raysgd.torch.operator.registrar import global_batches
from raysgd.torch.operator.settings import OperatorContext, TorchSettings
from raysgd.torch.parallel import handover
from raysgd.torch.parallel.strategy import DDP, Strategy
from raysgd.torch.parallel.sync import DDPSync, GradientSync
from raysgd.torch.parallel.tensors import sums_of
from raysgd.torch.step.advice import with_advice
from raysgd.torch.training_operator import TrainingOperator
from raysgd.trainer.messages.comparison import WeightSums
from raysgd.trainer.messages.epochs import RunnerFacts, bind_batch_info
from raysgd.trainer.messages.prediction import PredictRequest, Work
from raysgd.trainer.worker.hosted import HostedOperator
from raysgd.trainer.worker.ledger import Ledger
from raysgd.trainer.worker.operator import check_is_set_up
from raysgd.trainer.worker.step_loop import StepParts, StepRules
from raysgd.utils import BATCH_SIZE

logger = logging.getLogger(__name__)


class TorchHostedOperator(HostedOperator):
    """A user's `TrainingOperator` inside a worker, with its data, training loop and state.

    Attributes:
        parallel: Strategy, such as DDP, that keeps the workers' models in sync.
        internals: The library's private state for the operator.
    """

    settings: TorchSettings
    operator: TrainingOperator
    internals: TorchInternals
    state: TorchState
    feed: TorchFeed
    parts: TorchParts
    as_array = staticmethod(call_data.plain)

    def __init__(self, settings: TorchSettings, world: World, ledger: Ledger) -> None:
        self._device = _device(settings.use_gpu)
        self.parallel = _make_parallel(settings, world, self._device)
        rule = global_batches(settings)
        feed = TorchFeed(self._data, self.parallel, world.size, world.rank, rule, self._make_batch)
        super().__init__(settings, world, feed, ledger)
        self._modes: ModuleModes | None = None  # train/eval modes to restore after an evaluation; None otherwise
        self._prediction: PredictionLoader | None = None

    def build(self) -> RunnerFacts:
        settings, world, device = self.settings, self.world, self._device
        precision = make_precision(settings.use_fp16, device, settings.precision)
        self.parallel.forward_context = precision.forward
        context = OperatorContext(settings, world, device, precision, self.parallel)
        if settings.seed is not None:
            rng.seed_alike(settings.seed)
        self.operator = settings.training_operator_cls(config=settings.config_for(world.size), context=context)
        check_is_set_up(self.operator)
        self.internals = self.operator._raysgd
        self.internals.finish_setup(reports_ahead=is_plain(self.operator, "train_epoch", "train_batch"))
        if not is_plain(self.operator, "optimizer_step"):
            self.internals.prepare_steps()
        self._check_data()
        recovery = settings.recovery
        copies = recovery.undo if recovery.in_place else False
        undo = make_undo(self.operator, self.parallel, copies, world)
        splits = settings.batch_options.is_auto
        self.parts = TorchParts(self.operator, self.parallel.sync, self.feed, undo, splits)
        self.internals.gradients.watch_last()
        self.parallel.attach(self.internals.registered.wrapped)
        self.state = TorchState(self.operator, self.parallel, self.feed, self.parts.waiting_parameters)
        registered = self.internals.registered
        hyperparameters.note_first_rates(registered.schedulers)
        self.internals.chosen = hyperparameters.read(registered.optimizers)
        self.install_callbacks(settings.worker_callbacks)
        self._drawn, self._initial_seed = rng.capture(), torch.initial_seed()
        facts = self.facts()
        self._part_ways()
        return facts

    def _check_data(self) -> None:
        """Check that the train loader and the optimizers work with `split_batches` and `deterministic`.

        Raises:
            ValueError: The train loader or the optimizers do not work with one of these options.
        """
        train, options = self._data("train"), self.settings.batch_options
        if options.is_global and isinstance(train, UndividedLoader):
            name = "deterministic" if options.deterministic else "split_batches"
            raise ValueError(
                f"`{name}={getattr(options, name)!r}` needs train data that the library divides, and the train loader "
                f"is not divided ({train.reason}). Register a `DataLoader` over a map-style dataset, or omit `{name}`."
            )
        num_optimizers = len(self.internals.registered.optimizers)
        if options.deterministic and num_optimizers > 1:
            raise ValueError(
                f"`deterministic=True` with {num_optimizers} registered optimizers cannot work: one that steps between "
                "two shards would change the second one. Register a single optimizer, with parameter groups."
            )

    def _part_ways(self) -> None:
        """Give this rank's random number generators states that differ from those on all other ranks.

        A new worker with `deterministic=True` and without a seed keeps its states, because the generators are seeded
        for each shard of a batch.
        """
        rank = self.world.rank
        if self.has_trained:
            # If this worker's rank has changed, a new worker may have its old rank and a copy of its states. Both
            # workers would then draw the same random numbers.
            if rank != self.operator.world_rank:
                rng.fork(rng.capture(), ~rank)
        elif self.settings.seed is not None:
            rng.part_ways(self.settings.seed, rank)
        elif not self.settings.batch_options.deterministic:  # user code in `setup` may have seeded all ranks alike
            rng.fork(self._drawn, rank)

    def draw_apart(self) -> None:
        if not self.has_trained and not self.settings.batch_options.deterministic:
            rng.fork(rng.capture(), self.operator.global_step)

    def facts(self) -> RunnerFacts:
        registered = self.internals.registered
        train, validation = self._data("train"), self._data("validation")
        return RunnerFacts(
            num_models=len(registered.original_models),
            num_optimizers=len(registered.optimizers),
            num_schedulers=len(registered.schedulers),
            train_data=train.signature if isinstance(train, ShardedLoader | StreamData) else None,
            validation_data=validation.signature if isinstance(validation, ShardedLoader | StreamData) else None,
            seed=train.seed_hint if isinstance(train, ShardedLoader) else self._initial_seed,
            keeps_own_state=not is_plain(self.operator, "state_dict"),
            is_synchronous=self.parallel.sync.averages,
            is_sharded=self.parallel.is_sharded,
            epoch_obstacle=self.epoch_obstacle,
            ray_batches={} if self.world.rank else self.internals.data.ray_batches,
            has_validation=validation is not None or self.has_own_validate,
            keeps_global_batch=self.settings.keeps_global_batch,
            batch_size=train.batch_size if isinstance(train, ShardedLoader) else None,
            plateau_metrics=tuple(metric for metric, _ in self.operator._plateaus(0)),
        )

    def change_config(self, settings: TorchSettings) -> list[str]:
        internals, changed = self.internals, settings.config_changes[-1]
        chosen, internals.follows_rate = internals.chosen, False
        follows_rate_only = is_plain(self.operator, "config_changed")
        numbers = {name for groups in chosen for group in groups for name in group if name != "lr"}
        if follows_rate_only and (names := sorted(changed.keys() & numbers)):
            raise ValueError(
                f"`update_config({names[0]}=...)`: an optimizer has a number of this name, and only `lr` follows the "
                "config. Override `config_changed(self, config, changed)`: call `super().config_changed(config, "
                f"changed)`, and set `group[{names[0]!r}]` in `self.optimizer.param_groups`."
            )
        restore = hyperparameters.remember(internals.registered.optimizers, internals.registered.schedulers)
        with OnFailure(restore), OnFailure(partial(setattr, internals, "chosen", chosen)):
            super().change_config(settings)
        return sorted(changed.keys() - ({"lr"} if internals.follows_rate else set())) if follows_rate_only else []

    def edited_by(self, candidate: TorchHostedOperator) -> list[Hyperparameters]:
        differing = hyperparameters.differing(self.internals.chosen, candidate.internals.chosen)
        if not any(group for groups in differing for group in groups):
            return []
        candidate.take_edited(differing)  # if this raises, the worker still uses the old operator class
        return differing

    def take_edited(self, edited: list[Hyperparameters]) -> None:
        if edited:
            registered = self.internals.registered
            hyperparameters.apply(edited, registered.optimizers, registered.schedulers)

    def warm_up(self) -> None:
        operator, data = self.operator, self._data("train")
        if not operator.warms_up or self.group_obstacle or self.epoch_obstacle:
            return
        if not isinstance(data, ShardedLoader):
            return
        if is_plain(operator, "train_batch") and not (is_plain(operator, "train_epoch") or hasattr(operator, "model")):
            return  # without `self.model`, the user's `train_epoch` cannot call the default `train_batch`
        try:
            self.parts.begin_leg(0)
            batch = next(DividedLoaderSource(data, data.seed_hint).open(0, 0), None)
            if batch is not None:
                internals = self.internals
                info = {**internals.info_of_batch(0), "warm_up": True, **internals.info_of_call(None, 0)}
                bind_batch_info(operator.train_batch)(batch[0], info)
        finally:
            metric_objects.reset(operator, self.internals.registered)
            self.parallel.sync.end_leg()

    @property
    def group_obstacle(self) -> str | None:
        return self.parallel.obstacle or super().group_obstacle

    def take_rank(self, world: World) -> None:
        if self.parts.splits and self._device.type == "cuda":  # memory may have run out
            gc.collect()
            torch.cuda.empty_cache()
        config = self.operator.config
        before, now = config.get(BATCH_SIZE), self.settings.config_for(world.size).get(BATCH_SIZE)
        if now is not None:
            config[BATCH_SIZE] = now
        self._part_ways()
        self.operator._raysgd.take_rank(self.operator, world)
        self.feed.take_rank(world.rank, world.size, now, before)

    def send(self, state: Any, takers: Sequence[int]) -> None:
        handover.send(state, takers, self.operator.device)

    def receive(self, source: int, takers: Sequence[int]) -> Any:
        return handover.receive(source, takers, self.operator.device)

    @property
    def gather(self) -> Gather | None:
        if not self.parallel.sync.shares_metrics:
            return None
        if not self.world.is_distributed:  # a rank alone keeps its own metrics, because others may join later
            return lambda row: [row]
        group = mesh_group()
        return None if group is None else group.gather

    def finish_regroup(self) -> None:
        self.parallel.reform()

    def leave_evaluation(self) -> None:
        """Restore the train/eval modes from before an evaluation, and release the data of a prediction."""
        if self._modes is not None:
            self._modes.give_back()
        if self._prediction is not None:
            self._prediction.close()
        self._modes = self._prediction = None

    @contextmanager
    def evaluating(self) -> Iterator[StepParts]:
        """Put the models into evaluation mode for the `with` block and until the next training call."""
        internals, registered = self.internals, self.internals.registered
        internals.loss_calls.makes_all = is_plain(self.operator, "validate", "validate_batch", "forward")
        noting = internals.loss_calls.on(internals.criterion, internals.note_amount)
        modes = self._modes = self._modes or ModuleModes()
        modes.evaluate([*registered.models, getattr(self.operator, "model", None)])
        sync = self.parallel.sync
        try:
            with self.parallel.evaluating(registered.wrapped), noting, with_advice(registered.wrapped):
                yield StepParts(self.feed, sync.end_leg(StepRules()))
        finally:
            sync.end_leg()
            modes.note()

    @contextmanager
    def predicting(self) -> Iterator[None]:
        """Put the models into evaluation mode for the `with` block.

        At the end of the block, restore the models' previous modes and the states of the random number generators.
        """
        registered, modes = self.internals.registered, ModuleModes()
        modes.evaluate([*registered.models, getattr(self.operator, "model", None)])
        try:
            with self.giving_back_random_numbers(), self.parallel.evaluating(registered.wrapped), torch.no_grad():
                yield
        finally:
            modes.give_back()

    def weight_sums(self) -> WeightSums | None:
        models, chosen = self.internals.registered.trained, self.operator.compares_ranks
        remade, left_out_of = self.internals.remade, self.parallel.left_out_of
        if remade is not None:
            left_out_of = remade.added_to(left_out_of)
        return sums_of(models, chosen, left_out_of, self.settings.batch_options.deterministic)

    @contextmanager
    def inside_epoch(self) -> Iterator[None]:
        with super().inside_epoch(), metric_objects.set_aside(self.operator, self.internals.registered):
            yield

    def to_predict(self, request: PredictRequest, work: Work, share: Any) -> Iterator[tuple[Any, int]]:
        if self._prediction is None:
            self._prediction = PredictionLoader(partial(self.feed.collate_fn, "validation"), self._make_batch)
        return self._prediction.batches(request, work, share)

    def _make_batch(self, arrays: Any, form: BatchForm) -> Any:
        return self.internals.as_batch(arrays, form)

    def close(self) -> None:
        super().close()
        if self._prediction is not None:
            self._prediction.close()
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.empty_cache()

    def _data(self, name: str) -> Any:
        """Return the data that the operator registered under "train" or "validation"; None if it registered none."""
        if self.operator is None:  # the operator's `setup` is still running
            return None
        data = self.internals.data
        return data.train if name == "train" else data.validation


def _make_parallel(settings: TorchSettings, world: World, device: torch.device) -> Strategy:
    if settings.use_horovod:  # even for a single rank, because user code may call Horovod's methods of the optimizers
        from raysgd.torch.parallel.horovod_parallel import HorovodByHand, HorovodParallel

        return HorovodByHand() if settings.strategy == "none" else HorovodParallel(world.size)
    alone, several = GradientSync, DDPSync
    if settings.batch_options.deterministic:
        from raysgd.torch.parallel.ordered import OrderedDDPSync, OrderedSync

        alone, several = OrderedSync, OrderedDDPSync
    if not (world.is_distributed or settings.may_grow) or settings.strategy == "none":
        return Strategy(alone(has_others=world.is_distributed))
    if settings.strategy == "ddp":
        # Do not send metrics in each step from a GPU, because reading them would wait for the device.
        return DDP(several(shares_metrics=device.type == "cpu"))
    from raysgd.torch.parallel.fsdp import FSDP  # imported only if needed, because it loads more parts of PyTorch

    return FSDP(device, world.size, settings.fsdp_options)


def _device(use_gpu: bool) -> torch.device:
    if use_gpu and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
