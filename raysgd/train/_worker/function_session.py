"""The session of a training function in a worker, which `raysgd.train.report` and similar functions call."""

from __future__ import annotations

import os
import pickle
import socket
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import cloudpickle

from raysgd.air.reports import UploadOptions, node_ip
from raysgd.core.engine.shared.types import World
from raysgd.core.state.state_codec import EncodedState, StateEncoder
from raysgd.core.text.secrets import masked
from raysgd.train._worker.mailbox import Mailbox, PendingCheckpoints
from raysgd.train._worker.membership import Membership
from raysgd.train._worker.messages import (
    CheckpointRef,
    FunctionMessage,
    FunctionSpec,
    Question,
    RanksMet,
    TrainingResultType,
)
from raysgd.train._worker.shards import StreamPart, with_to_torch
from raysgd.train.constants import (
    DATE,
    HOSTNAME,
    NODE_IP,
    PID,
    TIME_THIS_ITER_S,
    TIME_TOTAL_S,
    TIMESTAMP,
    TRAINING_ITERATION,
)

_INLINE_BYTES = 1 << 20  # checkpoints below this size are sent with the message; larger ones are fetched later
_PLAIN = (type(None), bool, int, float, str)


class Session:
    """One run of a training function in this worker. `raysgd.train.report` and similar functions call its methods.

    Args:
        world: This worker's rank and the number of workers.
        spec: The function and how to run it.
        checkpoint: The checkpoint that the function starts from.
        shard: This worker's shard of the data, or a dict of shards.
        pending: Holds large checkpoints until the driver fetches them.

    Attributes:
        membership: The function's membership in a group that may change during the run; None if the group cannot
            change.
    """

    def __init__(
        self,
        world: World,
        spec: FunctionSpec,
        checkpoint: dict[str, Any] | None = None,
        shard: Any = None,
        pending: PendingCheckpoints | None = None,
    ) -> None:
        self._world = world
        self.checkpoint = checkpoint
        self.shard = with_to_torch(shard)
        self.accelerator: Any = None
        self.facts: Any = None
        self.is_muted = spec.is_muted
        self.iteration = 0
        self._spec = spec
        self._began = self._last_report = time.monotonic()
        self._pending_checkpoints = pending or PendingCheckpoints()
        # The function's thread encodes everything that leaves the worker. Encoding makes one copy without pickling
        # tensors and arrays, so no later step handles gigabytes in Python. An encoder reuses its buffers. Reports have
        # their own encoder, so that a small report never occupies the large buffer of a checkpoint.
        self._checkpoints, self._reports = StateEncoder(), StateEncoder()
        self.mailbox = Mailbox(self._run, spec.num_ahead)
        self.membership = self._membership_of(world) if spec.steps_in or world.is_distributed else None

    def _membership_of(self, world: World) -> Membership | None:
        spec, mailbox = self._spec, self.mailbox
        if not spec.is_elastic:
            return None
        membership = Membership(
            world, mailbox.break_off, lambda: mailbox.is_held, spec.steps_in, lambda n: mailbox.post(RanksMet(n))
        )
        if spec.has_parts:
            membership.flaw = "the dataset was divided at the start, and the part of a lost worker is lost"
        return membership

    @property
    def world(self) -> World:
        """This worker's rank and the number of workers.

        In a standby worker, the function waits here until the worker has joined a group and has a rank.
        """
        if self.membership is not None:
            self.membership.await_place()
        return self._world

    def _part_of(self, shard: Any) -> Any:
        """Return a shard of the data in the form in which the user's training function gets it.

        A worker's part of a stream is given a callable that returns the worker's `World`, because the rank may not be
        known yet. Any other shard is returned unchanged.
        """
        return shard.of_worker(lambda: self.world) if isinstance(shard, StreamPart) else shard

    def _run(self) -> Any:
        """Run the user's training function and return its return value. Called in the function's own thread."""
        try:
            return self._spec.function()
        except Exception as error:  # raised by the user's function
            explained = self._explained(error)
            if explained is error:
                raise
            raise explained.with_traceback(error.__traceback__) from error

    def _explained(self, error: Exception) -> Exception:
        """Return the exception to raise: the function's own exception, or a replacement that gives advice."""
        return error if self._spec.explain is None else self._spec.explain(error)

    def reports_one_dict(self, keywords: Mapping[str, Any]) -> bool:
        """Return True if the keywords are arguments of `report` itself, False if each keyword is a metric.

        In functions that `Trainer` runs, each keyword is a metric.
        """
        return False

    def report(self, metrics: Mapping[str, Any], checkpoint: Any = None, options: UploadOptions | None = None) -> None:
        """Send metrics, optionally with a checkpoint, which is a dict or a `Checkpoint`.

        Raises:
            TypeError: `checkpoint` has another type. Or `options` were passed: only functions that `fit` runs support
                them.
        """
        if options is not None:
            raise TypeError(f"`{options}`: only functions that `fit` runs can choose how a checkpoint is stored.")
        if self.is_repeating:
            return
        if checkpoint is not None:
            self.checkpoint = checkpoint = content_of(checkpoint)
        if self.is_muted and checkpoint is None:
            return
        data = self._packed(self._spec.encode(self._filled(dict(metrics))))
        if checkpoint is None:
            self._send_metrics(data)
        else:
            self._send(data, checkpoint)

    @property
    def is_repeating(self) -> bool:
        """True while the function is in a batch that has failed because a worker was lost.

        The loader will yield the batch again, and the function will report again. Also True in a new worker before its
        first batch, because the other ranks have already sent the reports that the new worker would send there.
        """
        return self.membership is not None and self.membership.has_failed

    def regroup(self, world: World, is_behind: bool) -> None:
        """Let the function continue in another group that this process has already joined.

        Args:
            world: The rank in that group, and the number of its ranks.
            is_behind: True if another rank has taken one more step than this rank; see `Membership.join`.
        """
        assert self.membership is not None, "the function cannot continue in another group"
        self._world = world
        self.membership.join(world, is_behind)
        self.mailbox.mend()

    def ask(self, name: str, data: Any = None) -> Any:
        """Ask the driver a question and return its answer, which is the same on all ranks. All ranks must ask.

        Args:
            name: Name of the question. It determines how the driver computes the answer.
            data: This rank's data, from which the driver computes the answer.

        Raises:
            RuntimeError: The function runs in a new worker that has not joined the other ranks yet. The other ranks
                have asked the question before, and the driver cannot answer it again.
        """
        if self.membership is not None and self.membership.is_new:
            raise RuntimeError(f"`{name}` was called before the first batch, so no new worker can join. Call it later.")
        return pickle.loads(self.mailbox.ask(Question(name, cloudpickle.dumps(data))))

    def _send_metrics(self, data: Any) -> None:
        """Send metrics without a checkpoint to the driver.

        Encoded metrics are in a buffer that the next report reuses, so the function waits until the metrics are read.
        """
        self.mailbox.offer(
            FunctionMessage(TrainingResultType.REPORT, data), may_wait=not isinstance(data, EncodedState)
        )

    def _send(self, data: Any, checkpoint: Mapping[str, Any]) -> None:
        """Send metrics with a checkpoint to the driver, which uses the checkpoint only if no lower rank has one."""
        if self.world.rank == 0:
            self.mailbox.offer(FunctionMessage(TrainingResultType.REPORT, data, self._checkpoint_ref(checkpoint)))
            return
        content = self._content(checkpoint)
        ref = CheckpointRef(content.get(self._spec.score_attribute))
        self._announce(data, ref, lambda _: self._checkpoints.encode(self._spec.encode(content)))

    def _announce(self, data: Any, checkpoint_ref: CheckpointRef, make: Callable[[Any], Any]) -> None:
        """Send metrics that announce a checkpoint. If the driver then requests the checkpoint, create it.

        Args:
            data: The metrics.
            checkpoint_ref: Describes the checkpoint.
            make: Function that creates the checkpoint.
        """
        token = self._pending_checkpoints.announce()
        self.mailbox.offer(FunctionMessage(TrainingResultType.REPORT, data, replace(checkpoint_ref, token=token)))
        self._pending_checkpoints.copy_if_fetched(token, make)

    def load_checkpoint(self) -> dict[str, Any] | None:
        """Return the newest checkpoint that the function has saved, or else the checkpoint from which it started.

        Return None if there is no such checkpoint.
        """
        return self.checkpoint

    def current_checkpoint(self) -> Any:
        """Return the result of `load_checkpoint` as a `Checkpoint`, or None."""
        if not self.checkpoint:
            return None
        from raysgd.air.checkpoint import Checkpoint

        return Checkpoint.from_dict(self.checkpoint)

    def dataset_shard(self, name: str | None) -> Any:
        """Return this worker's shard of the data; see `get_dataset_shard`."""
        if self.shard is None:
            warnings.warn("No dataset was passed to `run`, so there is no shard: `None` is returned.", stacklevel=3)
            return None
        if not isinstance(self.shard, dict):
            return self._part_of(self.shard)
        if name is None:
            raise RuntimeError(f"There are several datasets: choose one of {sorted(self.shard)}, with `dataset_name`.")
        if name not in self.shard:
            raise KeyError(f"There is no dataset {name!r}. Available: {sorted(self.shard)}.")
        return self._part_of(self.shard[name])

    def save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Send a checkpoint to the driver. Only rank 0's checkpoint is stored, but all ranks must call this method."""
        if self.is_repeating:
            return
        self.checkpoint = checkpoint
        checkpoint_ref = self._checkpoint_ref(checkpoint) if self.world.rank == 0 else None
        self.mailbox.offer(FunctionMessage(TrainingResultType.CHECKPOINT, None, checkpoint_ref))

    def _checkpoint_ref(self, checkpoint: Mapping[str, Any]) -> CheckpointRef:
        content = self._content(checkpoint)
        score = content.get(self._spec.score_attribute)
        encoded = self._checkpoints.encode(self._spec.encode(content))
        if len(encoded.skeleton) + encoded.num_bytes < _INLINE_BYTES:
            return CheckpointRef(score, encoded)
        return CheckpointRef(score, token=self._pending_checkpoints.keep(encoded))

    def _content(self, checkpoint: Mapping[str, Any]) -> dict[str, Any]:
        return {**checkpoint, TIMESTAMP: int(time.time())}

    def _packed(self, data: Any) -> Any:
        """Return metrics in the form in which they are sent: unchanged if all values are plain, else encoded."""
        if isinstance(data, dict) and all(type(value) in _PLAIN for value in data.values()):
            return data
        return self._reports.encode(data)

    def _filled(self, metrics: dict[str, Any]) -> dict[str, Any]:
        """Return a report's metrics, with the values that raysgd adds to every report."""
        now = time.monotonic()
        self.iteration += 1
        metrics.setdefault(TIME_THIS_ITER_S, now - self._last_report)
        self._last_report = now
        metrics[TIMESTAMP] = int(time.time())
        metrics[TRAINING_ITERATION] = self.iteration
        return {**metrics, **self._details()}

    def _details(self) -> dict[str, Any]:
        """Return time, host and process for a report, or an empty dict if reports do not include them."""
        if not self._spec.is_detailed:
            return {}
        return {
            DATE: time.strftime("%Y-%m-%d_%H-%M-%S"),
            HOSTNAME: socket.gethostname(),
            NODE_IP: node_ip(),
            PID: os.getpid(),
            TIME_TOTAL_S: time.monotonic() - self._began,
        }


def content_of(checkpoint: Any) -> dict[str, Any]:
    """Return the content of a checkpoint that the function has reported, as a dict.

    Raises:
        TypeError: `checkpoint` is neither a dict nor a `Checkpoint`.
    """
    if isinstance(checkpoint, Mapping):
        return dict(checkpoint)
    from raysgd.air.checkpoint import Checkpoint

    if isinstance(checkpoint, Checkpoint):
        return checkpoint.to_dict()
    raise TypeError(f"`checkpoint={masked(checkpoint)!r}`: need a dict or a `Checkpoint`, or None.")
