"""The order in which a pass over the data visits the samples: sequential, shuffled, or that of a user's sampler.

Each order is a function of a seed and the index of the pass, so every rank computes the same order without
communication.

A permutation of many indices is never stored. Each of its elements is computed when it is read, so reading can start at
any position without extra work. The computation is a Feistel network: each index is split into the row and column of a
roughly square table. Over several rounds, the row or the column is shifted by a hash of the other. Each shift is
invertible, so different indices stay different. The table may have more cells than there are indices. An index that
ends up in a surplus cell is sent through the network again until it leaves the surplus cells (cycle walking).

ADR 2 explains why the user's order is kept, and why large data is shuffled differently.
"""

from __future__ import annotations

import hashlib
import math
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain, islice, pairwise
from typing import Any, SupportsIndex, TypeAlias, overload

import numpy as np
import torch
from torch.utils.data import DistributedSampler, RandomSampler, SequentialSampler

from raysgd.core.numbers.seeds import seed_of
from raysgd.torch.objects import rng

Numbers: TypeAlias = "np.ndarray[Any, np.dtype[np.uint64]]"

_NUM_ROUNDS = 6
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_HALF = np.uint64(32)
_READ_AT_ONCE = 4096


@dataclass(frozen=True)
class Permutation(Sequence[int]):
    """A pseudorandom permutation of the numbers from 0 to `length - 1`. Elements are computed when they are read.

    The permutation depends only on `length` and `seed`, and is the same on every machine.

    Attributes:
        length: Number of elements.
        seed: String from which the order is derived.

    Examples:
        >>> numbers = Permutation(10, seed="7")
        >>> sorted(numbers) == list(range(10)), numbers[4:6] == [numbers[4], numbers[5]]
        (True, True)
        >>> len(Permutation(10**12, seed="7")[5 * 10**11 : 5 * 10**11 + 3])
        3
    """

    length: int
    seed: str

    def __len__(self) -> int:
        return self.length

    @overload
    def __getitem__(self, index: SupportsIndex) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> list[int]: ...

    def __getitem__(self, index: SupportsIndex | slice) -> int | list[int]:
        """Return the number at a position, or the numbers at the positions of a slice."""
        places = range(self.length)[index]
        if isinstance(places, int):
            return int(self.at(np.array([places], np.uint64))[0])
        found: list[int] = self.at(np.arange(places.start, places.stop, places.step).astype(np.uint64)).tolist()
        return found

    def __iter__(self) -> Iterator[int]:
        """Yield all numbers of the permutation in order, computing a few thousand at a time."""
        for start in range(0, self.length, _READ_AT_ONCE):
            yield from self[start : start + _READ_AT_ONCE]

    def at(self, places: Numbers) -> Numbers:
        """Return the numbers at the positions in `places`, each of which must be from 0 to `length - 1`."""
        numbers = self._moved(places)
        while (outside := numbers >= self.length).any():
            numbers[outside] = self._moved(numbers[outside])
        return numbers

    def _moved(self, numbers: Numbers) -> Numbers:
        """Apply the Feistel network once. Some of the returned numbers may be `length` or larger."""
        one, other = np.divmod(numbers, self._width)
        size, other_size = self._height, self._width
        for key in self._keys:
            one = (one + _hashed(other, key)) % size
            one, other, size, other_size = other, one, other_size, size
        return one * self._width + other

    @cached_property
    def _width(self) -> np.uint64:
        return np.uint64(max(1, math.isqrt(max(0, self.length - 1)) + 1))

    @cached_property
    def _height(self) -> np.uint64:
        return np.uint64(max(1, -(-self.length // int(self._width))))

    @cached_property
    def _keys(self) -> Numbers:
        digest = hashlib.blake2b(self.seed.encode(), digest_size=8 * _NUM_ROUNDS).digest()
        return np.frombuffer(digest, dtype="<u8").astype(np.uint64)


def _hashed(numbers: Numbers, key: np.uint64) -> Numbers:
    """Return a 32-bit hash of each number. The multiplications are meant to wrap around at 64 bits."""
    mixed = (numbers ^ key) * _FIRST
    mixed ^= mixed >> _HALF
    mixed *= _SECOND
    mixed >>= _HALF
    return mixed


Indices: TypeAlias = Sequence[Any]
"""Sample indices of a pass, in order. An `array` takes a quarter of the memory of a list."""


@dataclass(frozen=True)
class JoinedBatches(Sequence[Any]):
    """The sample indices of all batches of a pass, concatenated. The batches may differ in size.

    Attributes:
        samples: Indices of the samples, batch after batch.
        bounds: Positions at which the batches start, then the position at which the last batch ends.
    """

    samples: Sequence[Any]
    bounds: Sequence[int]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, key: Any) -> Any:
        return self.samples[key]

    @property
    def largest(self) -> int:
        """Number of samples in the largest batch."""
        return max((stop - start for start, stop in pairwise(self.bounds)), default=1)


_DRAWN_BELOW = 2**20


@dataclass(frozen=True)
class SequentialOrder:
    """The order of a sequential loader: ascending indices in every pass.

    Attributes:
        num_samples: Number of samples in a pass.
    """

    name = "sequential"
    num_samples: int

    def indices(self, seed: int, pass_index: int) -> range:
        """Return the dataset's indices in ascending order, regardless of the seed and the pass."""
        return range(self.num_samples)


@dataclass(frozen=True)
class ShuffledOrder:
    """The order of a shuffled loader: a new permutation of the indices in every pass.

    Attributes:
        num_samples: Number of samples in a pass.
        drawn_below: With fewer samples than this, `torch.randperm` generates the permutation when a pass starts.
            Otherwise, `Permutation` computes each index when it is read.
    """

    name = "shuffled"
    num_samples: int
    drawn_below: int = _DRAWN_BELOW

    def indices(self, seed: int, pass_index: int) -> Indices:
        """Return the permutation for a pass. Neither uses nor changes any global random number generator."""
        if self.num_samples >= self.drawn_below:
            return Permutation(self.num_samples, seed=f"{seed}/{pass_index}")
        generator = torch.Generator("cpu").manual_seed(seed_of(seed, pass_index))
        # Use the CPU even if user code called `torch.set_default_device`, because the dataset is indexed on the CPU.
        drawn = torch.randperm(self.num_samples, generator=generator, device="cpu")
        return array("q", drawn.numpy().tobytes())  # slices of a tensor are slow


@dataclass(frozen=True)
class SamplerOrder:
    """The order in which a user's sampler yields indices.

    The sampler is iterated over once per pass. Before that, the global generators of PyTorch, `random` and NumPy, and
    the sampler's own PyTorch `generator`, are seeded from the seed and the pass index. If the sampler has a method
    `set_epoch`, this method is called with the pass index. After the iteration, the generators' states are restored. If
    the sampler uses any other source of randomness, the ranks may get different orders. The ranks compare their orders
    and raise if the orders differ.
    """

    sampler: Any

    @property
    def num_samples(self) -> int:
        """Number of indices in a pass: the current length of the user's sampler."""
        return len(self.sampler)

    @property
    def name(self) -> str:
        """Description of the order for messages, with the class name of the user's sampler."""
        return f"sampler {type(self.sampler).__name__}"

    def indices(self, seed: int, pass_index: int) -> Indices:
        """Return the indices that the sampler yields in a pass: an array, or a list if they are not integers.

        If the sampler yields fewer indices than its `len`, the pass has only these samples.

        Raises:
            ValueError: The sampler yields more indices than its `len`. This method draws only one of the surplus
                indices, because some samplers never end.
        """
        limit = len(self.sampler)
        holders = (self.sampler, getattr(self.sampler, "sampler", None))
        own = next(filter(None, (getattr(each, "generator", None) for each in holders)), None)
        with _seeded(seed_of(seed, pass_index), own):
            if hasattr(self.sampler, "set_epoch"):
                self.sampler.set_epoch(pass_index)
            drawn = list(islice(self.sampler, limit + 1))
        if len(drawn) > limit:
            raise ValueError(
                f"`{type(self.sampler).__name__}` draws more than the {limit} samples that its `__len__` "
                "reports, so the data cannot be sharded. Correct `__len__`."
            )
        return _compact(drawn)

    def is_repeatable(self, seed: int) -> bool:
        """Return True if iterating over the sampler twice for the same pass yields the same order."""
        first, again = (_comparable(self.indices(seed, 0)) for _ in range(2))
        return first == again


@dataclass(frozen=True)
class BatchesOrder(SamplerOrder):
    """The order in which a user's batch sampler yields batches of indices.

    For this class, `num_samples` is the number of batches.
    """

    def indices(self, seed: int, pass_index: int) -> JoinedBatches:
        """Return the sample indices of all batches that the batch sampler yields in a pass."""
        batches = [list(batch) for batch in super().indices(seed, pass_index)]
        bounds = accumulate((len(batch) for batch in batches if batch), initial=0)
        return JoinedBatches(_compact([*chain.from_iterable(batches)]), [*bounds])


SampleOrder: TypeAlias = SequentialOrder | ShuffledOrder | SamplerOrder
"""The order in which a pass visits the samples: a pure function of seed and pass index.

Therefore, every rank computes the same order, even a worker that joins in the middle of a pass. The ranks compare the
attribute `name` to check that they use the same type of order.
"""


def order_of(sampler: Any) -> SampleOrder:
    """Return the order that a sampler specifies: sequential, shuffled, or whatever order a custom sampler yields."""
    # Compare exact types, because a subclass may yield any order.
    if type(sampler) is SequentialSampler:
        return SequentialOrder(len(sampler))
    if type(sampler) is RandomSampler and not sampler.replacement and len(sampler) == len(sampler.data_source):
        return ShuffledOrder(len(sampler))
    return SamplerOrder(sampler)


def length_of(sized: Any) -> int | None:
    """Return the length of a loader, a dataset or a sampler; None if it has no length."""
    try:
        return len(sized)
    except (TypeError, NotImplementedError):
        return None


def divides_data(sampler: Any) -> bool:
    """Return True if a sampler, like `DistributedSampler`, already gives each rank a shard of the samples."""
    # Many samplers copy the attribute names of PyTorch's DistributedSampler without subclassing it.
    by_name = hasattr(sampler, "num_replicas") and hasattr(sampler, "rank")
    return by_name or isinstance(sampler, DistributedSampler)


def _compact(drawn: list[Any]) -> Sequence[Any]:
    if any(isinstance(each, torch.Tensor) and each.ndim for each in drawn[:1]):
        return drawn  # each element is a batch, and an array would convert a batch of one index to a number
    try:
        return array("q", drawn)
    except (TypeError, OverflowError):
        return drawn  # strings, tuples and integers beyond 64 bits do not fit into an array


def _comparable(drawn: Any) -> Any:
    """Return the same indices in containers that `==` compares, with lists instead of tensors."""
    if not isinstance(drawn, list):
        return drawn
    return [each.tolist() if isinstance(each, torch.Tensor) else each for each in drawn]


@contextmanager
def _seeded(seed: int, own: Any) -> Iterator[None]:
    """Seed the global generators and the sampler's generator `own` in the `with` block, then restore their states."""
    drawn, own = rng.capture(), own if isinstance(own, torch.Generator) else torch.Generator()
    state = own.get_state()
    try:
        rng.seed_alike(seed)
        own.manual_seed(seed)
        yield
    finally:
        own.set_state(state)
        rng.restore(drawn)
