from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import pytest

from raysgd.core.engine.shared.interface import NoConnection
from raysgd.core.engine.shared.types import Rendezvous, World
from raysgd.train.backend import Backend, BackendConfig, PlacedConnection, backend_of, resolve
from raysgd.train.torch import TorchBackend, TorchConfig
from tests.helpers.fakes import meeting

MEETING = meeting(77, host="10.0.0.1", on_one_node=False)


class Own(Backend):
    pass


class AsProperty(BackendConfig):
    @property
    def backend_cls(self) -> type[Backend]:
        return Own


class AsMethod(BackendConfig):
    def backend_cls(self) -> type[Backend]:  # type: ignore[override]
        return Own


class AsAttribute(BackendConfig):
    backend_cls = Own  # type: ignore[assignment]


class AsNothing(BackendConfig):
    backend_cls = int  # type: ignore[assignment]


@pytest.mark.parametrize("config", [AsProperty(), AsMethod(), AsAttribute()])
def test_a_backend_is_found_however_the_config_gives_it(config: BackendConfig) -> None:
    assert type(backend_of(config)) is Own


def test_a_config_by_itself_connects_nothing() -> None:
    assert type(backend_of(BackendConfig())) is Backend
    assert isinstance(BackendConfig().connection(0), NoConnection)


def test_something_else_is_no_backend() -> None:
    with pytest.raises(TypeError, match=r"no on_start.*need a subclass"):
        backend_of(AsNothing())


def test_names_and_configs_are_resolved() -> None:
    config = AsProperty()
    assert resolve(config) is config
    assert resolve("torch") == TorchConfig()


@pytest.mark.parametrize(
    ("backend", "error", "message"),
    [
        ("pytorch", ValueError, "'torch', 'tensorflow'"),
        (3, TypeError, "`backend=3`"),
        (TorchConfig, TypeError, r"pass an instance, `TorchConfig\(\)`"),
    ],
)
def test_anything_else_is_refused(backend: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        resolve(backend)


@dataclass
class Noting(NoConnection):
    """Notes what the environment says when it is joined."""

    seen: dict[str, str | None] | None = None
    even_alone: bool | None = None

    def join(self, rendezvous: Rendezvous, world: World, *, even_alone: bool = False) -> None:
        self.even_alone = even_alone
        self.seen = {name: os.environ.get(name) for name in ("CUDA_VISIBLE_DEVICES", "RANK", "MASTER_PORT")}


def test_a_worker_learns_its_place_before_it_is_connected_and_forgets_it_afterwards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    monkeypatch.delenv("RANK", raising=False)
    inner = Noting()
    placed = PlacedConnection(inner, shares_gpus=True, names_address=True, names_place=True)
    placed.join(MEETING, World(rank=3, size=4, gpu_ids=("1",), node_gpu_ids=("0", "1")))
    assert inner.seen == {"CUDA_VISIBLE_DEVICES": "0,1", "RANK": "3", "MASTER_PORT": "77"}
    assert inner.even_alone
    placed.leave()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "1"
    assert "RANK" not in os.environ


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {}),
        ({"shares_gpus": True}, {"CUDA_VISIBLE_DEVICES": "0,1,10"}),
        ({"names_address": True}, {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "77"}),
        (
            {"names_place": True},
            {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "NODE_RANK": "1"},
        ),
    ],
)
def test_what_a_worker_is_told(options: dict[str, bool], expected: dict[str, str]) -> None:
    world = World(1, 2, local_rank=0, local_size=1, node_rank=1, num_nodes=2, node_gpu_ids=("0", "1", "10"))
    assert PlacedConnection(NoConnection(), **options).variables(MEETING, world) == expected


def test_a_worker_without_gpus_is_told_of_none() -> None:
    assert PlacedConnection(NoConnection(), shares_gpus=True).variables(MEETING, World(0, 1)) == {}


@pytest.mark.parametrize(
    ("config", "num_gpus", "transport", "names_address"),
    [
        (TorchConfig(), 0, "gloo", True),
        (TorchConfig(), 0.5, "gloo", True),  # NCCL cannot have two ranks on a GPU
        (TorchConfig(), 1, "nccl", True),
        (TorchConfig("gloo", "tcp", 7), 1, "gloo", False),
    ],
)
def test_torch_chooses_its_transport(config: TorchConfig, num_gpus: float, transport: str, names_address: bool) -> None:
    connection = config.connection(num_gpus)
    assert isinstance(connection, PlacedConnection)
    assert connection.inner.transport == transport  # type: ignore[attr-defined]
    assert connection.inner.timeout_s == config.timeout_s  # type: ignore[attr-defined]
    assert connection.names_address is names_address
    assert connection.names_place


def test_torch_knows_two_ways_to_meet() -> None:
    with pytest.raises(ValueError, match="`init_method='file'`"):
        TorchConfig(init_method="file").connection(0)


def test_a_time_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="`form_timeout_s=0`"):
        TorchConfig(form_timeout_s=0).connection(0)


def test_what_leaves_a_torch_worker_comes_back_equal_and_plain_data_as_it_is() -> None:
    import torch

    data = {"loss": 0.5, "weights": torch.arange(3), "model": torch.nn.Linear(1, 1)}
    decoded = TorchBackend.decode_data(TorchBackend.encode_data(data))
    assert decoded["loss"] == 0.5
    assert torch.equal(decoded["weights"], torch.arange(3))
    assert torch.equal(decoded["model"].weight, data["model"].weight)  # type: ignore[attr-defined]
    plain = {"loss": 0.5, "name": "a", "none": None}
    assert TorchBackend.encode_data(plain) == TorchBackend.decode_data(plain) == plain
