"""Checks the arguments of `register`, and provides helpers that work with both Keras 3 and tf_keras objects.

The helpers read and build models and optimizers, set learning rates, reset the counters with which Keras numbers names
such as `dense_1`, and send models from a worker to the driver as JSON.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from raysgd.core.private_names import find_name, require_names
from raysgd.exceptions import IncompatibleModelError
from raysgd.tf.objects.datasets import zeros
from raysgd.trainer.worker.operator import RegisteredParts, parts_of


def models_of(models: Any) -> RegisteredParts:
    """Check that `register(models=...)` got a Keras model or a container of models. Return the models.

    Also check that TensorFlow is the backend of Keras.
    """
    parts = parts_of("models", models, partial(_has, "trainable_weights"), "a Keras model")
    for model in parts.items:
        check_framework(model)
    return parts


def optimizers_of(optimizers: Any) -> RegisteredParts:
    """Check that `register(optimizers=...)` got a Keras optimizer or a container of them. Return the optimizers."""
    return parts_of("optimizers", optimizers, partial(_has, "apply_gradients"), "a Keras optimizer object, not a name")


def metrics_of(metrics: Any) -> RegisteredParts:
    """Check that `register(metrics=...)` got a Keras metric or a container of metrics. Return the metrics."""
    return parts_of("metrics", metrics, partial(_has, "update_state"), "a Keras metric")


def _has(name: str, item: Any) -> bool:
    return hasattr(type(item), name)  # not the item itself: some properties of an unbuilt model raise errors


def optimizers_in(model: Any) -> list[Any]:
    """Return a model's optimizers: the one from `compile` first, then those in attributes of the model and its layers.

    If an optimizer is wrapped in a `LossScaleOptimizer`, only the wrapper is returned.
    """
    by_id = {id(optimizer): optimizer for optimizer in (model.optimizer, *_optimizers_of_parts(model))}
    inside = {id(getattr(optimizer, "inner_optimizer", None)) for optimizer in by_id.values()}
    return [optimizer for key, optimizer in by_id.items() if key not in inside]


def _optimizers_of_parts(model: Any) -> Iterator[Any]:
    for part in layers_in(model):
        for value in list(vars(part).values()):
            several = value.values() if isinstance(value, Mapping) else value
            items = list(several) if isinstance(value, Mapping | list | tuple) else [value]
            yield from (item for item in items if hasattr(type(item), "apply_gradients"))


def layers_in(model: Any) -> list[Any]:
    """Return a model and all its layers, recursively."""
    require_names(model, "_flatten_layers")
    return list(model._flatten_layers())


def replace_method(owner: Any, name: str, function: Any) -> None:
    """Replace a method of one model or optimizer object, without Keras tracking the new method as an attribute."""
    function._is_of_raysgd = True
    object.__setattr__(owner, name, function)


def is_replaced(owner: Any, name: str) -> bool:
    """Return True if `replace_method` has replaced the method `name` of `owner`."""
    return getattr(vars(owner).get(name), "_is_of_raysgd", False)


def is_legacy(keras_object: Any) -> bool:
    """Return True if an object's class is from tf_keras (Keras 2), False if it is from Keras 3."""
    return any(base.__module__.partition(".")[0] == "tf_keras" for base in type(keras_object).__mro__)


def keras_of(keras_object: Any) -> Any:
    """Return the package from which an object's class comes: `keras` (Keras 3) or `tf_keras`."""
    return importlib.import_module("tf_keras" if is_legacy(keras_object) else "keras")


def class_names(keras_object: Any) -> set[str]:
    """Return the names of an object's class and its base classes."""
    return {base.__name__ for base in type(keras_object).__mro__}


def steps_per_execution(model: Any) -> int:
    """Return a compiled model's `steps_per_execution`, the number of steps that Keras runs in one graph call."""
    if is_legacy(model):
        require_names(model, "_steps_per_execution")
        return int(model._steps_per_execution.numpy())
    return int(model.steps_per_execution)


def check_framework(model: Any) -> None:
    """Check that TensorFlow is the backend of a model's Keras package.

    Raises:
        IncompatibleModelError: Keras 3 uses another backend.
    """
    keras = sys.modules.get("keras")
    if is_legacy(model) or keras is None or not hasattr(keras, "config"):
        return
    name = keras.config.backend()
    if name != "tensorflow":
        raise IncompatibleModelError(
            f'The backend of Keras is "{name}" in the workers, but `TFTrainer` needs TensorFlow: unset KERAS_BACKEND '
            "before Keras is imported."
        )


def require_compiled(model: Any, where: str) -> None:
    """Check that a model is compiled.

    Raises:
        IncompatibleModelError: The model is not compiled.
    """
    if getattr(model, "optimizer", None) is None:
        raise IncompatibleModelError(
            f"{where} returned a model that was not compiled, so it has no optimizer and no loss: call "
            "`model.compile(optimizer=..., loss=...)` before you return it."
        )


