"""Sequence packing: puts several short texts into one row of tokens, so that batches contain hardly any padding.

Each pack is one sample. Texts are packed before the samples are sharded, so the packs do not depend on the number of
workers. Each step is weighted by its number of labels. Position ids restart at 0 for each text. `transformers` models
detect text boundaries from the position ids and prevent attention across them.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

IGNORED = -100
"""The label that `transformers` losses ignore."""


def pack(samples: Iterable[Mapping[str, Any]], num_tokens: int) -> list[dict[str, list[int]]]:
    """Join texts into packs: rows of at most `num_tokens` tokens. Texts are never truncated.

    The packing depends only on text lengths, so all workers create the same packs. Texts are placed from longest to
    shortest, each into the fullest pack that still has space for it (best-fit decreasing).

    Args:
        samples: Tokenized texts, as tokenizers return them, with `input_ids` and optional `labels`. Default for
            `labels`: the `input_ids`.
        num_tokens: Maximum number of tokens per pack.

    Returns:
        Packs with `input_ids`, `labels` and `position_ids`. Return `collate_packs` from `build_collator` to batch them.

    Raises:
        ValueError: A text is empty or longer than a pack, or its numbers of labels and tokens differ.

    Examples:
        >>> texts = [{"input_ids": [5, 6, 7]}, {"input_ids": [8, 9]}, {"input_ids": [3, 4]}]
        >>> for each in pack(texts, num_tokens=5):
        ...     print(each)
        {'input_ids': [5, 6, 7, 8, 9], 'labels': [-100, 6, 7, -100, 9], 'position_ids': [0, 1, 2, 0, 1]}
        {'input_ids': [3, 4], 'labels': [-100, 4], 'position_ids': [0, 1]}
    """
    if not isinstance(num_tokens, int) or num_tokens < 1:
        raise ValueError(f"`num_tokens={num_tokens!r}`: need an integer of at least 1.")
    texts = [_checked(number, sample, num_tokens) for number, sample in enumerate(samples)]
    packs: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # free tokens and index of each pack, fullest pack first
    for number in sorted(range(len(texts)), key=lambda each: (-len(texts[each][0]), each)):
        length = len(texts[number][0])
        place = bisect_left(rooms, (length, -1))
        if place == len(rooms):
            packs.append([])
            room, index = num_tokens, len(packs) - 1
        else:
            room, index = rooms.pop(place)
        packs[index].append(number)
        insort(rooms, (room - length, index))
    return [_joined([texts[number] for number in numbers]) for numbers in packs]


def _checked(number: int, sample: Mapping[str, Any], num_tokens: int) -> tuple[list[int], list[int]]:
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


def _joined(texts: Sequence[tuple[list[int], list[int]]]) -> dict[str, list[int]]:
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

    Examples:
        >>> batch = collate_packs(pack([{"input_ids": [5, 6, 7]}, {"input_ids": [8, 9]}], num_tokens=3))
        >>> batch["input_ids"].tolist(), batch["labels"].tolist()
        ([[5, 6, 7], [8, 9, 0]], [[-100, 6, 7], [-100, 9, -100]])
    """
    longest = max(len(each["input_ids"]) for each in packs)
    padding = {"input_ids": 0, "labels": IGNORED, "position_ids": 0}
    return {
        name: torch.tensor([[*each[name], *[value] * (longest - len(each[name]))] for each in packs])
        for name, value in padding.items()
    }
