"""`EMA` and `SWA`: callbacks that average the model's weights during training, in every worker."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from raysgd.callbacks.worker_callback import WorkerCallback, index_of, is_sharded, models_of, optimizers_of, rank_of
from raysgd.core import arguments as checks

logger = logging.getLogger(__name__)

Weights = list[dict[str, Any]]
"""The tensors of each model, keyed by name."""


class AveragedWeights(WorkerCallback):
    """Base class of `EMA` and `SWA`, which average the weights of all models.

    The averages of parameters are equal in all workers. Floating-point buffers, such as batch-norm statistics, are
    averaged too. Other buffers are copied. If the buffers differ between workers, so do their averages: `get_model`,
    `swap` and checkpoints use the averages of rank 0. Frozen weights that `setup` creates again in each process
    (`excludes_frozen_from_state`) are left out. A second run of the same trainer continues the averages. `EMA` and
    `SWA` work with `TorchTrainer`, except with `strategy="fsdp"`.
    """

    def __init__(self) -> None:
        self.weights: Weights = []  # stays empty in the driver, because only the workers average

    def on_begin(self, operator: Any) -> None:
        if is_sharded(operator):
            raise ValueError(
                '`EMA` and `SWA` need whole models in each worker, and `strategy="fsdp"` shards them: use '
                '`strategy="ddp"`, or leave `EMA` and `SWA` out of `callbacks`.'
            )
        self.weights = []

    def state_dict(self) -> dict[str, Any]:
        return {"weights": [{name: tensor.cpu() for name, tensor in weights.items()} for weights in self.weights]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.weights = [{name: tensor.clone() for name, tensor in weights.items()} for weights in state["weights"]]

    def _check_state(self, operator: Any, state: Any) -> None:
        _check_averages(operator, state)

    def get_model(self, trainer: Any) -> Any:
        """Return a copy of the trainer's model with the averaged weights, on the CPU.

        If the trainer has several models, return a list of copies.

        Raises:
            RuntimeError: No weights have been averaged yet.
        """
        live = trainer.get_model(to_cpu=True)
        models = live if isinstance(live, list) else [live]
        for model, weights in zip(models, self._weights(trainer), strict=True):
            _put(model, weights)
        return live

    @contextmanager
    def swap(self, trainer: Any) -> Iterator[None]:
        """Use the averaged weights in all workers inside the block, for validation, prediction or saving.

        Afterwards, the trained weights are restored. Do not train in the block.

        Raises:
            RuntimeError: No weights have been averaged yet.

        Examples:
            >>> with ema.swap(trainer):  # doctest: +SKIP
            ...     print(trainer.validate())
        """
        averaged = self._weights(trainer)
        own = next(each for each in trainer.apply_all_operators(_own_weights) if each is not None)
        trainer.apply_all_operators(partial(_load_weights, weights=averaged))
        try:
            yield
        finally:
            trainer.apply_all_operators(partial(_load_weights, weights=own))

    def _weights(self, trainer: Any) -> Weights:
        states = trainer.apply_all_operators(partial(_state_of, key=self.state_key()))
        state = next((each for each in states if each is not None), None)
        if state is None or not state["weights"]:
            raise RuntimeError(
                f"`{self.state_key()}` has averaged nothing yet: pass it to `trainer.fit(callbacks=[...])` first."
            )
        return state["weights"]


class EMA(AveragedWeights):
    """Computes an exponential moving average of the weights. The average is updated after each optimizer step.

    The callback works with the library's training loop and with your own. With several optimizers, the average of a
    weight is updated after the steps of the optimizer that trains this weight.

    Args:
        decay: Factor of the old average in each update, such as 0.999.

    Raises:
        ValueError: `decay` is not at least 0 and less than 1.

    Examples:
        >>> ema = EMA(decay=0.99)
    """

    def __init__(self, decay: float = 0.999) -> None:
        if not checks.is_number(decay) or not 0 <= decay < 1:
            raise ValueError(f"`decay={decay!r}`: need a number from 0 to less than 1, such as 0.999.")
        super().__init__()
        self.decay = float(decay)

    def on_begin(self, operator: Any) -> None:
        super().on_begin(operator)
        optimizers = optimizers_of(operator)
        if not optimizers or not all(hasattr(each, "register_step_post_hook") for each in optimizers):
            names = ", ".join(type(each).__name__ for each in optimizers) or "none"
            raise ValueError(
                f"`EMA` follows steps of optimizers and cannot see the steps of the registered ones ({names}): pass "
                "objects of subclasses of `torch.optim.Optimizer` to `register`."
            )
        self.weights = [_copied(tensors) for tensors in _tensors_in(operator)]

    def _check_state(self, operator: Any, state: Any) -> None:
        super()._check_state(operator, state)
        if not state["weights"]:
            raise ValueError("The state of `EMA` does not match, so nothing was loaded: it has no averages.")

    def on_epoch_begin(self, operator: Any) -> None:
        self._saw_a_step = False  # True if an optimizer has stepped in the current epoch

    def on_optimizer_step(self, operator: Any, optimizer: Any) -> None:
        optimizers = optimizers_of(operator)
        own = optimizers[index_of(operator, optimizer)]
        for tensors, weights in zip(_tensors_in(operator), self.weights, strict=True):
            _mix(_trained_by(own, optimizers, tensors), weights, 1 - self.decay)
        self._saw_a_step = True

    def on_epoch_end(self, operator: Any, metrics: dict[str, Any]) -> None:
        if not self._saw_a_step and rank_of(operator) == 0:
            logger.warning(
                "`EMA` saw no step of a registered optimizer in this epoch: pass the optimizer whose `step` your code "
                "calls to `register`, and keep what that returns"
            )

    def state_key(self) -> str:
        return f"EMA(decay={self.decay})"


class SWA(AveragedWeights):
    """Computes the mean of the weights at the ends of epochs (stochastic weight averaging).

    If a run ends before `start_epoch`, the next run of the trainer continues to count epochs. This callback does not
    change the learning rate. Batch-norm statistics are averaged too. For exact batch-norm statistics, call
    `torch.optim.swa_utils.update_bn` on the model that `get_model` returns.

    Args:
        start_epoch: First epoch to average, counted from 1 in the first run with this callback.
        every_n_epochs: From `start_epoch` on, include the weights of every epoch (1), every second epoch (2), and so
            on.

    Raises:
        InvalidCountError: `start_epoch` or `every_n_epochs` is less than 1.

    Examples:
        >>> swa = SWA(start_epoch=8)
    """

    def __init__(self, start_epoch: int = 1, every_n_epochs: int = 1) -> None:
        self.start_epoch = checks.check_count("start_epoch", start_epoch, "Epochs count from 1.")
        self.every_n_epochs = checks.check_count("every_n_epochs", every_n_epochs, "1 takes every epoch.")
        super().__init__()

    def on_begin(self, operator: Any) -> None:
        super().on_begin(operator)
        self._num_epochs = self._num_updates = 0

    def on_epoch_end(self, operator: Any, metrics: dict[str, Any]) -> None:
        self._num_epochs += 1
        since = self._num_epochs - self.start_epoch
        if since < 0 or since % self.every_n_epochs:
            return
        self.weights = self.weights or [_copied(tensors) for tensors in _tensors_in(operator)]
        self._num_updates += 1
        for tensors, weights in zip(_tensors_in(operator), self.weights, strict=True):
            _mix(tensors, weights, 1 / self._num_updates)

    def state_key(self) -> str:
        return f"SWA(start_epoch={self.start_epoch}, every_n_epochs={self.every_n_epochs})"

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "num_updates": self._num_updates, "num_epochs": self._num_epochs}

    def _check_state(self, operator: Any, state: Any) -> None:
        super()._check_state(operator, state)
        counts = [state.get(name) for name in ("num_updates", "num_epochs")]
        if not all(map(checks.is_saved_count, counts)):
            raise ValueError(
                f"The state of `SWA` does not match, so nothing was loaded: its counts are {counts!r:.100}."
            )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._num_updates, self._num_epochs = int(state["num_updates"]), int(state["num_epochs"])


# ---------------------------------------------------------------------------------------------------- tensors


def _tensors_of(model: Any) -> dict[str, Any]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _tensors_in(operator: Any) -> list[dict[str, Any]]:
    """Return each model's parameters and buffers, except weights left out by `excludes_frozen_from_state`."""
    by_model, remade = [_tensors_of(model) for model in models_of(operator)], operator._raysgd.remade
    if remade is None:
        return by_model
    return [{name: each for name, each in tensors.items() if id(each) not in remade.ids} for tensors in by_model]


