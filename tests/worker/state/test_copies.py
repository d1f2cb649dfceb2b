"""Copies of the state that the driver fetches from a second thread, while the first one makes others."""

from __future__ import annotations

import threading
from typing import Any

from raysgd.engine.shared.replica import Capture
from raysgd.worker.state.copies import PendingCopies, StateCopy

LARGE = 10**6  # bytes, too many to travel with an answer


def test_a_copy_that_is_made_while_another_one_is_fetched_is_not_lost() -> None:
    copies = PendingCopies()
    first = copies.add(Capture(0), StateCopy("first", LARGE)).token
    fetching = threading.Thread(target=copies.fetch, args=(first,))

    class Kept(dict[int, Any]):
        """Is about to get the second copy when the first one is fetched."""

        def __setitem__(self, token: int, copy: Any) -> None:
            fetching.start()
            fetching.join(0.1)
            super().__setitem__(token, copy)

    copies._kept = Kept(copies._kept)
    second = copies.add(Capture(0), StateCopy("second", LARGE)).token
    fetching.join(60)
    assert second is not None
    assert copies.fetch(second).made() == "second"
