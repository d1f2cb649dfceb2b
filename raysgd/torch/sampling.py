"""The position in the data: which samples of a pass come next, for a group of any size.

All ranks step together. A *pass* is one order of all samples, the same on every rank. One *step* takes the
next `world_size * batch_size` samples of that order and divides them over the ranks, contiguously and as
evenly as possible. So what has been used is always a prefix of the order, and a position is just (pass index,
samples consumed): it stays valid when the group shrinks or grows, and each sample of a pass is used exactly
once whatever happens to the group.

It also means that N workers see in a step exactly what one process with an N times larger batch would see, in
the same order, down to the short last step. There the ranks' shares may differ; `Share.weight` is what makes
the mean of the ranks' gradients the mean over the samples.

Nothing here counts what was consumed: a `DataLoader` reads ahead, so only the training loop knows. It passes
the number back in when a pass is resumed.
"""

from __future__ import annotations

import hashlib
import inspect
import logging
import random
import sys
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol, TypeAlias, cast

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
)

from raysgd.torch._loader_process import EndsWithParent
from raysgd.torch.pass_plan import PassPlan, check_range

logger = logging.getLogger(__name__)

Indices: TypeAlias = Sequence[Any] | torch.Tensor
"""The order of one pass: anything with `len` and slices. A tensor needs a quarter of a list's memory."""


class SampleOrder(Protocol):
    """In which order a pass visits the samples: a function of (seed, pass index) and nothing else.

    That is what lets every rank, and a worker that joins in the middle of a pass, arrive at the same order on
    its own.
    """

    @property
    def num_samples(self) -> int:
        """Samples in a pass."""

    @property
    def name(self) -> str:
        """What kind of order this is, the same on every rank."""

    def indices(self, seed: int, pass_index: int) -> Indices:
        """Return the dataset indices in the order in which pass `pass_index` visits them."""


@dataclass(frozen=True)
class SequentialOrder:
    """The dataset's own order, every pass."""

    num_samples: int

    @property
    def name(self) -> str:
        """Always `"sequential"`."""
        return "sequential"

    def indices(self, seed: int, pass_index: int) -> range:
        """Return `0 ... num_samples - 1`; seed and pass make no difference."""
        return range(self.num_samples)


@dataclass(frozen=True)
class ShuffledOrder:
    """A new permutation of the dataset in every pass."""

    num_samples: int

    @property
    def name(self) -> str:
        """Always `"shuffled"`."""
        return "shuffled"

    def indices(self, seed: int, pass_index: int) -> torch.Tensor:
        """Return the permutation of this pass. No random state outside is used or changed."""
        generator = torch.Generator("cpu").manual_seed(_derive_seed(seed, pass_index))
        # On the CPU whatever `torch.set_default_device` says: indices are needed where the data is.
        return torch.randperm(self.num_samples, generator=generator, device="cpu")


@dataclass(frozen=True)
class SamplerOrder:
    """The order that a user's own sampler draws.

    The sampler is drawn once per pass, with every source of randomness it may use seeded from (seed, pass
    index): the global ones of torch, `random` and numpy, and generators that the sampler keeps in its
    attributes. They get their state back afterwards. A sampler with `set_epoch` is told the pass index first.
    Randomness of any other kind (the clock, the operating system) would give each rank another order and is
    not supported.
    """

    sampler: Any

    @property
    def num_samples(self) -> int:
        """What the sampler announces as its length now."""
        return len(self.sampler)

    @property
    def name(self) -> str:
        """The class of the sampler."""
        return f"sampler {type(self.sampler).__name__}"

    def indices(self, seed: int, pass_index: int) -> Indices:
        """Return what the sampler draws in this pass: an array, or a list where its indices are not integers.

        A sampler may draw less than its length, the pass is then that much shorter.

        Raises:
            ValueError: The sampler draws more than its length, perhaps without end.
        """
        limit = len(self.sampler)
        generators = [*_global_generators(), *_held_generators(self.sampler)]
        with _seeded(_derive_seed(seed, pass_index), generators):
            if hasattr(self.sampler, "set_epoch"):
                self.sampler.set_epoch(pass_index)
            drawn = list(islice(self.sampler, limit + 1))
        if len(drawn) > limit:
            raise ValueError(
                f"`{type(self.sampler).__name__}` draws more than the {limit} samples that its `__len__` "
                "announces: the data cannot be divided without knowing its size. Correct `__len__`."
            )
        return _compact(drawn)


