"""Trainers with one worker in this process, as for the tests of callbacks."""

from __future__ import annotations

from tests.callbacks.conftest import make_local as make_local
