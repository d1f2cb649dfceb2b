"""Captures and restores the state of the random number generators that training code draws from.

The captured state is a flat dict of bytes, numbers and None. So two of them compare with `==` to a plain
bool, and `torch.load(weights_only=True)` reads one back without trusting the file.
"""

from __future__ import annotations

import random
import struct
import sys
from types import ModuleType
from typing import Any

import torch

_MERSENNE_TWISTER = "MT19937"
_NUM_WORDS = 624
_PYTHON_WORDS = struct.Struct(f"<{_NUM_WORDS + 1}I")
"""The generator's words, and behind them its position: what Python's `random` reports as one tuple."""

_KEYS = (
    "torch",
    "torch_cuda",
    "python_version",
    "python_words",
    "python_gauss",
    "numpy_words",
    "numpy_position",
    "numpy_has_gauss",
    "numpy_gauss",
)


def capture() -> dict[str, Any]:
    """Return the state of torch's, Python's and numpy's global generators in this process.

    Covers torch's CPU generator; the current CUDA device's, if this process uses CUDA; the `random` module;
    and `numpy.random`'s legacy global generator, if numpy is loaded. Entries of a generator that is not there
    are None, as are numpy's when its global generator was exchanged for another kind than the Mersenne
    Twister it comes with.
    """
    version, words, gauss = random.getstate()
    return {
        "torch": _tensor_to_bytes(torch.get_rng_state()),
        "torch_cuda": _tensor_to_bytes(torch.cuda.get_rng_state()) if torch.cuda.is_initialized() else None,
        "python_version": version,
        "python_words": _PYTHON_WORDS.pack(*words),
        "python_gauss": gauss,
        **_capture_numpy(sys.modules.get("numpy")),
    }


def restore(state: dict[str, Any]) -> None:
    """Make every generator that `state` covers go on where it was when `capture` returned `state`.

    A generator that this process lacks (numpy not loaded, no CUDA device) is left out.

    Raises:
        ValueError: `state` lacks entries, or was captured from a generator of another kind or size.
    """
    missing = [key for key in _KEYS if key not in state]
    if missing:
        raise ValueError(f"`restore(state)`: `state` lacks {missing}. Pass what `capture()` returned.")
    try:
        torch.set_rng_state(_bytes_to_tensor(state["torch"]))
        if state["torch_cuda"] is not None and torch.cuda.is_available():
            torch.cuda.set_rng_state(_bytes_to_tensor(state["torch_cuda"]))
        words = _PYTHON_WORDS.unpack(state["python_words"])
        random.setstate((state["python_version"], words, state["python_gauss"]))
        _restore_numpy(sys.modules.get("numpy"), state)
    except (RuntimeError, TypeError, ValueError, IndexError, struct.error) as error:
        raise ValueError(
            "`restore(state)`: `state` does not fit this process's random number generators: it is damaged, "
            f"or comes from a version of torch, Python or numpy that keeps them differently ({error})."
        ) from error


def _capture_numpy(numpy: ModuleType | None) -> dict[str, Any]:
    state: dict[str, Any] = numpy.random.get_state(legacy=False) if numpy is not None else {}
    if state.get("bit_generator") != _MERSENNE_TWISTER:
        return dict.fromkeys([key for key in _KEYS if key.startswith("numpy_")])
    return {
        "numpy_words": state["state"]["key"].astype("<u4").tobytes(),
        "numpy_position": int(state["state"]["pos"]),
        "numpy_has_gauss": int(state["has_gauss"]),
        "numpy_gauss": float(state["gauss"]),
    }


def _restore_numpy(numpy: ModuleType | None, state: dict[str, Any]) -> None:
    if numpy is None or state["numpy_words"] is None:
        return
    words = numpy.frombuffer(state["numpy_words"], dtype="<u4")
    gauss = state["numpy_has_gauss"], state["numpy_gauss"]
    numpy.random.set_state((_MERSENNE_TWISTER, words, state["numpy_position"], *gauss))


def _tensor_to_bytes(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.numpy().tobytes())


def _bytes_to_tensor(content: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)
