"""Serializes Keras 3 and tf_keras models without weights to JSON, which a worker sends to the driver."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from raysgd.tf.objects import registration


def model_to_json(model: Any) -> str:
    """Serialize a model without its weights to JSON, including the arguments of its `compile` call."""
    keras = registration.keras_of(model)
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
