"""What the table of a recovery knows, as its tests make it up: two workers that run a call."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from raysgd.core.engine.policies import FailurePolicy, ScalingPolicy
from raysgd.core.engine.recovery.machine import Known
from raysgd.core.engine.shared.interface import GroupSpec
from tests.helpers.fakes import CountingReplica, NullConnection

_KNOWN = Known(
    spec=GroupSpec(NullConnection(), CountingReplica, regroups=True),
    scaling=ScalingPolicy(2),
    failures=FailurePolicy(continues=True),
    in_call=True,
    was_sent=True,
    members=frozenset({0, 1}),
    is_driver_only=False,
    can_continue=True,
    keeps_alike=True,
    must_end=False,
    is_ending=False,
    is_cut_off=False,
    only_in_workers=False,
    in_transit=False,
    is_lost=False,
    has_snapshot=True,
    num_standby=0,
    num_lost_copies=0,
    num_retries=3,
    num_left=3,
    continued_at=None,
    free_from=1,
    num_starts_left=None,
)


def known_of(**facts: Any) -> Known:
    return with_facts(_KNOWN, **facts)


def with_facts(known: Known, **facts: Any) -> Known:
    """Change facts, also those of the spec and of the policies."""
    for part in ("spec", "scaling", "failures"):
        value = getattr(known, part)
        own = {name: facts.pop(name) for name in [*facts] if hasattr(value, name)}
        facts[part] = replace(value, **own)
    return replace(known, **facts)
