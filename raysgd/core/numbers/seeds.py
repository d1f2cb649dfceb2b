"""Derives random seeds from names and numbers. The same names and numbers give the same seeds on every machine."""

from __future__ import annotations

import hashlib


def digest(*parts: object) -> int:
    """Return a 64-bit hash of the parts, joined with slashes as strings.

    >>> digest("1/2") == digest(1, 2)
    True
    """
    text = "/".join(map(str, parts))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def seed_of(*parts: object) -> int:
    """Return a random seed derived from the parts. It has 63 bits, so it fits in a signed 64-bit integer."""
    return digest(*parts) >> 1
