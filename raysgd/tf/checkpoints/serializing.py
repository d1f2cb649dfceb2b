"""Models without their weights, as text that travels from a worker to the driver, of Keras 3 or tf_keras."""

from __future__ import annotations

import importlib
import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from raysgd.tf.objects import registration

logger = logging.getLogger(__name__)


def model_to_json(model: Any, optimizer: Any = None, loss: Any = None, metrics: Sequence[Any] = ()) -> str:
    """Return a model, and what it is to be compiled with if it was not."""
    keras = registration.keras_of(model)
    parts = {"keras": keras.__name__, "model": keras.saving.serialize_keras_object(model)}
    if type(model).__name__ == "Sequential":
        _fill_in_input_shapes(parts["model"]["config"]["layers"])
    if optimizer is None or getattr(model, "optimizer", None) is not None:
        return json.dumps(parts)
    try:
        if getattr(loss, "__name__", "") == "<lambda>":  # Keras would hand out code
            raise ValueError("the loss is a lambda, which has no name to look it up by")
        options = {
            "optimizer": keras.optimizers.serialize(optimizer),
            "loss": keras.losses.serialize(loss),
            "metrics": [keras.metrics.serialize(metric) for metric in metrics],
        }
        return json.dumps({**parts, "options": options})
    except Exception as error:  # of any class: what is the user's may say anything about itself
        return json.dumps({**parts, "obstacle": str(error)})


def _fill_in_input_shapes(layers: Sequence[dict[str, Any]]) -> None:
    """Fill in the sizes of inputs that tf_keras leaves out where a layer was adapted ahead of its model."""
    known: Sequence[Any] = ()
    for layer in reversed(layers):
        known = (layer.get("build_config") or {}).get("input_shape") or known
        said = layer["config"].get("batch_input_shape")
        if said and not any(said) and len(said) == len(known):
            layer["config"]["batch_input_shape"] = known


def model_from_json(text: str, custom_objects: Mapping[str, Any] | None = None) -> Any:
    """Return the model, with new weights; compiled if it can be."""
    parts, custom = json.loads(text), dict(custom_objects or {})
    keras = importlib.import_module(parts["keras"])
    model = keras.saving.deserialize_keras_object(parts["model"], custom_objects=custom)
    obstacle = parts.get("obstacle")
    if "options" in parts:
        options = parts["options"]
        try:
            optimizer = keras.optimizers.deserialize(options["optimizer"], custom_objects=custom)
            loss = keras.losses.deserialize(options["loss"], custom_objects=custom)
            metrics = [keras.metrics.deserialize(metric, custom_objects=custom) for metric in options["metrics"]]
        except Exception as error:  # of any class: Keras raises various ones for what it does not know
            obstacle = str(error)
        else:
            model.compile(optimizer=optimizer, loss=loss, metrics=metrics)
    if obstacle is not None:
        logger.warning(
            "the model is handed out without its optimizer, because Keras cannot make the optimizer, the loss or a "
            "metric from its configuration; if one of them is yours, pass it in `custom_objects`: %s",
            obstacle.partition("\n")[0],
        )
    return model
