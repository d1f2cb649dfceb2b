"""`TorchState`: reads and restores the state of the PyTorch objects that the operator in one worker has registered.

Before `TorchState` loads a state, it checks that the state fits the registered objects.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from operator import methodcaller
from typing import Any

import torch

from raysgd.core.engine.transfers import DividedValue
from raysgd.core.state.state_codec import EncodedState, StateEncoder, decode
from raysgd.torch.checkpoints import divided
from raysgd.torch.checkpoints.checkpoint_file import GRADIENTS, TRAINED
from raysgd.torch.checkpoints.divided import Path_, StateInFolder
from raysgd.torch.data.feed import TorchFeed
from raysgd.torch.objects import rng
from raysgd.torch.objects.loading import (
    check_model,
    check_optimizer,
    check_precision,
    check_schedulers,
    load_model,
    plain,
    with_names_of,
    with_own_numbers,
    with_own_options,
    with_plain_names,
)
from raysgd.torch.objects.precision import saved_state
from raysgd.torch.operator.registrar import RegisteredObjects
from raysgd.torch.parallel.strategy import Strategy
from raysgd.torch.training_operator import TrainingOperator
from raysgd.trainer.worker.replica_state import RESUME, ReplicaState, StateCopy

logger = logging.getLogger(__name__)


def _at(state: Any, path: Path_) -> Any:
    for step in path:
        state = state[step]
    return state


CRITERION = "criterion"  # key for the state of a criterion with parameters; files of `ray.util.sgd` lack the key
LARGEST_BATCH = "largest_batch"  # key for the number of samples at once that `micro_batch_size="auto"` has found
REMADE = "remade"  # key for digests of frozen parameters that the state omits; see `raysgd.torch.objects.remade`


class TorchState(ReplicaState):
    """Reads and replaces the state of models, optimizers, schedulers and mixed precision in one worker.

    Args:
        operator: Operator that registered these objects.
        parallel: Strategy, such as DDP, that keeps the workers' models in sync.
        feed: This worker's data. The current position in the data is part of the state.
        waiting: Function that returns the parameters whose gradients no optimizer step has used yet.
    """

    def __init__(
        self,
        operator: TrainingOperator,
        parallel: Strategy,
        feed: TorchFeed,
        waiting: Callable[[], Sequence[Any]],
    ) -> None:
        super().__init__(operator, feed)
        self._internals = operator._raysgd
        self._parallel = parallel
        self._waiting = waiting
        self._encoder = StateEncoder()
        self._state_of: Callable[[Any], Any] = parallel.state_of

    def _parts(self) -> dict[str, Any]:
        parts, precision, remade = self.read_parts(), self._internals.precision, self._internals.remade
        if remade is not None:
            parts = self._without_remade(parts, remade)
        if self._internals.registered.schedulers:
            parts["schedulers"] = [scheduler.state_dict() for scheduler in self._internals.registered.schedulers]
        if precision.state_key:
            parts[precision.state_key] = precision.state_dict()
        return parts

    def _without_remade(self, parts: dict[str, Any], remade: Any) -> dict[str, Any]:
        """Return `parts` with digests in place of the frozen parameters that `setup` recreates.

        Args:
            parts: State dicts of the models, the criterion and the optimizers.
            remade: The operator's `RemadeParameters`.
        """
        models = parts["models"]
        reduced = {**parts, "models": [remade.without(index, model) for index, model in enumerate(models)]}
        if CRITERION in parts:
            reduced[CRITERION] = remade.without(len(models), parts[CRITERION])
        return {**reduced, REMADE: remade.record()}

    def remade_tensors(self) -> list[dict[str, torch.Tensor]]:
        """Return the frozen parameters that snapshots and checkpoints omit: for each module, a dict keyed by name."""
        remade = self._internals.remade
        return [] if remade is None else remade.tensors()

    def _more_progress(self) -> dict[str, Any]:
        progress: dict[str, Any] = {TRAINED: self._internals.trained.since_setup}
        if self._feed.largest_batch is not None:
            progress[LARGEST_BATCH] = self._feed.largest_batch
        waiting = {*map(id, self._waiting())}
        if waiting:
            progress[GRADIENTS] = [
                {name: each.grad for name, each in part.named_parameters() if id(each) in waiting}
                for part in self.registered.trained
            ]
        return progress

    def _apply_more_progress(self, resume: Mapping[str, Any]) -> None:
        """Load the gradients that no optimizer step has used yet.

        The entry `TRAINED` (frozen parameters and parameter groups) is not loaded here, because `_apply_parts` has
        already applied it.
        """
        size = resume.get(LARGEST_BATCH)
        if size is not None and self._internals.context.settings.batch_options.is_auto:
            self._feed.limit_batches(max(1, size))
        gradients = resume.get(GRADIENTS) or [{}] * len(self.registered.trained)
        for part, saved in zip(self.registered.trained, gradients, strict=True):
            for name, parameter in part.named_parameters():
                parameter.grad = saved[name].detach().clone().to(parameter.device) if name in saved else None

    def copy_for_driver(self, rank: int) -> StateCopy | None:
        if self._parallel.is_sharded:
            part = self._encoder.encode(divided.content_of(self.read_divided(), rank))
            return StateCopy(part, part.num_bytes, is_part=True)
        if rank:
            return None
        whole = self._encoder.encode(self.read())
        return StateCopy(whole, whole.num_bytes)

    def decoded(self, state: EncodedState | StateInFolder | DividedValue | Mapping[str, Any]) -> Mapping[str, Any]:
        if isinstance(state, StateInFolder):
            return divided.read_folder(state, self.room_for, self._parallel.group_beside)
        if isinstance(state, DividedValue):
            parts = divided.of_snapshot(state)
            if not self._parallel.is_sharded:
                return parts.whole()
            room = parts.make_room(self.room_for)
            parts.fill(room)
            return parts.joined(room)
        return decode(state, copy=False) if isinstance(state, EncodedState) else state

    def own(self) -> Any:
        return rng.capture()

    def check_own(self, own: Any) -> None:
        rng.check(own)

    def restore_own(self, own: Any) -> None:
        rng.restore(own)

    def read_parts(self) -> dict[str, Any]:
        """Return the state dicts of the models, the criterion and the optimizers.

        If models are sharded, all ranks must call this method together, and only rank 0 gets the full state.
        """
        read, criterion, registered = self._state_of, self.criterion, self.registered
        return {
            "models": [with_plain_names(read(model)) for model in registered.original_models],
            "optimizers": [read(optimizer) for optimizer in registered.optimizers],
            **({} if criterion is None else {CRITERION: with_plain_names(read(criterion))}),
        }

    def read_divided(self) -> dict[str, Any]:
        """Return the state of this worker, with only this rank's shard of each sharded tensor."""
        whole, self._state_of = self._state_of, methodcaller("state_dict")
        try:
            return self.read()
        finally:
            self._state_of = whole

    @property
    def criterion(self) -> Any:
        """The criterion if it has trainable parameters; otherwise None."""
        return self._internals.registered.original_criterion

    @property
    def registered(self) -> RegisteredObjects:
        """The objects that the operator passed to `register`."""
        return self._internals.registered

    def room_for(self, outline: Mapping[str, Any], paths: Sequence[Path_]) -> dict[Path_, Any]:
        """Return new tensors, by path, into which the caller reads this rank's shard of a state.

        Args:
            outline: The full state, with placeholder tensors, which have a shape but take no memory.
            paths: Paths of the tensors in the state.

        Raises:
            ValueError: The state does not fit the registered objects.
        """
        self.check(outline)
        return {path: self._room_for_one(outline, path) for path in paths}

    def _room_for_one(self, outline: Mapping[str, Any], path: Path_) -> torch.Tensor:
        """Return a new tensor for one path in the state, sharded like the parameter to which the tensor belongs.

        If the shape of the tensor differs from the shape of the parameter, the new tensor is not sharded.
        """
        wanted = _at(outline, path)
        part, *rest = path
        own: Any = None
        number: Any = rest[0]
        if part == "models":
            own = _named(self.registered.original_models[number], rest[1])
        elif part == CRITERION:
            own = _named(self.criterion, rest[0])
        elif rest[1] == "state":  # an optimizer's state is keyed by the index of the parameter
            index = rest[2]
            indices = [each for group in outline["optimizers"][number]["param_groups"] for each in group["params"]]
            parameters = [each for group in self._groups_for(outline)[number] for each in group]
            own = dict(zip(indices, parameters, strict=True)).get(index)
        is_like = own is not None and own.shape == wanted.shape
        return self._parallel.empty_like(own if is_like else torch.empty(wanted.shape), wanted.dtype)

    def _check_parts(self, state: Mapping[str, Any]) -> None:
        registered, precision = self.registered, self._internals.precision
        remade = self._remade_for(state)
        for index, (model, saved) in enumerate(zip(registered.original_models, state["models"], strict=True)):
            self._check_model(index, model, saved, state, remade)
        pairs = zip(registered.optimizers, state["optimizers"], strict=True)
        for (optimizer, saved), parameters in zip(pairs, self._groups_for(state), strict=True):
            check_optimizer(optimizer, saved, parameters)
        if self.criterion is not None and CRITERION in state:
            self._check_model(len(registered.original_models), self.criterion, state[CRITERION], state, remade)
        if registered.schedulers:
            check_schedulers(registered.schedulers, state["schedulers"])
        precision_state = saved_state(precision, dict(state))
        if precision_state is not None:
            check_precision(precision.state_dict(), precision_state)

    def _groups_for(self, state: Mapping[str, Any]) -> list[list[list[torch.Tensor]]]:
        """Return the parameters in each group of each optimizer, as they will be when `state` is loaded."""
        resume, optimizers = state.get(RESUME) or {}, self.registered.optimizers
        if TRAINED in resume:
            groups: list[list[list[torch.Tensor]]] = self._internals.trained.groups_after(resume[TRAINED])
            return groups
        return [[list(group["params"]) for group in getattr(each, "param_groups", ())] for each in optimizers]

    def _remade_for(self, state: Mapping[str, Any]) -> Any:
        """Return the operator's `RemadeParameters`, which tracks frozen parameters that states omit.

        Return None if the operator does not set `excludes_frozen_from_state`.

        Raises:
            ValueError: The state omits frozen parameters, but the operator does not set `excludes_frozen_from_state`.
        """
        remade = self._internals.remade
        if remade is None and REMADE in state:
            from raysgd.torch.objects.remade import refuse_left_out

            refuse_left_out(state[REMADE], type(self._operator))
        return remade

    def _check_model(
        self, index: int, model: torch.nn.Module, saved: Any, state: Mapping[str, Any], remade: Any
    ) -> None:
        left_out: Collection[str] = ()
        if remade is not None:
            saved, left_out = remade.fitting(index, with_plain_names(saved), state.get(REMADE))
        check_model(model, with_names_of(model, saved), left_out)

    def _apply_parts(self, state: Mapping[str, Any]) -> None:
        registered, precision = self.registered, self._internals.precision
        # Copy the states of the schedulers and the gradient scaler, because these objects keep references to what they
        # load. Copy the states before anything is replaced, because copying may fail.
        schedulers = copy.deepcopy([*map(with_own_numbers, registered.schedulers, state.get("schedulers", ()))])
        precision_state = copy.deepcopy(saved_state(precision, dict(state)))
        resume = state.get(RESUME) or {}
        if TRAINED in resume:
            self._internals.follow_trained(resume[TRAINED])
        for index, (model, saved) in enumerate(zip(registered.original_models, state["models"], strict=True)):
            self._load_model(index, model, saved, state)
        if self.criterion is not None:
            if state.get(CRITERION) is None:
                logger.warning("the state has no parameters of the criterion, so they stay unchanged")
            else:
                self._load_model(len(registered.original_models), self.criterion, state[CRITERION], state)
        for optimizer, saved in zip(registered.optimizers, state["optimizers"], strict=True):
            self._parallel.load_optimizer(optimizer, with_own_options(optimizer, saved))
        for scheduler, saved in zip(registered.schedulers, schedulers, strict=False):
            scheduler.load_state_dict(saved)
        if precision_state is not None:
            precision.load_state_dict(precision_state)

    def _load_model(self, index: int, model: torch.nn.Module, saved: Any, state: Mapping[str, Any]) -> None:
        remade = self._internals.remade
        if remade is None:
            self._parallel.load_model(model, with_names_of(model, saved))
            return
        saved, left_out = remade.fitting(index, with_plain_names(saved), state.get(REMADE))
        remade.begin_loading(index, left_out)
        load_model(model, with_names_of(model, saved), is_whole=False)
        remade.end_loading(index, left_out)


def _named(model: torch.nn.Module, name: Any) -> Any:
    return with_plain_names(model.state_dict()).get(plain(str(name)))
