"""What a checkpoint may hold, so that it can be loaded back without running code."""

from __future__ import annotations

import collections
import datetime
import enum
import fractions
import io
import pathlib
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from raysgd.torch.checkpoints.loadable import check_loadable
from raysgd.torch.checkpoints.tensor_file import read_archive


class Colour(enum.Enum):
    RED = 1


class Level(enum.IntEnum):
    HIGH = 1


class Point(NamedTuple):
    x: int


class MyDict(dict):  # type: ignore[type-arg]
    pass


class Thing:
    def __init__(self) -> None:
        self.x = 1


def written_and_loaded(value: Any) -> Any:
    stream = io.BytesIO()
    torch.save(value, stream)
    return read_archive(stream.getbuffer())


ALLOWED = [
    None,
    True,
    3,
    2**1990,
    1.5,
    float("inf"),
    2 + 3j,
    "text \u00e9",
    b"\x00\xff",
    b"",
    "",
    bytearray(b"x"),
    bytearray(),
    set(),
    [1, [2]],
    (1, ("a",)),
    {1: "a", "b": {None: 2}, (1, 2): 3, 2.5: True},
    collections.OrderedDict(b=1, a=2),
    collections.Counter("aab"),
    {1, 2},
    torch.Size([2, 3]),
    torch.float16,
    torch.device("cpu"),
]


@pytest.mark.parametrize("value", ALLOWED, ids=repr)
def test_what_is_allowed_comes_back_as_it_was(value: Any) -> None:
    got = written_and_loaded(check_loadable({"operator": value}))["operator"]
    assert got == value
    assert type(got) is type(value)


REFUSED = [
    Colour.RED,
    Level.HIGH,
    Point(1),
    MyDict(a=1),
    Thing(),
    frozenset({1}),
    collections.deque([1]),
    collections.defaultdict(list),
    datetime.datetime(2020, 1, 1),
    fractions.Fraction(1, 2),
    pathlib.PurePosixPath("x"),
    2**5000,
    np.array([Thing()], dtype=object),
    np.ma.array([1]),
    lambda x: x,
    Thing,
]


@pytest.mark.parametrize("value", REFUSED, ids=lambda value: type(value).__name__)
def test_what_could_not_come_back_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match=r'`state\["operator"\]\["x"\]` is a `.*`, which a checkpoint cannot'):
        check_loadable({"epoch": 1, "operator": {"x": value}})


@pytest.mark.parametrize("value", REFUSED, ids=lambda value: type(value).__name__)
def test_nothing_is_refused_when_pickles_are_allowed(value: Any) -> None:
    assert check_loadable({"x": [value]}, allow_pickle=True)["x"][0] is value


def test_the_message_names_the_place_the_type_and_the_way_out() -> None:
    state = {"models": [{"weight": torch.zeros(1)}, {"extra": (1, Thing())}]}
    with pytest.raises(ValueError, match="cannot give back") as caught:
        check_loadable(state)
    message = str(caught.value)
    assert '`state["models"][1]["extra"][1]`' in message
    assert f"`{Thing.__module__}.Thing`" in message
    assert "`load(path, weights_only=False)`" in message


def test_a_key_that_could_not_come_back_is_refused() -> None:
    with pytest.raises(ValueError, match=r"`key of state\[<Colour.RED: 1>\]`"):
        check_loadable({Colour.RED: 1})


def test_the_users_own_allow_list_counts() -> None:
    with torch.serialization.safe_globals([Thing]):
        assert check_loadable({"x": Thing()})["x"].x == 1
    with pytest.raises(ValueError, match="Thing"):
        check_loadable({"x": Thing()})


@pytest.mark.parametrize(
    ("scalar", "number"),
    [
        (np.float64(1.5), 1.5),
        (np.float32(0.5), 0.5),
        (np.int8(-3), -3),
        (np.uint64(2**63), 2**63),
        (np.bool_(True), True),
        (np.complex64(1j), 1j),
        (np.str_("a"), "a"),
        (np.bytes_(b"a"), b"a"),
    ],
)
def test_numpy_numbers_become_pythons(scalar: Any, number: Any) -> None:
    got = check_loadable({"x": scalar, scalar: 0})
    assert got == {"x": number, number: 0}
    assert [type(got["x"]), type(list(got)[1])] == [type(number), type(number)]


@pytest.mark.parametrize(
    "dtype", ["?", "i1", "u8", "f2", "f8", "g", "c16", "S3", "U3", "M8[s]", "m8[ms]", ">f4", "i4,f8"]
)
def test_numpy_arrays_come_back_as_arrays(dtype: str) -> None:
    for array in (np.ones((2, 3), dtype=dtype), np.zeros((), dtype=dtype), np.ones((2, 3), dtype=dtype).T):
        got = written_and_loaded(check_loadable({"x": array}))["x"]
        assert type(got) is np.ndarray
        assert got.dtype == array.dtype.newbyteorder("=")  # numpy itself unpickles to the native order.
        np.testing.assert_array_equal(got, array)


def test_tensors_are_neither_copied_nor_read() -> None:
    huge = torch.empty(10**15, device="meta")
    parameter = torch.nn.Parameter(torch.zeros(2))
    got = check_loadable({"huge": huge, "parameter": parameter})
    assert got["huge"] is huge
    assert got["parameter"] is parameter


def test_arrays_are_neither_copied_nor_read() -> None:
    huge = np.broadcast_to(np.float64(0), (10**14,))
    assert check_loadable({"huge": huge})["huge"] is huge


def test_attributes_of_tensors_are_looked_at() -> None:
    tensor = torch.zeros(1)
    tensor.note = "fine"  # type: ignore[attr-defined]
    assert check_loadable([tensor])[0] is tensor
    tensor.note = Thing()  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=r"vars\(state\[0\]\)"):
        check_loadable([tensor])


def test_the_copy_leaves_the_original_alone_and_keeps_sharing() -> None:
    shared = {"x": np.float32(1.0)}
    original = {"a": shared, "b": shared}
    got = check_loadable(original)
    assert got["a"] is got["b"]
    assert got["a"] is not shared
    assert type(shared["x"]) is np.float32


def test_a_structure_that_contains_itself_is_copied() -> None:
    state: dict[str, Any] = {"list": []}
    state["list"].append(state)
    got = check_loadable(state)
    assert got["list"][0] is got


@pytest.mark.parametrize("num_levels", [101, 5000])
def test_what_is_nested_too_deeply_is_refused(num_levels: int) -> None:
    nested: list[Any] = []
    for _ in range(num_levels):
        nested = [nested]
    with pytest.raises(ValueError, match="`state` is nested more than 100 levels deep"):
        check_loadable({"x": nested})


def test_a_modules_state_dict_keeps_its_metadata() -> None:
    state = torch.nn.BatchNorm1d(2).state_dict()
    assert check_loadable(state)._metadata == state._metadata


def test_states_of_torchs_own_schedulers_are_allowed() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1, momentum=0.9)
    schedulers = [
        torch.optim.lr_scheduler.StepLR(optimizer, 5),
        torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 2]),
        torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5),
        torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer),
        torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=5),
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5),
    ]
    states = [scheduler.state_dict() for scheduler in schedulers]
    assert written_and_loaded(check_loadable(states)) == states
