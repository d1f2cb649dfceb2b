"""The data of one replica, across calls: its streams, the passes begun, and the position that a state carries."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from raysgd.arrays.data_kinds import CallData, DataPosition
from raysgd.arrays.ray_batches import RayLoader
from raysgd.engine.shared.types import DataLedger
from raysgd.exceptions import OnFailure
from raysgd.messages.epochs import EpochRequest

logger = logging.getLogger(__name__)


class Feed(ABC):
    """Hands out the streams of a replica and knows where they are.

    A source of batches says whether the library divides its data (`is_divided`), so that a position means the same on
    any number of workers. Then its `state(consumed, is_mid_pass)` returns what a position also says: which data, in
    which order, and where in them; and `load_state(position)` takes one over, and tells whether a pass that stopped
    there can go on.

    Attributes:
        epoch: How many passes over the train data were begun.
        train_stream: The one over the registered train data, once a call has used it.
        data_of_call: This worker's share of what a call of `train`, or of `validate`, brought along last.
    """

    def __init__(self) -> None:
        self.epoch = 0
        self.train_stream: Any = None
        self.data_of_call: dict[str, CallData] = {}
        self._left_to_validate: Any = None  # the stream of which a call of `validate` left batches to the next one
        self._to_resume: Mapping[str, Any] | None = None
        self._of_call: tuple[str | None, Any] = (None, None)
        self._made: dict[str, tuple[str | None, Any]] = {}

    @property
    @abstractmethod
    def _ranks(self) -> Any:
        """The group, as sources see it."""

    @property
    @abstractmethod
    def _registered_stream(self) -> Any:
        """The `StreamData` that are registered to train on; None where other data are, or none."""

    @abstractmethod
    def _source(self, name: str, request: EpochRequest, *, training: bool) -> Any:
        """Return the source of batches of what is registered under "train" or "validation"."""

    @abstractmethod
    def _source_of_call(self, name: str, request: EpochRequest, *, training: bool) -> Any:
        """Return the source of batches of what the request has brought along under "train" or "validation"."""

    @abstractmethod
    def _stream_over(self, source: Any, begin_pass: Callable[[], int]) -> Any:
        """Return a stream to train on; `begin_pass` returns the index of a pass that begins."""

    @abstractmethod
    def _make(self, name: str) -> Any:
        """Return the loader or dataset that this worker's share under "train" or "validation" makes."""

    @abstractmethod
    def _open_validation(self, request: EpochRequest) -> Any:
        """A stream over the validation data that begins with the first batch."""

    @abstractmethod
    def obstacle(self, name: str) -> str | None:
        """The reason why the position in the data under "train" or "validation" is unknown; None where it is known."""

    def obstacle_of_call(self, stream: Any) -> str | None:
        """Return why a call over data that only it has cannot go on in them; None for a call over registered data."""
        return None

    @abstractmethod
    def ledger(self) -> DataLedger | None:
        """The record of what was used of the train data; None where that is not known."""

    @abstractmethod
    def ray_loader(self, name: str) -> RayLoader | None:
        """The data registered under "train" or "validation", if they are of Ray Data."""

    def take_share(self, name: str, request: EpochRequest, share: CallData | None) -> None:
        """Note this worker's share of what the driver divides, if one came along.

        A stream over another share of the same data is of no use any more.
        """
        if share is None:
            return
        if request.shard_key is not None:
            self.data_of_call[name] = share
            return
        loader = self.ray_loader(name)
        assert loader is not None, "the driver divides what is registered"
        loader.iterator = share.data.iterator
        if name == "train":
            self.train_stream = None

    def training(self, request: EpochRequest, *, is_begun: bool = False) -> Any:
        """Return the stream to train on: over data of the request if it has some, else over the registered data.

        Args:
            request: What is asked.
            is_begun: Whether the call goes on: its pass over data that only it has is counted already.
        """
        epoch = self.epoch
        with OnFailure(lambda: self._count(epoch)):  # a call that was not begun is no pass
            return self._joined(request, is_begun)

    def _joined(self, request: EpochRequest, is_begun: bool) -> Any:
        if request.shard_key is not None:
            self._count(self.epoch + (not is_begun))
            stream = self._stream_of_call(request)
        elif self.train_stream is None:
            stream = self._stream_over(self._source("train", request, training=True), self.begin_pass)
            self._resume(stream)
            self.train_stream, self._to_resume = stream, None
        else:
            stream = self.train_stream
        stream.source.join(self._ranks)
        return stream

    def _count(self, epoch: int) -> None:
        self.epoch = epoch

    @contextmanager
    def validating(self, request: EpochRequest) -> Iterator[Any]:
        """Inside is a call of `validate`, over this stream.

        Only a call that was to take some of the registered batches, and returned, leaves the others to the next one.
        After any other it begins with the first batch, wherever the user's loop stopped.
        """
        if request.shard_key is not None:  # over other data
            yield self._open_validation(request)
            return
        left, self._left_to_validate = self._left_to_validate, None
        stream = self._open_validation(request) if left is None or request.starts_over else left
        yield stream
        if request.num_steps is not None:
            self._left_to_validate = stream

    def _stream_of_call(self, request: EpochRequest) -> Any:
        """Return one that continues where the last call with the same data stopped."""
        key, stream = self._of_call
        if stream is None or key != request.shard_key:
            source = self._source_of_call("train", request, training=True)
            stream = self._stream_over(source, lambda: self.epoch - 1)
            self._go_to_place(stream)
            self._of_call = request.shard_key, stream
        return stream

    def _go_to_place(self, stream: Any) -> None:
        """Go on where the last call with the same data stopped, if the workers were given them again."""
        share = self.data_of_call["train"]
        place = share.place
        if place is None or not has_divided_source(stream):
            return
        if stream.source.load_state(place.saved):
            stream.resume(place.pass_index, place.consumed)
        self.data_of_call["train"] = replace(share, place=None)

    def made_of_call(self, name: str, request: EpochRequest) -> Any:
        """Return what the share for a call makes, once for all calls that use it."""
        key, made = self._made.get(name, (None, None))
        if key != request.shard_key:
            made = self._make(name)
            self._made[name] = request.shard_key, made
        return made

    def is_divided(self, stream: Any) -> bool:
        """Tell whether a stream's data is divided by the library, and its place known in a group of another size."""
        return stream is self.train_stream and has_divided_source(stream)

    def break_off(self) -> None:
        """Forget the steps that broke off, if there are some; they will be repeated."""
        for stream in (self.train_stream, self._of_call[1]):
            if stream is not None:
                stream.break_off()

    def begin_again(self, request: EpochRequest, share: CallData | None, place: DataPosition | None) -> None:
        """Get ready to go on with a call in another group.

        Args:
            request: What is asked.
            share: This worker's part of what the driver divides.
            place: Where the call is in data that only it has.
        """
        if request.shard_key is not None:
            self.take_share("train", request, share)
            self.data_of_call["train"] = replace(self.data_of_call["train"], place=place)

    def place_of_call(self, stream: Any) -> DataPosition | None:
        """Return where a call stopped in data that only it had; None at the end of a pass, or where unknown."""
        if stream is self.train_stream or not has_divided_source(stream):
            return None
        if not stream.is_mid_pass:
            return None
        consumed = stream.completed
        return DataPosition(stream.pass_index, consumed, stream.source.state(consumed, True))

    def begin_pass(self) -> int:
        """Count a pass over the train data; return its index."""
        self.epoch += 1
        return self.epoch - 1

    def pass_index(self, stream: Any) -> int:
        """Index of the pass that the next batch belongs to."""
        if stream is not self.train_stream:
            return self.epoch - 1
        index: int = stream.pass_index if stream.is_mid_pass else self.epoch
        return index

    def position(self) -> dict[str, Any] | None:
        """Return where in the train data the next batch is.

        Where each rank has its own data, a position inside a pass is unknown.
        """
        stream = self.train_stream
        if stream is None:
            return dict(self._to_resume) if self._to_resume else None
        is_mid_pass = stream.is_mid_pass
        if not self.is_divided(stream):
            return {"is_unknown": True, "pass_index": stream.pass_index} if is_mid_pass else None
        consumed = stream.completed if is_mid_pass else 0
        return {
            "pass_index": stream.pass_index,
            "consumed": consumed,
            "is_mid_pass": is_mid_pass,  # also before its first step is done
            **stream.source.state(consumed, is_mid_pass),
        }

    def check_position(self, position: Mapping[str, Any] | None) -> None:
        """Refuse a position that does not fit the registered stream.

        Raises:
            ValueError: It does not.
        """
        if self._registered_stream is not None and position and not position.get("is_unknown"):
            self._registered_stream.check_position(position)

    def go_to(self, epoch: int, position: Mapping[str, Any] | None) -> None:
        """Continue at a saved position, with fresh streams."""
        self.close()
        self.epoch, self._to_resume = epoch, position

    def close(self) -> None:
        """Drop the streams and all that they hold."""
        self.train_stream = None
        self._of_call = None, None
        self._left_to_validate = None

    def _resume(self, stream: Any) -> None:
        position = self._to_resume
        if position and position.get("is_unknown"):
            logger.warning(
                "epoch %s stopped in the middle, and the library does not divide this train data, so its position is "
                "unknown: reading it from the beginning",
                position["pass_index"],
            )
        elif position and has_divided_source(stream) and stream.source.load_state(position) and position["is_mid_pass"]:
            stream.resume(position["pass_index"], position["consumed"])


def has_divided_source(stream: Any) -> bool:
    """Return whether a stream is over data that the library divides."""
    return getattr(getattr(stream, "source", None), "is_divided", False)
