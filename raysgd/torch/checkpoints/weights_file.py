"""Reads and writes weights files: safetensors files that contain only models, and that other programs can read.

In a file of one model, tensors are named as in the model's `state_dict`. With several models, each name is prefixed
with the model's index and a dot. Tied weights, which have several names, are stored under the first name. The file's
metadata maps the other names to the first name.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from raysgd.core.imports import require
from raysgd.core.state.strict_reading import in_short
from raysgd.exceptions import CheckpointCorruptedError

_NUM_MODELS, _TIED, _LEFT_OUT = "raysgd_models", "raysgd_tied", "raysgd_left_out"
LEFT_OUT = "remade"
"""Key in a state for digests of the frozen parameters that the state omits because `setup` recreates them."""
_HEADER_AT = 8
"""Position of the file's JSON header. The first 8 bytes hold the header's length."""
_MAX_MODELS = 10_000


def write(path: str | os.PathLike[str], content: Mapping[str, Any]) -> None:
    """Write the models in a state to a weights file, atomically: readers see a complete file, old or new.

    Args:
        path: Path or URI of the file.
        content: State with the key `models`.

    Raises:
        ImportError: safetensors is not installed.
        ValueError: A value in a model's state is not a tensor.
        OSError: The file could not be written. `path` is unchanged.
    """
    from raysgd.storage import files  # imported lazily, because only the driver writes files

    tensors, metadata = _flat(content["models"])
    if LEFT_OUT in content:
        metadata[_LEFT_OUT] = json.dumps(content[LEFT_OUT])
    packed = _library("safetensors.torch").save(tensors, metadata)
    with files.saving(path) as file:
        file.write(packed)


def check_writable() -> None:
    """Check that safetensors is installed.

    Raises:
        ImportError: safetensors is not installed.
    """
    _library("safetensors.torch")


def is_weights_file(path: str) -> bool:
    """Return True if the first bytes of a file are those of a safetensors file."""
    with open(path, "rb") as file:
        start = file.read(_HEADER_AT + 1)
    return start[_HEADER_AT:] == b"{"


def read(path: str, name: str) -> dict[str, Any]:
    """Read a weights file.

    Args:
        path: Path of the file.
        name: Name of the file to show in errors.

    Returns:
        A dict. The key `models` has a list of the models' state dicts, with tensors on the CPU. If the file omits
        parameters, the key `LEFT_OUT` has the digests of these parameters.

    Raises:
        ImportError: safetensors is not installed.
        CheckpointCorruptedError: The file is damaged.
    """
    library = _library("safetensors")
    try:
        with library.safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118  it is no dict
        return {"models": _models(tensors, metadata), **_left_out(metadata)}
    except OSError:
        raise
    except Exception as error:  # the content of a damaged file may cause any error
        raise CheckpointCorruptedError(
            f"`{name}` is not an intact safetensors file: {in_short(error)}. It was damaged, or not copied completely. "
            "Copy it again from its source, or load another file."
        ) from error


def with_tied(saved: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a model's saved state dict in which tied weights occur under all their names.

    `read` has already added the other names if raysgd wrote the file. Other programs may store tied weights under one
    name without recording the other names.

    Args:
        saved: State dict from a file.
        own: Current state dict of the model, in which tied weights are the same object.
    """
    by_tensor: dict[int, list[str]] = {}
    for name, tensor in own.items():
        by_tensor.setdefault(id(tensor), []).append(name)
    full = dict(saved)
    for names in by_tensor.values():
        there = next((name for name in names if name in saved), None)
        full.update({name: saved[there] for name in names if there is not None and name not in saved})
    return full


def _flat(models: Sequence[Mapping[str, Any]]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return the tensors of all models by name, with tied weights under one name only, and the file's metadata."""
    tensors: dict[str, torch.Tensor] = {}
    tied: dict[str, str] = {}
    first: dict[int, str] = {}
    for index, model in enumerate(models):
        for key, value in model.items():
            name = key if len(models) == 1 else f"{index}.{key}"
            if not isinstance(value, torch.Tensor):
                raise ValueError(
                    f"`models[{index}][{key!r}]` is a `{type(value).__name__}`: safetensors holds tensors only. "
                    'Save with `format="torch"`.'
                )
            if id(value) in first:
                tied[name] = first[id(value)]
            else:
                first[id(value)], tensors[name] = name, value.detach().contiguous()
    return tensors, {"format": "pt", _NUM_MODELS: str(len(models)), _TIED: json.dumps(tied)}


def _models(tensors: dict[str, torch.Tensor], metadata: Mapping[str, str]) -> list[dict[str, torch.Tensor]]:
    tied = json.loads(metadata.get(_TIED, "{}"))
    tensors.update({name: tensors[other] for name, other in tied.items()})
    num_models = int(metadata.get(_NUM_MODELS, 1))
    if not 1 <= num_models <= _MAX_MODELS:
        raise ValueError(f"its metadata names {num_models} models")
    if num_models == 1:
        return [tensors]
    models: dict[str, dict[str, torch.Tensor]] = {str(index): {} for index in range(num_models)}
    for name, tensor in tensors.items():
        index, _, key = name.partition(".")
        if index not in models:
            raise ValueError(f"its metadata names {num_models} models, but it has {name[:50]!r}")
        models[index][key] = tensor
    return list(models.values())


def _left_out(metadata: Mapping[str, str]) -> dict[str, Any]:
    if _LEFT_OUT not in metadata:
        return {}
    from raysgd.torch.objects.remade import parts_of  # imported lazily, because most programs do not need it

    record = json.loads(metadata[_LEFT_OUT])
    parts_of(record)
    return {LEFT_OUT: record}


def _library(module: str) -> Any:
    return require(module, extra="hf", purpose="files of safetensors")