def is_compiled_with(model: Any, optimizer: Any) -> bool:
    """Return True if `optimizer` is the one from a model's `compile`, whichever of them is wrapped for loss scaling."""
    compiled = getattr(model, "optimizer", None)
    return getattr(compiled, "inner_optimizer", compiled) is getattr(optimizer, "inner_optimizer", optimizer)


def with_loss_scale(optimizer: Any, models: Sequence[Any]) -> Any:
    """Return an optimizer, wrapped in a `LossScaleOptimizer` if a model computes in float16. Do not wrap it twice."""
    parts = (part for model in models for part in (model, *getattr(model, "layers", ())))
    policies = {getattr(getattr(part, "dtype_policy", None), "name", "") for part in parts}
    if "mixed_float16" not in policies or "LossScale" in type(optimizer).__name__:
        return optimizer
    keras = keras_of(optimizer)
    return (keras.mixed_precision if is_legacy(optimizer) else keras.optimizers).LossScaleOptimizer(optimizer)


def weights_of(model: Any) -> list[Any]:
    """Return a model's weights, or an empty list if it has not been built."""
    return list(model.weights) if model.built else []


def weights_changed_by_layers(model: Any) -> list[Any]:
    """Return the non-trainable weights, except those of frozen layers, which may be large and do not change."""
    layers = [layer for layer in layers_in(model) if layer.built]
    frozen = {id(weight) for layer in layers if not layer.trainable for weight in layer.weights}
    weights = {id(weight): weight for layer in layers for weight in layer.non_trainable_weights}
    return [weight for number, weight in weights.items() if number not in frozen]


def take_weights_in(model: Any) -> None:
    """Update the cached values that a model's layers have computed from their weights.

    Call this after the model's weights were set. Layers with an `adapt` method, such as `Normalization`, have such
    values.
    """
    for layer in layers_in(model):
        finalize = getattr(layer, "finalize_state", None)
        if layer is not model and finalize is not None and layer.built and layer.weights:
            finalize()


def variables_outside(models: Sequence[Any], variables: Iterable[Any]) -> list[str]:
    """Return the names of the variables that belong to none of the models."""
    known = {id(variable) for model in models for variable in model.variables}
    return [str(getattr(one, "path", None) or one.name) for one in variables if id(one) not in known]


def variables_of_optimizer(optimizer: Any) -> list[Any]:
    """Return an optimizer's variables: the step counter, and per-variable state such as momentums.

    With Keras 3, the learning rate is also a variable, unless it follows a schedule. If the optimizer is wrapped for
    loss scaling, the variables of both optimizers are returned, the wrapper's first.
    """
    variables = optimizer.variables
    return [*_variables_of_scale(optimizer), *(variables() if callable(variables) else variables)]


def _variables_of_scale(optimizer: Any) -> list[Any]:
    """Return the loss scale of a tf_keras wrapper and its step counter, which the wrapper's `variables` lack."""
    if not hasattr(type(optimizer), "dynamic_counter"):
        return []
    require_names(optimizer, "_loss_scale")
    return [optimizer._loss_scale.current_loss_scale, optimizer.dynamic_counter] if optimizer.dynamic else []


def variables_to_load(optimizer: Any, values: Any) -> list[Any]:
    """Return the variables of an optimizer for which a state has values. Older states lack tf_keras's loss scale."""
    variables, of_scale = variables_of_optimizer(optimizer), _variables_of_scale(optimizer)
    is_older = isinstance(values, Sequence) and len(values) == len(variables) - len(of_scale)
    return variables[len(of_scale) :] if is_older else variables


def build_model(model: Any, element_spec: Any) -> None:
    """Create a model's variables by calling the model on zeros, unless it has variables already."""
    if model.built and model.weights:
        return
    model(zeros(element_spec[0] if isinstance(element_spec, tuple) and element_spec else element_spec, 1))


def has_own_train_step(model: Any) -> bool:
    """Return True if the user has overridden the model's `train_step`."""
    return not is_stock(type(model).train_step)


def is_stock(part: Any) -> bool:
    """Return True if a layer, loss or method is part of Keras or raysgd, and False if the user defined it."""
    return getattr(part, "__module__", "keras").partition(".")[0] in ("keras", "tf_keras", "raysgd")


def refuse_unreduced_loss(model: Any) -> None:
    """Check that all losses from a model's `compile` are reduced to a scalar.

    Per-sample losses cannot be combined across ranks. A model whose `train_step` the user has overridden is not
    checked.

    Raises:
        IncompatibleModelError: A loss has the reduction "none".
    """
    import tensorflow as tf

    for loss in [] if has_own_train_step(model) else tf.nest.flatten(getattr(model, "loss", None)):
        if getattr(loss, "reduction", "") in (None, "none"):
            named = f"{type(loss).__name__}(reduction={loss.reduction!r})"
            raise IncompatibleModelError(
                f"`{named}` in `compile` cannot work with several workers: the "
                'loss of a step is not one number. Use `reduction="sum_over_batch_size"` or `reduction="sum"`.'
            )


