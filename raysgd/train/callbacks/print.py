"""`PrintCallback`, which prints the reports of a run."""

from __future__ import annotations

import json
from typing import Any

from raysgd.train.callbacks.callback import TrainingCallback
from raysgd.train.callbacks.logging import SafeFallbackEncoder


class PrintCallback(TrainingCallback):
    """Prints the reports of all workers as JSON."""

    def handle_result(self, results: list[dict[str, Any]], **info: Any) -> None:
        print(json.dumps(results, indent=4, cls=SafeFallbackEncoder), flush=True)
