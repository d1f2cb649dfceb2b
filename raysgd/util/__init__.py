"""Iterators over sharded data, and sharded data frames: the former `ray.util.iter` and `ray.util.data`.

Everything is lazy and runs in the process that iterates over a shard. An iterator only describes how to compute its
elements. It can be pickled and does not need Ray.

This package starts no processes. Callers decide which process reads which shard, and when.
"""

from __future__ import annotations

from raysgd.core.imports import lazy_names

lazy_names(__name__, {})
