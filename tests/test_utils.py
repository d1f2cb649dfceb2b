from __future__ import annotations

import socket

import pytest

from raysgd import utils


def test_the_names_of_special_keys_are_those_of_existing_code() -> None:
    assert (utils.BATCH_COUNT, utils.NUM_SAMPLES, utils.BATCH_SIZE) == (
        "batch_count",
        "num_samples",
        "*batch_size",
    )


def test_every_public_name_is_there() -> None:
    assert [name for name in utils.__all__ if not hasattr(utils, name)] == []


def test_override_returns_the_method_itself() -> None:
    def keys() -> None: ...

    assert utils.override(dict)(keys) is keys


def test_override_refuses_a_name_that_the_interface_lacks() -> None:
    with pytest.raises(AssertionError, match="`kees` overrides nothing: `dict` has no such attribute"):

        class Misspelt(dict[str, int]):
            @utils.override(dict)
            def kees(self) -> None: ...


def test_a_free_port_can_be_bound() -> None:
    port = utils.find_free_port()
    with socket.socket() as server:
        server.bind(("127.0.0.1", port))
        assert server.getsockname()[1] == port
