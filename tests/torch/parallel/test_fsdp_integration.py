"""Trainers whose models and optimizer states are divided over the workers."""

from __future__ import annotations

import gc
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import distributed_c10d
from torch.distributed.tensor import DTensor

from raysgd.exceptions import CheckpointCorruptedError
from raysgd.torch import TorchTrainer
from raysgd.torch.parallel.fsdp import FSDP, _filled, _skeleton_of
from raysgd.torch.parallel.options import FSDPOptions
from raysgd.trainer.configuration import Recovery
from tests.helpers.patience import hearing_all_ranks
from tests.torch.gate import mark_when_inside
from tests.torch.lab import Experiment, run_alone, run_together
from tests.torch.operators_for_tests import NUM_FEATURES, LinearOperator, dataset, equal

pytestmark = pytest.mark.integration


class Blocks(LinearOperator):
    """Blocks in a list and a head, a buffer that is in no state, and an optimizer with a state."""

    def setup(self, config: dict[str, Any]) -> None:
        super().setup({"optimizer": "adam", **config})

    def make_model(self) -> torch.nn.Module:
        with torch.device(self.config.get("made_on", "cpu")):
            return Net()

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        mark = Path(self.config.get("marks", "/"), f"{self.global_step}")
        if self.world_rank == 1 and self.global_step in self.config.get("dies_in", ()) and not mark.exists():
            mark.touch()
            while self.global_step == self.config.get("waits_in") and not mark.with_name("landed").exists():
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        return super().train_batch(batch, batch_info)


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(NUM_FEATURES, NUM_FEATURES) for _ in range(3))
        self.head = torch.nn.Linear(NUM_FEATURES, 1)
        self.register_buffer("shift", torch.empty(1), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.shift.fill_(0.5)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            features = features + torch.tanh(block(features))
        return self.head(features) + self.shift


def start(num_workers: int = 2, **options: Any) -> TorchTrainer:
    return TorchTrainer(
        **{
            "training_operator_cls": Blocks,
            "num_workers": num_workers,
            "num_cpus_per_worker": 0.5,
            "use_gpu": False,
            "strategy": "fsdp",
            "strategy_options": {"min_block_parameters": 1},
            **options,
        }
    )


@pytest.fixture(scope="module")
def divided(ray_cluster: None) -> Iterator[TorchTrainer]:
    with start() as trainer:
        yield trainer


def shares(operator: Any) -> tuple[int, int, int]:
    """Numbers of this rank: of the model, and of what its optimizer steps and keeps."""
    optimizer = operator.optimizer
    stepped = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    kept = [entry["exp_avg"] for entry in optimizer.state.values()]
    return tuple(sum(t.to_local().numel() for t in ts) for ts in (operator.model.parameters(), stepped, kept))  # type: ignore[return-value]


def test_every_worker_holds_a_part_and_steps_that(divided: TorchTrainer) -> None:
    before = divided.get_model().state_dict()
    divided.train()
    after = divided.get_model().state_dict()
    assert all(not torch.equal(before[name], after[name]) for name in before)
    whole = sum(tensor.numel() for tensor in after.values())
    parts = divided.apply_all_operators(shares)
    assert [sum(column) for column in zip(*parts, strict=True)] == [whole] * 3
    assert all(0 < number < whole for part in parts for number in part)


def test_the_model_comes_whole_and_plain(divided: TorchTrainer) -> None:
    model = divided.get_model()
    assert type(model).__name__ == "Net"
    assert [type(parameter) for parameter in model.parameters()] == [torch.nn.Parameter] * 8
    assert model.shift.item() == 0.5
    loss = torch.nn.functional.mse_loss
    features, _, target = dataset(13, seed=1).tensors
    assert divided.validate()["val_loss"] == pytest.approx(loss(model(features), target).item(), rel=1e-5)


def test_a_model_without_numbers_gets_them_part_by_part(
    divided: TorchTrainer, make_local: Callable[..., TorchTrainer]
) -> None:
    divided.reset_config({"made_on": "meta"})
    try:
        assert not any(divided.apply_all_operators(has_whole_parameters))
        alone = make_local(Blocks, config={"batch_size": 8})
        alone.load_state_dict(divided.state_dict())
        model = divided.get_model()
        assert model.shift.item() == 0.5
        assert all(parameter.std() > 0 for parameter in model.parameters() if parameter.numel() > 1)
        assert divided.train()["train_loss"] == pytest.approx(alone.train()["train_loss"], rel=1e-5)
        torch.testing.assert_close(dict(divided.get_model().state_dict()), dict(alone.get_model().state_dict()))
    finally:
        divided.reset_config({})


def has_whole_parameters(operator: Any) -> bool:
    """Whether this rank holds a parameter that is not divided, with memory for it."""
    gc.collect()
    found = [each for each in gc.get_objects() if type(each) is torch.nn.Parameter and not each.is_meta]
    return any(each.untyped_storage().nbytes() for each in found)


class CallsDifferentlyOften(Blocks):
    """Rank 0 has no validation data here, and the other one calls the model more than once for a batch."""

    def make_loader(self, data: Any, shuffle: bool = False) -> Any:
        features, numbers, target = data.tensors
        if len(data) != 13 or self.world_size == 1:
            return super().make_loader(data, shuffle)
        return [
            (features[i : i + 4], numbers[i : i + 4], target[i : i + 4]) for i in range(0, 13, 4) if self.world_rank
        ]

    def validate_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        whole = [not isinstance(each, DTensor) for each in self.model.parameters()]
        for _ in range(batch_info["batch_idx"]):
            self.model(batch[0])
        return {**super().validate_batch(batch, batch_info), "whole": sum(whole)}


def test_workers_without_batches_help_the_others_to_validate(divided: TorchTrainer) -> None:
    experiment = Experiment(
        CallsDifferentlyOften,
        calls=[("validate", None), ("train", None), ("validate", None)],
        options={"strategy": "fsdp", "fsdp_options": FSDPOptions(min_block_parameters=1)},
    )
    expected, found = run_alone(experiment).results, run_together(divided, experiment).results
    assert found[0]["val_loss"] == pytest.approx(expected[0]["val_loss"], rel=1e-5)
    assert found[2]["val_loss"] != found[0]["val_loss"]
    for index in (0, 2):
        assert (found[index]["num_samples"], found[index]["whole"]) == (13, 0), "between two forward passes"


def refuse_objects(operator: Any) -> None:
    """Let PyTorch's collectives of objects, which all end in one function, raise in this process."""

    @wraps(vars(distributed_c10d)["_tensor_to_object"])
    def refuse(*args: Any) -> None:
        raise AssertionError("an object arrived over gloo")

    vars(distributed_c10d)["_tensor_to_object"] = refuse


def accept_objects(operator: Any) -> None:
    vars(distributed_c10d)["_tensor_to_object"] = vars(distributed_c10d)["_tensor_to_object"].__wrapped__


def test_no_object_is_unpickled_that_arrives_over_gloo(divided: TorchTrainer, tmp_path: Path) -> None:
    experiment = Experiment(
        CallsDifferentlyOften,
        calls=[("train", None), ("validate", None)],
        options={"strategy": "fsdp", "fsdp_options": FSDPOptions(min_block_parameters=1)},
    )
    divided.apply_all_operators(refuse_objects)
    try:
        assert run_together(divided, experiment).results[1]["num_samples"] == 13
        divided.train()
        divided.save(tmp_path / "whole.pt", whole=True)
        divided.save(tmp_path / "parts")
        divided.load(tmp_path / "parts")
        divided.get_model()
    finally:
        divided.apply_all_operators(accept_objects)


def test_a_worker_without_a_batch_helps_the_others_to_predict(divided: TorchTrainer) -> None:
    rows = torch.rand(3, NUM_FEATURES)
    model = divided.get_model().eval()
    for data in (rows, rows[:1]):
        found = divided.predict((data, torch.zeros(len(data))), batch_size=1, has_target=False)
        torch.testing.assert_close(found, model(data).detach())


def test_a_model_that_is_put_together_shares_the_weights_that_it_shared() -> None:
    model = torch.nn.ModuleDict({"in": torch.nn.Embedding(4, 2), "out": torch.nn.Linear(2, 4, bias=False)})
    model["out"].weight = model["in"].weight  # type: ignore[assignment]
    plain = _filled(_skeleton_of(model), {name: tensor.clone() for name, tensor in model.state_dict().items()})
    assert plain["out"].weight is plain["in"].weight is not model["in"].weight  # type: ignore[index]
    assert equal(dict(plain.state_dict()), dict(model.state_dict()))


def test_files_travel_to_other_ways_of_training_and_back(
    divided: TorchTrainer, tmp_path: Path, make_local: Callable[..., TorchTrainer]
) -> None:
    divided.train()
    state = divided.state_dict()
    path = divided.save(tmp_path / "divided")
    alone = make_local(Blocks)
    alone.load(path)
    assert equal(alone.state_dict(), state)
    found = alone.train()
    assert found["train_loss"] == found["train_loss"]
    for trainer in (divided, alone):
        assert "divided" in trainer._life.controller.snapshots.last_file_in_words
    back = alone.save(tmp_path / "alone")
    divided.load(back)
    assert equal(divided.state_dict(), alone.state_dict())


def test_another_class_is_refused(divided: TorchTrainer) -> None:
    with pytest.raises(ValueError, match=r'`reload` cannot work with `strategy="fsdp"`: save, and load into'):
        divided.reload(Blocks)
    assert divided.train()["num_samples"] > 0


def test_each_worker_writes_its_part_and_reads_it_back(divided: TorchTrainer, tmp_path: Path) -> None:
    divided.train()
    path, state = divided.save(tmp_path / "parts"), divided.state_dict()
    assert {"part-0.pt", "part-1.pt", "ranks.pt", "rest.pt"} == {entry.name for entry in path.iterdir()}
    following = divided.train()["train_loss"]
    after = divided.state_dict()
    divided.load(path)
    assert equal(divided.state_dict(), state)
    assert divided.train()["train_loss"] == following
    assert equal(divided.state_dict(), after)


def test_one_file_on_request_and_parts_of_a_folder(divided: TorchTrainer, tmp_path: Path) -> None:
    folder, state = divided.save(tmp_path / "parts"), divided.state_dict()
    whole = torch.load(divided.save(tmp_path / "whole.pt", whole=True))
    assert equal(whole["models"], state["models"])
    divided.train()
    trained = divided.state_dict()
    report = divided.load(folder, parts=["models"])
    assert report is not None
    assert report.parts == ("models",)
    assert equal(divided.state_dict(), {**trained, "models": state["models"]})
    divided.load(tmp_path / "whole.pt")
    assert equal(divided.state_dict(), state)


def test_a_damaged_folder_leaves_the_workers_as_they_were(divided: TorchTrainer, tmp_path: Path) -> None:
    path = divided.save(tmp_path / "parts")
    divided.train()
    state = divided.state_dict()
    part = path / "part-1.pt"
    content = bytearray(part.read_bytes())
    content[-100] ^= 1
    part.write_bytes(content)
    with hearing_all_ranks(), pytest.raises(CheckpointCorruptedError, match="checksum"):
        divided.load(path)
    assert equal(divided.state_dict(), state)
    assert [event.kind for event in divided.status().events] == ["started"], "the workers were kept"
    with pytest.raises(IsADirectoryError, match="other content than a checkpoint"):
        divided.save(tmp_path)


def test_a_lost_worker_is_replaced_and_nothing_is_lost(
    ray_cluster: None, tmp_path: Path, make_local: Callable[..., TorchTrainer]
) -> None:
    """A rank takes its part of the model along: all go back to a snapshot, inside the call or before it.

    The other worker keeps its process.
    """
    alone = make_local(Blocks, config={"batch_size": 8})
    expected = [alone.train(num_steps=number) for number in (7, 1, 2)]
    config = {"dies_in": [5, 8], "waits_in": 5, "marks": str(tmp_path)}
    with start(config=config, recovery=Recovery(snapshot_every_n_steps=1, snapshot_every_s=3600)) as trainer:
        [survivor, lost] = trainer.apply_all_workers(os.getpid)
        watcher = threading.Thread(target=mark_when_inside, args=(trainer, tmp_path / "landed"))
        watcher.start()
        found = [trainer.train(num_steps=number) for number in (7, 1, 2)]
        watcher.join()
        inside, before = (event.detail for event in trainer.status().events if event.kind == "restored")
        assert [event.num_kept for event in trainer.status().events if event.kind == "restored"] == [1, 1]
        pids = trainer.apply_all_workers(os.getpid)
        assert pids[0] == survivor
        assert pids[1] != lost
        model = trainer.get_model().state_dict()
    assert inside.startswith("from a snapshot inside the call, after ")
    assert re.fullmatch(r"from the last snapshot, with . completed calls? since run again", before)
    for name in ("num_samples", "train_loss"):
        assert [result[name] for result in found] == pytest.approx([result[name] for result in expected], rel=1e-5)
    torch.testing.assert_close(dict(model), dict(alone.get_model().state_dict()), rtol=1e-5, atol=1e-6)


class DiesInValidation(Blocks):
    def validate_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        mark = Path(self.config["marks"], "died")
        if self.world_rank == 1 and batch_info["batch_idx"] and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().validate_batch(batch, batch_info)


@pytest.mark.soak
def test_ranks_that_wait_for_one_another_in_validation_are_freed_and_kept(ray_cluster: None, tmp_path: Path) -> None:
    config = {"marks": str(tmp_path), "batch_size": 1}
    with start(4, training_operator_cls=DiesInValidation, config=config) as trainer:
        trainer.train()
        before = trainer.apply_all_workers(os.getpid)
        assert trainer.validate()["num_samples"] == 13
        after = trainer.apply_all_workers(os.getpid)
        [event] = [event for event in trainer.status().events if event.kind == "restored"]
    assert (event.num_kept, after[:3]) == (3, [before[rank] for rank in (0, 2, 3)])


def test_a_state_fits_any_number_of_workers_and_rank_zero_may_live_in_the_driver(
    divided: TorchTrainer, tmp_path: Path
) -> None:
    divided.train()
    of_two = divided.state_dict()
    with start(3, use_local=True, precision="bf16", accumulate_grad_batches=2, clip_grad_norm=1.0) as trainer:
        trainer.load(divided.save(tmp_path / "parts"))
        assert equal(trainer.state_dict(), of_two)
        trainer.train()
        trainer.take_state_of(divided)
        assert equal(trainer.state_dict(), of_two)
        trainer.train()
        model = trainer.get_model()
        assert type(model).__name__ == "Net", "a copy: the live one cannot be used by one rank alone"
        assert trainer.validate()["num_samples"] == 13
        state = trainer.state_dict()
    assert equal(dict(state["models"][0]), dict(model.state_dict()))


@pytest.mark.parametrize("options", [{}, {"micro_batch_size": 2}, {"accumulate_grad_batches": 2}], ids=str)
def test_a_global_batch_of_uneven_shares_is_a_batch_of_one_process(
    options: dict[str, Any], make_local: Callable[..., TorchTrainer], ray_cluster: None
) -> None:
    """Of 7 samples three workers get 3, 2 and 2; of the 3 that are left, and of the last one, some get only padding."""
    config = {"optimizer": "sgd", "num_samples": 22, "batch_size": 7}
    with start(3, split_batches=True, config=config, **options) as trainer:
        alone = make_local(Blocks, split_batches=True, config=config, **options)
        for _ in range(2):
            several, one = trainer.train(), alone.train()
            assert several["num_samples"] == one["num_samples"] == 22
            assert several["train_loss"] == pytest.approx(one["train_loss"], rel=1e-5)
        found, expected = trainer.get_model().state_dict(), alone.get_model().state_dict()
    for name, each in expected.items():
        torch.testing.assert_close(found[name], each, rtol=1e-5, atol=1e-6)


def test_a_single_worker_has_nothing_to_divide(make_local: Callable[..., TorchTrainer]) -> None:
    trainer = make_local(Blocks, strategy="fsdp", precision="fp16")
    trainer.train()
    assert type(trainer.get_local_operator().model).__name__ == "Net"


def test_trained_parameters_of_two_dtypes_are_refused_before_a_step(process_group: None) -> None:
    def model(is_frozen: bool) -> torch.nn.Module:
        first, second = torch.nn.Linear(4, 4, dtype=torch.bfloat16), torch.nn.Linear(4, 4)
        return torch.nn.Sequential(torch.nn.Sequential(first.requires_grad_(not is_frozen)), second)

    FSDP(torch.device("cpu"), 1).wrap(model(is_frozen=True), None, {})
    with pytest.raises(ValueError, match=r"several dtypes \(bfloat16, float32\)\. Cast them to one dtype"):
        FSDP(torch.device("cpu"), 1).wrap(model(is_frozen=False), None, {})
