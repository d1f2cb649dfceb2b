"""`predict` in the driver: distributes batches to the workers in rounds, and returns the outputs in row order.

A round is one call to all workers, which predict some batches each. If a worker dies during a round, its batches are
redistributed over the other workers and the round is repeated. Rounds have no side effects, so no row is lost or
duplicated. ADR 79 explains why predictions run in rounds.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

from raysgd.core.arrays import trees
from raysgd.core.config_keys import BATCH_SIZE, PLAIN_BATCH_SIZE
from raysgd.core.engine.shared.call import Call
from raysgd.core.engine.shared.types import World
from raysgd.core.numbers.results import CallProgress
from raysgd.trainer.configuration.settings import ReplicaSettings
from raysgd.trainer.driver.life import TrainerLife
from raysgd.trainer.driver.shared_data import stored_once
from raysgd.trainer.messages.prediction import PredictRequest
from raysgd.trainer.messages.prediction_data import DEFAULT_BATCH_SIZE, PredictionSource

_SHORT_S, _LONG_S = 0.25, 1.0
_MOST_BYTES = 64 * 2**20
_MOST_BATCHES = 1024
_LARGE_BYTES = 2**16


def usual_batch_size(settings: ReplicaSettings, num_workers: int) -> Any:
    """Return the batch size of one worker for predictions. Take it from the config if possible, else use a default."""
    options = settings.batch_options
    config = options.config_for(settings.config, num_workers)
    return options.of_worker(config.get(BATCH_SIZE, config.get(PLAIN_BATCH_SIZE, DEFAULT_BATCH_SIZE)), num_workers)


def next_round_size(size: int, seconds: float, num_bytes: int, num_batches: int, num_workers: int) -> int:
    """Return how many batches to send to each worker in the next round.

    The number doubles after a short round and halves after a long round. It is limited to 1,024 batches, and by memory.

    Args:
        size: Number of batches that each worker predicted in the last round.
        seconds: Duration of the last round.
        num_bytes: Bytes of inputs and outputs in the last round, over all workers.
        num_batches: Number of batches in the last round, over all workers.
        num_workers: Number of workers.
    """
    wanted = size * 2 if seconds < _SHORT_S else size // 2 if seconds > _LONG_S else size
    fitting = _MOST_BYTES * num_batches // (max(1, num_bytes) * num_workers)
    return max(1, min(wanted, fitting, _MOST_BATCHES))


def outputs_in_rounds(
    life: TrainerLife, source: PredictionSource, info: Mapping[str, Any], has_target: bool | None, max_retries: int
) -> Iterator[Any]:
    """Predict in rounds, in each of which every worker predicts some of the batches. Yield the outputs in batch order.

    Args:
        life: The trainer's workers and settings.
        source: Source of the batches.
        info: The user's entries for the `batch_info` of `predict_batch`.
        has_target: Whether tuple batches end with a target. None to decide by the data.
        max_retries: How many times to repeat a round after a failure.
    """
    key, target = uuid.uuid4().hex, source.has_target if has_target is None else has_target
    size, num_done, total = 1, 0, source.num_batches
    known: Sequence[World] | None = None

    def requests(pieces: Sequence[Any], worlds: Sequence[World]) -> list[tuple[Any, ...]]:
        """Return the arguments for each rank in one round.

        In the first round, and after the group of workers has changed, include the data that every rank needs.
        """
        nonlocal known
        is_new, known = worlds is not known, worlds
        shares: list[tuple[Any, ...]] = [()] * len(worlds)
        if is_new and source.share is not None:
            shares = [(share,) for share in stored_once(life.store, [source.share] * len(worlds))]
        arguments, first, is_last = list[tuple[Any, ...]](), num_done, num_done + len(pieces) == total
        for rank, own in enumerate(dealt(pieces, len(worlds))):
            request = PredictRequest(key, info, target, first, num_done, len(worlds), total, is_last)
            work, is_large = source.work(own), sum(map(source.nbytes, own)) > _LARGE_BYTES
            arguments.append((request, life.store(rank, work) if is_large else work, *shares[rank]))
            first += len(own)
        return arguments

    def tell(expected: int | None, is_done: bool = False) -> None:
        life.listeners.tell(CallProgress(num_done, expected, 0, None, None, "predict", is_done=is_done))

    try:
        while pieces := source.draw(size * life.controller.num_workers):
            began_at = time.monotonic()
            call = Call(life.framework.runner_cls.predict, partial(requests, pieces), on_wait=life.listeners.on_wait)
            answers = life.controller.run(call, max_retries=max_retries)
            outputs = [output for answer in answers for output in answer]
            num_bytes = sum(map(source.nbytes, pieces)) + sum(map(trees.nbytes, outputs))
            size = next_round_size(size, time.monotonic() - began_at, num_bytes, len(pieces), len(answers))
            num_done += len(pieces)
            tell(total)
            yield from outputs
        tell(num_done, is_done=True)
    finally:
        source.close()


def dealt(pieces: Sequence[Any], num_workers: int) -> list[Sequence[Any]]:
    """Divide a list of batches into consecutive parts, one per worker, as evenly as possible.

    Examples:
        >>> dealt([1, 2, 3, 4, 5], 3)
        [[1, 2], [3, 4], [5]]
    """
    size, more = divmod(len(pieces), num_workers)
    ends = [rank * size + min(rank, more) for rank in range(num_workers + 1)]
    return [pieces[start:stop] for start, stop in pairwise(ends)]
