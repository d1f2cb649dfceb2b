"""The session that a helper works in."""

from __future__ import annotations

from raysgd.exceptions import SessionMisuseError
from raysgd.train._session import Session, current_session


def running_session(helper: str) -> Session:
    """The session of the function that runs in this process.

    Raises:
        SessionMisuseError: No function runs here.
    """
    session = current_session()
    if session is None:
        raise SessionMisuseError(
            f"`{helper}` works only in the workers of a run: call it inside the training function that you "
            "pass to a trainer."
        )
    return session