def _derive_seed(seed: int, pass_index: int) -> int:
    """Mix seed and pass index so that pass 1 of seed 7 is not pass 0 of seed 8."""
    digest = hashlib.blake2b(f"{seed}/{pass_index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1  # 63 bits: every generator takes a non-negative signed integer


def _compact(drawn: list[Any]) -> Indices:
    try:
        return array("q", drawn)
    except (TypeError, OverflowError):
        return drawn  # keys, tuples or integers beyond 64 bits, as the dataset wants them


@contextmanager
def _seeded(seed: int, generators: Sequence[Any]) -> Iterator[None]:
    """Seed all generators for the time of the block.

    They are restored last to first, so that one which is listed twice comes out right.
    """
    with ExitStack() as restore:
        for generator in generators:
            restore.callback(_reseed(generator, seed))
        yield


def _reseed(generator: Any, seed: int) -> Callable[[], object]:
    """Seed a generator of torch, numpy or `random`; return the function that puts its old state back."""
    if isinstance(generator, torch.Generator):
        torch_state = generator.get_state()
        generator.manual_seed(seed)
        return lambda: generator.set_state(torch_state)
    if hasattr(generator, "getstate"):  # the module `random` and its Random
        python_state = generator.getstate()
        generator.seed(seed)
        return lambda: generator.setstate(python_state)
    if hasattr(generator, "get_state"):  # the module `numpy.random` and its RandomState: 32 bits
        numpy_state = generator.get_state()
        generator.seed(seed % 2**32)
        return lambda: generator.set_state(numpy_state)
    bits = generator.bit_generator  # numpy.random.Generator
    bits_state = bits.state
    bits.state = type(bits)(seed).state
    return lambda: setattr(bits, "state", bits_state)


def _global_generators() -> list[Any]:
    """Return the process-wide generators that exist so far; CUDA's only if someone has started CUDA."""
    generators: list[Any] = [torch.default_generator, random]
    if torch.cuda.is_initialized():
        generators.extend(torch.cuda.default_generators)
    if "numpy" in sys.modules:  # not loaded: nothing has drawn from it
        generators.append(sys.modules["numpy"].random)
    return generators


def _held_generators(sampler: Any, seen: frozenset[int] = frozenset()) -> list[Any]:
    """Return the generators kept by a sampler, and by the samplers that it wraps."""
    found: list[Any] = []
    seen = seen | {id(sampler)}
    for value in (getattr(sampler, "generator", None), *getattr(sampler, "__dict__", {}).values()):
        if _is_generator(value):
            found.append(value)
        elif isinstance(value, Sampler) and id(value) not in seen:
            found.extend(_held_generators(value, seen))
    return found


def _is_generator(value: object) -> bool:
    if isinstance(value, (torch.Generator, random.Random)):
        return not isinstance(value, random.SystemRandom)  # the operating system's: has no state to set
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, (numpy.random.Generator, numpy.random.RandomState))


_SEED_BY_HAND = 0


