from __future__ import annotations

import stat
from pathlib import Path

import pytest

import raysgd.v2
from raysgd.core.connections.horovod import HorovodConnection
from raysgd.train.backend import PlacedConnection, resolve
from raysgd.train.horovod import HorovodConfig


def connection_of(config: HorovodConfig) -> HorovodConnection:
    placed = config.connection(0)
    assert isinstance(placed, PlacedConnection)
    assert isinstance(placed.inner, HorovodConnection)
    return placed.inner


def test_it_is_found_by_its_name() -> None:
    assert isinstance(resolve("horovod"), HorovodConfig)
    assert raysgd.v2.HorovodConfig is HorovodConfig


def test_the_start_has_a_patience_of_its_own() -> None:
    assert connection_of(HorovodConfig(timeout_s=7)) == HorovodConnection(form_timeout_s=7.0)
    assert connection_of(HorovodConfig()).timeout_s > connection_of(HorovodConfig()).form_timeout_s == 300


@pytest.mark.parametrize(
    ("nics", "expected"), [(None, ()), (set(), ()), ({"eth1", "eth0"}, ("eth0", "eth1")), ("eth1", ("eth1",))]
)
def test_interfaces_may_be_one_or_several(nics: str | set[str] | None, expected: tuple[str, ...]) -> None:
    assert connection_of(HorovodConfig(nics=nics)).interfaces == expected


def test_gpus_of_a_node_are_shared_and_values_arrive_without_wrappers() -> None:
    backend = HorovodConfig().backend_cls
    assert backend.share_cuda_visible_devices
    assert backend.encode_data({"loss": 0.5}) == {"loss": 0.5}


def test_every_config_has_a_key_of_its_own_unless_it_is_given_one() -> None:
    assert HorovodConfig().key not in (None, HorovodConfig().key)
    assert HorovodConfig(key="mine").key == "mine"


def test_a_private_key_is_written_for_its_owner_and_never_over_another(tmp_path: Path) -> None:
    path = tmp_path / "identity"
    HorovodConfig(ssh_identity_file=str(path))
    assert not path.exists()
    for content in ("first", "second"):
        HorovodConfig(ssh_str=content, ssh_identity_file=str(path))
        assert path.read_text() == "first"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_the_timeout_in_horovods_form() -> None:
    timeout = HorovodConfig(timeout_s=500).start_timeout
    assert 0 < timeout.remaining() <= 500
    assert not timeout.timed_out()
