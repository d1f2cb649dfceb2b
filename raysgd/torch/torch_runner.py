"""`TorchRunner`: the replica in each worker. It owns the operator, the streams of its data, and the timers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from raysgd._checks import is_integer
from raysgd.engine.replica import Capture
from raysgd.engine.time_spent import DRIVER
from raysgd.engine.types import Handover, World
from raysgd.exceptions import NotRegisteredError
from raysgd.replicas.epoch_run import EpochRun
from raysgd.replicas.epochs import bind_batch_info
from raysgd.replicas.facts import RunnerFacts
from raysgd.replicas.operator import Internals, take_place
from raysgd.replicas.prediction import PredictRequest, Work
from raysgd.replicas.putting_back import MOST_BYTES, putting_back
from raysgd.replicas.runner import ClassRunner
from raysgd.torch import handover as handing_over
from raysgd.torch import hyperparameters, metric_objects, predicting, rng
from raysgd.torch.advice import with_advice
from raysgd.torch.checkpoint_file import FileIdentity, mapped_again
from raysgd.torch.ddp import DDP
from raysgd.torch.divided_folder import WrittenPart
from raysgd.torch.feed import Feed
from raysgd.torch.hyperparameters import Hyperparameters
from raysgd.torch.internals import TorchInternals
from raysgd.torch.logical_shards import LogicalShards
from raysgd.torch.modes import Modes
from raysgd.torch.operator_context import OperatorContext
from raysgd.torch.parallel import NoParallel, unwrap
from raysgd.torch.precision import make_precision
from raysgd.torch.predicting import ToPredict
from raysgd.torch.registrar import Registered, joint_batches
from raysgd.torch.replica_state import TorchState, as_in_file
from raysgd.torch.sampling import ShardedLoader, Unsharded
from raysgd.torch.schedulers import IdleSchedulers
from raysgd.torch.settings import TorchSettings
from raysgd.torch.step_loop import StepLoop, overrides
from raysgd.torch.streams import DividedSource, Source
from raysgd.torch.training_operator import TrainingOperator
from raysgd.utils import BATCH_SIZE

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class TorchFacts(RunnerFacts):
    """What is to be known of a `TorchRunner` besides.

    Attributes:
        num_schedulers: How many schedulers are registered; None when there are none.
        seed: Where this rank would take the order of the data from.
        is_synchronous: Whether every step involves all ranks.
        is_sharded: Whether it takes all ranks to read a model.
    """

    num_schedulers: int | None
    seed: int
    is_synchronous: bool
    is_sharded: bool = False

    @property
    def counts(self) -> dict[str, int]:
        counts = super().counts
        return {**counts, "schedulers": self.num_schedulers} if self.num_schedulers else counts


class TorchRunner(ClassRunner):
    """Hosts one operator."""

    stock_train_epochs = (TrainingOperator.train_epoch,)
    _kept_by_reload = (*ClassRunner._kept_by_reload, "_has_trained")
    _state: TorchState
    _feed: Feed

    def __init__(self, settings: TorchSettings, world: World) -> None:
        self._settings = settings
        self._device = _device(settings.use_gpu)
        self._parallel = _make_parallel(settings, world, self._device)
        is_balanced = self._parallel.times_exchanges = settings.batch_options.balance is not None
        super().__init__(
            world,
            settings.snapshot_every_n_steps,
            Feed(self._data, self._parallel, world.size, self._undo, world.rank, joint_batches(settings), is_balanced),
        )
        self._modes = Modes()
        self._prediction = ToPredict()
        self._has_trained = False

    @property
    def operator(self) -> TrainingOperator:
        """The live operator."""
        operator: TrainingOperator = self._operator
        return operator

    @property
    def _internals(self) -> TorchInternals:
        return self.operator._raysgd

    def setup(self) -> TorchFacts:
        """Builds the operator, which runs the user's `setup`."""
        settings, world, device = self._settings, self._world, self._device
        precision = make_precision(settings.use_fp16, device, settings.precision)
        context = OperatorContext(settings, world, device, precision, self._parallel)
        if settings.seed is not None:
            rng.seed_alike(settings.seed)
        self._operator = settings.training_operator_cls(settings.config_for(world.size), context)
        self._check_data()
        self._warn_of_batch_norms()
        self._state = TorchState(self._operator, self._parallel, self._feed)
        self._loop = StepLoop(self._operator, self._parallel, self._feed)
        self._internals.chosen = hyperparameters.read(self._internals.registered.optimizers)
        self.install_callbacks(settings.worker_callbacks)
        facts = self._facts()
        self._part_ways()
        self._ledger.enter(DRIVER)
        return facts

    def _check_data(self) -> None:
        """Refuses train data that cannot be divided by joint batches, if the trainer has to."""
        train, options = self._data("train"), self._settings.batch_options
        if options.is_joint and isinstance(train, Unsharded):
            name = "deterministic" if options.deterministic else "joint_batch"
            raise ValueError(
                f"`{name}={getattr(options, name)!r}` needs train data that the library divides, and the train loader "
                f"is not divided ({train.reason}). Register a `DataLoader` over a map-style dataset, or omit `{name}`."
            )
        num_optimizers = len(self._internals.registered.optimizers)
        if options.deterministic and num_optimizers > 1:
            raise ValueError(
                f"`deterministic=True` with {num_optimizers} registered optimizers cannot work: one that steps between "
                "two shards would change the second one. Register a single optimizer, with parameter groups."
            )

    def _warn_of_batch_norms(self) -> None:
        """Says once what shares by speed mean to them."""
        models = self._internals.registered.original_models
        kinds = (torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d)
        has_some = any(isinstance(module, kinds) for model in models for module in model.modules())
        if self._settings.batch_options.balance is not None and has_some and self._world.rank == 0:
            logger.warning(
                '`balance="speed"` with batch norms: each worker normalizes over its own share, whose size follows its '
                "speed. Gradients of other layers are exact. Use another norm, or `sync_batchnorm=True` on GPUs"
            )

    def _part_ways(self) -> None:
        """Gives this rank its own random numbers, unless it has drawn some already."""
        if self._settings.seed is not None and not self._has_trained:
            rng.part_ways(self._settings.seed, self._world.rank)

    def renew(self, settings: TorchSettings) -> TorchFacts:
        self.shutdown()
        TorchRunner.__init__(self, settings, self._world)
        return self.setup()

    def _edited_by(self, candidate: TorchRunner) -> list[Hyperparameters]:
        differing = hyperparameters.differing(self._internals.chosen, candidate._internals.chosen)
        return differing if any(group for groups in differing for group in groups) else []

    def _take_edited(self, edited: list[Hyperparameters]) -> None:
        if edited:
            registered = self._internals.registered
            hyperparameters.apply(edited, registered.optimizers, registered.schedulers)

    def follow_config(self) -> None:
        """Gives the optimizers the hyperparameters of `setup` again, after a state of another config was loaded."""
        registered = self._internals.registered
        hyperparameters.apply(self._internals.chosen, registered.optimizers, registered.schedulers)

    def change_config(self, config: Mapping[str, Any], changed: Mapping[str, Any]) -> list[str]:
        internals = self._internals
        chosen, internals.followed = internals.chosen, set()
        try:
            with hyperparameters.put_back_on_errors(internals.registered.optimizers, internals.registered.schedulers):
                super().change_config(config, changed)
        except BaseException:
            internals.chosen = chosen
            raise
        return [] if overrides(self.operator, "config_changed") else sorted(changed.keys() - internals.followed)

    def _facts(self) -> TorchFacts:
        registered = self._internals.registered
        train, validation = self._data("train"), self._data("validation")
        return TorchFacts(
            num_models=len(registered.original_models),
            num_optimizers=len(registered.optimizers),
            num_schedulers=len(registered.schedulers) or None,
            train_data=train.signature if isinstance(train, ShardedLoader) else None,
            validation_data=validation.signature if isinstance(validation, ShardedLoader) else None,
            seed=train.seed_hint if isinstance(train, ShardedLoader) else torch.initial_seed(),
            keeps_own_state=overrides(self.operator, "state_dict"),
            is_synchronous=self._parallel.synchronizes,
            is_sharded=self._parallel.is_sharded,
            epoch_obstacle=self._epoch_obstacle,
            ray_batches={} if self._world.rank else self._internals.data.ray_batches,
            has_validation=validation is not None or overrides(self.operator, "validate"),
        )

    def restore_file(self, identity: FileIdentity, weights_only: bool, own_state: Any) -> None:
        """Takes over a checkpoint out of a file that the driver keeps open; nothing is changed if it does not fit.

        Raises:
            OtherFileError: This process does not find that file.
            KeyError, ValueError: As in `restore`.
        """
        with mapped_again(identity, weights_only=weights_only) as state:
            self.restore(as_in_file(state), own_state)

    def _with_copy(self, part: Capture) -> Capture:
        if not self._parallel.is_sharded:
            return super()._with_copy(part)
        return self._copies.add_apart(replace(part, is_part=True), self._state.copied_part(self._world.rank))

    def write_part(self, folder: str) -> WrittenPart:
        """Writes what this rank has of divided models and optimizers into a folder; all ranks have to ask."""
        from raysgd.torch import divided_state  # not everywhere: it loads parts of PyTorch that others do without

        return divided_state.write(folder, self._state, self._parallel)

    def shutdown(self) -> None:
        super().shutdown()
        self._prediction.close()
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.empty_cache()

    @property
    def _connection_obstacle(self) -> str | None:
        return self._parallel.obstacle

    def warm_up(self) -> None:
        """Takes one step on the first batch. What it changes is taken over from another rank later, or put back."""
        self._ledger.stand_by()
        operator, data = self.operator, self._data("train")
        if not operator.warms_up_standby or self._group_obstacle or self._epoch_obstacle:
            return
        if not isinstance(data, ShardedLoader):
            return
        try:
            self._arm(0)
            batch = next(DividedSource(data, data.seed_hint).open(0, 0), None)
            if batch is not None:
                with putting_back(operator, self._state.objects(), _undo_of_tensor, _is_open_class):
                    self._warm_up(batch[0])
        except Exception as error:  # in a real step the user would get the exception
            logger.warning("warm-up of a standby worker failed: %r", error)
        finally:
            self._parallel.step.close_call()

    def _warm_up(self, batch: Any) -> None:
        operator = self.operator
        internals = self._internals
        info = {**internals.info_of_batch(0), "warm_up": True, **internals.info_of_call(None, 0)}
        bind_batch_info(operator.train_batch)(batch, info)

    def _take_place(self, world: World) -> None:
        config = self.operator.config
        before, now = config.get(BATCH_SIZE), self._settings.config_for(world.size).get(BATCH_SIZE)
        if now is not None:
            config[BATCH_SIZE] = now
        self._part_ways()
        take_place(self.operator, world)
        self._feed.take_place(world.rank, world.size, now, before)
        self._parallel.step.own_s = 0.0  # the ranks are compared, and some of them are new

    def _send(self, state: Any, takers: Sequence[int]) -> None:
        handing_over.send(state, takers, self.operator.device)

    def _receive(self, source: int, takers: Sequence[int]) -> Any:
        return handing_over.receive(source, takers, self.operator.device)

    def _hand_over(self, handover: Handover) -> None:
        super()._hand_over(handover)
        self._parallel.reform()  # for what is frozen by now, which a new worker has just heard

    @contextmanager
    def _training(self, run: EpochRun, stream: Any) -> Iterator[None]:
        self._has_trained = True
        self._parallel.exchanges.ledger = self._ledger
        self._modes.give_back()
        self._prediction.close()
        self._arm(run.epoch_idx, stream.source)
        internals, registered = self._internals, self._internals.registered
        stream.prepare = partial(self._parallel.match, registered.wrapped)
        began_at, idle = stream.num_steps_taken, IdleSchedulers(registered.schedulers)
        try:
            with with_advice(registered.wrapped):
                yield
            self._finish_steps(stream.num_steps_taken - began_at)
            if not stream.is_mid_pass:
                idle.warn(self.operator, internals.once)
        finally:
            self._parallel.step.close_call()

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        """The models stay in evaluation mode afterwards, until they are trained again."""
        registered = self._internals.registered
        self._modes.evaluate([*registered.models, getattr(self.operator, "model", None)])
        try:
            with self._parallel.evaluating(registered.wrapped):
                yield
        finally:
            self._modes.note()

    @contextmanager
    def _predicting(self) -> Iterator[None]:
        """Modes of models and random states are given back, so that training goes on as if nothing had happened."""
        registered, modes = self._internals.registered, Modes()
        modes.evaluate([*registered.models, getattr(self.operator, "model", None)])
        try:
            with (
                self._giving_back_random_numbers(),
                self._parallel.evaluating(registered.wrapped),
                torch.no_grad(),
            ):
                yield
        finally:
            modes.give_back()

    @contextmanager
    def _giving_back_random_numbers(self) -> Iterator[None]:
        drawn = rng.capture()
        try:
            yield
        finally:
            rng.restore(drawn)

    def _to_predict(self, request: PredictRequest, work: Work, share: Any) -> Iterator[tuple[Any, int]]:
        return self._prediction.batches(request, work, share)

    def _as_array(self, value: Any) -> Any:
        return predicting.plain(value)

    def _arm(self, epoch_idx: int, source: Source | None = None) -> None:
        """Gets ready for the steps of a call over such data."""
        operator, internals = self.operator, self._internals
        internals.own_steps.begin_call()
        window = operator.accumulate_grad_batches(epoch_idx)
        if not is_integer(window) or window < 1:
            raise ValueError(
                f"`{type(operator).__name__}.accumulate_grad_batches` returned {window!r}: return how many batches "
                "make an optimizer step, at least 1."
            )
        may_defer = internals.precision.can_defer
        num_shards, wrapped = 0 if source is None else source.num_shards, internals.registered.wrapped
        most_parts = 1 if source is None or num_shards else source.most_batches
        step, world = self._parallel.step, self._world
        step.most_parts = most_parts
        step.shards = LogicalShards(num_shards, world.rank, world.size, wrapped) if num_shards else None
        if num_shards and window > 1:
            raise ValueError(
                f"`accumulate_grad_batches={window}` does not work with `deterministic=True`: make the joint batch as "
                "many times larger, and pass `max_batch_per_worker`."
            )
        self._parallel.arm(wrapped, _may_run_backward(operator), window * most_parts, may_defer)

    def _finish_steps(self, num_batches: int) -> None:
        """Leaves no gradient behind for another call."""
        internals, step, name = self._internals, self._parallel.step, type(self.operator).__name__
        internals.finish_window()
        if step.window > 1 and num_batches and not step.is_used:
            option = f"accumulate_grad_batches={step.window}" if step.most_parts == 1 else "max_batch_per_worker"
            raise ValueError(
                f"`{option}` had no effect: `{name}` computes its "
                "gradients by itself. Call `self.backward(loss)` and `self.optimizer_step()` in `train_batch`, for "
                "every batch, or accumulate by hand and omit the option."
            )
        if num_batches and internals.own_steps.misses_clipping:
            raise ValueError(
                f"Gradient clipping had no effect: `{name}` steps an optimizer that is no "
                "`torch.optim.Optimizer`. Call `self.optimizer_step()` instead of its `step`, or clip the gradients "
                "yourself and leave `clip_grad_norm` and `clip_grad_value` out."
            )

    def _undo(self) -> Callable[[], None]:
        """Remembers what padding must not change: what metric objects have seen."""
        return metric_objects.remember(self.operator, self._internals.registered)

    def _data(self, name: str) -> Any:
        """What is registered under "train" or "validation"."""
        if self._operator is None:  # it is still being set up
            return None
        data = self._internals.data
        return data.train if name == "train" else data.validation

    def models(self, to_cpu: bool) -> list[torch.nn.Module | None]:
        """Copies of the models without any wrapper, on the CPU; the live ones for a replica in the driver.

        Of models that are sharded all ranks have to ask for copies, and rank 0 alone gets some.
        """
        models = self._state.registered.original_models
        if to_cpu or self._parallel.is_sharded:
            return [self._parallel.plain_model(model) for model in models]
        return [unwrap(model) for model in models]

    def update_schedulers(self, metric: Any) -> None:
        """Steps every registered scheduler with `metric`."""
        schedulers = self._internals.registered.schedulers
        if not schedulers:
            raise NotRegisteredError("`update_scheduler` was called, but `setup` registered no scheduler.")
        for scheduler in schedulers:
            scheduler.step(metric)


