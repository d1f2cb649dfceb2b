"""The state that a snapshot has, in the driver: whole, or in the parts of ranks that divide it."""

from __future__ import annotations

from typing import Any

from raysgd._state.state_codec import decode
from raysgd.engine.transfers import DividedValue


def whole(shared_state: Any, copy: bool) -> Any:
    """The whole state.

    Args:
        shared_state: That of a snapshot.
        copy: Whether its tensors have memory of their own. Those of ranks that divide it always have.
    """
    if isinstance(shared_state, DividedValue):
        return _divided(shared_state).whole()
    return decode(shared_state, copy=copy)


def outline(shared_state: Any) -> Any:
    """The state, for a look at what it is made of."""
    return (
        _divided(shared_state).outline() if isinstance(shared_state, DividedValue) else decode(shared_state, copy=False)
    )


def _divided(parts: DividedValue) -> Any:
    from raysgd.torch.checkpoints.divided_snapshot import DividedSnapshot  # not everywhere: it loads parts of PyTorch

    return DividedSnapshot(parts)