def _check_averages(operator: Any, state: Any) -> None:
    """Check that saved averages fit the operator's models.

    Raises:
        ValueError: A tensor of a model has no average, or its average has another shape or dtype. Only with
            `excludes_frozen_from_state` may tensors have no average.
    """
    misfit = _misfit(
        [_tensors_of(model) for model in models_of(operator)], state, may_lack=operator._raysgd.remade is not None
    )
    if misfit:
        raise ValueError(f"The state of averaged weights does not match, so nothing was loaded: {misfit}.")


def _misfit(models: Sequence[Mapping[str, Any]], state: Any, may_lack: bool) -> str | None:
    averages = state.get("weights") if isinstance(state, Mapping) else None
    if not isinstance(averages, list) or not all(isinstance(each, Mapping) for each in averages):
        return "it has no averages"
    if len(averages) not in (0, len(models)):
        return f"it has averages of {len(averages)} models, but the operator registered {len(models)}"
    for tensors, weights in zip(models, averages, strict=False):
        lacking = [name for name in tensors if name not in weights]
        if lacking and not may_lack:
            return f"it has no average of {lacking}"
        for name, average in weights.items():
            if name not in tensors:
                return f"no model has {str(name)[:50]!r}"
            if type(average) is not type(own := _precise(tensors[name].data)) or _look(average) != _look(own):
                return f"the average of {name!r} has another shape or dtype"
    return None


