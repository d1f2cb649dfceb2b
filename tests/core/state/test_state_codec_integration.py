"""Encoded states on their way through Ray's object store."""

from __future__ import annotations

import pytest
import ray
import torch

from raysgd.core.state.state_codec import StateEncoder, decode, lend

pytestmark = pytest.mark.integration

NUM_FLOATS = 2**20


@ray.remote(num_cpus=1)
class Worker:
    """Sends states as a training worker does, from a buffer that it uses again and again."""

    def __init__(self) -> None:
        self._encoder = StateEncoder()

    def send(self, value: float) -> tuple[list[ray.ObjectRef], int]:
        encoded = self._encoder.encode({"w": torch.full((NUM_FLOATS,), value), "value": value})
        address = encoded.buffer.ctypes.data
        reference = ray.put(encoded)
        return [reference], address


@pytest.mark.usefixtures("ray_cluster")
def test_states_arrive_and_the_buffer_is_used_again() -> None:
    worker = Worker.remote()
    try:
        (first,), address = ray.get(worker.send.remote(1.0))
        (second,), same_address = ray.get(worker.send.remote(2.0))
        assert same_address == address
        for reference, value in ((first, 1.0), (second, 2.0)):
            for copy in (True, False):
                state = decode(ray.get(reference), copy=copy)
                assert state["value"] == value
                assert torch.equal(state["w"], torch.full((NUM_FLOATS,), value))
    finally:
        ray.kill(worker)


@pytest.mark.usefixtures("ray_cluster")
def test_the_driver_sees_the_bytes_where_ray_keeps_them() -> None:
    encoded = StateEncoder().encode(torch.zeros(NUM_FLOATS))
    reference = ray.put(encoded)
    first, second = (ray.get(reference) for _ in range(2))
    assert first.buffer.ctypes.data == second.buffer.ctypes.data
    assert not first.buffer.flags.writeable
    assert decode(first, copy=False).data_ptr() == first.buffer.ctypes.data


@pytest.mark.usefixtures("ray_cluster")
def test_a_state_that_is_lent_is_copied_into_the_store() -> None:
    large, small = torch.ones(NUM_FLOATS), torch.ones(3)
    reference = ray.put(lend([large, small]))
    large.zero_()
    arrived = decode(ray.get(reference), copy=False)
    assert torch.equal(arrived[0], torch.ones(NUM_FLOATS))
    assert arrived[1].tolist() == [1.0] * 3
    assert [tensor.data_ptr() % 64 for tensor in arrived] == [0, 0]
