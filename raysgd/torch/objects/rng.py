"""Captures and restores the state of the random number generators that training code uses.

A captured state is a flat dict of bytes, numbers and None. Such dicts can be compared with `==`, and
`torch.load(weights_only=True)` can read them from an untrusted file.
"""

from __future__ import annotations

import hashlib
import random
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

RNG = "rng"
"""Key in a checkpoint for the states of all ranks' random number generators."""

_MERSENNE_TWISTER = "MT19937"
_NUM_WORDS = 624
_PYTHON_WORDS = struct.Struct(f"<{_NUM_WORDS + 1}I")
"""Layout of the state of Python's `random`: the words of the Mersenne Twister, then the position in these words."""

_TORCH_BYTES = 5056
_TORCH_PLACE = struct.Struct("<iiQ")
_TORCH_PLACE_AT = 8
"""Offset of three fields in the state of PyTorch's CPU generator, which `_TORCH_PLACE` unpacks.

The fields are the number of words left, a flag that is 1 if the generator was seeded, and the position of the next
word.
"""

_CUDA_BYTES = 16

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
    """Return the states of the global random number generators of PyTorch, Python and NumPy in this process.

    The result contains the states of PyTorch's CPU generator, of the generator of the current CUDA device, of the
    `random` module, and of the legacy global generator of `numpy.random`. The CUDA entry is None if this process does
    not use CUDA. NumPy's entries are None if user code replaced NumPy's global generator with a generator that is not a
    Mersenne Twister.
    """
    version, words, gauss = random.getstate()
    return {
        "torch": _tensor_to_bytes(torch.get_rng_state()),
        "torch_cuda": _tensor_to_bytes(torch.cuda.get_rng_state()) if torch.cuda.is_initialized() else None,
        "python_version": version,
        "python_words": _PYTHON_WORDS.pack(*words),
        "python_gauss": gauss,
        **_capture_numpy(),
    }


def seed_alike(seed: int) -> None:
    """Seed the global generators of PyTorch, Python and NumPy with one seed, which is the same on all ranks."""
    torch.manual_seed(seed)  # also seeds the generators of all CUDA devices
    random.seed(seed)
    np.random.seed(seed % 2**32)


def part_ways(seed: int, rank: int) -> None:
    """Seed the global generators from a seed and the rank. Random numbers, as in dropout, then differ between ranks."""
    seed_alike(_seed_of(str(seed).encode(), rank))


def fork(state: Mapping[str, Any], number: int) -> None:
    """Give the global generators states that depend on a captured state and a number, such as the rank.

    PyTorch, Python and NumPy each get a new seed that depends only on the number and on the captured state of their own
    generator (for PyTorch, the CPU generator). If the user seeded only some of these generators, the random numbers of
    the seeded generators therefore stay reproducible.

    Args:
        state: State that `capture` returned.
        number: Number that differs between ranks. With 0, the captured state itself is restored.
    """
    restore(state)
    if number == 0:
        return
    torch.manual_seed(_seed_of(state["torch"], number))  # also seeds the generators of all CUDA devices
    random.seed(_seed_of(state["python_words"], number))
    if state["numpy_words"] is not None:
        np.random.seed(_seed_of(state["numpy_words"], number) % 2**32)


def _seed_of(origin: bytes, number: int) -> int:
    digest = hashlib.blake2b(origin + f"/{number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def restore(state: Any) -> None:
    """Restore every generator in `state` to its state when `capture` was called.

    The state of a CUDA device is ignored if this process has no such device.

    Raises:
        ValueError: `check` would reject the state. No generator has changed.
    """
    writers: list[Any] = [torch.set_rng_state, torch.cuda.set_rng_state, random.setstate, np.random.set_state]
    for write, own in zip(writers, check(state), strict=True):
        if own is not None:
            write(own)


def check(state: Any) -> list[Any]:
    """Check that `restore(state)` will succeed, without changing anything.

    Return the states to set in the generators of PyTorch, CUDA, Python and NumPy, in this order. A state is None if its
    generator is left unchanged.

    Raises:
        ValueError: `state` lacks entries, is damaged, or comes from another type of generator.
    """
    missing = [key for key in _KEYS if key not in state] if isinstance(state, Mapping) else list(_KEYS)
    if missing:
        raise ValueError(f"`restore(state)`: `state` lacks {missing}. Pass what `capture()` returned.")
    try:
        return [
            _checked_torch(state["torch"]),
            _checked_cuda(state["torch_cuda"]),
            _checked_python(state["python_version"], state["python_words"], state["python_gauss"]),
            _checked_numpy(*(state[key] for key in _KEYS if key.startswith("numpy_"))),
        ]
    except (RuntimeError, TypeError, ValueError, IndexError, struct.error) as error:
        raise ValueError(
            "`restore(state)`: `state` does not match this process's random number generators. It is damaged, "
            f"or comes from a version of torch, Python or numpy that stores them differently ({error})."
        ) from error


def _checked_torch(content: Any) -> torch.Tensor:
    state = _bytes_to_tensor(content)
    torch.Generator().set_state(state)
    if len(content) == _TORCH_BYTES:  # `set_state` does not check the sum that is checked below
        num_left, _, position = _TORCH_PLACE.unpack_from(content, _TORCH_PLACE_AT)
        _require(num_left + position <= _NUM_WORDS + 1, "a position outside of its words")
    return state


def _checked_cuda(content: Any) -> torch.Tensor | None:
    if content is None:
        return None
    state = _bytes_to_tensor(content)
    _require(len(content) == _CUDA_BYTES, f"{len(content)} bytes for CUDA")
    if not torch.cuda.is_available():
        return None
    torch.Generator("cuda").set_state(state)
    return state


def _checked_python(version: Any, content: Any, gauss: Any) -> tuple[Any, ...]:
    _require(version == random.getstate()[0], "another version of Python's generator")
    _require(gauss is None or type(gauss) is float, "a next number that is not a float")
    state = version, _PYTHON_WORDS.unpack(content), gauss
    random.Random().setstate(state)
    return state


def _checked_numpy(content: Any, position: Any, has_gauss: Any, gauss: Any) -> tuple[Any, ...] | None:
    if content is None:
        return None
    _require(type(content) is bytes and len(content) == 4 * _NUM_WORDS, "no words for numpy")
    _require(type(position) is int and 0 <= position <= _NUM_WORDS, "a position outside of its words")
    _require(has_gauss in (0, 1) and type(gauss) is float, "a next number that is not a float")
    return _MERSENNE_TWISTER, struct.unpack(f"<{_NUM_WORDS}I", content), position, has_gauss, gauss


def _require(holds: bool, finding: str) -> None:
    if not holds:
        raise ValueError(finding)


def _capture_numpy() -> dict[str, Any]:
    state: Any = np.random.get_state(legacy=False)
    if state["bit_generator"] != _MERSENNE_TWISTER:
        return dict.fromkeys([key for key in _KEYS if key.startswith("numpy_")])
    return {
        "numpy_words": state["state"]["key"].astype("<u4").tobytes(),
        "numpy_position": int(state["state"]["pos"]),
        "numpy_has_gauss": int(state["has_gauss"]),
        "numpy_gauss": float(state["gauss"]),
    }


def _tensor_to_bytes(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.numpy().tobytes())


def _bytes_to_tensor(content: Any) -> torch.Tensor:
    _require(type(content) is bytes, "no bytes")
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)
