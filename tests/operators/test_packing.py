"""Packs of texts, and models that train on them as on the texts themselves."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from raysgd import TorchTrainer
from raysgd.operators import HuggingFaceOperator, collate_packs, pack

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
    ],
)
def test_what_cannot_be_packed_is_refused(samples: Any, num_tokens: int, finding: str) -> None:
    with pytest.raises(ValueError, match=finding):
        pack(samples, num_tokens)


@pytest.mark.parametrize("task", ["next words", "adapter", "next words of GPT-2"])
@pytest.mark.parametrize("options", [{}, {"activation_checkpointing": True}])
def test_packed_texts_are_trained_on_as_texts_of_their_own(lab: Any, task: str, options: dict[str, Any]) -> None:
    class Packed(HuggingFaceOperator):
        remakes_frozen = True

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
