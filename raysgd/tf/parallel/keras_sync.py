"""Keeps replicas of Keras models in sync: averages gradients before the optimizer applies them, and merges metrics.

Each process has its own model and no TensorFlow strategy. `Synchronizer.watch` replaces an optimizer's method that
applies gradients. The replacement averages the gradients of all ranks first, with one all-reduce of a flat buffer per
step. This works for Keras 3 and tf_keras, for `fit`, `train_on_batch` and loops with a `GradientTape`, in graph and
eager mode.

The average is weighted by samples. A step of N replicas therefore equals a single-process step on the global batch,
however unevenly the samples are sharded. A rank without samples takes part with weight 0, without running user code.

ADR 31 explains why gradients are averaged in the optimizer instance.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from raysgd.core.connections.group import Group
from raysgd.core.connections.tensorflow import group_of
from raysgd.core.engine.shared.types import World
from raysgd.core.private_names import require_names
from raysgd.exceptions import IncompatibleModelError, InvalidRegistrationError
from raysgd.tf.objects import registration
from raysgd.tf.objects.datasets import num_samples
from raysgd.tf.parallel.averaging import REFUSALS, ExchangeRecord, GradientAverager
from raysgd.tf.parallel.global_losses import GlobalLosses, refuse_by_name
from raysgd.tf.parallel.global_metrics import GlobalMetrics, check_aggregation
from raysgd.tf.parallel.step import TFStep, TracedStep, applying_zeros, assigned, repeat_with_zeros


class Synchronizer:
    """Keeps one replica's optimizers and models in sync with other ranks, by replacing some of their methods.

    An optimizer or model with replaced methods is called watched.

    Args:
        world: This rank and the number of ranks.
        num_workers: The intended number of replicas. If it is larger than 1, other replicas may join later.
        counts_steps: Whether to watch models and optimizers even if there will never be other replicas, so that steps
            are counted.

    Attributes:
        step: The current training step, if raysgd's own loop draws the batches.
        validation_step: The current validation step. In a validation, the ranks do not step together.
        exchanges: Counts the gradient all-reduces and measures the time between them.
        undo: Undoes what an interrupted step of Keras's `fit` has changed before its all-reduce.
        losses: Scales losses that are not means over samples. None if there will never be other replicas.
        watches: False if models and optimizers are left unchanged, because there will never be other replicas.
    """

    losses: GlobalLosses | None = None

    def __init__(self, world: World, num_workers: int = 1, counts_steps: bool = False) -> None:
        is_one_of_many = world.is_distributed or num_workers > 1
        self.watches = is_one_of_many or counts_steps
        self.step, self.validation_step, self.undo = TFStep(), TFStep(), StepUndo()
        self.exchanges = ExchangeRecord(group_of(world))
        if not self.watches:
            return
        self._traced = traced = TracedStep()
        self._losses = GlobalLosses(self.exchanges, traced, self.step, self.validation_step)
        self.losses = self._losses if is_one_of_many else None
        self._registered: Callable[[], Sequence[Any]] | None = None  # returns the registered models
        self._averager = GradientAverager(self.exchanges, traced, self._losses.num_samples_of)
        self._metrics = GlobalMetrics(self.exchanges, traced, self._losses)

    @property
    def group(self) -> Group:
        """The group of ranks that all-reduce gradients."""
        return self.exchanges.group

    def regroup(self, world: World) -> None:
        """Use another group for all-reduces, after all its ranks have joined it.

        Watched optimizers and models stay watched.
        """
        self.exchanges.group = group_of(world)
        if self.watches:
            self._averager.forget_full_step()

    def restrict_to(self, registered: Callable[[], Sequence[Any]]) -> None:
        """Reject all later optimizer steps that train variables outside the registered models.

        A step is checked when it is traced or runs eagerly. In a group of one rank, no step is rejected.

        Args:
            registered: Function that returns the registered models.
        """
        self._registered = registered

    def watch(self, optimizer: Any) -> None:
        """Replace an optimizer's method that applies gradients, so that gradients are averaged over all ranks first.

        Do nothing if the method was already replaced.
        """
        name = _name_of_apply(optimizer)
        if not self.watches or registration.is_replaced(optimizer, name):
            return
        import tensorflow as tf

        wrapper = self._apply if name == "apply" else self._apply_gradients
        wrapped = wrapper(optimizer, getattr(optimizer, name))
        # Replace the method on this optimizer only. Its class must stay unchanged, because saved models refer to it.
        registration.replace_method(optimizer, name, tf.autograph.experimental.do_not_convert(wrapped))

    def require_watched(self, optimizer: Any) -> None:
        """Check that an optimizer averages gradients over all ranks.

        Raises:
            InvalidRegistrationError: The optimizer was not registered.
        """
        if not self.watches or registration.is_replaced(optimizer, _name_of_apply(optimizer)):
            return
        with self.exchanges.noting(*REFUSALS):
            raise InvalidRegistrationError(
                f"`self.optimizer` is a `{type(optimizer).__name__}` that was not registered, so each worker would "
                "train a separate model. Pass it to `register`, also when you replace an optimizer later, and use "
                "the optimizer that `register` returns."
            )

    def _refuse_strangers(self, optimizer: Any, variables: Sequence[Any]) -> None:
        """Reject an optimizer step that trains variables outside the registered models.

        Such variables would not be saved or sent to new workers. A rank that is alone for now checks this too, because
        it does not trace its step again when others join.
        """
        if self.losses is None or self._registered is None:
            return
        strangers = registration.variables_outside(self._registered(), variables)
        if strangers:
            raise InvalidRegistrationError(
                f"`{type(optimizer).__name__}` trains variables of no registered model: {', '.join(strangers)}. They "
                "would be neither saved nor sent to new workers. Make them with `add_weight` of a layer, and "
                "register the layer too: `register(models=[model, layer], ...)`."
            )

    def _apply(self, optimizer: Any, inner: Callable[..., Any]) -> Any:
        """Return a replacement for a Keras 3 optimizer's `apply` that averages gradients over all ranks first."""

        def apply(grads: Any, trainable_variables: Any = None) -> Any:
            import tensorflow as tf

            gradients = list(grads)
            if trainable_variables is None:
                require_names(optimizer, "_trainable_variables")
            variables = list(optimizer._trainable_variables if trainable_variables is None else trainable_variables)
            with tf.init_scope():  # outside the graph, because variables created in a branch would stay uninitialized
                registration.build_optimizer(optimizer, variables)
            with self._averaging(optimizer, variables, gradients) as averaged:
                return inner(averaged, trainable_variables)

        return apply

    def _apply_gradients(self, optimizer: Any, inner: Callable[..., Any]) -> Any:
        """Return a replacement for tf_keras's `Optimizer.apply_gradients` that averages gradients over ranks first."""

        def apply_gradients(grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
            pairs = list(grads_and_vars)
            gradients, variables = [gradient for gradient, _ in pairs], [variable for _, variable in pairs]
            with self._averaging(optimizer, variables, gradients) as averaged:
                return inner(list(zip(averaged, variables, strict=True)), *args, **kwargs)

        return apply_gradients

    @contextmanager
    def _averaging(self, optimizer: Any, variables: list[Any], gradients: list[Any]) -> Iterator[list[Any]]:
        """Provide the mean of all ranks' gradients, and record the all-reduce if a step is being traced.

        On an empty batch, the traced step repeats its recorded all-reduces. Graph operations that are created inside
        the block run after the all-reduce. If it fails, they do not run, and not even the optimizer's step counter
        changes.
        """
        import tensorflow as tf

        with self.exchanges.noting(*REFUSALS):
            self._refuse_strangers(optimizer, variables)
            if self.losses is not None:
                refuse_by_name(gradients)
                self.losses.refuse_unscaled()
        repeat = applying_zeros(optimizer, list(variables), gradients)
        self._traced.note_exchange(repeat, is_applied=True)
        averaged = self._averager.average(gradients, repeat)
        first = [gradient for gradient in averaged if gradient is not None][:1]
        with tf.control_dependencies(first):
            self.undo.end_step()
            yield averaged

    def watch_model(self, model: Any) -> None:
        """Make a compiled model train and evaluate together with the other ranks' models.

        This method makes all optimizers in the model's attributes average gradients. It also replaces the model's
        methods, so that they count the samples of each batch, scale the losses, and merge the metrics when an epoch or
        an evaluation ends.

        Raises:
            IncompatibleModelError: The model is compiled with XLA, or a metric cannot be merged over ranks.
        """
        if not self.watches:
            return
        refuse_xla(model)
        model.jit_compile = False  # with "auto", Keras might use XLA on a GPU
        for optimizer in registration.optimizers_in(model):
            self.watch(optimizer)
        check_aggregation(model.metrics)
        if registration.is_replaced(model, "train_step"):
            return
        replacements = {
            "train_step": self._step_function(model, self._training_step(model)),
            "test_step": self._step_function(model, model.test_step, is_test=True),
            "get_metrics_result": self._metrics.results_of(model),
        }
        if self.losses is not None:
            replacements["compute_loss"] = self.losses.compute_loss_of(model)
        for name, function in replacements.items():
            registration.replace_method(model, name, function)

    def _training_step(self, model: Any) -> Callable[[Any], Any]:
        """Wrap a model's `train_step` so that it can be undone, and raises an error if nothing applies gradients."""
        inner = model.train_step

        def train_step(data: Any) -> Any:
            with self.undo.begin_step(registration.weights_changed_by_layers(model)):
                result = inner(data)
            if not self._traced.num_applied and _has_variables_to_train(model):
                with self.exchanges.noting(*REFUSALS):
                    raise IncompatibleModelError(
                        f"`{type(model).__name__}.train_step` uses no optimizer that the library knows of, so each "
                        "worker would train a separate model. Keep the optimizers as attributes of the model, like "
                        "`self.optimizer`, and call their `apply_gradients`."
                    )
            return result

        return train_step

    def _step_function(self, model: Any, step_of_user: Callable[[Any], Any], is_test: bool = False) -> Any:
        """Wrap a model's `train_step` or `test_step` so that it counts samples and works on empty batches.

        A rank has an empty batch if only other ranks have samples in a step. The wrapper then repeats the all-reduces
        of a step on a non-empty batch, with zeros.
        """
        usual_step: tuple[Sequence[Any], Any] = (), None  # all-reduces and result of a step on a non-empty batch
        is_own = not registration.is_stock(type(model).test_step if is_test else type(model).train_step)

        def inner(data: Any) -> Any:
            result = step_of_user(data)
            if is_own:
                self._metrics.note_returned(result)
            # Set the number of all-reduces per step while a step is traced. An evaluation step applies no gradients
            # and leaves the number unchanged.
            self.exchanges.num_per_step = self._traced.num_applied or self.exchanges.num_per_step
            return result

        def step(data: Any) -> Any:
            import tensorflow as tf

            count = num_samples(data)
            with self._traced.tracing(count, is_test):
                self._metrics.note_batch(count)
                if _is_never_empty(data) and not tf.executing_eagerly():
                    result = inner(data)
                    self._metrics.note_means(model, count)
                    return result

                def usual() -> Any:
                    nonlocal usual_step
                    result = inner(data)
                    usual_step = tuple(self._traced.exchanges), result
                    return tf.nest.map_structure(tf.convert_to_tensor, result)

                if tf.executing_eagerly():
                    result = usual() if count > 0 else repeat_with_zeros(*usual_step)
                else:
                    result = tf.cond(count > 0, usual, lambda: repeat_with_zeros(*usual_step))
                self._metrics.note_means(model, count)
                return result

        return step

    def take_part(self, train_step: Callable[[Any], Any], batch: Any) -> None:
        """Take part in a step for which this rank has no samples, by repeating the all-reduces of its last step.

        Args:
            train_step: The operator's `train_step`. If this rank has not taken a step yet, `train_step` is traced to
                find out which all-reduces a step has.
            batch: Batch with which to trace the step.
        """
        import tensorflow as tf

        repeats = self.step.usual
        if not repeats:
            with self._traced.tracing(0, is_test=False):
                tf.function(train_step).get_concrete_function(batch)  # traces the step without running it
                repeats = list(self._traced.exchanges)
        for repeat in repeats:
            repeat()
        self.step.skip()

    def merging_metrics(self) -> AbstractContextManager[None]:
        """Inside the block, let watched models return results over all ranks when an epoch or an evaluation ends."""
        return self._metrics.merging() if self.watches else nullcontext()

    def fitting(self, before_exchange: Callable[[], None]) -> AbstractContextManager[None]:
        """Inside the block, call `before_exchange` before each gradient all-reduce of a Keras loop."""
        return assigned(self.exchanges, before_exchange=before_exchange)

    def evaluating(self, together: bool) -> AbstractContextManager[None]:
        """Use this around a Keras evaluation, to scale losses according to how the ranks share the data.

        Args:
            together: True if each rank evaluates its part of the same global batches.
        """
        return assigned(self._losses, evaluates_together=together)


def refuse_xla(model: Any) -> None:
    """Reject a model compiled with `jit_compile=True`, because XLA cannot call Python functions. "auto" is allowed.

    Raises:
        IncompatibleModelError: The model is compiled with `jit_compile=True`.
    """
    asked = getattr(model, "_compile_config", None)
    config = getattr(asked, "config", None) or {}
    if config.get("jit_compile") is True:
        raise IncompatibleModelError(
            "`jit_compile=True` does not work with several workers: code that XLA compiled cannot exchange gradients. "
            "Compile the model with `jit_compile=False`."
        )


def _name_of_apply(optimizer: Any) -> str:
    """Return the name of the optimizer's method that applies gradients, which differs between Keras 3 and tf_keras."""
    return "apply" if hasattr(optimizer, "apply") else "apply_gradients"


def _has_variables_to_train(model: Any) -> bool:
    try:
        return bool(model.trainable_variables)
    except ValueError:  # tf_keras raises this for a model that was never built
        return any(layer.trainable_variables for layer in model.layers)


def _is_never_empty(data: Any) -> bool:
    import tensorflow as tf

    first = tf.nest.flatten(data)[0]
    return bool(first.shape.rank and first.shape[0])


class StepUndo:
    """Copies a model's non-trainable weights at the start of each step, as part of the traced step.

    A step changes trainable weights only after its all-reduce. Other weights may change in the forward pass.
    """

    def __init__(self) -> None:
        self._copies: dict[int, tuple[Any, Any]] = {}  # by ID of a weight: the weight, and the variable with its copy
        self._is_open: Any = None  # TensorFlow variable: True from the start of a step until its all-reduce

    def begin_step(self, weights: Iterable[Any]) -> AbstractContextManager[Any]:
        """Copy the weights. Operations that are created inside the returned context manager run after that."""
        import tensorflow as tf

        weights = list(weights)
        with tf.init_scope():  # outside the graph, which may be traced several times
            if self._is_open is None:
                self._is_open = tf.Variable(False, trainable=False)
            for weight in weights:
                if id(weight) not in self._copies:
                    copy = tf.Variable(weight.numpy(), trainable=False, dtype=weight.dtype)
                    self._copies[id(weight)] = weight, copy
        copied = [self._copies[id(weight)][1].assign(tf.convert_to_tensor(weight)) for weight in weights]
        with tf.control_dependencies(copied):
            return tf.control_dependencies([self._is_open.assign(True)])

    def end_step(self) -> None:
        """Record that the step's all-reduce is done. Call this where operations run only after the all-reduce."""
        if self._is_open is not None:
            self._is_open.assign(False)

    @property
    def _is_interrupted(self) -> bool:
        return self._is_open is not None and bool(self._is_open.numpy())

    def undo_step(self) -> None:
        """Restore the weights if a step was interrupted before its all-reduce was done."""
        if self._is_interrupted:
            for weight, copy in self._copies.values():
                weight.assign(copy.numpy())
            self._is_open.assign(False)

    def values_of(self, weights: Iterable[Any]) -> list[Any]:
        """Return the weights, with the copies in place of weights that the running step may have changed."""
        copies = self._copies if self._is_interrupted else {}
        return [copies[id(weight)][1] if id(weight) in copies else weight for weight in weights]
