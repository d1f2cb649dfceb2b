"""Values that a checkpoint file can give back without running code."""

from __future__ import annotations

import collections
import io
from typing import Any

import numpy as np
import torch

from raysgd._reading.plain_pickle import check_depth
from raysgd.torch.checkpoints.tensor_file import read_archive


def check_loadable(state: Any, *, allow_pickle: bool = False) -> Any:
    """Return a copy of the structure of `state` that can be loaded back; tensors and arrays are not copied.

    numpy's numbers become Python's. Whatever is not plainly loadable is tried out, so that classes which were
    allowed through `torch.serialization.add_safe_globals` count as loadable.

    Args:
        state: What is going to be written.
        allow_pickle: Refuse nothing. The file may then need `weights_only=False` when it is read.

    Raises:
        ValueError: Something could not be loaded back with `weights_only=True`. The message says where it is.
    """
    if not allow_pickle:
        check_depth(state, "`state`")
    return _LoadableCopy(allow_pickle).convert(state, "state")


class _LoadableCopy:
    """Copies a structure and makes sure that all of it can be loaded back."""

    _PLAIN_TYPES = frozenset(
        {type(None), bool, float, complex, str, bytes, bytearray, torch.Size, torch.dtype, torch.device}
    )
    _MAX_INT_BITS = 2000
    """The pickle opcode for larger ones is not understood when weights only are loaded."""

    def __init__(self, allow_pickle: bool) -> None:
        self._allow_pickle = allow_pickle
        self._copies: dict[int, Any] = {}

    def convert(self, value: Any, path: str) -> Any:
        """Return the copy of `value`, which is found at `path`."""
        kind = type(value)
        if kind in self._PLAIN_TYPES or (kind is int and value.bit_length() <= self._MAX_INT_BITS):
            return value
        if kind in (dict, collections.OrderedDict, list, tuple):
            return self._convert_container(value, path)
        if isinstance(value, np.generic) and type(value.item()) in (bool, int, float, complex, str, bytes):
            return value.item()
        if kind not in (torch.Tensor, torch.nn.Parameter) or value.is_quantized or value.is_nested:
            self._require_loadable(_sample(value), value, path)
        elif vars(value):
            self._require_loadable(vars(value), value, f"vars({path})")
        return value

    def _convert_container(self, value: Any, path: str) -> Any:
        """Copy a container, once for all the places where it is found."""
        if isinstance(value, tuple):
            return tuple(self.convert(item, f"{path}[{i}]") for i, item in enumerate(value))
        if id(value) in self._copies:
            return self._copies[id(value)]
        copy = self._copies[id(value)] = type(value)()
        if isinstance(value, list):
            copy.extend(self.convert(item, f"{path}[{i}]") for i, item in enumerate(value))
            return copy
        for key, item in value.items():
            item_path = f"{path}[{_quoted(key)}]"
            copy[self.convert(key, f"key of {item_path}")] = self.convert(item, item_path)
        if isinstance(value, collections.OrderedDict):  # A module's state dict keeps its layers' versions there.
            vars(copy).update(self.convert(vars(value), f"vars({path})"))
        return copy

    def _require_loadable(self, sample: Any, value: Any, path: str) -> None:
        """Raise unless `sample`, which stands for `value`, survives a round trip."""
        if self._allow_pickle:
            return
        try:
            stream = io.BytesIO()
            torch.save(sample, stream)
            read_archive(stream.getbuffer())
        except Exception as error:
            raise ValueError(
                f"`{path}` is a `{type(value).__module__}.{type(value).__qualname__}`, which a checkpoint "
                "cannot give back without running code. Allowed are tensors, numpy arrays, numbers, strings, "
                "bytes, None, and dicts, lists and tuples of these. Convert it in `state_dict()`, or opt in: "
                "`save(path, weights_only=False)`, and `load(path, weights_only=False)` for files you trust."
            ) from error


def _sample(value: Any) -> Any:
    """A small stand-in that is loadable exactly if `value` is."""
    if type(value) is np.ndarray and not value.dtype.hasobject:
        return np.empty(0, dtype=value.dtype)
    return value


def _quoted(key: Any) -> str:
    return f'"{key}"' if isinstance(key, str) else repr(key)