class ElasticBatchSampler(Sampler[list[int]]):
    """The batches of one rank, from any position in a pass and for any size of the group.

    Pass it to a `DataLoader` as `batch_sampler`. Before each iteration say where it starts with `begin_pass`.
    An iterator belongs to the plan it was started with: it may run ahead of training, and a later
    `begin_pass` or `reshape` does not disturb it.

    Iterated by hand, before any pass was begun, it goes over all samples once, each time in another order if the
    order is shuffled. The orders are the same on all ranks whatever their seeds are, because the ranks have no
    common one yet.

    Attributes:
        order: The order of the samples.
        batch_size: Samples per rank in a full step.
        drop_last: Leave out a last joint step that is not full.
        pad: Give a rank without samples in the last step some to repeat, see `PassPlan`.
        rank: This worker's place in the group.
        world_size: Size of the group.
        plan: The pass begun last, or None before the first and after `reshape`.

    Raises:
        ValueError: A number is out of range.

    Example:
        >>> order = SequentialOrder(10)
        >>> sampler = ElasticBatchSampler(order, 2, drop_last=False, pad=True, rank=1, world_size=2)
        >>> plan = sampler.begin_pass(0, seed=1)
        >>> list(sampler)
        [[2, 3], [6, 7], [9]]
        >>> sampler.reshape(rank=0, world_size=1)
        >>> plan = sampler.begin_pass(0, seed=1, consumed=plan.consumed_after(2))
        >>> list(sampler)
        [[8, 9]]
    """

    plan: PassPlan | None

    def __init__(
        self, order: SampleOrder, batch_size: int, drop_last: bool, pad: bool, rank: int, world_size: int
    ) -> None:
        self.order = order
        self.drop_last = drop_last
        self.pad = pad
        self._indices: Indices = ()
        self._drawn_for: tuple[int, int] | None = None
        self._fingerprint: int | None = None
        self._num_by_hand = 0
        self.reshape(rank, world_size, batch_size)

    def begin_pass(self, pass_index: int, seed: int, consumed: int = 0) -> PassPlan:
        """Start a pass, or resume it after `consumed` samples, and return the plan for the rest of it.

        Args:
            pass_index: Number of the pass, from 0.
            seed: Decides the order together with `pass_index`. Must be the same on every rank.
            consumed: Samples of this pass that were used already, by a group of whatever size.

        Raises:
            ValueError: `consumed` is outside the pass, or the user's sampler cannot be used.
        """
        indices = self._draw(seed, pass_index)
        self.plan = self._plan(len(indices), consumed)
        return self.plan

    def fingerprint(self) -> int | None:
        """A number for the order of the pass begun last, where a user's sampler drew it; None where it cannot vary."""
        if self._fingerprint is None and isinstance(self.order, SamplerOrder):
            drawn = self._indices
            content = memoryview(drawn) if isinstance(drawn, array) else repr(drawn).encode()
            digest = hashlib.blake2b(content, digest_size=5).digest()  # so short that sums over all ranks fit 63 bits
            self._fingerprint = int.from_bytes(digest, "big")
        return self._fingerprint

    def reshape(self, rank: int, world_size: int, batch_size: int | None = None) -> None:
        """Take another place in another group; `batch_size=None` keeps the samples per rank.

        The pass in progress ends here: call `begin_pass` with the position to go on from.

        Raises:
            ValueError: A number is out of range.
        """
        check_range("world_size", world_size, minimum=1)
        check_range("rank", rank, minimum=0, maximum=world_size - 1)
        if batch_size is not None:
            check_range("batch_size", batch_size, minimum=1)
            self.batch_size = batch_size
        self.rank = rank
        self.world_size = world_size
        self.plan = None

    def __iter__(self) -> Iterator[list[int]]:
        """Iterate over this rank's batches in the rest of the pass; with no pass begun, in one by hand."""
        if self.plan is not None:
            return _batches(self._indices, self.plan, self.rank)
        indices = self._draw(_SEED_BY_HAND, self._num_by_hand)
        self._num_by_hand += 1
        return _batches(indices, self._plan(len(indices), consumed=0), self.rank)

    def __len__(self) -> int:
        """Return this rank's batches in the pass as begun; with no pass begun, in a whole one."""
        plan = self.plan or self._plan(self.order.num_samples, consumed=0)
        return plan.num_batches(self.rank)

    def _plan(self, num_samples: int, consumed: int) -> PassPlan:
        return PassPlan(num_samples, consumed, self.batch_size, self.world_size, self.drop_last, self.pad)

    def _draw(self, seed: int, pass_index: int) -> Indices:
        # Resuming a pass is the common case in recovery: the order is known and drawing may cost seconds.
        if self._drawn_for != (seed, pass_index):
            self._indices = self.order.indices(seed, pass_index)
            self._drawn_for, self._fingerprint = (seed, pass_index), None
        return self._indices


def _batches(indices: Indices, plan: PassPlan, rank: int) -> Iterator[list[int]]:
    for share in islice(plan.shares(rank), plan.num_batches(rank)):
        batch = indices[share.start : share.stop]
        yield batch.tolist() if isinstance(batch, torch.Tensor) else list(batch)


@dataclass(frozen=True)
class DataSignature:
    """What must be equal on all ranks for them to divide the same data.

    Attributes:
        num_samples: Samples in a pass.
        batch_size: Samples per rank in a full step.
        drop_last: Whether a last step that is not full is left out.
        order: `SampleOrder.name` of the order.
    """

    num_samples: int
    batch_size: int
    drop_last: bool
    order: str