def _may_run_backward(operator: TrainingOperator) -> bool:
    """Whether user code may compute gradients past the rung that weights the loss."""
    return any(overrides(operator, name) for name in ("train_epoch", "train_batch", "backward"))


def _make_parallel(settings: TorchSettings, world: World, device: torch.device) -> NoParallel:
    if settings.use_horovod:  # also for one rank: its optimizers then have what Horovod adds to them
        from raysgd.torch.horovod_parallel import HorovodByHand, HorovodParallel

        return HorovodByHand() if settings.parallel == "none" else HorovodParallel(world.size)
    if not world.is_distributed or settings.parallel == "none":
        return NoParallel(has_others=world.is_distributed)
    if settings.parallel == "ddp":
        return DDP()
    from raysgd.torch.fsdp import FSDP  # not everywhere: it loads parts of PyTorch that others do without

    return FSDP(device, world.size, settings.fsdp_options)


def _device(use_gpu: bool) -> torch.device:
    if use_gpu and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _is_open_class(kind: type) -> bool:
    """Whether to look into objects of this class: of PyTorch those that hold tensors, of raysgd what leads to them."""
    if kind in (TorchInternals, Internals, Registered):
        return True
    return kind.__module__.startswith("torch.nn.modules.") and kind.__module__ != "torch.nn.modules.lazy"


def _undo_of_tensor(value: Any) -> Callable[[], object] | None:
    """What puts a small tensor back; None for a large one, and for what is no tensor."""
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided or value.nbytes > MOST_BYTES:
        return None
    return partial(value.detach().copy_, value.detach().clone())
