"""Defines the version number of raysgd in a module of its own, which imports nothing else."""

from __future__ import annotations

__version__ = "0.1.0"
