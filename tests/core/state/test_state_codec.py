"""Encoding and decoding of training states."""

from __future__ import annotations

import collections
import gc
import io
import pickle
import subprocess
import sys
import threading
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from raysgd.core.state.state_codec import EncodedState, StateEncoder, decode, lend
from tests.helpers.run_if import RunIf

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.complex64,
    torch.complex128,
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint16,
]


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclass
class Scaler:
    """Stands for an object in an operator's state."""

    factor: float
    history: list[torch.Tensor]


def round_trip(state: Any, *, copy: bool = True) -> Any:
    return decode(ship(StateEncoder().encode(state)), copy=copy)


def ship(encoded: EncodedState) -> EncodedState:
    """Do what Ray does: one pickle, and the large buffers beside it, read-only when they arrive."""
    buffers: list[pickle.PickleBuffer] = []
    content = pickle.dumps(encoded, protocol=5, buffer_callback=buffers.append)
    return pickle.loads(content, buffers=[bytes(buffer.raw()) for buffer in buffers])


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())


@pytest.mark.parametrize("copy", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_arrives_bit_for_bit(dtype: torch.dtype, copy: bool) -> None:
    tensor = torch.randn(3, 5, dtype=torch.float64).mul(50).to(dtype)
    for sent in (tensor, tensor.t(), tensor[:, ::2], tensor[0, 0], tensor[:0]):
        got = round_trip({"x": sent}, copy=copy)["x"]
        assert (got.dtype, got.shape, bits(got)) == (sent.dtype, sent.shape, bits(sent))


def test_infinities_and_nans_arrive_bit_for_bit() -> None:
    tensor = torch.tensor([float("nan"), float("inf"), -0.0])
    assert bits(round_trip(tensor)) == bits(tensor)


def test_dense_tensors_keep_their_strides() -> None:
    tensor = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    got = round_trip(tensor)
    assert got.stride() == tensor.stride()
    assert torch.equal(got, tensor)


def test_lazy_conjugates_and_negatives_arrive_as_their_values() -> None:
    tensor = torch.randn(3, dtype=torch.complex64)
    got = round_trip([tensor, tensor.conj(), tensor.conj().imag])
    assert torch.equal(got[0], tensor)
    assert torch.equal(got[1], tensor.conj())
    assert torch.equal(got[2], tensor.conj().imag)


def test_containers_keep_type_order_and_content() -> None:
    state = {
        "b": [1, (2.5, "x", None, b"\x00"), True],
        "a": collections.OrderedDict(z=1, y=2),
        "d": collections.defaultdict(list, k=[1]),
        "p": Pair(1, Pair(2, 3)),
        "c": collections.Counter("aab"),
        "s": {1, 2},
        3: 2**100,
    }
    got = round_trip(state)
    assert got == state
    assert list(got) == list(state)
    assert [type(value) for value in got.values()] == [type(value) for value in state.values()]
    assert got["d"]["new"] == []


def test_a_modules_state_dict_keeps_its_metadata() -> None:
    state = torch.nn.BatchNorm1d(2).state_dict()
    got = round_trip(state)
    assert got._metadata == state._metadata
    assert all(torch.equal(got[key], state[key]) for key in state)


@pytest.mark.parametrize("copy", [True, False])
def test_numpy_values_arrive(copy: bool) -> None:
    large = np.arange(5000.0).reshape(50, 100)
    state = {
        "scalar": np.float32(1.5),
        "small": np.arange(3),
        "large": large,
        "fortran": large.T,
        "cut": large[::2],
    }
    got = round_trip(state, copy=copy)
    assert got["scalar"] == 1.5
    assert type(got["scalar"]) is np.float32
    for key in ("small", "large", "fortran", "cut"):
        np.testing.assert_array_equal(got[key], state[key])
        assert got[key].dtype == state[key].dtype


def test_large_arrays_travel_in_the_buffer() -> None:
    encoded = StateEncoder().encode({"replay": np.zeros(100_000)})
    assert encoded.num_bytes >= 800_000
    assert len(encoded.skeleton) < 2_000


def test_objects_arrive_with_the_tensors_in_them() -> None:
    got = round_trip({"scaler": Scaler(2.0, [torch.ones(2), torch.zeros(1)])})
    assert got["scaler"].factor == 2.0
    assert [item.tolist() for item in got["scaler"].history] == [[1.0, 1.0], [0.0]]


def test_objects_of_local_classes_and_lambdas_arrive() -> None:
    class Local:
        value = 3

    got = round_trip({"object": Local(), "function": lambda x: x + 1})
    assert got["object"].value == 3
    assert got["function"](1) == 2


def test_sparse_tensors_arrive() -> None:
    tensor = torch.eye(3).to_sparse()
    assert torch.equal(round_trip(tensor).to_dense(), torch.eye(3))


def test_one_tensor_in_two_places_stays_one_and_travels_once() -> None:
    tensor = torch.randn(1000)
    encoded = StateEncoder().encode({"a": tensor, "b": [tensor]})
    got = decode(encoded, copy=True)
    assert got["a"] is got["b"][0]
    assert encoded.num_bytes < 2 * tensor.nbytes


def test_tied_weights_stay_tied() -> None:
    first, second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
    second.weight = first.weight
    got = round_trip(torch.nn.Sequential(first, second).state_dict())
    assert got["0.weight"] is got["1.weight"]
    assert got["0.bias"] is not got["1.bias"]


def test_equal_tensors_with_memory_of_their_own_stay_apart() -> None:
    got = round_trip([torch.zeros(2), torch.zeros(2), torch.empty(0), torch.empty(0)])
    assert len({id(tensor) for tensor in got}) == 4


def test_parameters_stay_parameters() -> None:
    frozen = torch.nn.Parameter(torch.ones(2), requires_grad=False)
    got = round_trip([torch.nn.Parameter(torch.ones(2)), frozen, torch.ones(2, requires_grad=True) * 2])
    assert [type(tensor) for tensor in got] == [torch.nn.Parameter, torch.nn.Parameter, torch.Tensor]
    assert [tensor.requires_grad for tensor in got] == [True, False, True]
    assert all(tensor.is_leaf for tensor in got)


def test_a_state_without_tensors_needs_no_buffer() -> None:
    encoded = StateEncoder().encode({"epoch": 1})
    assert encoded.num_bytes == 0
    assert decode(encoded, copy=False) == {"epoch": 1}


def test_training_after_encode_does_not_show() -> None:
    tensor, array = torch.zeros(3), np.zeros(3000)
    encoded = StateEncoder().encode([tensor, array])
    tensor.fill_(7)
    array[:] = 7
    got = decode(encoded, copy=True)
    assert got[0].tolist() == [0.0] * 3
    assert not got[1].any()


def test_encode_keeps_no_tensor_alive() -> None:
    tensor = torch.zeros(3)
    reference = weakref.ref(tensor)
    encoder = StateEncoder()
    gc.disable()
    try:
        encoded = encoder.encode({"x": tensor})
        del tensor
        assert reference() is None
    finally:
        gc.enable()
    assert decode(encoded, copy=True)["x"].tolist() == [0.0] * 3


def test_the_buffer_travels_outside_of_the_pickle() -> None:
    encoded = StateEncoder().encode({"x": torch.zeros(100_000), "y": torch.zeros(1)})
    buffers: list[pickle.PickleBuffer] = []
    content = pickle.dumps(encoded, protocol=5, buffer_callback=buffers.append)
    assert len(content) < 2_000
    assert [buffer.raw().nbytes for buffer in buffers] == [encoded.num_bytes]


def test_parts_start_at_multiples_of_64_bytes() -> None:
    encoded = StateEncoder().encode([torch.zeros(1, dtype=torch.bool), torch.zeros(3), torch.zeros(2)])
    got = decode(encoded, copy=False)
    assert [tensor.data_ptr() % 64 for tensor in got] == [0, 0, 0]


def test_views_lie_in_the_buffer_and_copies_do_not() -> None:
    encoded = StateEncoder().encode([torch.zeros(3), np.zeros(3000)])
    tensor_view, array_view = decode(encoded, copy=False)
    tensor_copy, array_copy = decode(encoded, copy=True)
    encoded.buffer.fill(255)
    assert tensor_view.isnan().all()
    assert np.isnan(array_view).all()
    assert tensor_copy.tolist() == [0.0] * 3
    assert not array_copy.any()


@pytest.mark.parametrize("copy", [True, False])
def test_each_tensor_has_a_storage_exactly_over_its_bytes(copy: bool) -> None:
    got = round_trip([torch.zeros(3), torch.zeros(100_000)], copy=copy)
    assert [tensor.untyped_storage().nbytes() for tensor in got] == [12, 400_000]
    stream = io.BytesIO()
    torch.save(got[0], stream)
    assert stream.tell() < 5_000


def test_views_of_read_only_memory_come_without_a_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = round_trip([torch.ones(3), np.zeros(3000)], copy=False)
    assert got[0].tolist() == [1.0] * 3
    assert not got[1].flags.writeable


def test_a_buffer_that_nobody_uses_any_more_is_used_again() -> None:
    encoder = StateEncoder()
    first = encoder.encode(torch.zeros(1000))
    address = first.buffer.ctypes.data
    del first

    second = encoder.encode(torch.ones(900))

    assert second.buffer.ctypes.data == address
    assert decode(second, copy=True).tolist() == [1.0] * 900


@pytest.mark.parametrize("keep", [lambda encoded: encoded, lambda encoded: decode(encoded, copy=False)["x"][3:]])
def test_a_buffer_in_use_is_not_touched(keep: Callable[[EncodedState], Any]) -> None:
    encoder = StateEncoder()
    kept = keep(encoder.encode({"x": torch.zeros(1000)}))
    for _ in range(3):
        encoder.encode({"x": torch.ones(1000)})
    assert not (decode(kept, copy=True)["x"] if isinstance(kept, EncodedState) else kept).any()


def test_whoever_keeps_the_last_state_finds_two_buffers_in_turn() -> None:
    encoder = StateEncoder()
    addresses, last = [], None
    for _ in range(6):
        last = encoder.encode(torch.zeros(1000))
        addresses.append(last.buffer.ctypes.data)
    assert last is not None
    assert len(set(addresses)) == 2
    assert addresses[:2] * 3 == addresses


def test_a_buffer_comes_back_from_another_thread_and_from_an_encoder_that_is_gone() -> None:
    encoder = StateEncoder()
    held = [encoder.encode(torch.zeros(1000))]
    address = held[0].buffer.ctypes.data
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()
    last = encoder.encode(torch.ones(1000))
    assert last.buffer.ctypes.data == address
    del encoder
    assert decode(last, copy=True).tolist() == [1.0] * 1000


def test_a_state_that_outgrew_the_spare_buffers_gets_a_larger_one() -> None:
    encoder = StateEncoder()
    encoder.encode(torch.zeros(10))
    assert decode(encoder.encode(torch.ones(1000)), copy=True).tolist() == [1.0] * 1000


def test_no_more_than_two_buffers_are_kept() -> None:
    encoder = StateEncoder()
    lent = [encoder.encode(torch.zeros(1000)) for _ in range(4)]
    addresses = {encoded.buffer.ctypes.data for encoded in lent}
    assert len(addresses) == 4
    lent.clear()
    assert sum(memory.num_bytes for memory in encoder._buffers._spare) == 2 * 4032


class TestLend:
    LARGE = 20_000

    def test_large_tensors_stay_where_they_are_and_all_arrive(self) -> None:
        large = torch.arange(self.LARGE)
        state = {
            "large": large,
            "same": large,
            "small": torch.ones(3),
            "turned": torch.arange(2.0 * self.LARGE).reshape(2, -1).t(),
            "parameter": torch.nn.Parameter(torch.ones(self.LARGE)),
            "array": np.arange(self.LARGE),
        }
        encoded = lend(state)
        assert [content.ctypes.data for content in encoded.apart] == [large.data_ptr(), state["parameter"].data_ptr()]
        assert encoded.buffer.nbytes < encoded.num_bytes
        got = decode(ship(encoded), copy=True)
        assert list(got) == list(state)
        assert got["large"] is got["same"]
        assert type(got["parameter"]) is torch.nn.Parameter
        for key in state:
            np.testing.assert_array_equal(np.asarray(got[key].data), np.asarray(state[key].data))

    def test_what_arrived_can_be_lent_again(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            arrived = decode(ship(lend({"x": torch.ones(self.LARGE)})), copy=False)
            again = decode(ship(lend(arrived)), copy=True)
        assert torch.equal(again["x"], torch.ones(self.LARGE))

    def test_lazy_conjugates_arrive_as_their_values(self) -> None:
        tensor = torch.randn(self.LARGE, dtype=torch.complex64)
        assert torch.equal(decode(ship(lend(tensor.conj())), copy=True), tensor.conj())


def test_what_cannot_be_pickled_is_reported() -> None:
    with pytest.raises(TypeError, match="pickle"):
        StateEncoder().encode({"lock": __import__("threading").Lock()})


def test_a_model_arrives_without_the_wrapper_that_belongs_to_its_group() -> None:
    class Model(torch.nn.Linear):
        pass

    wrapped = DistributedDataParallel.__new__(DistributedDataParallel)
    torch.nn.Module.__init__(wrapped)
    wrapped.module = Model(2, 1)
    got = round_trip({"models": [wrapped], "same": wrapped})
    assert type(got["same"]) is Model
    assert got["models"][0] is got["same"]
    assert torch.equal(got["same"].weight, wrapped.module.weight)


def test_a_part_of_something_divided_is_refused_with_advice() -> None:
    class Divided(torch.Tensor):
        def full_tensor(self) -> None: ...

    with pytest.raises(ValueError, match="gather_state"):
        StateEncoder().encode([torch.zeros(2).as_subclass(Divided)])


def test_a_process_without_pytorch_needs_none() -> None:
    program = """
import sys
import numpy as np
from raysgd.core.state.state_codec import StateEncoder, decode
state = {"weights": [np.arange(5000.0)], "epoch": 3}
arrived = decode(StateEncoder().encode(state), copy=True)
assert (arrived["weights"][0] == state["weights"][0]).all() and arrived["epoch"] == 3
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.gpu
@RunIf(cuda=True)
def test_tensors_on_a_gpu_arrive_on_the_cpu() -> None:
    tensor = torch.randn(1000, 7, device="cuda")
    encoder = StateEncoder()
    for sent in (tensor, tensor.t(), tensor[:, ::2]):
        got = decode(encoder.encode({"x": sent, "y": torch.ones(2)}), copy=True)
        assert got["x"].device.type == "cpu"
        assert torch.equal(got["x"], sent.cpu())
        assert got["y"].tolist() == [1.0, 1.0]
