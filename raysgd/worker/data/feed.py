"""The data of one replica, across calls: its streams, the passes begun, and the position that a state carries."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from raysgd.arrays.ray_batches import RayLoader
from raysgd.arrays.whole_data import DataPosition
from raysgd.engine.shared.types import DataLedger
from raysgd.messages.epochs import EpochRequest
from raysgd.worker.data.streams import LeftoverBatches

logger = logging.getLogger(__name__)


class Feed(ABC):
    """Hands out the streams of a replica and knows where they are.

    Attributes:
        epoch: How many passes over the train data were begun.
        train_stream: The one over the registered train data, once a call has used it.
        validation: The streams to evaluate on.
        data_of_call: This worker's share of what a call of `train`, or of `validate`, brought along last.
        divided_source: The class, or classes, of sources whose position means the same on any number of workers.
    """

    divided_source: ClassVar[type | tuple[type, ...]]

    def __init__(self) -> None:
        self.epoch = 0
        self.train_stream: Any = None
        self.data_of_call: dict[str, Any] = {}
        self.validation = LeftoverBatches(self._open_validation)
        self._to_resume: Mapping[str, Any] | None = None
        self._of_call: tuple[str | None, Any] = (None, None)
        self._made: dict[str, tuple[str | None, Any]] = {}

    @abstractmethod
    def _open_training(self, request: EpochRequest) -> Any:
        """A stream over the registered train data."""

    @abstractmethod
    def _open_call(self, request: EpochRequest) -> Any:
        """Return a stream over train data that the request has brought along."""

    @abstractmethod
    def _make(self, name: str) -> Any:
        """Return the loader or dataset that this worker's share under "train" or "validation" makes."""

    @abstractmethod
    def _open_validation(self, request: EpochRequest) -> Any:
        """A stream over the validation data that begins with the first batch."""

    @abstractmethod
    def obstacle(self, name: str) -> str | None:
        """Why the position in the data under "train" or "validation" is unknown; None where it is known."""

    @abstractmethod
    def ledger(self) -> DataLedger | None:
        """What was used of the train data; None where that is not known."""

    @abstractmethod
    def _origin(self, stream: Any) -> dict[str, Any]:
        """What a position in divided data also says: which data, in which order."""

    @abstractmethod
    def _go_to_position(self, stream: Any, position: Mapping[str, Any]) -> None:
        """Continues at a saved position, where this stream over divided data can get there."""

    @abstractmethod
    def ray_loader(self, name: str) -> RayLoader | None:
        """What is registered under "train" or "validation", if it is of Ray Data."""

    def take_share(self, name: str, request: EpochRequest, share: Any) -> None:
        """Notes this worker's share of what the driver divides, if one came along.

        A stream over another share of the same data is of no use any more.
        """
        if share is None:
            return
        if request.shard_key is not None:
            self.data_of_call[name] = share
            return
        loader = self.ray_loader(name)
        assert loader is not None, "the driver divides what is registered"
        loader.iterator = share.iterator
        if name == "train":
            self.train_stream = None

    def training(self, request: EpochRequest) -> Any:
        """Return the stream to train on: over data of the request if it has some, else over the registered data."""
        if request.shard_key is not None:
            return self._stream_of_call(request)
        if self.train_stream is None:
            self.train_stream = self._open_training(request)
            self._resume(self.train_stream)
        return self.train_stream

    def _stream_of_call(self, request: EpochRequest) -> Any:
        """Return one that continues where the last call with the same data stopped."""
        self.epoch += 1
        key, stream = self._of_call
        if stream is None or key != request.shard_key:
            stream = self._open_call(request)
            self._of_call = request.shard_key, stream
        return stream

    def made_of_call(self, name: str, request: EpochRequest) -> Any:
        """Return what the share for a call makes, once for all calls that use it."""
        key, made = self._made.get(name, (None, None))
        if key != request.shard_key:
            made = self._make(name)
            self._made[name] = request.shard_key, made
        return made

    def is_divided(self, stream: Any) -> bool:
        """Whether a stream is over registered data that the library divides."""
        return stream is self.train_stream and isinstance(stream.source, self.divided_source)

    def place_of_call(self, stream: Any) -> DataPosition | None:
        """Where a call stopped in data that only it had; None at the end of a pass, and where that is not known."""
        if stream is self.train_stream or not isinstance(getattr(stream, "source", None), self.divided_source):
            return None
        return DataPosition(stream.pass_index, stream.completed) if stream.is_mid_pass else None

    def begin_pass(self) -> int:
        """Counts a pass over the train data; returns its index."""
        self.epoch += 1
        return self.epoch - 1

    def pass_index(self, stream: Any) -> int:
        """Index of the pass that the next batch belongs to."""
        if stream is not self.train_stream:
            return self.epoch - 1
        index: int = stream.pass_index if stream.is_mid_pass else self.epoch
        return index

    def position(self) -> dict[str, Any] | None:
        """Where in the train data the next batch is.

        Where each rank has its own data, a position inside a pass is unknown.
        """
        stream = self.train_stream
        if stream is None:
            return dict(self._to_resume) if self._to_resume else None
        is_mid_pass = stream.is_mid_pass
        if not self.is_divided(stream):
            return {"is_unknown": True, "pass_index": stream.pass_index} if is_mid_pass else None
        return {
            "pass_index": stream.pass_index,
            "consumed": stream.completed if is_mid_pass else 0,
            "is_mid_pass": is_mid_pass,  # also before its first step is done
            **self._origin(stream),
        }

    def go_to(self, epoch: int, position: Mapping[str, Any] | None) -> None:
        """Continues at a saved position, with fresh streams."""
        self.close()
        self.epoch, self._to_resume = epoch, position

    def close(self) -> None:
        """Drops the streams and all that they hold."""
        self.train_stream = None
        self._of_call = None, None
        self.validation.drop()

    def _resume(self, stream: Any) -> None:
        position, self._to_resume = self._to_resume, None
        if position and position.get("is_unknown"):
            logger.warning(
                "epoch %s stopped in the middle, and the library does not divide this train data, so its position is "
                "unknown: reading it from the beginning",
                position["pass_index"],
            )
        elif position and self.is_divided(stream):
            self._go_to_position(stream, position)
