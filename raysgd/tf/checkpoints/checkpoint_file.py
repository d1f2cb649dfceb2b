"""The checkpoint file of `TFTrainer`: written atomically, read without running code.

The file is an ordinary NumPy `.npz` archive. Every array of the state is a member, named by its path in the state, so
`numpy.load(path)["models/0/1"]` returns an array. Another member, `state.json`, holds the rest of the state:
containers, numbers, strings, and references to the arrays. As in any zip archive, each member has a checksum, which is
verified when the member is read.

ADR 61 explains why the file is an `.npz` archive.
"""

from __future__ import annotations

import base64
import io
import json
import math
import os
import zipfile
from collections.abc import Sequence
from typing import IO, Any

import numpy as np

from raysgd.core.state.strict_reading import (
    FormerValue,
    check_depth,
    check_format,
    check_stored,
    checked_state,
    read_pickle,
    refusals_of,
    require,
)
from raysgd.tf.objects import registration

FORMAT_VERSION = 1
"""The format version that this version of raysgd writes, and the newest that it reads."""

REQUIRED_KEYS = ("epoch", "models", "optimizers")
"""The keys that every training state must have."""

_INDEX = "state.json"
_ZIP_START = b"PK\x03\x04"
_TAG = "raysgd"
FORMER_OPTIMIZER = "optimizer_weights"
"""Key of the optimizer's variables in files written by `ray.util.sgd`, which used another order of the variables."""

_LEGACY_KEYS = ("epoch", "weights", FORMER_OPTIMIZER)


def write(path: str | os.PathLike[str], state: dict[str, Any]) -> None:
    """Write `state` to `path` atomically.

    Raises:
        ValueError: `state` is nested too deeply, or contains an object that cannot be stored. The message gives the
            location of the object in `state`.
        OSError: The file could not be written. `path` is unchanged.
    """
    from raysgd.storage import files  # imported here, because workers only read files and do not need it

    arrays: dict[str, np.ndarray[Any, Any]] = {}
    check_depth(state, "`state`")
    tree = _encoded(state, "", arrays)
    names = {name: {"dtype": array.dtype.name, "shape": array.shape} for name, array in arrays.items()}
    index = json.dumps({"format": FORMAT_VERSION, "state": tree, "arrays": names})
    with files.saving(path) as file, zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, _storable(array), allow_pickle=False)
        archive.writestr(_INDEX, index)


def check(state: dict[str, Any]) -> None:
    """Check that a checkpoint file can store `state`.

    Raises:
        ValueError: `state` is nested too deeply, or contains an object that cannot be stored. The message gives the
            location of the object in `state`.
    """
    check_depth(state, "`state`")
    _encoded(state, "", {})


def read(path: str | os.PathLike[str], *, name: str | None = None) -> dict[str, Any]:
    """Read a checkpoint, verify its integrity, and return the state.

    Files written by `ray.util.sgd`, which are pickled dicts of arrays, are also read without running code. Their state
    has the key `FORMER_OPTIMIZER` instead of `optimizers`.

    Args:
        path: The file to read.
        name: Name of the file in error messages, if `path` is a temporary copy.

    Raises:
        FileNotFoundError: The file does not exist.
        CheckpointCorruptedError: The file is damaged or not a checkpoint. This is also a `ValueError` and a
            `RuntimeError`.
        UnsafeCheckpointError: A file written by `ray.util.sgd` contains more than arrays. This is also a `ValueError`.
        ValueError: The content is not a training state, or a newer version of raysgd wrote it.
    """
    name = name or os.fspath(path)
    with open(path, "rb") as file:
        is_archive = file.read(len(_ZIP_START)) == _ZIP_START
        file.seek(0)
        if not is_archive:
            return _read_legacy(file, name)
        with refusals_of(name), zipfile.ZipFile(file) as archive:
            check_stored(archive, os.fstat(file.fileno()).st_size)
            index = json.loads(archive.read(_INDEX))
            version = index["format"]
        check_format(name, version, FORMAT_VERSION)
        with refusals_of(name), zipfile.ZipFile(file) as archive:
            arrays = {
                key: _array(archive.read(f"{key}.npy"), facts["dtype"], facts["shape"])
                for key, facts in index["arrays"].items()
            }
            state = _decoded(index["state"], arrays)
            check_depth(state)
    return checked_state(state, name, REQUIRED_KEYS)


