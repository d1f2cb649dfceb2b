"""Seeds that follow from names and numbers; the same on every machine."""

from __future__ import annotations

import hashlib


def digest(*parts: object) -> int:
    """Return 64 bits that differ when any of the parts does.

    >>> digest("1/2") == digest(1, 2)
    True
    """
    text = "/".join(map(str, parts))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def seed_of(*parts: object) -> int:
    """Return a seed that differs when any of the parts does: 63 bits, for it is a signed integer, 0 or more."""
    return digest(*parts) >> 1
