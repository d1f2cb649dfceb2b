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

from raysgd.core.state.strict_reading import DamagedFileError, check_depth
from raysgd.torch.checkpoints.checkpoint_file import packed, unpacked


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
    num_bytes = stream.tell()
    stream.seek(0)
    return unpacked(torch.load(stream, weights_only=True), num_bytes)


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
    got = written_and_loaded(packed({"operator": value}))["operator"]
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
    np.ma.array([1]),
    lambda x: x,
    Thing,
]


@pytest.mark.parametrize("value", REFUSED, ids=lambda value: type(value).__name__)
def test_what_could_not_come_back_is_refused(value: Any) -> None:
    kind = rf"{type(value).__module__}\.{type(value).__qualname__}"
    with pytest.raises(ValueError, match=rf'`state\["x"\]\[1\]` is a `{kind}`, .*`load\(path, weights_only=False\)`'):
        packed({"epoch": 1, "x": [2, value]})


@pytest.mark.parametrize("value", REFUSED, ids=lambda value: type(value).__name__)
def test_nothing_is_refused_when_pickles_are_allowed(value: Any) -> None:
    assert packed({"x": [value]}, allow_pickle=True)["x"][0] is value


def test_a_key_that_could_not_come_back_is_refused() -> None:
    with pytest.raises(ValueError, match=r"`key of state\[<Colour.RED: 1>\]`"):
        packed({Colour.RED: 1})


def test_the_users_own_allow_list_counts() -> None:
    with torch.serialization.safe_globals([Thing]):
        assert packed({"x": Thing()})["x"].x == 1
    with pytest.raises(ValueError, match="Thing"):
        packed({"x": Thing()})


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
    got = packed({"x": scalar, scalar: 0})
    assert got == {"x": number, number: 0}
    assert [type(got["x"]), type(list(got)[1])] == [type(number), type(number)]


@pytest.mark.parametrize("dtype", ["?", "i1", "u2", "u8", "f2", "f8", "c8", "c16", ">f4"])
def test_numpy_arrays_are_tensors_in_the_file_and_come_back_as_arrays(dtype: str) -> None:
    readonly = np.ones(3, dtype=dtype)
    readonly.flags.writeable = False
    ones = np.ones((2, 3), dtype=dtype)
    for array in (ones, np.zeros((), dtype=dtype), ones.T, ones[:, ::-1], np.ones((0, 2), dtype=dtype), readonly):
        written = packed({"x": array})
        assert type(written["x"]["raysgd_numpy"]) is torch.Tensor
        got = written_and_loaded(written)["x"]
        assert type(got) is np.ndarray
        assert got.dtype == array.dtype.newbyteorder("=")
        np.testing.assert_array_equal(got, array)
        assert got.flags.writeable


@pytest.mark.parametrize("dtype", ["O", "g", "S3", "U3", "M8[s]", "m8[ms]", "i4,f8"])
def test_arrays_that_are_no_tensors_are_refused_where_they_are_saved(dtype: str) -> None:
    array = np.zeros(2, dtype=dtype)
    with pytest.raises(ValueError, match=r'`state\["operator"\]\["x"\]` is an array of `.*`, which no tensor can hold'):
        packed({"epoch": 1, "operator": {"x": array}})
    assert packed({"x": array}, allow_pickle=True)["x"] is array


def test_an_array_that_is_in_two_places_is_one_array_again() -> None:
    array = np.arange(3)
    got = written_and_loaded(packed({"a": array, "b": [array, (array,)]}))
    assert got["a"] is got["b"][0] is got["b"][1][0]


def test_the_key_that_marks_arrays_is_refused() -> None:
    with pytest.raises(ValueError, match=r'`state\["x"\]\["raysgd_numpy"\]`: this key marks NumPy arrays'):
        packed({"x": {"raysgd_numpy": 1}})


def test_tensors_are_neither_copied_nor_read() -> None:
    huge = torch.empty(10**15, device="meta")
    parameter = torch.nn.Parameter(torch.zeros(2))
    got = packed({"huge": huge, "parameter": parameter})
    assert got["huge"] is huge
    assert got["parameter"] is parameter


def test_attributes_of_tensors_are_looked_at() -> None:
    tensor = torch.zeros(1)
    tensor.note = "fine"  # type: ignore[attr-defined]
    assert packed([tensor])[0] is tensor
    tensor.note = Thing()  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=r"vars\(state\[0\]\)"):
        packed([tensor])


def test_the_copy_leaves_the_original_alone_and_keeps_sharing() -> None:
    shared = {"x": np.float32(1.0)}
    original = {"a": shared, "b": shared}
    got = packed(original)
    assert got["a"] is got["b"]
    assert got["a"] is not shared
    assert type(shared["x"]) is np.float32


def test_a_structure_that_contains_itself_is_copied() -> None:
    state: dict[str, Any] = {"list": []}
    state["list"].append(state)
    got = packed(state)
    assert got["list"][0] is got


@pytest.mark.parametrize("num_levels", [101, 5000])
def test_what_is_nested_too_deeply_is_refused(num_levels: int) -> None:
    nested: list[Any] = []
    for _ in range(num_levels):
        nested = [nested]
    with pytest.raises(ValueError, match="`state` is nested more than 100 levels deep"):
        packed({"x": nested})


@pytest.mark.parametrize("turned", [False, True])
def test_depth_counts_what_was_seen_in_another_place(turned: bool) -> None:
    inner: list[Any] = []
    for _ in range(60):
        inner = [inner]
    outer = [inner]
    for _ in range(60):
        outer = [outer]
    both = [inner, outer]
    with pytest.raises(DamagedFileError, match="more than 100 levels"):
        check_depth(both[::-1] if turned else both)


def test_a_modules_state_dict_keeps_its_metadata() -> None:
    state = torch.nn.BatchNorm1d(2).state_dict()
    assert packed(state)._metadata == state._metadata


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
    assert written_and_loaded(packed(states)) == states
