"""`EMA` and `SWA`: averages of the weights, kept in every worker while it trains."""

from __future__ import annotations

import uuid
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

from raysgd import _checks
from raysgd.callbacks._operators import is_sharded, models_of, rank_of
from raysgd.callbacks.callback import Callback, Run
from raysgd.callbacks.worker_callback import WorkerCallback

Weights = list[dict[str, Any]]
"""For each model its tensors by name."""

_averagers: WeakKeyDictionary[Any, WeakValueDictionary[str, Averager]] = WeakKeyDictionary()
"""In a worker: the averagers that run beside an operator, by key."""


class AveragedWeights(Callback):
    """What `EMA` and `SWA` share: how to get at the averages, which are alike in all workers.

    Floating-point buffers, such as the statistics of batch norms, are averaged as well; other buffers are copied. For
    `TorchTrainer`, but not with `parallel="fsdp"`.
    """

    def __init__(self) -> None:
        self._key = uuid.uuid4().hex
        self._kept: dict[str, Any] | None = None

    def worker_callback(self) -> WorkerCallback:
        """Keeps the averages in the workers. A second run of the same trainer goes on with them."""
        return self._averager(self._key)

    @abstractmethod
    def _averager(self, key: str) -> Averager:
        """Makes what keeps the averages in a worker."""

    def on_run_end(self, run: Run, error: BaseException | None) -> None:
        """Keeps a copy of the averages, for the time after the run."""
        if error is None:
            self._kept = self._fetch(run.trainer) or self._kept

    def get_model(self, trainer: Any) -> Any:
        """A copy of the model with the averaged weights, on the CPU, or a list of models.

        Raises:
            RuntimeError: Nothing was averaged yet.
        """
        found = trainer.get_model(to_cpu=True)
        models = found if isinstance(found, list) else [found]
        for model, weights in zip(models, self._weights(trainer), strict=True):
            _put(model, weights)
        return found

    @contextmanager
    def swap(self, trainer: Any) -> Iterator[None]:
        """Inside the block all workers have the averaged weights, to validate, predict or save with; do not train.

        Raises:
            RuntimeError: Nothing was averaged yet.

        Example:
            >>> with ema.swap(trainer):  # doctest: +SKIP
            ...     print(trainer.validate())
        """
        averaged = self._weights(trainer)
        own = next(each for each in trainer.apply_all_operators(_own_weights) if each is not None)
        trainer.apply_all_operators(partial(_put_all, weights=averaged))
        try:
            yield
        finally:
            trainer.apply_all_operators(partial(_put_all, weights=own))

    def _weights(self, trainer: Any) -> Weights:
        state = self._fetch(trainer) or self._kept
        if state is None or not state["weights"]:
            raise RuntimeError(
                f"`{type(self).__name__}` has averaged nothing yet: pass it to `trainer.fit(callbacks=[...])` first."
            )
        weights: Weights = state["weights"]
        return weights

    def _fetch(self, trainer: Any) -> dict[str, Any] | None:
        """The state of the averagers while they run, from rank 0; None where there are none."""
        found = trainer.apply_all_operators(partial(_state_of, key=self._key))
        return next((each for each in found if each is not None), None)


class EMA(AveragedWeights):
    """Keeps an exponential moving average of the weights, updated after each optimizer step.

    Args:
        decay: How much of the average stays in each update, such as 0.999.
        warmup: Whether the first updates take more of the new weights: the decay is then at most (1 + n) / (10 + n) in
            update n.

    Raises:
        ValueError: `decay` is not between 0 and 1.

    Example:
        >>> ema = EMA(decay=0.99)
    """

    def __init__(self, decay: float = 0.999, *, warmup: bool = False) -> None:
        super().__init__()
        if not _checks.is_number(decay) or not 0 <= decay < 1:
            raise ValueError(f"`decay={decay!r}`: need a number from 0 to less than 1, such as 0.999.")
        _checks.refuse_text(warmup=warmup)
        self.decay, self.warmup = float(decay), bool(warmup)

    def _averager(self, key: str) -> Averager:
        return EMAInWorker(key, self.decay, self.warmup)


class SWA(AveragedWeights):
    """Keeps the plain mean of the weights at the end of epochs (stochastic weight averaging).

    The learning rate is up to your scheduler. The statistics of batch norms are averaged too; for exact ones call
    `torch.optim.swa_utils.update_bn` on the model of `get_model`.

    Args:
        start_epoch: The first epoch whose weights count, from 1 in the first run with this callback.
        every_n_epochs: How often the weights are taken from there on.

    Raises:
        InvalidCountError: A number is less than 1.

    Example:
        >>> swa = SWA(start_epoch=8)
    """

    def __init__(self, start_epoch: int = 1, every_n_epochs: int = 1) -> None:
        super().__init__()
        self.start_epoch = _checks.check_count("start_epoch", start_epoch, "Epochs count from 1.")
        self.every_n_epochs = _checks.check_count("every_n_epochs", every_n_epochs, "1 takes every epoch.")

    def _averager(self, key: str) -> Averager:
        return SWAInWorker(key, self.start_epoch, self.every_n_epochs)


