"""Iterators over sharded data, and sharded data frames: the former `ray.util.iter` and `ray.util.data`.

Everything is lazy and runs in the process that iterates over a shard. An iterator is a plain description that can be
pickled, and does not need Ray.

Users start the processes, and decide in which order several processes read their shards.
"""

from __future__ import annotations

from raysgd.core.imports import lazy_names

lazy_names(__name__, {})
