"""Models without their weights, as text that travels from a worker to the driver, of Keras 3 or tf_keras."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from raysgd.tf.objects import registration


def model_to_json(model: Any) -> str:
    """Return a model, and what it was compiled with."""
    keras = registration.keras_of(model)
    made = keras.saving.serialize_keras_object(model)
    if type(model).__name__ == "Sequential":
        _fill_in_input_shapes(made["config"]["layers"])
    return json.dumps({"keras": keras.__name__, "model": made})


def _fill_in_input_shapes(layers: Sequence[dict[str, Any]]) -> None:
    """Fill in the sizes of inputs that tf_keras leaves out where a layer was adapted ahead of its model."""
    known: Sequence[Any] = ()
    for layer in reversed(layers):
        known = (layer.get("build_config") or {}).get("input_shape") or known
        said = layer["config"].get("batch_input_shape")
        if said and not any(said) and len(said) == len(known):
            layer["config"]["batch_input_shape"] = known


def model_from_json(text: str, custom_objects: Mapping[str, Any] | None = None) -> Any:
    """Return the model, with new weights; compiled if it was."""
    parts = json.loads(text)
    saving = importlib.import_module(parts["keras"]).saving
    return saving.deserialize_keras_object(parts["model"], custom_objects=dict(custom_objects or {}))
