"""Encoded states on their way through Ray's object store."""

from __future__ import annotations

import pytest
import ray
import torch

from raysgd.torch.state_codec import StateEncoder, decode

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
        self._encoder.release(encoded)
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
