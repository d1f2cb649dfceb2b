"""Makes the variables of models and optimizers before the first step, so that there is a state from the beginning."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from raysgd.exceptions import IncompatibleModelError
from raysgd.tf.objects import datasets, registration
from raysgd.tf.parallel.keras_sync import Synchronizer
from raysgd.tf.training_operator import TrainingOperator

logger = logging.getLogger(__name__)


def check_batches(operator: TrainingOperator) -> None:
    """Refuses datasets whose batches a single model cannot take.

    Raises:
        InvalidRegistrationError: A dataset has others.
    """
    if len(operator._models) != 1:
        return
    shapes = registration.input_shapes_of(operator._models[0])
    for name in ("train_dataset", "validation_dataset"):
        if getattr(operator, name) is not None:
            datasets.check_batches_for(name, getattr(operator, name), shapes)


def refuse_stateful(models: Iterable[Any]) -> None:
    """Refuses recurrent layers that carry a state from batch to batch.

    Raises:
        IncompatibleModelError: There is one.
    """
    for layer in (layer for model in models for layer in model._flatten_layers()):
        if hasattr(layer, "cell") and layer.stateful:
            raise IncompatibleModelError(
                f"`{type(layer).__name__}(stateful=True)` cannot be divided: its state belongs to rows of the batch "
                "before, which other workers may have. Use `stateful=False` or `num_workers=1`, or let each worker "
                "read its own sequences: `raysgd.tf.prepare_dataset_shard(dataset)`."
            )


def build(operator: TrainingOperator, uses_fit: bool, may_trace: bool, synchronizer: Synchronizer) -> None:
    """Makes all variables where that is possible.

    Args:
        operator: Has registered models and optimizers.
        uses_fit: Whether the model is compiled, and knows its optimizers.
        may_trace: Whether its `train_step` may be traced to find out what each optimizer changes.
        synchronizer: Watches the model then.
    """
    dataset = operator.train_dataset
    with operator._raysgd.scope():
        for model in operator._models:
            if dataset is not None:
                _try_to_build(model, dataset.element_spec)
        if uses_fit and may_trace and _has_traced_train_step(operator, synchronizer):
            return
        if not uses_fit and len(operator._models) != len(operator._optimizers):
            return
        for model, optimizer in zip(operator._models, operator._optimizers, strict=not uses_fit):
            if model.built and model.trainable_variables:
                registration.build_optimizer(optimizer, model.trainable_variables)


def check_loss(operator: TrainingOperator, synchronizer: Synchronizer) -> None:
    """Refuses a loss that is no mean over the samples where the user's `forward` computes with it.

    Raises:
        IncompatibleModelError: The library could not scale it.
    """
    loss = operator._raysgd.registered.loss
    reduction, is_stock = getattr(loss, "reduction", ""), type(operator).forward is TrainingOperator.forward
    if synchronizer.watches and not is_stock and reduction in ("sum", "mean_with_sample_weight"):
        raise IncompatibleModelError(
            f"`register(loss={type(loss).__name__}(reduction={reduction!r}))` with your own `forward` cannot work with "
            'several workers. Use `reduction="sum_over_batch_size"`; for a mean over anything else than samples return '
            "`(output, loss, weight)` from `forward`."
        )


def _try_to_build(model: Any, element_spec: Any) -> None:
    try:
        registration.build_model(model, element_spec)
    except Exception as error:  # it builds itself in the first step, as it would without us
        logger.debug("a model could not be built ahead of its first step: %s", error)


def _has_traced_train_step(operator: TrainingOperator, synchronizer: Synchronizer) -> bool:
    """Return whether the user's `train_step`, which knows what each optimizer changes, could be traced."""
    model = operator._models[0]
    if model.run_eagerly or not registration.has_own_train_step(model):
        return False
    synchronizer.watch_model(model, may_be_idle=True)
    try:
        with synchronizer.exchanges.surfacing_errors():
            registration.trace_train_step(model, operator.train_dataset.element_spec)
    except IncompatibleModelError:
        raise
    except Exception as error:  # it says so itself in the first step, if it is no matter of tracing it this early
        logger.debug("a `train_step` could not be traced ahead of the first step: %s", error)
        return False
    return True