def _look(tensor: Any) -> tuple[Any, ...]:
    return tensor.shape, tensor.dtype, tensor.layout, tensor.is_meta


def _parameters_of(optimizer: Any) -> Iterator[Any]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def _trained_by(optimizer: Any, optimizers: Sequence[Any], tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tensors of a model that are averaged after a step of `optimizer`.

    These are the parameters that the optimizer trains. Tensors that no optimizer trains, such as batch-norm statistics,
    are averaged after the steps of the model's first optimizer.
    """
    trained = [set(map(id, _parameters_of(each))) for each in optimizers]
    parts = [each for each, ids in zip(optimizers, trained, strict=True) if ids & set(map(id, tensors.values()))]
    own, all_trained = set(map(id, _parameters_of(optimizer))), set().union(*trained)
    takes_rest = optimizer is (parts or optimizers)[0]
    return {
        name: tensor
        for name, tensor in tensors.items()
        if id(tensor) in own or (takes_rest and id(tensor) not in all_trained)
    }


def _copied(tensors: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _precise(tensor.detach()).clone() for name, tensor in tensors.items()}


def _precise(tensor: Any) -> Any:
    """Convert floats with fewer than 32 bits to 32 bits, because an average would lose small updates to rounding."""
    return tensor.float() if tensor.is_floating_point() and tensor.element_size() < 4 else tensor


def _mix(tensors: Mapping[str, Any], weights: dict[str, Any], share: float) -> None:
    """Update averages with the current tensors.

    Args:
        tensors: The current tensors by name.
        weights: The averages by name. They are updated in place.
        share: Factor of the current tensor in the new average.
    """
    import torch

    with torch.no_grad():
        for name, tensor in tensors.items():
            if name not in weights:  # the tensor has no average yet, because it was frozen in earlier updates
                weights[name] = _precise(tensor.detach()).clone()
            if weights[name].device != tensor.device:  # the average was loaded from a state dict, on the CPU
                weights[name] = weights[name].to(tensor.device)
            if tensor.is_floating_point() or tensor.is_complex():
                weights[name].lerp_(_precise(tensor.detach()), share)
            else:
                weights[name].copy_(tensor)


def _put(model: Any, weights: Mapping[str, Any]) -> None:
    import torch

    with torch.no_grad():
        for name, tensor in _tensors_of(model).items():
            # Frozen tensors may have no average (`excludes_frozen_from_state`).
            if name in weights or tensor.requires_grad:
                tensor.copy_(weights[name])


# ---------------------------------------------------------------------------------------------------- in the workers


def _state_of(operator: Any, key: str) -> dict[str, Any] | None:
    state: dict[str, Any] | None = operator._raysgd.callbacks.state_of(key) if rank_of(operator) == 0 else None
    if state is not None:
        _check_averages(operator, state)
    return state


def _own_weights(operator: Any) -> Weights | None:
    if rank_of(operator) != 0:
        return None
    return [{name: each.detach().cpu().clone() for name, each in tensors.items()} for tensors in _tensors_in(operator)]


def _load_weights(operator: Any, weights: Sequence[Mapping[str, Any]]) -> None:
    for model, each in zip(models_of(operator), weights, strict=True):
        _put(model, each)
