"""Keeps the replicas of Keras models equal: gradients are averaged around the optimizer, metrics merged by their state.

Each process has a model of its own and no strategy. An optimizer that is watched averages the gradients of all ranks
before it uses them: one exchange for each step, in one flat buffer. It works for Keras 3 and for tf_keras, for `fit`,
`train_on_batch` and loops with a `GradientTape`, in graphs and eagerly.

The average is by samples: a rank's gradient counts by the samples that it is the mean of. So a step of N replicas is
the step of one process on the joint batch, however unevenly the samples fall on them. A rank without samples takes
part with weight 0.

Why gradients are averaged around the optimizer instance: ADR 31.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from raysgd._meters import as_weight
from raysgd.backends.group import Array
from raysgd.backends.tensorflow import group_of
from raysgd.engine.types import World
from raysgd.exceptions import IncompatibleModelError, InvalidRegistrationError
from raysgd.tf import losses, registration
from raysgd.tf.datasets import num_samples
from raysgd.tf.exchange import Layout
from raysgd.tf.step import Step

_ONE = np.float64(1.0)
_EQUAL_WEIGHTS = 1e-6
"""The sum of the ranks' weights is 1 up to this when all have as many samples as the first step had."""


class Synchronizer:
    """Watches optimizers and models of one replica.

    Args:
        world: The place among the replicas.
        watches: Whether to watch models and optimizers also of a replica that is alone: others may join it later, or
            its steps have to be counted.

    Attributes:
        step: The step of training, where our own loop hands the batches out.
        validation_step: The same in an evaluation, where each rank goes through its batches for itself.
        evaluates_together: Whether a Keras loop that evaluates has all ranks at the same joint batch.
        before_exchange: Called ahead of each exchange of gradients, in one of TensorFlow's threads, if it is set. What
            it raises ends the step before it has changed a weight.
        num_exchanges: Exchanges of gradients that were completed.
        num_exchanges_per_step: How many a step of a model that is watched has.
        own_s: Seconds of the training call that were not spent in exchanges, up to the last one.
        registered: Says which models the optimizers may train; nothing is refused where it is None.
        watches: Whether it does anything at all; models of a replica that stays alone are left as they are.
    """

    def __init__(self, world: World, watches: bool = False) -> None:
        self.group = group_of(world)
        self.step, self.validation_step = Step(), Step()
        self.evaluates_together = False
        self.before_exchange: Callable[[], None] | None = None
        self.num_exchanges = 0
        self.num_exchanges_per_step = 1
        self.own_s = 0.0
        self._left_at: float | None = None  # when the last exchange of the call was over
        self._num_samples = 0.0  # of this rank, in all exchanges
        self.registered: Callable[[], Sequence[Any]] | None = None
        self.watches = world.is_distributed or watches
        self._counted: Any = None  # samples in the batch of a Keras loop, a tensor of the graph that is being traced
        self._exchanges: list[_Applied | _Compared] = []  # of the step that is being traced
        self._merges_metrics = False
        self._is_test = False  # whether the step that is being traced is one of evaluation
        self._counted_last: Any = None  # a variable: samples in the last batch of a Keras loop
        self._error: BaseException | None = None
        self._of_user = _Averager(self)  # one for a replica: ranks retrace at different times
        self._averagers = [self._of_user]

    def rejoin(self, world: World) -> None:
        """Goes on with another group, which all its ranks have joined already; what is watched stays watched."""
        self.group = group_of(world)
        for averager in self._averagers:
            averager.forget_full_step()

    # ------------------------------------------------------------------------------------------------ to tell

    def forget_call(self) -> None:
        """Forgets what was measured."""
        self.own_s, self._num_samples = 0.0, 0.0

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Inside is a training call, or a part of one."""
        self._left_at = time.perf_counter()
        try:
            yield
        finally:
            self._left_at = None

    @property
    def num_samples(self) -> int:
        """Samples of this rank in the steps of the training call."""
        return int(self._num_samples / self.num_exchanges_per_step)

    @contextmanager
    def _exchanging(self, num_samples: float) -> Iterator[None]:
        is_measured = self._left_at is not None
        if self._left_at is not None:
            self.own_s += time.perf_counter() - self._left_at
        yield
        self.num_exchanges += 1
        if is_measured:
            self._num_samples += num_samples
            self._left_at = time.perf_counter()

    # ------------------------------------------------------------------------------------------------ gradients

    def watch(self, optimizer: Any) -> None:
        """Makes an optimizer average the gradients of all ranks; once, however often it is called."""
        name = "apply" if hasattr(optimizer, "apply") else "apply_gradients"
        if not self.watches or getattr(vars(optimizer).get(name), "_is_of_raysgd", False):
            return
        wrapper = self._apply if name == "apply" else self._apply_gradients
        import tensorflow as tf

        self._averagers.append(_Averager(self))
        wrapped = wrapper(optimizer, getattr(optimizer, name), self._averagers[-1])
        wrapped = tf.autograph.experimental.do_not_convert(wrapped)
        wrapped._is_of_raysgd = True
        setattr(optimizer, name, wrapped)  # of the instance: its class, which a saved model names, does not change

    def require_watched(self, optimizer: Any) -> None:
        """Refuses an optimizer that would step with this rank's gradients alone.

        Raises:
            InvalidRegistrationError: It was not registered.
        """
        name = "apply" if hasattr(optimizer, "apply") else "apply_gradients"
        if self.watches and not getattr(vars(optimizer).get(name), "_is_of_raysgd", False):
            self._refuse(
                f"`self.optimizer` is a `{type(optimizer).__name__}` that was not registered, so each worker would "
                "train a model of its own. Call `register` with it, also when you replace an optimizer later, and use "
                "what it returns."
            )

    def _refuse_strangers(self, optimizer: Any, variables: Sequence[Any]) -> None:
        """Refuses to train what no registered model has: it would not be saved, or handed to a worker that steps in."""
        if self.group.size == 1 or self.registered is None:
            return
        strangers = registration.variables_outside(self.registered(), variables)
        if strangers:
            self._refuse(
                f"`{type(optimizer).__name__}` trains variables of no registered model: {', '.join(strangers)}. They "
                "would be neither saved nor given to workers that step in. Make them with `add_weight` of a layer, and "
                "register the layer too: `register(models=[model, layer], ...)`."
            )

    def _refuse(self, message: str) -> None:
        """Raises, and remembers what: of an error in a step that is traced, TensorFlow makes something of its own."""
        error = InvalidRegistrationError(message)
        self.note(error)
        raise error

    def average(self, gradients: Sequence[Any]) -> list[Any]:
        """The mean of the ranks' gradients by samples; None stays None. For optimizers that are not watched."""
        return self._of_user.average(gradients) if self.watches else list(gradients)

    def _apply(self, optimizer: Any, inner: Callable[..., Any], averager: _Averager) -> Any:
        """Keras 3."""

        def apply(grads: Any, trainable_variables: Any = None) -> Any:
            import tensorflow as tf

            gradients = list(grads)
            variables = list(optimizer._trainable_variables if trainable_variables is None else trainable_variables)
            with tf.init_scope():  # what is made in a branch of a graph would stay without a value
                registration.build_optimizer(optimizer, variables)
            self._refuse_strangers(optimizer, variables)
            self._note_exchange(_Applied(optimizer, variables, gradients))
            averaged = averager.average(gradients)
            with _after(averaged):
                return inner(averaged, trainable_variables)

        return apply

    def _apply_gradients(self, optimizer: Any, inner: Callable[..., Any], averager: _Averager) -> Any:
        """tf_keras."""

        def apply_gradients(grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
            pairs = list(grads_and_vars)
            gradients, variables = [gradient for gradient, _ in pairs], [variable for _, variable in pairs]
            self._refuse_strangers(optimizer, variables)
            self._note_exchange(_Applied(optimizer, variables, gradients))
            averaged = averager.average(gradients)
            with _after(averaged):
                return inner(list(zip(averaged, variables, strict=True)), *args, **kwargs)

        return apply_gradients

    # ------------------------------------------------------------------------------------------------ models

    def watch_model(self, model: Any, may_be_idle: bool) -> None:
        """Makes a compiled model train and evaluate together with those of the other ranks.

        Args:
            model: The optimizers among its attributes are watched, its `train_step` tells how many samples a batch
                has, and its metrics are those of all ranks when an epoch or an evaluation ends.
            may_be_idle: Whether it may be given an empty batch in a step in which other ranks have samples.

        Raises:
            IncompatibleModelError: It is compiled with XLA, whose code cannot call out.
        """
        if not self.watches:
            return
        refuse_xla(model)
        model.jit_compile = False  # "auto" may mean XLA on a GPU
        for optimizer in registration.optimizers_in(model):
            self.watch(optimizer)
        if getattr(vars(model).get("train_step"), "_is_of_raysgd", False):
            return
        replacements = {
            "train_step": self._step_function(model, self._training_step(model), may_be_idle),
            "test_step": self._step_function(model, model.test_step, may_be_idle, is_test=True),
            "get_metrics_result": self._metrics_result(model),
        }
        for name in registration.choices_of_logs(model):
            replacements[name] = self._logs(model, getattr(model, name))
        for name, function in replacements.items():
            function._is_of_raysgd = True
            object.__setattr__(model, name, function)  # past Keras, which keeps track of what models are given

    def _training_step(self, model: Any) -> Callable[[Any], Any]:
        """The `train_step` of a model, which is refused if it would train without the other ranks."""
        inner = model.train_step

        def train_step(data: Any) -> Any:
            result = inner(data)
            if not self._num_applied and _has_variables_to_train(model):
                error = IncompatibleModelError(
                    f"`{type(model).__name__}.train_step` uses no optimizer that the library knows of, so each worker "
                    "would train a model of its own. Keep the optimizers as attributes of the model, like "
                    "`self.optimizer`, and call their `apply_gradients`."
                )
                self.note(error)  # of what is raised while a step is traced, Keras makes something of its own
                raise error
            return result

        return train_step

    def _step_function(
        self, model: Any, step_of_user: Callable[[Any], Any], may_be_idle: bool, is_test: bool = False
    ) -> Any:
        """A step of a model with the number of samples noted, and with nothing to learn where there are none."""
        remembered = _Remembered()

        def inner(data: Any) -> Any:
            self._weigh_means(model.metrics)
            with self.scaling_losses():
                return step_of_user(data)

        def step(data: Any) -> Any:
            import tensorflow as tf

            count = num_samples(data)
            with self._counting(count, is_test):
                self._note_last(count)
                if not may_be_idle or (_is_never_empty(data) and not tf.executing_eagerly()):
                    result = inner(data)
                    self._count_exchanges()
                    return result

                def usual() -> Any:
                    result = inner(data)
                    self._count_exchanges()
                    remembered.exchanges, remembered.result = tuple(self._exchanges), result
                    return tf.nest.map_structure(tf.convert_to_tensor, result)

                if tf.executing_eagerly():
                    return usual() if count > 0 else _idle(remembered)
                return tf.cond(count > 0, usual, lambda: _idle(remembered))

        return step

    def _count_exchanges(self) -> None:
        """Notes, while a step is traced, how many exchanges it has; an evaluation has none, and says nothing."""
        self.num_exchanges_per_step = self._num_applied or self.num_exchanges_per_step

    def _note_exchange(self, exchange: _Applied | _Compared) -> None:
        if self._counted is not None:  # only ranks whose Keras draws the batches may have to repeat it
            self._exchanges.append(exchange)

    @property
    def _num_applied(self) -> int:
        return sum(isinstance(exchange, _Applied) for exchange in self._exchanges)

    @contextmanager
    def _counting(self, count: Any, is_test: bool) -> Iterator[None]:
        self._counted, self._exchanges, self._is_test = count, [], is_test
        try:
            yield
        finally:
            self._counted, self._exchanges, self._is_test = None, [], False

    def _note_last(self, count: Any) -> None:
        import tensorflow as tf

        if self._counted_last is None:
            with tf.init_scope():
                self._counted_last = tf.Variable(0, dtype=tf.int64, trainable=False)
        self._counted_last.assign(tf.cast(count, tf.int64))

    # ------------------------------------------------------------------------------------------------ losses

    def scaling_losses(self) -> AbstractContextManager[None]:
        """Inside, losses that are no means over the samples are scaled, see `losses`; with what all ranks have."""
        return losses.scaled(self._factor) if self.watches else nullcontext()

    def weighted(self, loss: Any, weight: Any) -> Any:
        """A loss that is the mean over so much, so scaled that it counts by that over all ranks."""
        import tensorflow as tf

        return loss * tf.cast(self._factor(weight), loss.dtype) if self.watches else loss

    def _factor(self, divisor: Any) -> Any:
        is_sum = divisor is losses.SUM
        self._note_exchange(_Compared(self, is_sum))
        return self._compared(is_sum, 0.0 if is_sum else divisor)

    def _compared(self, is_sum: bool, divisor: Any) -> Any:
        import tensorflow as tf

        compare = partial(self._compare, self._is_test, is_sum)
        own = tf.stop_gradient(tf.cast(divisor, tf.float64))
        with tf.control_dependencies(self._changed()):
            factor = tf.numpy_function(compare, [self._count_or_unknown(), own], tf.float64)
        factor.set_shape([])
        return factor

    def _changed(self) -> list[Any]:
        """What the traced step has changed so far: to wait for, so that a loss of workers finds no half of it."""
        import tensorflow as tf

        applied = [exchange for exchange in self._exchanges if isinstance(exchange, _Applied)]
        if not applied or tf.executing_eagerly():
            return []
        return [tf.convert_to_tensor(variable) for exchange in applied for variable in exchange.variables]

    def _count_or_unknown(self) -> Any:
        import tensorflow as tf

        return tf.constant(-1, tf.int64) if self._counted is None else tf.cast(self._counted, tf.int64)

    def _compare(self, is_test: bool, is_sum: bool, count: Array, divisor: Array) -> np.float64:
        """Runs whenever the graph does. What a rank without samples computes does not count."""
        if is_test and not self.evaluates_together:
            return _ONE
        try:
            own = None if is_sum else as_weight("weight", float(divisor))
            if self.validation_step.use() is not None:
                return np.float64(self.validation_step.factor(own))
            return np.float64(self._factor_over_ranks(self.num_samples_of(int(count)), own))
        except BaseException as error:
            self.note(error)
            raise

    def _factor_over_ranks(self, num_samples: float, divisor: float | None) -> float:
        own = np.array([num_samples, divisor or 0.0]) if num_samples else np.zeros(2)
        joint = own.copy()
        self.group.add_up(joint)
        if not num_samples:
            return 0.0
        part = 1.0 if divisor is None else divisor / joint[1] if joint[1] else 0.0
        return float(part * joint[0] / num_samples)

    def num_samples_of(self, counted: int) -> float:
        """What our own loop knows, or else what was counted in the batch; 1 where it is unknown: a plain mean."""
        known = self.step.use() if self.group.size > 1 else self.step.num_samples
        if known is not None:
            return known
        return counted if counted >= 0 else 1

    # ------------------------------------------------------------------------------------------------ metrics

    def _weigh_means(self, metrics: Sequence[Any]) -> None:
        """Makes means count a number for the whole batch by this rank's share of the samples."""
        for metric in metrics:
            if registration.is_mean(metric) and not getattr(vars(metric).get("update_state"), "_is_of_raysgd", False):
                update = self._update_of_mean(metric.update_state)
                update._is_of_raysgd = True
                object.__setattr__(metric, "update_state", update)

    def _update_of_mean(self, inner: Callable[..., Any]) -> Any:
        def update_state(values: Any, sample_weight: Any = None) -> Any:
            import tensorflow as tf

            is_number = tf.TensorShape(getattr(values, "shape", ())).rank == 0
            if self._counted is not None and sample_weight is None and is_number:
                sample_weight = 1.0 / self._factor(losses.SUM)
            return inner(values, sample_weight=sample_weight)

        return update_state

    def _metrics_result(self, model: Any) -> Any:
        inner = model.get_metrics_result

        def get_metrics_result() -> Any:
            import tensorflow as tf

            is_in_step = self._counted is not None or not tf.executing_eagerly()
            if is_in_step or not self._merges_metrics:
                return inner()
            with self.merged(variables_of(model.metrics)):
                return tf.nest.map_structure(lambda tensor: tensor, inner())

        return get_metrics_result

    def _logs(self, model: Any, inner: Callable[[Any], Any]) -> Any:
        """What Keras takes for the results of an epoch: those of the metrics, or what the last step returned."""

        def chosen(logs: Any) -> Any:
            results = inner(logs)
            if results is not logs or not isinstance(logs, Mapping) or not self._merges_metrics:
                return results
            return self._of_all_ranks(model, logs)

        return chosen

    def _of_all_ranks(self, model: Any, logs: Mapping[str, Any]) -> dict[str, Any]:
        """What the last step returned: results of metrics over all ranks, and the mean by samples of other numbers.

        A rank without samples in that step has no say.
        """
        returned, own = _flat(logs), _flat(_results(model))
        with self.merged(variables_of(model.metrics)):
            joint = _flat(_results(model))
        count = 0.0 if self._counted_last is None else float(self._counted_last.numpy())
        told = [count]
        for path, value in returned.items():
            weighted = count * value if count else np.zeros_like(value)
            told += [count * _is_same(value, own.get(path)), *weighted.reshape(-1)]
        sums = np.array(told)
        self.group.add_up(sums)
        means = iter(sums[1:] / sums[0] if sums[0] else sums[1:])
        for path, value in returned.items():
            is_of_metric, mean = next(means) == 1.0, np.array([next(means) for _ in range(value.size)])
            returned[path] = joint[path] if is_of_metric else mean.reshape(value.shape)
        return _with_values(logs, returned)

    @contextmanager
    def merged(self, variables: Sequence[Any]) -> Iterator[None]:
        """The state of metrics is the sum of that of all ranks inside, and this rank's own again afterwards."""
        if self.group.size == 1 or not variables:
            yield
            return
        own = [np.asarray(variable.numpy()) for variable in variables]
        flat = np.concatenate([array.reshape(-1).astype(np.float64) for array in own])
        self.group.add_up(flat)
        _assign_flat(variables, own, flat)
        try:
            yield
        finally:
            for variable, array in zip(variables, own, strict=True):
                variable.assign(array)

    @contextmanager
    def merging_metrics(self) -> Iterator[None]:
        """Inside, the results of models that are watched are those of all ranks whenever an epoch ends."""
        self._merges_metrics = True
        try:
            yield
        finally:
            self._merges_metrics = False

    @contextmanager
    def evaluating(self, together: bool) -> Iterator[None]:
        """Inside, a Keras loop evaluates; all ranks the same joint batches, or each one its own."""
        self.evaluates_together = together
        try:
            yield
        finally:
            self.evaluates_together = False

    # ------------------------------------------------------------------------------------------------ state

    def merge_statistics(self, models: Sequence[Any]) -> None:
        """Averages what is not trained but changes in training, such as the moving averages of BatchNorm."""
        variables = [v for model in models for v in model.non_trainable_weights if _is_float(v)]
        if self.group.size == 1 or not variables:
            return
        own = [np.asarray(variable.numpy()) for variable in variables]
        flat = np.concatenate([array.reshape(-1).astype(np.float64) for array in own]) / self.group.size
        self.group.add_up(flat)
        _assign_flat(variables, own, flat)

    def share_first(self, variables: Sequence[Any]) -> None:
        """Gives every rank rank 0's values."""
        if self.group.size == 1:
            return
        for variable in variables:
            array = np.array(variable.numpy())
            if array.dtype.hasobject:  # strings
                continue
            flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            self.group.from_first(flat)
            variable.assign(flat.view(array.dtype).reshape(array.shape))

    # ------------------------------------------------------------------------------------------------ errors

    @contextmanager
    def surfacing_errors(self) -> Iterator[None]:
        """Raises what an exchange raised, instead of the words that TensorFlow makes of it."""
        self._error = None
        try:
            yield
        except Exception as error:
            cause, self._error = self._error, None
            if cause is None:
                raise
            raise cause from error

    def note(self, error: BaseException) -> None:
        """Remembers what an exchange raised on its way through TensorFlow."""
        self._error = self._error or error


class _Compared:
    """An exchange of what the ranks' losses were divided by."""

    def __init__(self, synchronizer: Synchronizer, is_sum: bool) -> None:
        self._synchronizer, self._is_sum = synchronizer, is_sum

    def repeat_with_zeros(self) -> None:
        """Takes part in it."""
        self._synchronizer._compared(self._is_sum, 0.0)


class _Applied:
    """What an optimizer was given in a step, without the numbers.

    Args:
        optimizer: The optimizer.
        variables: What it changes.
        gradients: One for each; None for a variable that the loss does not depend on.
    """

    def __init__(self, optimizer: Any, variables: Sequence[Any], gradients: Sequence[Any]) -> None:
        self._optimizer = optimizer
        self._variables = list(variables)
        self._zeros = [_zeros_like(*pair) for pair in zip(gradients, variables, strict=True)]

    @property
    def variables(self) -> list[Any]:
        """What the optimizer has changed, its own state included."""
        return [*self._variables, *registration.variables_of_optimizer(self._optimizer)]

    def repeat_with_zeros(self) -> None:
        """Applies gradients of the same kinds that are zero."""
        zeros = [zero() for zero in self._zeros]
        self._optimizer.apply_gradients(list(zip(zeros, self._variables, strict=True)))


@dataclass
class _Remembered:
    """The usual step of a model: its exchanges, and what it returned."""

    exchanges: Sequence[_Applied | _Compared] = ()
    result: Any = None


def _idle(usual: _Remembered) -> Any:
    """A step without samples: as many exchanges and updates as the usual one, with gradients of zero."""
    import tensorflow as tf

    if usual.result is None:
        raise IncompatibleModelError(
            "With `run_eagerly=True` the first batch must have a sample for each worker: make the batches larger."
        )
    for exchange in usual.exchanges:
        exchange.repeat_with_zeros()
    return tf.nest.map_structure(lambda value: tf.zeros(value.shape, value.dtype), usual.result)


def _zeros_like(gradient: Any, variable: Any) -> Callable[[], Any]:
    """Makes a gradient of the same kind, of zero; later, because it may be needed in another graph.

    Its shape is the variable's: a graph may know less of that of the gradient.
    """
    import tensorflow as tf

    if gradient is None:
        return lambda: None
    dtype = gradient.dtype
    if isinstance(gradient, tf.IndexedSlices):
        inner, kind, shape = gradient.values.shape[1:], gradient.indices.dtype, gradient.dense_shape
        size = None if shape is None else tf.get_static_value(shape)
        return lambda: tf.IndexedSlices(
            tf.zeros([0, *inner], dtype), tf.zeros([0], kind), None if size is None else tf.constant(size, shape.dtype)
        )
    shape = variable.shape
    return lambda: tf.zeros(shape, dtype)


class _Averager:
    """Averages the gradients of one optimizer.

    A gradient is copied into the buffer with its weight in one pass, the buffer is added up over all ranks in place,
    and TensorFlow uses the sums where they lie. The weight of a rank is its samples over those of a full step, which is
    what the first step is taken for; the sum of the weights travels along. In full steps it is 1, and nothing more is
    to be done.
    """

    def __init__(self, synchronizer: Synchronizer) -> None:
        self._synchronizer = synchronizer
        self._full_step: float | None = None
        self._layouts: dict[tuple[Any, ...], Layout] = {}

    def forget_full_step(self) -> None:
        """Takes the next step for a full one: the ranks of a new group have none in common."""
        self._full_step = None

    def average(self, gradients: Sequence[Any]) -> list[Any]:
        """The mean of all ranks' gradients, as tensors; None stays None."""
        import tensorflow as tf

        given = [gradient for gradient in gradients if gradient is not None]
        if not given:
            return list(gradients)
        dense = [tf.convert_to_tensor(gradient) for gradient in given if not isinstance(gradient, tf.IndexedSlices)]
        sparse = [part for gradient in given if isinstance(gradient, tf.IndexedSlices) for part in _parts(gradient)]
        count = self._synchronizer._count_or_unknown()
        sent = [*dense, *sparse]
        exchange = partial(self._exchange, len(dense))
        received = tf.numpy_function(exchange, [count, *sent], [tensor.dtype for tensor in sent])
        for index, (before, after) in enumerate(zip(sent, received, strict=True)):
            after.set_shape(before.shape if index < len(dense) else [None, *before.shape[1:]])
        averages, joined = iter(received), iter(received[len(dense) :])
        return [_like(gradient, averages, joined) for gradient in gradients]

    def _exchange(self, num_dense: int, count: Array, *gradients: Array) -> list[Array]:
        """Runs whenever the graph does, in one of TensorFlow's threads."""
        synchronizer = self._synchronizer
        try:
            if synchronizer.before_exchange is not None:
                synchronizer.before_exchange()
            num_samples = synchronizer.num_samples_of(int(count))
            with synchronizer._exchanging(num_samples):
                return self._averaged(num_samples, gradients[:num_dense], gradients[num_dense:])
        except BaseException as error:
            synchronizer.note(error)
            raise

    def _averaged(self, num_samples: float, gradients: Sequence[Array], sparse: Sequence[Array]) -> list[Array]:
        group = self._synchronizer.group
        if self._full_step is None:
            self._full_step = max(1.0, group.largest(num_samples))
        key = tuple((gradient.shape, gradient.dtype) for gradient in gradients)
        layout = self._layouts.get(key) or self._layouts.setdefault(key, Layout(gradients))
        buffer = layout.take()
        weight = num_samples / (self._full_step * group.size)
        layout.fill(buffer, gradients, weight)
        group.add_up(buffer)
        total = float(buffer[-1])
        if total and abs(total - 1.0) > _EQUAL_WEIGHTS:
            buffer *= 1.0 / total
        joined = self._joined(weight / total if total else 0.0, sparse) if sparse else []
        return [*layout.split(buffer), *joined]

    def _joined(self, weight: float, parts: Sequence[Array]) -> list[Array]:
        """The rows of all ranks one behind the other, as one process would have them: values and indices in turns."""
        group = self._synchronizer.group
        own = [part if index % 2 else (part * weight).astype(part.dtype) for index, part in enumerate(parts)]
        counts = group.gather(np.array([len(part) for part in own], np.int64))
        return [group.gather_rows(part, [int(count[index]) for count in counts]) for index, part in enumerate(own)]


def _after(averaged: Sequence[Any]) -> Any:
    """Where nothing is done before the exchange is: a step that breaks off has not even counted itself."""
    import tensorflow as tf

    first = next((gradient for gradient in averaged if gradient is not None), None)
    return tf.control_dependencies([] if first is None else [first])


def _parts(gradient: Any) -> tuple[Any, Any]:
    return gradient.values, gradient.indices


def _like(gradient: Any, averages: Iterator[Any], joined: Iterator[Any]) -> Any:
    """The average in the form that the gradient had. A sparse one has the rows of all ranks, also those twice.

    It makes a difference: optimizers treat rows that come twice, or not at all, in ways of their own.
    """
    import tensorflow as tf

    if gradient is None:
        return None
    if not isinstance(gradient, tf.IndexedSlices):
        return next(averages)
    return tf.IndexedSlices(next(joined), next(joined), gradient.dense_shape)


def _has_variables_to_train(model: Any) -> bool:
    try:
        return bool(model.trainable_variables)
    except ValueError:  # of tf_keras, for a model that was not built and does without
        return any(layer.trainable_variables for layer in model.layers)


def _is_never_empty(data: Any) -> bool:
    import tensorflow as tf

    first = tf.nest.flatten(data)[0]
    return bool(first.shape.rank and first.shape[0])


def refuse_xla(model: Any) -> None:
    """Refuses a model that was compiled with XLA, whose code cannot call out; "auto" does not count.

    Raises:
        IncompatibleModelError: It was.
    """
    asked = getattr(model, "_compile_config", None)
    config = getattr(asked, "config", None) or {}
    if config.get("jit_compile") is True:
        raise IncompatibleModelError(
            '`jit_compile=True` does not work with `backend="gloo"`: code that XLA compiled cannot exchange gradients. '
            'Compile the model with `jit_compile=False`, or use `backend="mwms"` with tf_keras.'
        )


def _results(model: Any) -> dict[str, Any]:
    """The results of all metrics of a model, under the names of the metrics and under those that Keras gives them."""
    by_name = {metric.name: metric.result() for metric in model.metrics}
    return {**type(model).get_metrics_result(model), **by_name}


def _flat(logs: Mapping[str, Any], path: tuple[str, ...] = ()) -> dict[tuple[str, ...], Array]:
    """The numbers in dicts within dicts, by the path to them."""
    found: dict[tuple[str, ...], Array] = {}
    for name, value in logs.items():
        if isinstance(value, Mapping):
            found.update(_flat(value, (*path, name)))
        elif np.asarray(value).dtype.kind in "biuf":
            found[(*path, name)] = np.asarray(value, np.float64)
    return found


def _with_values(logs: Mapping[str, Any], values: Mapping[tuple[str, ...], Array], path: Any = ()) -> dict[str, Any]:
    """The same dicts with other numbers."""
    return {
        name: _with_values(value, values, (*path, name))
        if isinstance(value, Mapping)
        else values.get((*path, name), value)
        for name, value in logs.items()
    }


def _is_same(value: Array, other: Array | None) -> bool:
    return other is not None and value.shape == other.shape and np.allclose(value, other, equal_nan=True)


def variables_of(metrics: Sequence[Any]) -> list[Any]:
    """The state of metrics, each variable once."""
    return list({id(variable): variable for metric in metrics for variable in metric.variables}.values())


def _assign_flat(variables: Sequence[Any], like: Sequence[Array], flat: Array) -> None:
    start = 0
    for variable, array in zip(variables, like, strict=True):
        part = flat[start : start + array.size].reshape(array.shape)
        variable.assign(part.astype(array.dtype))
        start += array.size


def _is_float(variable: Any) -> bool:
    return np.asarray(variable.numpy()).dtype.kind in "fV"  # V: bfloat16, whose kind NumPy does not know
