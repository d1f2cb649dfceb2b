"""The plan of a run: its arguments, checked once, before anything of the run leaves a trace."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raysgd.engine.worker import packed_bytes
from raysgd.train._worker.shards import check_dataset
from raysgd.train.checkpoint import CheckpointStrategy, check_strategy, load_checkpoint
from raysgd.train.utils import without_arguments


@dataclass(frozen=True)
class RunPlan:
    """The arguments of a run. `checked` makes it; everything else takes it as it is.

    Attributes:
        function: The user's function, its argument bound.
        dataset: The data to divide over the workers; None for none.
        checkpoint: What the run starts from; read already, if it was a file.
        checkpoint_strategy: Which checkpoints are kept.
    """

    function: Callable[[], Any]
    dataset: Any = None
    checkpoint: dict[str, Any] | None = None
    checkpoint_strategy: CheckpointStrategy | None = None

    @classmethod
    def checked(
        cls,
        train_func: Callable[..., Any],
        config: Any = None,
        dataset: Any = None,
        checkpoint: Mapping[str, Any] | str | Path | None = None,
        checkpoint_strategy: CheckpointStrategy | None = None,
    ) -> RunPlan:
        """A plan of arguments as users pass them.

        Raises:
            ValueError: The function takes more than one argument, or there is no file at the path `checkpoint`.
            TypeError: An argument is of the wrong kind.
            UnpicklableError: The function or its config cannot be sent to the workers; a `TypeError`.
        """
        function = without_arguments(train_func, config)
        check_dataset(dataset)
        check_strategy(checkpoint_strategy)
        begin_from = load_checkpoint(checkpoint)
        packed_bytes("`train_func`", train_func)
        packed_bytes("`config`", config)
        return cls(function, dataset, begin_from, checkpoint_strategy)