@dataclass(frozen=True)
class ShardedLoader:
    """A user's loader, rebuilt so that each rank loads its share.

    Attributes:
        loader: Same dataset and options as the user's, with `sampler` as its `batch_sampler`.
        sampler: Where to begin passes and change the group.
        seed_hint: The seed the user gave, as far as this worker can tell. One rank's must be chosen for all.
        num_samples: Samples in a pass over all ranks.
        signature: To compare across ranks.
    """

    loader: DataLoader[Any]
    sampler: ElasticBatchSampler
    seed_hint: int
    num_samples: int
    signature: DataSignature


@dataclass(frozen=True)
class Unsharded:
    """A loader that is used as it is: every rank iterates over all that it yields.

    Attributes:
        loader: The user's object.
        reason: Why it was left alone, as a phrase for a log message.
        warn: Whether the user may have expected otherwise.
    """

    loader: Any
    reason: str
    warn: bool


def shard_loader(
    loader: Any, *, rank: int, world_size: int, training: bool, pin_memory: bool = False
) -> ShardedLoader | Unsharded:
    """Rebuild a map-style `DataLoader` so that the group divides its samples, or say why it is left alone.

    The loader's own order is respected: what is sequential in one process is sequential over many workers,
    what is shuffled is shuffled again in each pass, a user's sampler draws the joint order. `batch_size` is
    that of one worker, as written.

    All loading options are kept, but for `in_order=False`: batches that overtake each other would be counted
    for the wrong step, so they arrive in order here (a warning says so).

    Args:
        loader: Whatever the user registered.
        rank: This worker's place in the group.
        world_size: Size of the group.
        training: True pads ranks without samples in the last step so that all can take part in the gradient
            exchange; False gives them no batch, so that evaluation sees every sample once.
        pin_memory: Whether batches are put where a GPU can copy them from while it computes, also if the user's loader
            does not ask for that.

    Raises:
        ValueError: `rank` or `world_size` is out of range.

    Example:
        >>> sharded = shard_loader(DataLoader(range(8), batch_size=2), rank=1, world_size=2, training=True)
        >>> plan = sharded.sampler.begin_pass(0, seed=0)
        >>> [batch.tolist() for batch in sharded.loader]
        [[2, 3], [6, 7]]
    """
    obstacle = _obstacle(loader)
    if obstacle is not None:
        return obstacle
    batches = loader.batch_sampler
    order = _order_of(batches.sampler)
    sampler = ElasticBatchSampler(order, batches.batch_size, batches.drop_last, training, rank, world_size)
    return ShardedLoader(
        loader=_rebuild(loader, sampler, pin_memory),
        sampler=sampler,
        seed_hint=_seed_hint(loader, batches.sampler),
        num_samples=order.num_samples,
        signature=DataSignature(order.num_samples, sampler.batch_size, sampler.drop_last, order.name),
    )


def _obstacle(loader: Any) -> Unsharded | None:
    for rule in _RULES:
        if rule.applies(loader):
            return Unsharded(loader, rule.reason, rule.warn)
    return None


def _has_own_iteration(loader: DataLoader[Any]) -> bool:
    names = ("__iter__", "_get_iterator")
    return any(getattr(type(loader), name, None) is not getattr(DataLoader, name, None) for name in names)


def _has_no_length(sized: Any) -> bool:
    try:
        len(sized)
    except (TypeError, NotImplementedError):
        return True
    return False


def _divides_data(sampler: Any) -> bool:
    # Many samplers that do what torch's DistributedSampler does, without deriving from it, use its names.
    by_name = hasattr(sampler, "num_replicas") and hasattr(sampler, "rank")
    return by_name or isinstance(sampler, DistributedSampler)


def _own_sampler(loader: DataLoader[Any]) -> Any:
    # Not `loader.sampler`: that is a mere default where the user passed `batch_sampler=BatchSampler(...)`.
    return cast(BatchSampler, loader.batch_sampler).sampler


@dataclass(frozen=True)
class _Rule:
    applies: Callable[[Any], bool]
    reason: str
    warn: bool


