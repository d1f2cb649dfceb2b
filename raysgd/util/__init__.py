"""Iterators over sharded data, and sharded data frames: the former `ray.util.iter` and `ray.util.data`.

An iterator only describes how to compute its elements. It can be pickled and does not need Ray. The elements are
computed in the process that iterates over a shard, when it iterates. This package starts no processes: the user's
program decides which process reads which shard.
"""

from __future__ import annotations

from raysgd.core.imports import lazy_names

lazy_names(__name__, {})