def trace_train_step(model: Any, element_spec: Any) -> None:
    """Trace a model's `train_step` without running it, to create the variables of all optimizers that it uses."""
    import tensorflow as tf

    tf.function(model.train_step, autograph=is_legacy(model)).get_concrete_function(element_spec)


def build_optimizer(optimizer: Any, variables: Sequence[Any]) -> None:
    """Create an optimizer's variables, such as momentums, for the model variables that it will train."""
    if hasattr(optimizer, "build"):
        if not getattr(optimizer, "built", False) or is_legacy(optimizer):
            optimizer.build(list(variables))
    elif hasattr(optimizer, "_create_all_weights"):  # optimizers from before Keras 2.11
        optimizer._create_all_weights(list(variables))


Rates = Sequence[float | None]
"""One rate per optimizer, or None for an optimizer that follows a schedule or whose rate cannot be set."""


def read_rates(optimizers: Iterable[Any]) -> list[float | None]:
    """Return the optimizers' current learning rates.

    The rate is None for an optimizer that follows a schedule or whose rate cannot be set.
    """
    return [_rate_of(optimizer) for optimizer in optimizers]


def _rate_of(optimizer: Any) -> float | None:
    chosen = getattr(optimizer, "inner_optimizer", optimizer).get_config().get("learning_rate")
    is_scheduled = isinstance(chosen, Mapping)  # a schedule would soon overwrite a rate that is assigned here
    rate: Any = getattr(optimizer, "learning_rate", None)
    return float(rate.numpy()) if hasattr(rate, "assign") and not is_scheduled else None


def set_rates(rates: Rates, optimizers: Iterable[Any]) -> None:
    """Set the optimizers' learning rates. An optimizer for which `rates` has None keeps its rate."""
    for rate, optimizer in zip(rates, optimizers, strict=True):
        if rate is not None:
            optimizer.learning_rate.assign(rate)


def differing_rates(before: Rates, after: Rates) -> list[float | None]:
    """Compare two lists of learning rates, one rate per optimizer.

    Return `after`, with None in place of each rate that is the same in `before`. Return [] if all rates are the same.
    """
    changed = [rate if rate != (before[at] if at < len(before) else None) else None for at, rate in enumerate(after)]
    return changed if any(rate is not None for rate in changed) else []


_first_counts: Mapping[str, int] | None = None  # Keras's counters before the first `setup` in this process


def begin_names() -> None:
    """Reset Keras's name counters, so that the next `setup` gets the same names as in a new process.

    The entries of results are named after the metrics. Without the reset, a metric `auc` would be called `auc_1` on a
    worker that has already run a `setup`, and its name would differ between workers.
    """
    global _first_counts
    import tensorflow as tf

    reset_legacy = getattr(tf.keras.backend, "reset_uids", None)  # only tf_keras has this function
    counts = _counts_of_keras() if reset_legacy is None else {}
    if _first_counts is None:
        _first_counts = dict(counts)
    elif reset_legacy is not None:
        reset_legacy()
    counts.clear()
    counts.update(_first_counts)


def _counts_of_keras() -> dict[str, int]:
    """Return the dict in which Keras 3 counts names in this thread, or a new dict if this Keras version has none."""
    attribute: Any = find_name("keras.src.backend.common.global_state:get_global_attribute")
    fresh: dict[str, int] = defaultdict(int)
    if attribute is None:
        return fresh
    return attribute("object_name_uids", default=fresh, set_to_default=True)


def model_to_json(model: Any) -> str:
    """Serialize a model without its weights to JSON, including the arguments of its `compile` call."""
    keras = keras_of(model)
    made = keras.saving.serialize_keras_object(model)
    if type(model).__name__ == "Sequential":
        _fill_in_input_shapes(made["config"]["layers"])
    return json.dumps({"keras": keras.__name__, "model": made})


def _fill_in_input_shapes(layers: Sequence[dict[str, Any]]) -> None:
    """Fill in missing input shapes in the serialized layers of a Sequential model.

    tf_keras omits input shapes if a layer's `adapt` was called before the model was built.
    """
    known: Sequence[Any] = ()
    for layer in reversed(layers):
        known = (layer.get("build_config") or {}).get("input_shape") or known
        said = layer["config"].get("batch_input_shape")
        if said and not any(said) and len(said) == len(known):
            layer["config"]["batch_input_shape"] = known


def model_from_json(text: str, custom_objects: Mapping[str, Any] | None = None) -> Any:
    """Rebuild a model from JSON, with newly initialized weights. Compile the model if the original was compiled."""
    parts = json.loads(text)
    saving = importlib.import_module(parts["keras"]).saving
    return saving.deserialize_keras_object(parts["model"], custom_objects=dict(custom_objects or {}))