class Averager(WorkerCallback):
    """Keeps an average of the weights in one worker.

    Args:
        key: Which callback of the driver it belongs to.
    """

    def __init__(self, key: str) -> None:
        self._key = key
        self.num_updates = 0
        self.weights: Weights = []

    def on_begin(self, operator: Any) -> None:
        if is_sharded(operator):
            raise ValueError('Averages of weights need whole models in each worker: `parallel="fsdp"` divides them.')
        _averagers.setdefault(operator, WeakValueDictionary())[self._key] = self
        self.num_updates, self.weights = 0, []

    def update(self, operator: Any, share: float) -> None:
        """Moves the averages towards the present weights.

        Args:
            operator: Whose models are averaged.
            share: How much of the present weights goes in; 1 replaces the averages.
        """
        import torch

        with torch.no_grad():
            if not self.weights:
                self.weights = [_copied(model) for model in models_of(operator)]
            for model, weights in zip(models_of(operator), self.weights, strict=True):
                _mix(model, weights, share)
        self.num_updates += 1

    def state_dict(self) -> dict[str, Any]:
        on_cpu = [{name: tensor.cpu() for name, tensor in weights.items()} for weights in self.weights]
        return {"num_updates": self.num_updates, "weights": on_cpu}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.num_updates = int(state["num_updates"])
        self.weights = [{name: tensor.clone() for name, tensor in weights.items()} for weights in state["weights"]]


class EMAInWorker(Averager):
    """Updates the averages after each step."""

    def __init__(self, key: str, decay: float, warmup: bool) -> None:
        super().__init__(key)
        self._decay, self._warmup = decay, warmup
        self._has_stepped = False

    def on_begin(self, operator: Any) -> None:
        super().on_begin(operator)
        self.weights = [_copied(model) for model in models_of(operator)]

    def on_gradients(self, operator: Any, optimizer: Any) -> None:
        self._has_stepped = True

    def on_step_end(self, operator: Any, step: int, metrics: Mapping[str, Any]) -> None:
        if self._has_stepped:  # without it, nothing counted in the step
            self._has_stepped = False
            self.update(operator, 1 - self._present_decay)

    @property
    def _present_decay(self) -> float:
        num = self.num_updates
        return min(self._decay, (1 + num) / (10 + num)) if self._warmup else self._decay


class SWAInWorker(Averager):
    """Updates the averages at the end of epochs."""

    def __init__(self, key: str, start_epoch: int, every_n_epochs: int) -> None:
        super().__init__(key)
        self._start, self._every = start_epoch, every_n_epochs
        self._num_epochs = 0

    def on_begin(self, operator: Any) -> None:
        super().on_begin(operator)
        self._num_epochs = 0

    def on_epoch_end(self, operator: Any, metrics: dict[str, Any]) -> None:
        self._num_epochs += 1
        since = self._num_epochs - self._start
        if since >= 0 and since % self._every == 0:
            self.update(operator, 1 / (self.num_updates + 1))

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "num_epochs": self._num_epochs}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._num_epochs = int(state["num_epochs"])


# ---------------------------------------------------------------------------------------------------- tensors


def _tensors_of(model: Any) -> dict[str, Any]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _copied(model: Any) -> dict[str, Any]:
    return {name: _precise(tensor.detach()).clone() for name, tensor in _tensors_of(model).items()}


def _precise(tensor: Any) -> Any:
    """In at least 32 bits: an average in fewer would not move."""
    return tensor.float() if tensor.is_floating_point() and tensor.element_size() < 4 else tensor


def _mix(model: Any, weights: dict[str, Any], share: float) -> None:
    for name, tensor in _tensors_of(model).items():
        if weights[name].device != tensor.device:  # it came out of a state
            weights[name] = weights[name].to(tensor.device)
        if tensor.is_floating_point() or tensor.is_complex():
            weights[name].lerp_(_precise(tensor.detach()), share)
        else:
            weights[name].copy_(tensor)


def _put(model: Any, weights: Mapping[str, Any]) -> None:
    import torch

    with torch.no_grad():
        for name, tensor in _tensors_of(model).items():
            tensor.copy_(weights[name])


# ---------------------------------------------------------------------------------------------------- in the workers


def _state_of(operator: Any, key: str) -> dict[str, Any] | None:
    averager = _averagers[operator].get(key) if operator in _averagers else None
    return averager.state_dict() if averager is not None and rank_of(operator) == 0 else None


def _own_weights(operator: Any) -> Weights | None:
    return [_copied_to_cpu(model) for model in models_of(operator)] if rank_of(operator) == 0 else None


def _copied_to_cpu(model: Any) -> dict[str, Any]:
    return {name: tensor.detach().cpu().clone() for name, tensor in _tensors_of(model).items()}


def _put_all(operator: Any, weights: Sequence[Mapping[str, Any]]) -> None:
    for model, each in zip(models_of(operator), weights, strict=True):
        _put(model, each)
