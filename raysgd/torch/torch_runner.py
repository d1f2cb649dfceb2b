"""`TorchRunner`: the replica in each worker. It owns the operator, the position in the data and the timers."""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from raysgd._batching import config_for_worker
from raysgd._meters import MetricSummary
from raysgd._timers import TimerCollection
from raysgd.engine.epochs import EpochAnswer, EpochRequest, Progress, call_with_accepted
from raysgd.engine.replica import Capture
from raysgd.engine.results import WorkerMetrics, as_number
from raysgd.engine.types import World
from raysgd.exceptions import NotRegisteredError
from raysgd.torch import rng
from raysgd.torch.parallel import DDP, NoParallel, Step, unwrap
from raysgd.torch.precision import make_precision, saved_state
from raysgd.torch.sampling import DataSignature, ShardedLoader
from raysgd.torch.state_codec import EncodedState, StateEncoder, decode
from raysgd.torch.streams import Agreement, BatchStream, DividedSource, LockstepSource, PlainSource, Source
from raysgd.torch.training_operator import OperatorContext, TrainingOperator

logger = logging.getLogger(__name__)

RESUME = "resume"  # key of what only snapshots and files carry: the position in the data and the step counter
_TICK_S = 0.1  # between two looks at a progress bar
_KEPT = ("optimizers", "schedulers", "operator")  # parts whose new owners keep the very objects that they are given
_INLINE_BYTES = 65536  # a state up to this size travels with the answer; a call of its own would cost more


@dataclass(frozen=True)
class RunnerSpec:
    """What every replica is made from; `use_local` says that the one of rank 0 lives in the driver."""

    operator_cls: type[TrainingOperator]
    config: Mapping[str, Any]
    use_gpu: bool = False
    use_fp16: bool | str = False
    use_tqdm: bool = False
    wrap_ddp: bool = True
    add_dist_sampler: bool = True
    scheduler_step_freq: str | None = None
    use_local: bool = False


@dataclass(frozen=True)
class RunnerFacts:
    """What the driver wants to know about a replica that was set up.

    Attributes:
        num_models: How many models are registered, and so on; `num_schedulers` is None when there are none.
        train_data: What all ranks must agree on; None for a loader that is not divided.
        validation_data: Likewise.
        seed: Where this rank would take the order of the data from.
        keeps_own_state: Whether the operator has a state of its own, which evaluation may change.
        is_synchronous: Whether every step involves all ranks.
    """

    num_models: int
    num_optimizers: int
    num_schedulers: int | None
    train_data: DataSignature | None
    validation_data: DataSignature | None
    seed: int
    keeps_own_state: bool
    is_synchronous: bool


