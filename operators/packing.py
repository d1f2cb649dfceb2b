"""Sequence packing: puts several short texts into one row of tokens, so that batches contain hardly any padding.

Each pack is one sample. Texts are packed before the samples are sharded, so the packs do not depend on the number of
workers. `HuggingFaceOperator` weights each batch by its number of labels. Position ids restart at 0 for each text.
`transformers` models detect text boundaries from the position ids and prevent attention across them.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, overload

import torch

from raysgd.streams.stream import DROPPED, Pipeline, RowSteps, Shard, Stream, from_row

IGNORED = -100
"""The label that `transformers` losses ignore."""

_NUM_OPEN = 16  # maximum number of packs of a shard that wait for more texts
_NUM_UNTIL_CUT = 256  # after this many packs, all open packs of a shard are closed, so that reading can start there

Text = tuple[list[int], list[int]]
"""The tokens and the labels of a text."""


@overload
def pack(samples: Stream, num_tokens: int) -> Stream: ...


@overload
def pack(samples: Iterable[Mapping[str, Any]], num_tokens: int) -> list[dict[str, list[int]]]: ...


def pack(samples: Any, num_tokens: int) -> Any:
    """Join texts into packs: rows of at most `num_tokens` tokens. Texts are never truncated.

    The packing depends only on text lengths, so all workers create the same packs. Texts are placed from longest to
    shortest, each into the fullest pack that still has space for it (best-fit decreasing).

    A stream is packed while it is read. Each shard is packed separately, and its texts are placed in the order in which
    they are read. At most 16 packs at a time wait for more texts. Call `pack` after `map` and `filter`, and before
    `shuffle`, `take` and `batch`, which then count packs.

    Args:
        samples: An iterable or a stream of tokenized texts, as tokenizers return them, with `input_ids` and optional
            `labels`. Default for `labels`: the `input_ids`.
        num_tokens: Maximum number of tokens per pack.

    Returns:
        A list of packs or, for a stream, a stream of packs. A pack has `input_ids`, `labels` and `position_ids`. To
        batch packs, return `collate_packs` from `build_collator`.

    Raises:
        ValueError: `num_tokens` is not a positive integer. Or a text has no `input_ids`, is empty or longer than a
            pack, or its numbers of labels and tokens differ (for a stream, raised when the text is read). Or the stream
            is already shuffled, limited or batched, or uses seeded functions.

    Examples:
        >>> texts = [{"input_ids": [5, 6, 7]}, {"input_ids": [8, 9]}, {"input_ids": [3, 4]}]
        >>> for each in pack(texts, num_tokens=5):
        ...     print(each)
        {'input_ids': [5, 6, 7, 8, 9], 'labels': [-100, 6, 7, -100, 9], 'position_ids': [0, 1, 2, 0, 1]}
        {'input_ids': [3, 4], 'labels': [-100, 4], 'position_ids': [0, 1]}

        >>> from raysgd.data import IterableStream
        >>> stream = pack(IterableStream(texts), num_tokens=5).batch(2, collate=collate_packs)
    """
    if not isinstance(num_tokens, int) or num_tokens < 1:
        raise ValueError(f"`num_tokens={num_tokens!r}`: need an integer of at least 1.")
    if isinstance(samples, Stream):
        return _PackedStream(samples, num_tokens).map(checked_pack)
    texts = [_checked(number, sample, num_tokens) for number, sample in enumerate(samples)]
    packs = _OpenPacks(num_tokens)
    for text in sorted(texts, key=lambda text: len(text[0]), reverse=True):  # texts of equal length stay in order
        packs.add(text)
    return packs.close_all()


class _OpenPacks:
    """Packs that still have space. Each text goes into the fullest pack that has space for the text.

    Args:
        num_tokens: Maximum number of tokens per pack.
    """

    def __init__(self, num_tokens: int) -> None:
        self._num_tokens, self._num_opened = num_tokens, 0
        self._packs: dict[int, list[Text]] = {}  # in the order in which they were opened
        self._rooms: list[tuple[int, int]] = []  # number of free tokens and key of each pack, fullest pack first

    def __len__(self) -> int:
        return len(self._packs)

    def add(self, text: Text) -> None:
        """Put a text into a pack. If no pack has space for it, open another pack."""
        length = len(text[0])
        place = bisect_left(self._rooms, (length, -1))
        if place == len(self._rooms):
            room, key = self._num_tokens, self._num_opened
            self._num_opened += 1
        else:
            room, key = self._rooms.pop(place)
        self._packs.setdefault(key, []).append(text)
        insort(self._rooms, (room - length, key))

    def close_fullest(self) -> dict[str, list[int]]:
        """Remove and return the pack with the fewest free tokens."""
        _, key = self._rooms.pop(0)
        return _joined(self._packs.pop(key))

    def close_all(self) -> list[dict[str, list[int]]]:
        """Remove and return all packs, in the order in which they were opened."""
        packs = [_joined(texts) for texts in self._packs.values()]
        self._packs.clear()
        self._rooms.clear()
        return packs


class _PackedStream(Stream):
    """Packs the texts of each shard of a stream. A row is a pack, or the error of a text that cannot be packed.

    A cut is a place between two packs of a shard, with all earlier texts of the shard in the packs before the cut. To
    start at a pack in the middle of a shard, this object reads the shard from the last known cut before this pack, or
    else from the beginning of the shard.

    Args:
        texts: The stream of texts.
        num_tokens: Maximum number of tokens per pack.
    """

    def __init__(self, texts: Stream, num_tokens: int) -> None:
        self._texts, self._num_tokens = _of_texts(texts), num_tokens
        # For each shard, a dict of its known cuts. Each key is the number of the pack after a cut, and the value is the
        # number of the first text after that cut.
        self._cuts: dict[str, dict[int, int]] = {}

    def shards(self) -> Sequence[Shard]:
        num_filters = sum(step.is_filter for step in self._texts.steps)
        packing = f"packs of {self._num_tokens} tokens, {_NUM_OPEN}, {_NUM_UNTIL_CUT}, {num_filters} filters"
        return [Shard(each.name, None, f"{each.version}, {packing}") for each in self._texts.shards()]

    def open(self, shard: str, start: int) -> Iterator[Any]:
        cuts = self._cuts.setdefault(shard, {0: 0})
        at = max(number for number in [*cuts] if number <= start)
        return from_row(self._packs(shard, at, cuts), start, at)

    def _packs(self, shard: str, number: int, cuts: dict[int, int]) -> Iterator[Any]:
        """Yield the packs of a shard from a cut on.

        Args:
            shard: Name of the shard.
            number: Number of the pack after the cut.
            cuts: Dict of the shard's known cuts. For each cut, the key is the number of the pack after the cut, and the
                value is the number of the first text after the cut. This method adds the cuts that it finds.
        """
        packs, last_cut = _OpenPacks(self._num_tokens), number
        for place, text in self._checked_texts(shard, cuts[number]):
            if isinstance(text, Exception):
                yield text
                number += 1
                continue
            packs.add(text)
            if len(packs) > _NUM_OPEN:
                yield packs.close_fullest()
                number += 1
            if number - last_cut >= _NUM_UNTIL_CUT:
                closed = packs.close_all()
                yield from closed
                number = last_cut = number + len(closed)
                cuts[number] = place + 1
        yield from packs.close_all()

    def _checked_texts(self, shard: str, start: int) -> Iterator[tuple[int, Text | Exception]]:
        steps = RowSteps(self._texts.steps, seed="")
        for place, row in enumerate(self._texts.source.open(shard, start), start):
            try:
                sample = steps(row, shard, place)
                if sample is DROPPED:
                    continue
                text: Text | Exception = _checked(place, sample, self._num_tokens)
            except Exception as error:  # functions of the user, and samples of any type
                text = error
            yield place, text


def _of_texts(stream: Stream) -> Pipeline:
    """Return a stream's pipeline, after checking that the pipeline has no operations that must come after packing.

    Raises:
        ValueError: The stream is shuffled, limited or batched, or uses seeded functions.
    """
    texts = stream._pipeline()
    for name, is_called, call in (
        ("shuffle", texts.buffer > 1, "shuffle(buffer)"),
        ("take", texts.limit is not None, "take(num_rows)"),
        ("batch", texts.batch_size is not None, "batch(size)"),
    ):
        if is_called:
            raise ValueError(
                f"`pack` after `{name}`: packs are made before the rows are divided among workers. Write "
                f"`pack(stream, num_tokens).{call}`, which counts packs."
            )
    if any(step.is_seeded for step in texts.steps):
        raise ValueError(
            "`pack` after `map(..., seeded=True)` or `filter(..., seeded=True)`: packs have to be the same in each "
            "epoch. Use seeded functions on packs, as in `pack(stream, num_tokens).map(function, seeded=True)`."
        )
    return texts


def checked_pack(row: Any) -> Any:
    """Return a row of a packed stream, or raise the error that takes the place of a row.

    With `batch(on_error="skip")`, a stream skips the rows for which a function raises an error.
    """
    if isinstance(row, Exception):
        raise row
    return row


def _checked(number: int, sample: Any, num_tokens: int) -> Text:
    if not isinstance(sample, Mapping) or "input_ids" not in sample:
        found = f"the keys {', '.join(map(repr, sample))}" if isinstance(sample, Mapping) else type(sample).__name__
        raise ValueError(
            f"Text {number} has no `input_ids` ({found}): encode texts first, as with `tokenizer(text, "
            "truncation=True, max_length=...)`."
        )
    tokens = _as_list(sample["input_ids"])
    labels = _as_list(sample.get("labels", tokens))
    if not 0 < len(tokens) <= num_tokens:
        raise ValueError(
            f"Text {number} has {len(tokens)} tokens, but a pack holds 1 to `num_tokens={num_tokens}`: truncate texts "
            "when you encode them, as with `tokenizer(text, truncation=True, max_length=...)`, and skip empty ones."
        )
    if len(labels) != len(tokens):
        raise ValueError(f"Text {number} has {len(tokens)} tokens and {len(labels)} labels: need one for each token.")
    return tokens, labels


def _as_list(values: Any) -> list[int]:
    return values.tolist() if isinstance(values, torch.Tensor) else [*values]


def _joined(texts: Sequence[Text]) -> dict[str, list[int]]:
    """Join texts into a pack.

    The first token of each text has no label. Otherwise, the model would learn to predict the first token from the
    preceding text.
    """
    return {
        "input_ids": [token for tokens, _ in texts for token in tokens],
        "labels": [label for _, labels in texts for label in (IGNORED, *labels[1:])],
        "position_ids": [place for tokens, _ in texts for place in range(len(tokens))],
    }


def collate_packs(packs: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
    """Collate packs into a batch with one row per pack. Pad shorter packs at the end.

    Padding tokens have no labels, and their position ids keep the texts from attending to them.

    Raises:
        ValueError: A sample is not a pack.

    Examples:
        >>> batch = collate_packs(pack([{"input_ids": [5, 6, 7]}, {"input_ids": [8, 9]}], num_tokens=3))
        >>> batch["input_ids"].tolist(), batch["labels"].tolist()
        ([[5, 6, 7], [8, 9, 0]], [[-100, 6, 7], [-100, 9, -100]])
    """
    if not all("position_ids" in each for each in packs):
        raise ValueError(
            "`collate_packs` got a sample without `position_ids`: it collates packs. Call `pack(samples, num_tokens)` "
            "first, also for `predict`, `test` and `validate(dataset=...)`."
        )
    longest = max(len(each["input_ids"]) for each in packs)
    padding = {"input_ids": 0, "labels": IGNORED, "position_ids": 0}
    return {
        name: torch.tensor([[*each[name], *[value] * (longest - len(each[name]))] for each in packs])
        for name, value in padding.items()
    }