def _encoded(value: Any, path: str, arrays: dict[str, np.ndarray[Any, Any]]) -> Any:
    """Convert `value` to a JSON-serializable object, and collect its arrays in `arrays` under their paths."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, np.generic):
        value = np.asarray(value) if value.dtype.kind == "V" else value.item()
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return value  # also NaN and infinity, which Python's `json` module can write and read
    if isinstance(value, bytes):
        return {_TAG: "bytes", "value": base64.b64encode(value).decode()}
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        name = _unused(path.strip("/"), arrays)
        arrays[name] = value
        return {_TAG: "array", "value": name}
    if type(value) in (list, tuple):
        items = [_encoded(item, f"{path}/{index}", arrays) for index, item in enumerate(value)]
        return items if isinstance(value, list) else {_TAG: "tuple", "value": items}
    if type(value) is dict:
        pairs = [(_encoded(key, path, {}), _encoded(item, f"{path}/{key}", arrays)) for key, item in value.items()]
        if all(isinstance(key, str) for key, _ in pairs) and _TAG not in value:
            return dict(pairs)
        return {_TAG: "dict", "value": [list(pair) for pair in pairs]}
    raise ValueError(
        f"`state{''.join(f'[{part!r}]' for part in path.strip('/').split('/'))}` is a "
        f"`{type(value).__module__}.{type(value).__qualname__}`, which a checkpoint cannot restore without running "
        "code. Allowed are NumPy arrays, numbers, strings, bytes, None, and dicts, lists and tuples of these. Convert "
        "it in `state_dict()`."
    )


def _decoded(tree: Any, arrays: dict[str, Any]) -> Any:
    if isinstance(tree, list):
        return [_decoded(item, arrays) for item in tree]
    if not isinstance(tree, dict):
        return tree
    if _TAG not in tree:
        return {key: _decoded(item, arrays) for key, item in tree.items()}
    kind, value = tree[_TAG], tree["value"]
    if kind == "array":
        return arrays[value]
    if kind == "bytes":
        return base64.b64decode(value)
    items = [_decoded(item, arrays) for item in value]
    return tuple(items) if kind == "tuple" else {key: item for key, item in items}


def _unused(name: str, arrays: dict[str, Any]) -> str:
    candidate, number = name, 0
    while candidate in arrays or not candidate:
        number += 1
        candidate = f"{name}~{number}"
    return candidate


def _storable(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return an array that NumPy's file format can store. bfloat16 and similar dtypes are viewed as integers."""
    array = np.ascontiguousarray(array) if array.ndim else array
    return array.view(f"u{array.dtype.itemsize}") if array.dtype.kind == "V" else array


def _array(content: bytes, dtype_name: str, shape: list[int]) -> Any:
    """Return the array in a `.npy` member of the archive, with the dtype and the shape that `state.json` records.

    Raises:
        ValueError: The array in the member has another shape, or a dtype that is not allowed.
    """
    require(math.prod(shape) <= len(content), "an array is larger than its member")
    member = io.BytesIO(content)
    array = np.lib.format.read_array(member, allow_pickle=False)
    require(list(array.shape) == shape and not member.read(1), "an array has a different shape than the file says")
    array = array.astype(array.dtype.newbyteorder("="), copy=False)
    return array if array.dtype.name == dtype_name else array.view(_small_float(dtype_name))


def _small_float(name: str) -> np.dtype[Any]:
    """Return the dtype with this name, such as bfloat16, which NumPy itself lacks.

    Arrays with such a dtype are stored as integers.

    Raises:
        ValueError: NumPy itself has this dtype, so an array with another dtype in its member is damaged.
    """
    import ml_dtypes  # noqa: F401 - registers the dtype with NumPy

    dtype = np.dtype(name)
    if dtype.kind != "V" or dtype.names is not None:
        raise ValueError("an array has a different type than the file says")
    return dtype


def _read_legacy(file: IO[bytes], name: str) -> dict[str, Any]:
    with refusals_of(name, "Files of the old library can be read if they contain only arrays."):
        state = read_pickle(file.read())
    checked_state(state, name, _LEGACY_KEYS)
    with refusals_of(name):
        weights = {key: _former_arrays(state[key]) for key in ("weights", FORMER_OPTIMIZER)}
    return {"epoch": state["epoch"], "models": [weights["weights"]], FORMER_OPTIMIZER: weights[FORMER_OPTIMIZER]}


def _former_arrays(values: Any) -> list[Any]:
    require(isinstance(values, list | tuple), "its weights are not a list")
    arrays = [each.value if isinstance(each, FormerValue) else each for each in values]
    require(all(isinstance(each, np.ndarray | np.generic) for each in arrays), "its weights are not a list of arrays")
    return arrays


# For each current optimizer, the attributes that hold its slots, in the order in which the old optimizer of the same
# name stored its slots. Both optimizers compute the same steps from these slots.
FORMER_SLOTS = {
    "SGD": ("momentums",),
    "Adam": ("_momentums", "_velocities", "_velocity_hats"),
    "RMSprop": ("_velocities", "_momentums", "_average_gradients"),
    "Adagrad": ("_accumulators",),
    "Adadelta": ("_accumulated_grads", "_accumulated_delta_vars"),
    "Adamax": ("_m", "_u"),
}


def former_slots(optimizer: Any, weights: Sequence[Any]) -> list[Any] | None:
    """Return a value for each variable of a current optimizer, using the weights from a file of `ray.util.sgd`.

    Such a file contains the result of `get_weights()` of a pre-Keras-2.11 optimizer: the number of steps, then the
    slots (per-variable state, such as momentums) of all model variables, grouped by slot type. It does not name the
    optimizer. Current optimizers have additional variables and a different order.

    Variables that the file does not contain keep their current values. Return None if the shapes of the weights do not
    match the optimizer's variables.

    Args:
        optimizer: The current optimizer.
        weights: The weights from the file.
    """
    variables, inner = registration.variables_of_optimizer(optimizer), getattr(optimizer, "inner_optimizer", optimizer)
    if hasattr(inner, "_create_all_weights"):  # a pre-Keras-2.11 optimizer, which uses the same order as the file
        homes = registration.variables_of_optimizer(inner)
    else:
        slots = [getattr(inner, attribute, None) or () for attribute in FORMER_SLOTS.get(type(inner).__name__, ())]
        homes = [inner.iterations, *(variable for one in slots for variable in one)]
    homes = homes if len(weights) > 1 else homes[:1]  # SGD without momentum: ignore the slots that tf_keras creates
    if [np.shape(weight) for weight in weights] != [tuple(home.shape) for home in homes]:
        return None
    values = {id(home): np.asarray(weight) for home, weight in zip(homes, weights, strict=True)}
    return [values.get(id(variable), np.array(variable.numpy())) for variable in variables]
