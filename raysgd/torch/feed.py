"""The data of one replica, across calls: its streams, the passes begun, and the position that a state carries."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch

from raysgd.engine.types import DataLedger
from raysgd.exceptions import NotRegisteredError
from raysgd.replicas.epochs import EpochRequest
from raysgd.replicas.streams import Remainder
from raysgd.torch.batch_sampler import ElasticBatchSampler
from raysgd.torch.parallel import NoParallel, Summation
from raysgd.torch.sample_order import SamplerOrder
from raysgd.torch.sampling import ShardedLoader, Unsharded
from raysgd.torch.step import Step
from raysgd.torch.streams import Agreement, BatchStream, DividedSource, LockstepSource, PlainSource, Source

logger = logging.getLogger(__name__)


class Feed:
    """Hands out the streams of a replica and knows where they are.

    Args:
        data_of: What is registered under "train" or "validation".
        parallel: How the replicas are kept equal.
        world_size: How many replicas there are.
        undo: Called ahead of a batch of padding in training; returns what undoes what must not stay of it.

    Attributes:
        epoch: How many passes over the train data were begun.
        train_stream: That over the registered train loader, once a call has used it.
        validation: The streams to evaluate on.
    """

    def __init__(
        self,
        data_of: Callable[[str], ShardedLoader | Unsharded | None],
        parallel: NoParallel,
        world_size: int,
        undo: Callable[[], Callable[[], None]] | None = None,
    ) -> None:
        self._data_of = data_of
        self._parallel = parallel
        self._world_size = world_size
        self._undo = undo
        self.validation = Remainder(self._open_validation)
        self._agreement: Agreement | None = None
        self._summation: Summation | None = None
        self._order_before: int | None = None
        self._to_resume: Mapping[str, Any] | None = None
        self.train_stream: BatchStream | None = None
        self.epoch = 0

    # ------------------------------------------------------------------------------------------------ streams

    def training(self, request: EpochRequest) -> BatchStream:
        """The stream to train on: the shard of the request if it has one, else the train loader."""
        if request.shard is not None:
            self.epoch += 1
            source = self._plain_source(_joined_pairs(request.shard), lockstep=True)
            return BatchStream(source, self._parallel.step, lambda: self.epoch - 1, self._undo)
        if self.train_stream is None:
            source = self._source("train", request.seed, lockstep=True)
            self.train_stream = BatchStream(source, self._parallel.step, self._begin_pass, self._undo)
            self._resume(self.train_stream)
        if isinstance(self.train_stream.source, DividedSource):
            self._prepare_check(self.train_stream.source)
        return self.train_stream

    def _open_validation(self, request: EpochRequest) -> BatchStream:
        return BatchStream(self._source("validation", request.seed, lockstep=False), Step(), lambda: 0)

    def _begin_pass(self) -> int:
        self.epoch += 1
        return self.epoch - 1

    def _source(self, name: str, seed: int, *, lockstep: bool) -> Source:
        data = self._data_of(name)
        if data is None:
            return PlainSource(_Missing(name))
        if isinstance(data, ShardedLoader):
            return DividedSource(data, seed)
        return self._plain_source(data.loader, lockstep)

    def _plain_source(self, loader: Any, lockstep: bool) -> Source:
        if lockstep and self._parallel.synchronizes:
            self._agreement = self._agreement or Agreement(self._start_sum())
            return LockstepSource(loader, self._world_size, self._agreement)
        return PlainSource(loader)

    def _start_sum(self) -> Summation:
        """Made once in each group, by all ranks at the same time."""
        self._summation = self._summation or self._parallel.summation()
        return self._summation

    def _prepare_check(self, source: DividedSource) -> None:
        """Sees to it that a user's sampler draws the same on all ranks, and after a resumption what it drew before."""
        data = self._data_of("train")
        assert isinstance(data, ShardedLoader)
        if not isinstance(data.sampler.order, SamplerOrder):
            return
        is_joint = self._parallel.synchronizes and self._world_size > 1
        start_sum = self._start_sum() if is_joint else None
        source.check_order = partial(self._check_order, data.sampler, start_sum)

    def _check_order(self, sampler: ElasticBatchSampler, start_sum: Summation | None) -> None:
        own, before = sampler.fingerprint(), self._order_before
        self._order_before = None
        assert own is not None, "only a rank's own order is checked"
        if start_sum is not None:
            numbers = torch.tensor([own])
            start_sum(numbers)()
            if numbers.item() != own * self._world_size:
                raise ValueError(
                    f"The workers' {sampler.order.name} drew different orders. The library divides one order of all "
                    "samples, which the sampler has to draw alike on every worker: from generators of torch, numpy or "
                    "`random`, or from what `set_epoch` told it, and from nothing that it counts by itself or that "
                    "depends on the rank. If it divides the data itself, pass `add_dist_sampler=False`."
                )
        if before not in (None, own):
            logger.warning(
                "the train data's %s draws another order than in the epoch that is resumed: some samples are "
                "repeated, others are skipped",
                sampler.order.name,
            )

    def take_place(self, rank: int, size: int, batch_size: int | None, instead_of: int | None) -> None:
        """Divides the data again, for a place in a group of another size.

        Args:
            rank: The place.
            size: The size.
            batch_size: How many samples of a joint batch are this worker's share from now on; None if unknown.
            instead_of: How many were; loaders with another batch size keep theirs.
        """
        self._world_size = size
        self._summation = None
        self.validation.drop()
        for name in ("train", "validation"):
            data = self._data_of(name)
            if isinstance(data, ShardedLoader):
                data.sampler.reshape(rank, size, batch_size if data.sampler.batch_size == instead_of else None)

    def close(self) -> None:
        """Drops the iterators, and with them the processes of the loaders."""
        self.train_stream = None
        self.validation.drop()

    # ------------------------------------------------------------------------------------------------ position

    def obstacle(self, name: str) -> str | None:
        """Why it is unknown where in these data the next batch is."""
        data = self._data_of(name)
        if data is None or isinstance(data, ShardedLoader):
            return None
        return f"the {name} loader is not divided by the library ({data.reason})"

    def pass_index(self, stream: BatchStream) -> int:
        """Index of the pass that the next batch belongs to."""
        if stream is not self.train_stream:
            return self.epoch - 1
        return stream.pass_index if stream.is_mid_pass else self.epoch

    def ledger(self) -> DataLedger | None:
        """What was used of the train data; None where that is not known."""
        stream = self.train_stream
        if stream is None or not isinstance(stream.source, DividedSource):
            return None
        return DataLedger(stream.pass_index, *stream.ledger())

    def position(self) -> dict[str, Any] | None:
        """Where in the data the next batch is, for loaders whose position means the same on any number of workers.

        Of others, inside a pass, only that it is unknown.
        """
        stream, data = self.train_stream, self._data_of("train")
        if stream is None:
            return dict(self._to_resume) if self._to_resume else None
        if not isinstance(stream.source, DividedSource):
            return {"is_unknown": True, "pass_index": stream.pass_index} if stream.is_mid_pass else None
        assert isinstance(data, ShardedLoader)
        is_mid_pass = stream.is_mid_pass
        position = {
            "pass_index": stream.pass_index,
            "consumed": stream.completed if is_mid_pass else 0,
            "is_mid_pass": is_mid_pass,
            "seed": stream.source.seed,
            "num_samples": data.num_samples,
        }
        order = self._order_before or data.sampler.fingerprint() if is_mid_pass else None
        return position if order is None else {**position, "order": order}

    def go_to(self, epoch: int, position: Mapping[str, Any] | None) -> None:
        """Goes on from a saved position, with fresh streams."""
        self.close()
        self.epoch, self._to_resume, self._order_before = epoch, position, None

    def _resume(self, stream: BatchStream) -> None:
        position, self._to_resume = self._to_resume, None
        data = self._data_of("train")
        if position and position.get("is_unknown"):
            logger.warning(
                "epoch %s stopped in the middle, and the library does not divide this train data, so its position is "
                "unknown: reading it from the beginning",
                position["pass_index"],
            )
            return
        if not position or not isinstance(data, ShardedLoader) or not isinstance(stream.source, DividedSource):
            return
        if position["num_samples"] != data.num_samples:
            logger.warning("the size of the train data has changed since the state was saved: starting a new epoch")
            return
        stream.source.seed = position["seed"]
        if position.get("is_mid_pass", position["consumed"] > 0):
            stream.resume(position["pass_index"], position["consumed"])
            self._order_before = position.get("order")


class _Missing:
    """Stands for a loader that was not registered; an error only once somebody draws from it."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __iter__(self) -> Iterator[Any]:
        way_out = ", or pass `dataset` to `train`." if self._name == "train" else " before you call `validate`."
        raise NotRegisteredError(
            f"`{self._name}_loader` was not registered: pass it to `register_data` in `setup`{way_out}"
        )


def _joined_pairs(batches: Iterable[Any]) -> Iterator[Any]:
    """Batches of a dataset, lists of `(input, label)` tensors, as one tensor of inputs and one of labels."""
    for batch in batches:
        if isinstance(batch, list) and batch and isinstance(batch[0], tuple):
            yield tuple(_joined(list(parts)) for parts in zip(*batch, strict=True))
        else:
            yield batch


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    tensors = [torch.as_tensor(part) for part in parts]
    return torch.stack(tensors) if tensors[0].ndim == 0 else torch.cat(tensors)