# In this order: each rule may rely on those before it.
_RULES = (
    _Rule(lambda loader: not isinstance(loader, DataLoader), "not a torch DataLoader", warn=False),
    _Rule(lambda loader: isinstance(loader.dataset, IterableDataset), "its dataset is iterable", warn=False),
    _Rule(_has_own_iteration, "its class overrides the iteration of DataLoader", warn=True),
    _Rule(lambda loader: loader.batch_sampler is None, "it forms no batches (`batch_size=None`)", warn=True),
    _Rule(lambda loader: type(loader.batch_sampler) is not BatchSampler, "custom `batch_sampler`", warn=True),
    _Rule(lambda loader: _divides_data(_own_sampler(loader)), "its sampler divides the data", warn=False),
    _Rule(lambda loader: _has_no_length(loader.dataset), "its dataset has no length", warn=True),
    _Rule(lambda loader: _has_no_length(_own_sampler(loader)), "its sampler has no length", warn=True),
)


def _order_of(sampler: Any) -> SampleOrder:
    # Exact types: a subclass may draw anything.
    if type(sampler) is SequentialSampler:
        return SequentialOrder(len(sampler))
    if type(sampler) is RandomSampler and _draws_each_once(sampler):
        return ShuffledOrder(len(sampler))
    return SamplerOrder(sampler)


def _draws_each_once(sampler: RandomSampler) -> bool:
    return not sampler.replacement and len(sampler) == len(sampler.data_source)


_KEPT_OPTIONS = (
    "num_workers",
    "collate_fn",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "generator",
    "prefetch_factor",
    "persistent_workers",
)


def _rebuild(loader: DataLoader[Any], sampler: ElasticBatchSampler, pin_memory: bool) -> DataLoader[Any]:
    options = {name: getattr(loader, name) for name in _KEPT_OPTIONS}
    options["pin_memory"] = loader.pin_memory or pin_memory
    if loader.num_workers:
        options["worker_init_fn"] = EndsWithParent(loader.worker_init_fn)
    device = getattr(loader, "pin_memory_device", "")
    if device and "pin_memory_device" in inspect.signature(DataLoader).parameters:
        options["pin_memory_device"] = device
    if not getattr(loader, "in_order", True):
        logger.warning(
            "`in_order=False` has no effect on a loader that is divided over workers: a batch that overtakes "
            "another would be counted for the wrong step."
        )
    return DataLoader(loader.dataset, batch_sampler=sampler, **options)


def _seed_hint(loader: DataLoader[Any], sampler: Any) -> int:
    for generator in (loader.generator, getattr(sampler, "generator", None)):
        if isinstance(generator, torch.Generator):
            return generator.initial_seed()
    return torch.initial_seed()


def count_samples(batch: Any) -> int:
    """Return the number of samples in a batch of any shape, at the cost of looking at sizes only.

    The last array in a tuple or list is usually the target, whose first dimension counts samples more
    reliably than that of an input. Where the target is a list of dicts, as in detection, each is one sample.
    Failing that the first array anywhere inside counts, then the length of a list; anything else is one sample.

    Example:
        >>> count_samples((torch.zeros(3, 8, 8), torch.zeros(4)))
        4
        >>> count_samples({"text": torch.zeros(2, 16)})
        2
        >>> count_samples([{"boxes": torch.zeros(5, 4)}, {"boxes": torch.zeros(0, 4)}, {"boxes": torch.zeros(1, 4)}])
        3
    """
    parts = batch if isinstance(batch, (tuple, list)) else (batch,)
    if len(parts) > 1 and _is_list_of_samples(parts):
        return len(parts)
    target = next((part for part in reversed(parts) if _is_array(part) or _is_list_of_samples(part)), None)
    counted = _first_counted(parts) if target is None else target
    if counted is not None:
        return len(counted)
    return len(batch) if isinstance(batch, (tuple, list)) else 1


def _is_array(value: Any) -> bool:
    shape = getattr(value, "shape", None)
    return isinstance(shape, tuple) and len(shape) > 0  # torch.Size is a tuple; numpy arrays count too


def _is_list_of_samples(value: Any) -> bool:
    """Whether it is a list of dicts with the same keys, which were not joined to one dict."""
    if not isinstance(value, (tuple, list)) or not value or not isinstance(value[0], Mapping):
        return False
    return all(isinstance(item, Mapping) and item.keys() == value[0].keys() for item in value)


def _first_counted(parts: Iterable[Any]) -> Any:
    """The first array or list of samples anywhere in them."""
    for part in parts:
        if _is_array(part) or _is_list_of_samples(part):
            return part
        inner = part.values() if isinstance(part, Mapping) else part if isinstance(part, (tuple, list)) else ()
        found = _first_counted(inner)
        if found is not None:
            return found
    return None
