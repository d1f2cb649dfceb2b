"""Packs of texts, and models that train on them as on the texts themselves."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from raysgd import TorchTrainer
from raysgd.data import Shard, Stream
from raysgd.exceptions import StreamError
from raysgd.operators import HuggingFaceOperator, collate_packs, pack
from tests.streams.made import START, joint, pass_of, read_together

pytestmark = pytest.mark.usefixtures("keeps_the_environment")


def texts(num_texts: int, longest: int = 12) -> list[dict[str, list[int]]]:
    draw = random.Random(0)
    return [{"input_ids": [draw.randrange(3, 20) for _ in range(draw.randint(1, longest))]} for _ in range(num_texts)]


def unpacked(packs: list[dict[str, list[int]]]) -> list[list[int]]:
    found: list[list[int]] = []
    for each in packs:
        for token, place in zip(each["input_ids"], each["position_ids"], strict=True):
            if place == 0:
                found.append([])
            assert place == len(found[-1])
            found[-1].append(token)
    return found


@pytest.mark.parametrize("num_tokens", [12, 17, 100])
def test_every_text_is_in_one_pack_whole(num_tokens: int) -> None:
    samples = texts(200)
    packs = pack(samples, num_tokens)
    assert sorted(unpacked(packs)) == sorted(sample["input_ids"] for sample in samples)
    assert all(len(each["input_ids"]) <= num_tokens for each in packs)
    num_all = sum(len(sample["input_ids"]) for sample in samples)
    assert len(packs) <= 1.05 * num_all / num_tokens + 1, "there is little padding"
    assert packs == pack(samples, num_tokens)


def test_labels_of_a_text_stay_with_its_tokens() -> None:
    samples = [{"input_ids": torch.tensor([5, 6, 7]), "labels": torch.tensor([-100, -100, 7])}, {"input_ids": [8, 9]}]
    assert pack(samples, 5)[0]["labels"] == [-100, -100, 7, -100, 9]


@pytest.mark.parametrize(
    ("samples", "num_tokens", "finding"),
    [
        ([{"input_ids": [1, 2]}], 0, "`num_tokens=0`: need an integer"),
        ([{"input_ids": [1]}, {"input_ids": [1, 2, 3]}], 2, "Text 1 has 3 tokens, but a pack holds 1 to"),
        ([{"input_ids": []}], 2, "Text 0 has 0 tokens"),
        ([{"input_ids": [1, 2], "labels": [1]}], 2, "2 tokens and 1 labels"),
        ([{"text": "a", "id": 1}], 2, r"Text 0 has no `input_ids` \(the keys 'text', 'id'\): encode texts first"),
        (["a"], 2, r"Text 0 has no `input_ids` \(str\)"),
    ],
)
def test_what_cannot_be_packed_is_refused(samples: Any, num_tokens: int, finding: str) -> None:
    with pytest.raises(ValueError, match=finding):
        pack(samples, num_tokens)


def test_texts_are_packed_before_they_are_collated() -> None:
    with pytest.raises(
        ValueError, match=r"`collate_packs` got a sample without `position_ids`.*`pack\(samples, num_tok"
    ):
        collate_packs([*pack([{"input_ids": [1, 2]}], 4), {"input_ids": [1, 2]}])


# ------------------------------------------------------------------------------------------------------------- streams


class Texts(Stream):
    """Texts in shards. A row is the number of a text."""

    def __init__(self, lengths: list[int], samples: list[dict[str, list[int]]]) -> None:
        self._lengths, self.samples = lengths, samples
        self.num_read = 0

    def shards(self) -> list[Shard]:
        return [Shard(str(number), length, "1") for number, length in enumerate(self._lengths)]

    def open(self, shard: str, start: int) -> Iterator[int]:
        first = sum(self._lengths[: int(shard)])
        for number in range(first + start, first + self._lengths[int(shard)]):
            self.num_read += 1
            yield number

    def encoded(self) -> Stream:
        return self.map(lambda number: self.samples[number])


def streamed(lengths: list[int], longest: int = 12) -> tuple[Texts, list[list[int]]]:
    source = Texts(lengths, texts(sum(lengths), longest))
    return source, sorted(sample["input_ids"] for sample in source.samples)


def packs_in(stream: Stream, world_size: int = 1) -> list[dict[str, list[int]]]:
    steps = read_together(pass_of(stream.batch(5)), world_size)
    return [each for step in steps for each in joint(step)]


@pytest.mark.parametrize("lengths", [[300], [40, 0, 7, 110], [3] * 100])
def test_every_text_of_a_stream_is_in_one_pack_whole_with_any_number_of_workers(lengths: list[int]) -> None:
    source, expected = streamed(lengths)
    stream = pack(source.encoded(), 16).shuffle(100)
    packs = packs_in(stream)
    assert sorted(unpacked(packs)) == expected
    assert all(packs_in(stream, world_size) == packs for world_size in (2, 3))
    assert all(len(each["input_ids"]) <= 16 for each in packs)


def test_a_stream_has_as_little_padding_as_a_list() -> None:
    source, expected = streamed([2000])
    packs = packs_in(pack(source.encoded(), 100))
    assert len(packs) <= 1.05 * sum(map(len, expected)) / 100


def test_a_filter_may_leave_texts_out_before_they_are_packed() -> None:
    source, expected = streamed([60, 60])
    stream = pack(source.encoded().filter(lambda text: len(text["input_ids"]) > 4), 16)
    assert sorted(unpacked(packs_in(stream, 2))) == [text for text in expected if len(text) > 4]


def test_a_shard_can_be_read_from_any_pack_on() -> None:
    source, _ = streamed([3000])
    stream = pack(source.encoded(), 16)
    packs = list(stream.open("0", 0))
    assert len(packs) > 1000
    for start in [0, 1, 255, 256, 257, 700, len(packs) - 1, len(packs)]:
        new = pack(source.encoded(), 16)
        assert list(new.open("0", start)) == packs[start:], "another process reads from the beginning"
        source.num_read = 0
        assert list(stream.open("0", start)) == packs[start:]
        assert source.num_read <= (len(packs) - start + 300) * 3000 / len(packs), "this process, from a cut on"
    with pytest.raises(ValueError, match="the shard has only"):
        list(stream.open("0", len(packs) + 1))


@pytest.mark.parametrize("lengths", [[900], [200, 40, 90]])
def test_a_pass_over_packs_continues_with_the_next_pack(lengths: list[int]) -> None:
    source, expected = streamed(lengths)
    undisturbed = packs_in(pack(source.encoded(), 16).shuffle(100))
    found: list[dict[str, list[int]]] = []
    position = START
    for world_size in (3, 1, 2, 7, 1):
        stream = pack(source.encoded(), 16).shuffle(100).batch(5)  # as another process makes it
        steps = read_together(pass_of(stream), world_size, position, None if world_size == 7 else 4)
        found += [each for step in steps for each in joint(step)]
        position = steps[-1][0][-1].after if steps else position
    assert found == undisturbed
    assert sorted(unpacked(found)) == expected


def test_a_position_fits_the_same_packs_only() -> None:
    source, _ = streamed([20])
    versions = {
        pack(stream, num_tokens).shards()[0].version
        for stream, num_tokens in (
            (source.encoded(), 16),
            (source.map(lambda number: source.samples[number]), 16),
            (source.encoded(), 17),
            (source.encoded().filter(bool), 16),
        )
    }
    assert len(versions) == 3


@pytest.mark.parametrize("world_size", [1, 3])
def test_texts_that_cannot_be_packed_can_be_left_out(world_size: int) -> None:
    source, _ = streamed([50, 50])
    source.samples[7]["input_ids"] = list(range(17))
    source.samples[80].clear()
    stream = pack(source.encoded(), 16)
    with pytest.raises(StreamError, match=r"shard '0', row \d+: .* Text 7 has 17 tokens, but a pack holds 1 to"):
        packs_in(stream, world_size)
    steps = read_together(pass_of(stream.batch(5, on_error="skip")), world_size)
    found = sorted(unpacked([each for step in steps for each in joint(step)]))
    assert found == sorted(each["input_ids"] for number, each in enumerate(source.samples) if number not in (7, 80))
    assert steps[-1][0][-1].after.left_out == 2


@pytest.mark.parametrize(
    ("make", "finding"),
    [
        (lambda texts: texts.shuffle(9), r"`pack` after `shuffle`.* `pack\(stream, num_tokens\)\.shuffle\(buffer\)`"),
        (lambda texts: texts.take(9), r"`pack` after `take`.* `pack\(stream, num_tokens\)\.take\(num_rows\)`"),
        (lambda texts: texts.batch(9), r"`pack` after `batch`.* `pack\(stream, num_tokens\)\.batch\(size\)"),
        (lambda texts: texts.map(print, seeded=True), r"seeded=True.*same in each epoch.*\.map\(function, seeded=True"),
    ],
)
def test_what_counts_texts_or_draws_numbers_comes_after_packing(make: Any, finding: str) -> None:
    source, _ = streamed([20])
    with pytest.raises(ValueError, match=finding):
        pack(make(source.encoded()), 16)


@pytest.mark.parametrize("task", ["next words", "adapter", "next words of GPT-2"])
@pytest.mark.parametrize("options", [{}, {"activation_checkpointing": True}])
def test_packed_texts_are_trained_on_as_texts_of_their_own(lab: Any, task: str, options: dict[str, Any]) -> None:
    class Packed(HuggingFaceOperator):
        excludes_frozen_from_state = True

        def build_model(self, config: dict[str, Any]) -> Any:
            return lab.model_of(config["task"])

        def build_data(self, config: dict[str, Any]) -> Any:
            data = texts(24)
            packs = pack(data, 16) if config["packs"] else [each for text in data for each in pack([text], 16)]
            return torch.utils.data.DataLoader(packs, len(packs), collate_fn=collate_packs), None  # type: ignore[arg-type, var-annotated]

    found = []
    for packs in (True, False):
        config = {"task": task, "packs": packs, "optimizer": "sgd", "lr": 0.3}
        with TorchTrainer(training_operator_cls=Packed, config=config, use_local=True, **options) as trainer:
            losses = [trainer.train()["train_loss"] for _ in range(3)]
            found.append((losses, lab.weights(trainer.get_model())))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-6)
    torch.testing.assert_close(found[0][1], found[1][1], rtol=0, atol=1e-6)
    assert found[0][0][0] > found[0][0][2]
