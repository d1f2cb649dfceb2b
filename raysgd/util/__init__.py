"""Iterators over data in shards, and data frames in such: what `ray.util.iter` and `ray.util.data` were.

What it guarantees: everything is lazy and happens where a shard is iterated over. An iterator is a plain description
that can be pickled, and needs no Ray.

What it leaves to others: processes, and the order in which several of them read their shards.
"""

from __future__ import annotations

from raysgd._imports import lazy_names

lazy_names(__name__, {})