class TorchRunner:
    """Hosts one operator.

    Args:
        spec: What the operator is made from.
        world: The place among the replicas.
    """

    def __init__(self, spec: RunnerSpec, world: World) -> None:
        self._spec = spec
        self._world = world
        self._operator: TrainingOperator | None = None
        self._parallel: NoParallel = DDP() if world.is_distributed and spec.wrap_ddp else NoParallel()
        self._timers = TimerCollection()
        self._train_stream: BatchStream | None = None
        self._validation_stream: BatchStream | None = None
        self._agreement: Agreement | None = None
        self._resume: Mapping[str, Any] | None = None
        self._encoder = StateEncoder()
        self._captured: dict[int, EncodedState] = {}
        self._next_token = 0
        self._running: tuple[BatchStream, int, int | None, Mapping[str, Any]] | None = None
        self.epoch = 0

    @property
    def operator(self) -> TrainingOperator:
        """The live operator."""
        assert self._operator is not None
        return self._operator

    # ------------------------------------------------------------------------------------------------ replica

    def setup(self) -> RunnerFacts:
        """Builds the operator, which runs the user's `setup`."""
        spec, world = self._spec, self._world
        device = _device(spec.use_gpu)
        context = OperatorContext(
            world=world,
            device=device,
            use_gpu=device.type == "cuda",
            use_tqdm=spec.use_tqdm,
            wrap_ddp=self._parallel.synchronizes,
            add_dist_sampler=spec.add_dist_sampler,
            scheduler_step_freq=spec.scheduler_step_freq,
            precision=make_precision(spec.use_fp16, device),
            parallel=self._parallel,
        )
        self._operator = spec.operator_cls(config_for_worker(spec.config, world.size), context)
        return self._facts()

    def _facts(self) -> RunnerFacts:
        operator = self.operator
        train, validation = self._data("_train_data"), self._data("_validation_data")
        return RunnerFacts(
            num_models=len(getattr(operator, "_original_models", ())),
            num_optimizers=len(getattr(operator, "_optimizers", ())),
            num_schedulers=len(getattr(operator, "_schedulers", ())) or None,
            train_data=train.signature if isinstance(train, ShardedLoader) else None,
            validation_data=validation.signature if isinstance(validation, ShardedLoader) else None,
            seed=train.seed_hint if isinstance(train, ShardedLoader) else torch.initial_seed(),
            keeps_own_state=_overrides(operator, "state_dict"),
            is_synchronous=self._parallel.synchronizes,
        )

    def capture(self, landed_token: int | None) -> Capture:
        """Copies the state once: rank 0 what all ranks share, every rank its random state."""
        rank_state = rng.capture()
        if self._world.rank:
            return Capture(rank_state)
        for token in [token for token in self._captured if landed_token is not None and token <= landed_token]:
            landed = self._captured.pop(token)
            if not self._spec.use_local:  # in the driver nothing travelled: these very bytes are the snapshot
                self._encoder.release(landed)
        encoded = self._encoder.encode(self.state())
        if encoded.num_bytes <= _INLINE_BYTES:
            return Capture(rank_state, shared_state=encoded)
        self._next_token += 1
        self._captured[self._next_token] = encoded
        return Capture(rank_state, token=self._next_token)

    def fetch(self, token: int) -> EncodedState:
        """The copy of the state that `token` names."""
        return self._captured[token]

    def restore(
        self, shared_state: EncodedState | Mapping[str, Any], rank_states: Sequence[Any], may_keep: bool = False
    ) -> None:
        """Takes over a snapshot or a checkpoint; nothing is changed if it does not fit.

        Args:
            shared_state: Encoded; or as it is, where it did not have to travel.
            rank_states: By rank; there may be fewer or more of them than ranks.
            may_keep: Whether the state is nobody else's, so that optimizers may keep the very tensors.

        Raises:
            KeyError: A part is missing.
            ValueError: A part does not fit what is registered.
        """
        state = decode(shared_state, copy=False) if isinstance(shared_state, EncodedState) else shared_state
        self._check(state)
        self._apply(
            state if may_keep else {**state, **copy.deepcopy({key: state[key] for key in _KEPT if key in state})}
        )
        if self._world.rank < len(rank_states) and rank_states[self._world.rank] is not None:
            rng.restore(rank_states[self._world.rank])

    def shutdown(self) -> None:
        """Drops the iterators, and with them the processes of the loaders. The operator itself stays usable."""
        self._train_stream = self._validation_stream = self._running = None
        self._captured.clear()
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.empty_cache()

    # ------------------------------------------------------------------------------------------------ epochs

    def train_epoch(self, request: EpochRequest) -> EpochAnswer:
        """Runs the operator's `train_epoch` once."""
        operator = self.operator
        self._arm_timers(request.profile)
        self._parallel.arm(getattr(operator, "_models", ()), weight_in_hook=_may_run_backward(operator))
        stream = self._training_stream(request)
        epoch_idx = self._pass_index(stream)
        info = {**request.info, **operator._own_info(request.num_steps, epoch_idx)}
        began_at, epoch_before = stream.num_steps_taken, self.epoch
        batches = stream.take(request.num_steps)
        iterator = _Watched(batches if request.tick is None else _ticking(batches, request.tick))
        self._running = (stream, began_at, request.num_steps, info)
        with self._timers.record("train_epoch"):
            returned = call_with_accepted(
                operator.train_epoch, iterator, info=info, num_steps=request.num_steps, epoch_idx=epoch_idx
            )
        self._running = None
        if not iterator.was_touched and self.epoch == epoch_before:
            self.epoch += 1  # an epoch that brought its own data
        answer = self._answer(returned, {"epoch": self.epoch}, request.profile, stream.num_steps_taken - began_at)
        return replace(answer, epoch_idx=epoch_idx)

    def validate(self, request: EpochRequest) -> EpochAnswer:
        """Runs the operator's `validate` once."""
        operator = self.operator
        self._arm_timers(request.profile)
        if self._validation_stream is None:
            source = self._source("_validation_data", "validation", request.seed, lockstep=False)
            self._validation_stream = BatchStream(source, Step(), lambda: 0)
        stream = self._validation_stream
        began_at = stream.num_steps_taken
        self._running = (stream, began_at, request.num_steps, request.info)
        with self._parallel.evaluating(getattr(operator, "_models", ())), self._timers.record("validation"):
            returned = call_with_accepted(operator.validate, stream.take(request.num_steps), info=dict(request.info))
        self._running = None
        return self._answer(returned, {}, request.profile, stream.num_steps_taken - began_at)

    def progress(self) -> Progress | None:
        """How far the running epoch is; called from a second thread, so it only reads."""
        running = self._running
        if running is None:
            return None
        stream, began_at, num_steps, info = running
        loss = as_number(self.operator._latest_metrics.get("train_loss"))
        total = num_steps if num_steps is not None else stream.source.num_steps()
        return Progress(
            stream.num_steps_taken - began_at, total, info.get("epoch_idx", 0), info.get("num_epochs"), loss
        )

    def _answer(self, returned: Any, extra: dict[str, Any], profile: bool, num_steps: int) -> EpochAnswer:
        timings = {"profile": self._timers.stats()} if profile else {}
        if not isinstance(returned, Mapping):
            return EpochAnswer(None, returned, num_steps)
        values = {**extra, **{name: _plain(value) for name, value in returned.items()}, **timings}
        if isinstance(returned, MetricSummary):
            return EpochAnswer(WorkerMetrics(values, returned.totals, returned.objects), None, num_steps)
        return EpochAnswer(WorkerMetrics(values), None, num_steps)

    def _arm_timers(self, profile: bool) -> None:
        if profile:
            self._timers.reset()
            self._timers.enable()
        else:
            self._timers.disable()
        self.operator.timers = self._timers

    # ------------------------------------------------------------------------------------------------ data

    def _training_stream(self, request: EpochRequest) -> BatchStream:
        if request.shard is not None:
            self.epoch += 1
            source = self._plain_source(_joined_pairs(request.shard), lockstep=True)
            return BatchStream(source, self._parallel.step, lambda: self.epoch - 1)
        if self._train_stream is None:
            source = self._source("_train_data", "train", request.seed, lockstep=True)
            self._train_stream = BatchStream(source, self._parallel.step, self._begin_pass)
            self._resume_position(self._train_stream)
        return self._train_stream

    def _begin_pass(self) -> int:
        self.epoch += 1
        return self.epoch - 1

    def _pass_index(self, stream: BatchStream) -> int:
        """Index of the pass that the next batch belongs to."""
        if stream is not self._train_stream:
            return self.epoch - 1
        return stream.pass_index if stream.is_mid_pass else self.epoch

    def _source(self, attribute: str, name: str, seed: int, *, lockstep: bool) -> Source:
        data = self._data(attribute)
        if data is None:
            return PlainSource(_Missing(name))
        if isinstance(data, ShardedLoader):
            return DividedSource(data, seed)
        return self._plain_source(data.loader, lockstep)

    def _plain_source(self, loader: Any, lockstep: bool) -> Source:
        if lockstep and self._parallel.synchronizes:
            self._agreement = self._agreement or Agreement()
            return LockstepSource(loader, self._world.size, self._agreement)
        return PlainSource(loader)

    def _data(self, attribute: str) -> Any:
        return getattr(self.operator, attribute, None)

    def _position(self) -> dict[str, Any] | None:
        """Where in the data the next batch is, for loaders whose position means the same on any number of workers."""
        stream = self._train_stream
        if stream is None:
            return dict(self._resume["position"]) if self._resume and self._resume.get("position") else None
        if not isinstance(stream.source, DividedSource):
            return None
        position = {"pass_index": stream.pass_index, "consumed": stream.consumed if stream.is_mid_pass else 0}
        data = self._data("_train_data")
        return {**position, "seed": stream.source.seed, "num_samples": data.num_samples}

    def _resume_position(self, stream: BatchStream) -> None:
        resume, self._resume = self._resume, None
        position = (resume or {}).get("position")
        if not position or not isinstance(stream.source, DividedSource):
            return
        if position["num_samples"] != self._data("_train_data").num_samples:
            logger.warning("the train data has another size than when the state was saved: starting a fresh pass")
            return
        stream.source.seed = position["seed"]
        if position["consumed"]:
            stream.resume(position["pass_index"], position["consumed"])

    # ------------------------------------------------------------------------------------------------ state

    def state(self) -> dict[str, Any]:
        """The live state; copy before anything else runs."""
        operator = self.operator
        state: dict[str, Any] = {
            "epoch": self.epoch,
            "operator": operator.state_dict(),
            "models": [unwrapped.state_dict() for unwrapped in self._registered("_original_models")],
            "optimizers": [optimizer.state_dict() for optimizer in self._registered("_optimizers")],
        }
        if operator._schedulers:
            state["schedulers"] = [scheduler.state_dict() for scheduler in operator._schedulers]
        if operator._precision.state_key:
            state[operator._precision.state_key] = operator._precision.state_dict()
        state[RESUME] = {"global_step": operator.global_step, "position": self._position()}
        return state

    def _registered(self, name: str) -> list[Any]:
        found = getattr(self.operator, name, None)
        if found is None:
            raise NotRegisteredError(
                f"`{type(self.operator).__name__}.setup` never called `register`: register models and optimizers "
                "there, so that the library can save and restore them."
            )
        return list(found)

    def _check(self, state: Mapping[str, Any]) -> None:
        models, optimizers = self._registered("_original_models"), self._registered("_optimizers")
        for model, saved in zip(models, state["models"], strict=True):
            _check_tensors(model.state_dict(), saved)
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            _check_groups(optimizer.state_dict(), saved)
        if self.operator._schedulers:
            assert len(state["schedulers"]) == len(self.operator._schedulers)
        state["operator"], state["epoch"]

    def _apply(self, state: Mapping[str, Any]) -> None:
        operator = self.operator
        for model, saved in zip(self._registered("_original_models"), state["models"], strict=True):
            model.load_state_dict(saved)
        for optimizer, saved in zip(self._registered("_optimizers"), state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        for scheduler, saved in zip(operator._schedulers, state.get("schedulers", ()), strict=False):
            scheduler.load_state_dict(saved)
        precision_state = saved_state(operator._precision, dict(state))
        if precision_state is not None:
            operator._precision.load_state_dict(precision_state)
        self.epoch = state["epoch"]
        operator.load_state_dict(state["operator"])
        resume = state.get(RESUME) or {}
        operator.global_step = resume.get("global_step", operator.global_step)
        self._train_stream = self._validation_stream = None
        self._resume = resume

    def models(self, to_cpu: bool) -> list[torch.nn.Module]:
        """Copies of the models without any wrapper, on the CPU; the live ones for a replica in the driver."""
        models = [unwrap(model) for model in self._registered("_original_models")]
        return [copy.deepcopy(model).cpu() for model in models] if to_cpu else models

    def update_schedulers(self, metric: Any) -> None:
        """Steps every registered scheduler with `metric`."""
        if not getattr(self.operator, "_schedulers", None):
            raise NotRegisteredError("`update_scheduler` was called, but `setup` registered no scheduler.")
        for scheduler in self.operator._schedulers:
            scheduler.step(metric)


class _Watched:
    """An iterator that knows whether anybody drew from it."""

    def __init__(self, batches: Iterator[Any]) -> None:
        self._batches = batches
        self.was_touched = False

    def __iter__(self) -> Iterator[Any]:
        self.was_touched = True
        return self._batches

    def __next__(self) -> Any:
        self.was_touched = True
        return next(self._batches)


def _ticking(batches: Iterator[Any], tick: Callable[[], None]) -> Iterator[Any]:
    due = time.monotonic()
    for batch in batches:
        if time.monotonic() >= due:
            tick()
            due = time.monotonic() + _TICK_S
        yield batch


def _may_run_backward(operator: TrainingOperator) -> bool:
    """Whether user code may call `backward` past the rung that weights the loss."""
    return _overrides(operator, "train_epoch") or _overrides(operator, "train_batch")


def _overrides(operator: TrainingOperator, name: str) -> bool:
    return getattr(type(operator), name) is not getattr(TrainingOperator, name)


def _device(use_gpu: bool) -> torch.device:
    if use_gpu and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


class _Missing:
    """Stands for a loader that was not registered; an error only once somebody draws from it."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __iter__(self) -> Iterator[Any]:
        way_out = ", or pass `dataset` to `train`." if self._name == "train" else " before you call `validate`."
        raise NotRegisteredError(
            f"`{self._name}_loader` was not registered: pass it to `register_data` in `setup`{way_out}"
        )


def _joined_pairs(batches: Iterable[Any]) -> Iterator[Any]:
    """Batches of a dataset, lists of `(input, label)` tensors, as one tensor of inputs and one of labels."""
    for batch in batches:
        if isinstance(batch, list) and batch and isinstance(batch[0], tuple):
            yield tuple(_joined(list(parts)) for parts in zip(*batch, strict=True))
        else:
            yield batch


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    tensors = [torch.as_tensor(part) for part in parts]
    return torch.stack(tensors) if tensors[0].ndim == 0 else torch.cat(tensors)


def _plain(value: Any) -> Any:
    """Tensors as numbers where they have one element, and on the CPU in any case."""
    if isinstance(value, torch.Tensor):
        return value.item() if value.ndim == 0 else value.detach().cpu()
    return value


def _check_tensors(own: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    missing, extra = sorted(own.keys() - saved.keys()), sorted(saved.keys() - own.keys())
    shapes = [
        f"{name}: {tuple(saved[name].shape)} instead of {tuple(tensor.shape)}"
        for name, tensor in own.items()
        if isinstance(tensor, torch.Tensor) and name in saved and saved[name].shape != tensor.shape
    ]
    if missing or extra or shapes:
        raise ValueError(
            "The state of a model does not fit the registered model, nothing was loaded. "
            f"Missing: {missing or 'nothing'}; unknown: {extra or 'nothing'}; shapes: {shapes or 'all fit'}."
        )


def _check_groups(own: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    sizes = [len(group["params"]) for group in own.get("param_groups", ())]
    saved_sizes = [len(group["params"]) for group in saved.get("param_groups", ())]
    if sizes != saved_sizes:
        raise ValueError(
            f"The state of an optimizer does not fit, nothing was loaded: its groups have {saved_sizes} "
            "parameters, the "
            f"registered optimizer's {sizes}."
        )
