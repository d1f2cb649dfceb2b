"""An adapter on a frozen base on several workers: packed or not, accumulated, and through kills."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray.cloudpickle
import torch

from raysgd import TorchTrainer
from raysgd.data import IterableStream
from raysgd.operators import HuggingFaceOperator, collate_packs, pack
from raysgd.testing import kill_worker

pytestmark = pytest.mark.integration

PLACES = ("step:0", "step:1", "step:3", "step:4", "snapshot", "now")


@pytest.fixture(scope="module")
def lab() -> Iterator[Any]:
    """The models, which workers can use without a path to the tests."""
    lab = importlib.import_module("tests.operators.hugging_face_lab")
    ray.cloudpickle.register_pickle_by_value(lab)
    yield lab
    ray.cloudpickle.unregister_pickle_by_value(lab)


@pytest.fixture(scope="module")
def operator_cls(lab: Any) -> Any:
    class InDouble(HuggingFaceOperator):
        """Computes in double precision, also the loss, for which `transformers` has one in fp32."""

        excludes_frozen_from_state = True

        def build_model(self, config: dict[str, Any]) -> Any:
            return lab.in_double()

        def build_data(self, config: dict[str, Any]) -> Any:
            samples = [text for text in lab.samples("none") if len(text["input_ids"]) > 2]
            if config["packed"] == "in a stream":
                packed = pack(IterableStream(samples), 16).shuffle(128)
                return packed.batch(config["batch_size"], collate=collate_packs), None
            packs = pack(samples, 16) if config["packed"] else [each for text in samples for each in pack([text], 16)]
            size = config["batch_size"]
            return torch.utils.data.DataLoader(packs, size, shuffle=True, collate_fn=collate_packs), None  # type: ignore[arg-type, var-annotated]

        def forward(self, features: Any, target: Any) -> Any:
            inputs = {name: each for name, each in features[0].items() if name != "labels"}
            output = self.model(**inputs, use_cache=False)
            logits = output.logits[:, :-1].flatten(0, 1)
            return output, torch.nn.functional.cross_entropy(logits, target.flatten()), self.count_labels(target)

    return InDouble


def train(operator_cls: Any, packed: bool | str, accumulated: int, place: str = "", **options: Any) -> Any:
    config = {"packed": packed, "batch_size": 6 // accumulated, "lr": 0.1, "optimizer": "sgd", "seed": 3}
    options = {"split_batches": True, "accumulate_grad_batches": accumulated, "seed": 3, **options}
    with TorchTrainer(training_operator_cls=operator_cls, config=config, **options) as trainer:
        losses = [trainer.train()["train_loss"]]
        if place:
            kill_worker(trainer, 1, at=place)
        losses += [trainer.train()["train_loss"] for _ in range(2)]
        state = trainer.state_dict()
        assert all("lora" in name for name in state["models"][0])
        return losses[-1], trainer.get_model(to_cpu=True).state_dict()


def check(found: Any, expected: Any) -> None:
    assert found[0] == pytest.approx(expected[0], rel=1e-9)
    for name, tensor in expected[1].items():
        if "lora" in name:
            assert (found[1][name] - tensor).abs().max() <= 1e-9 * tensor.abs().max(), name
        else:
            assert torch.equal(found[1][name], tensor), f"{name} was moved"


@pytest.mark.parametrize(
    ("packed", "accumulated"),
    [
        (True, 2),
        ("in a stream", 1),
        pytest.param(False, 1, marks=pytest.mark.soak),
        pytest.param(True, 1, marks=pytest.mark.soak),
        pytest.param("in a stream", 2, marks=pytest.mark.soak),
    ],
)
@pytest.mark.parametrize("num_workers", [2, pytest.param(3, marks=pytest.mark.soak)])
def test_n_workers_train_the_adapter_of_one(
    operator_cls: Any, ray_cluster: None, num_workers: int, packed: bool | str, accumulated: int
) -> None:
    alone = train(operator_cls, packed, accumulated, use_local=True)
    place = "step:3" if num_workers == 2 else ""
    check(train(operator_cls, packed, accumulated, place, num_workers=num_workers, num_cpus_per_worker=0.5), alone)


@pytest.mark.soak
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("num_workers", [2, 3])
@pytest.mark.parametrize("packed", [True, "in a stream"])
def test_kills_change_nothing(
    operator_cls: Any, ray_cluster: None, num_workers: int, place: str, packed: bool | str
) -> None:
    alone = train(operator_cls, packed, 2, use_local=True)
    check(train(operator_cls, packed, 2, place, num_workers=num_workers, num_cpus_per_worker=0.5), alone)


def test_a_divided_base_may_be_in_bf16_beside_its_adapter(lab: Any, ray_cluster: None, tmp_path: Path) -> None:
    config = {"task": "adapter on bf16", "lr": 0.1, "optimizer": "sgd", "batch_size": 3}
    options = {"strategy": "fsdp", "num_workers": 2, "num_cpus_per_worker": 0.5, "precision": "bf16"}
    with TorchTrainer(training_operator_cls=lab.Task, config=config, **options) as trainer:
        first = trainer.get_model().state_dict()
        trainer.train()
        trained = trainer.get_model().state_dict()
        HuggingFaceOperator.save_pretrained(trainer, tmp_path)
        with pytest.raises(ValueError, match="adapters need a whole `PeftModel`"):
            HuggingFaceOperator.load_pretrained(trainer, tmp_path)
    changed = {name for name, each in trained.items() if not torch.equal(each, first[name])}
    assert changed
    assert all("lora" in name for name in changed)
    assert (tmp_path / "adapter_model.safetensors").exists()

    class Remade(lab.Task):  # type: ignore[name-defined, misc]
        excludes_frozen_from_state = True

    with pytest.raises(ValueError, match=r"excludes_frozen_from_state = True` cannot work with `strategy=\"fsdp\"`"):
        TorchTrainer(training_operator_cls=Remade, config=config, **options)
