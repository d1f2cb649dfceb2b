"""Files of whoever: none runs code, becomes much larger than it is, or changes a trainer that refuses it.

Covers `raysgd.core.state.strict_reading` and `raysgd.core.state.strict_reading`: whole files show what parts of
them do not. That good files are read as they were written is shown by `test_checkpoint_file.py`.
"""

from __future__ import annotations

import collections
import io
import json
import os
import pickle
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.tensor
from torch.distributed.device_mesh import DeviceMesh

from raysgd.core.state.strict_reading import DamagedFileError, FormerValue
from raysgd.exceptions import CheckpointCorruptedError, UnsafeCheckpointError
from raysgd.torch import TorchTrainer
from raysgd.torch.checkpoints import checkpoint_file
from raysgd.torch.checkpoints.checkpoint_file import unpacked
from raysgd.torch.objects import rng as random_states
from tests.torch.load_changed_files import KINDS
from tests.torch.mutations import archived, sealed
from tests.torch.operators_for_tests import equal
from tests.torch.test_torch_trainer_state import stateful

ROOM_BYTES = 50 * 2**20


def pickled(operator: bytes) -> bytes:
    """A pickle of a state whose operator is what these opcodes make."""
    state = b"\x80\x02}(X\x05\x00\x00\x00epochK\x01X\x08\x00\x00\x00operator" + operator
    return state + b"X\x06\x00\x00\x00models]X\x0a\x00\x00\x00optimizers]u."


def archive_of(pickle_content: bytes, **members: bytes) -> bytes:
    """An archive as `torch.save` writes it."""
    contents = {"archive/data.pkl": pickle_content, "archive/version": b"3\n"}
    return archived({**contents, **{f"archive/{name}": content for name, content in members.items()}})


def dtype_with_objects() -> bytes:
    """A void dtype whose field is an object, and an array of it: the object is at an address out of the file."""
    names = b"X\x01\x00\x00\x00a"
    of_no_size = b"J\xff\xff\xff\xff"
    of_objects = (
        b"cnumpy\ndtype\n(X\x02\x00\x00\x00O8K\x00K\x01tR(K\x03X\x01\x00\x00\x00|NNN" + of_no_size * 2 + b"K?tb"
    )
    void = b"cnumpy\ndtype\n(X\x02\x00\x00\x00V8K\x00K\x01tR"
    state = b"(K\x03X\x01\x00\x00\x00|N" + names + b"\x85}" + names + of_objects + b"K\x00\x86sK\x08K\x01K\x10tb"
    array = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\nK\x00\x85" + as_bytes(b"b") + b"tR"
    return array + b"(K\x01K\x01\x85" + void + state + b"\x89" + as_bytes(b"AAAAAAAA") + b"tb"


def as_bytes(content: bytes) -> bytes:
    """Bytes as protocol 2 has them."""
    text = b"X" + struct.pack("<I", len(content)) + content
    return b"c_codecs\nencode\n(" + text + b"X\x06\x00\x00\x00latin1tR"


def old_arrays_of(array: bytes) -> bytes:
    """A file of the old library's TensorFlow trainer."""
    return (
        b"\x80\x02}(X\x05\x00\x00\x00epochK\x01X\x07\x00\x00\x00weights]" + array + b"a"
        b"X\x11\x00\x00\x00optimizer_weights]u."
    )


def tensor_of(num_values: int, size: int, stride: int, offset: int = 0) -> bytes:
    """A tensor that says how large it is, and how large its memory."""

    def number(value: int) -> bytes:
        return b"\x8a\x08" + struct.pack("<q", value)

    storage = b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpu" + number(
        num_values
    )
    place = number(offset) + number(size) + b"\x85" + number(stride) + b"\x85\x89ccollections\nOrderedDict\n)R"
    return b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + b"tQ" + place + b"tR"


def nested(num_levels: int) -> bytes:
    """Tuples in tuples."""
    return b")" + b"\x85" * num_levels


def state_with(operator: Any) -> dict[str, Any]:
    return {"epoch": 1, "operator": operator, "models": [], "optimizers": []}


MILLIONS = b"J" + struct.pack("<i", 400_000_000)
B_AS_BYTES = as_bytes(b"b")
ONE_MEMORY = {"data/0": bytes(64)}
FILES: dict[str, Callable[[], bytes]] = {
    "a dtype with fields of objects": lambda: archive_of(pickled(dtype_with_objects())),
    "the same in a file of arrays": lambda: old_arrays_of(dtype_with_objects()),
    "bytes by their number": lambda: archive_of(pickled(b"cbuiltins\nbytes\n" + MILLIONS + b"\x85R")),
    "a buffer by its size": lambda: archive_of(pickled(b"cbuiltins\nbytearray\n" + MILLIONS + b"\x85R")),
    "an array by its shape": lambda: archive_of(
        pickled(b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n" + MILLIONS + b"\x85" + B_AS_BYTES + b"tR")
    ),
    "a tensor past its memory": lambda: archive_of(pickled(tensor_of(10**6, 10**6, 1)), **ONE_MEMORY),
    "a tensor behind its memory": lambda: archive_of(pickled(tensor_of(16, 4, 1, offset=10**9)), **ONE_MEMORY),
    "a tensor that is one value": lambda: archive_of(pickled(tensor_of(16, 10**12, 0)), **ONE_MEMORY),
    "a tensor of no size at all": lambda: archive_of(pickled(tensor_of(16, -1, 1)), **ONE_MEMORY),
    "a value that is nested deeply": lambda: archive_of(pickled(nested(200_000))),
    "what replaces a method": lambda: archive_of(
        pickled(b"ccollections\nOrderedDict\n)R}X\x05\x00\x00\x00itemsK\x01sb")
    ),
    "members that are packed": lambda: zipped(zipfile.ZIP_DEFLATED, {"archive/data.pkl": bytes(100_000_000)}),
    "arrays that are packed": lambda: zipped(zipfile.ZIP_DEFLATED, {"state.json": b"[" * 100_000_000}),
    "an index that is nested deeply": lambda: zipped(zipfile.ZIP_STORED, {"state.json": b"[" * 200_000}),
    "an array by its header": lambda: array_file_of(b"(100000000,)", [100_000_000]),
    "an array of objects by its header": lambda: array_file_of(b"(1,)", [1], descr=b"|O"),
    "an old file by its tensor": lambda: old_file_of(tensor_of(10**8, 10**8, 1)),
}  # fmt: skip


def zipped(compression: int, members: dict[str, bytes]) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", compression) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return stream.getvalue()


def array_file_of(shape: bytes, told: list[int], descr: bytes = b"<f8") -> bytes:
    header = b"{'descr': '" + descr + b"', 'fortran_order': False, 'shape': " + shape + b", }\n"
    tree = {"epoch": 1, "models": {"raysgd": "array", "value": "a"}, "optimizers": []}
    index = {"format": 1, "state": tree, "arrays": {"a": {"dtype": "float64", "shape": told}}}
    member = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + bytes(8)
    return archived({"a.npy": member, "state.json": json.dumps(index).encode()})


def old_file_of(operator: bytes) -> bytes:
    stream = io.BytesIO()
    torch.save(0, stream, _use_new_zipfile_serialization=False)
    parts = io.BytesIO(stream.getvalue())
    start = b"".join(pickle.dumps(pickle.load(parts), protocol=2) for _ in range(3))
    return (
        start
        + pickled(operator.replace(b"tQ", b"NtQ"))
        + pickle.dumps(["0"], protocol=2)
        + struct.pack("<q", 16)
        + bytes(64)
    )


READ = """
import resource, sys
from pathlib import Path
from raysgd.tf.checkpoints import checkpoint_file as array_file
from raysgd.torch.checkpoints import checkpoint_file
import os
num_pages = int(Path("/proc/self/statm").read_text().split()[0])
limit = num_pages * os.sysconf("SC_PAGE_SIZE") + int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
for path in sys.argv[2:]:
    for read in (checkpoint_file.read, lambda path: checkpoint_file.mapped(path).__enter__(), array_file.read):
        try:
            print(path, "was read", read(path))
        except ValueError as error:
            assert len(str(error)) < 2000, path
            if read is not array_file.read:
                assert type(error).__name__ in ("CheckpointCorruptedError", "UnsafeCheckpointError"), path
                assert path in str(error)
        print(path)
"""


@pytest.mark.long
def test_no_file_is_read_that_is_not_what_it_says(tmp_path: Path) -> None:
    """Also with a right checksum."""
    paths = [tmp_path / f"{name}{more}" for name in FILES for more in ("", " that is sealed")]
    for path in paths:
        content = FILES[path.name.removesuffix(" that is sealed")]()
        path.write_bytes(content if path.name in FILES else sealed(content))
    found = subprocess.run(
        [sys.executable, "-c", READ, str(ROOM_BYTES), *map(str, paths)],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert found.returncode == 0, f"{found.stdout[-1000:]}\n{found.stderr[-3000:]}"
    assert "was read" not in found.stdout


@pytest.mark.parametrize(
    "mark", [1, torch.zeros(()).expand(10**9), torch.zeros(2, dtype=torch.bfloat16), torch.eye(2).to_sparse()], ids=type
)
def test_a_mark_of_an_array_without_an_array_is_refused(mark: Any, tmp_path: Path) -> None:
    checkpoint_file.write(tmp_path / "file", state_with({"raysgd_numpy": mark}))
    with pytest.raises(CheckpointCorruptedError, match="file`"):
        checkpoint_file.read(tmp_path / "file")


def test_functions_of_numpy_are_not_read_out_of_files_with_a_checksum(tmp_path: Path) -> None:
    checkpoint_file.write(tmp_path / "file", state_with(np.arange(3)))
    with pytest.raises(UnsafeCheckpointError, match=r"needs `numpy\._?core\.multiarray\._reconstruct`"):
        checkpoint_file.read(tmp_path / "file")


class Opens:
    """A file that makes a mesh of devices, which makes a process group, which opens a port."""

    def __reduce__(self) -> tuple[Any, ...]:
        return DeviceMesh, ("cpu", [0])


@pytest.mark.parametrize("is_sealed", [False, True])
def test_classes_that_torch_allows_by_itself_are_not_called(is_sealed: bool, tmp_path: Path) -> None:
    allowed = set(torch.serialization.get_safe_globals())
    assert DeviceMesh in allowed
    state = {"epoch": 1, "operator": Opens(), "models": [], "optimizers": []}
    checkpoint_file.write(tmp_path / "file", state) if is_sealed else torch.save(state, tmp_path / "file")
    with pytest.raises(UnsafeCheckpointError, match=r"needs `torch\.distributed"):
        checkpoint_file.read(tmp_path / "file")
    with pytest.raises(ValueError, match="cannot restore without running code"):
        checkpoint_file.packed(state)
    assert not torch.distributed.is_initialized()
    assert set(torch.serialization.get_safe_globals()) == allowed


def test_classes_that_the_program_allows_are_read(tmp_path: Path) -> None:
    torch.save({"epoch": 1, "operator": Allowed(), "models": [], "optimizers": []}, tmp_path / "file")
    with torch.serialization.safe_globals([Allowed]):
        assert type(checkpoint_file.read(tmp_path / "file")["operator"]) is Allowed
    with pytest.raises(UnsafeCheckpointError, match="Allowed"):
        checkpoint_file.read(tmp_path / "file")


class Allowed:
    """A class of the program."""


WHOLE, FIRST = torch.zeros(10_000), torch.zeros(1, 1, dtype=torch.int64)
LARGE: list[Any] = [
    [WHOLE[start:] for start in range(1000)],
    [{"raysgd_numpy": WHOLE.expand(2, -1)} for _ in range(1000)],
    {WHOLE[:1].expand(10**9): 1},
    collections.Counter({(WHOLE[:1].expand(10**9),): 1}),
    torch.sparse_coo_tensor(FIRST, torch.zeros(1, 1).expand(1, 10**9), (1, 10**9), check_invariants=False),
    torch.sparse_coo_tensor(
        FIRST.expand(1, 10**6), torch.zeros(1).expand(10**6), (2,), is_coalesced=False, check_invariants=False
    ),
]


@pytest.mark.parametrize("large", LARGE, ids=type)
def test_many_tensors_in_one_memory_are_not_made_large(large: Any, tmp_path: Path) -> None:
    torch.save(state_with(large), tmp_path / "file")
    with pytest.raises(CheckpointCorruptedError, match="many times as large as the file"):
        checkpoint_file.read(tmp_path / "file")


def test_arrays_of_earlier_files_are_not_made_large(tmp_path: Path) -> None:
    """Each of them is a copy of the same bytes."""
    arrays = [FormerValue() for _ in range(100)]
    for array in arrays:
        array.__setstate__((1, (10_000,), DTYPE, False, BYTES))
    with pytest.raises(DamagedFileError, match="many times as large as the file"):
        unpacked(state_with(arrays), len(BYTES))
    assert np.array_equal(unpacked([arrays[0]] * 100, len(BYTES))[99], np.zeros(10_000))


DTYPE, BYTES = FormerValue("f4"), bytes(40_000)
DTYPE.__setstate__((3, "<", None, None, None, -1, -1, 0))


@pytest.mark.parametrize(
    "layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc], ids=lambda layout: str(layout)
)
@pytest.mark.filterwarnings("ignore:Sparse CS. tensor support")
def test_sparse_tensors_come_back(layout: torch.layout, tmp_path: Path) -> None:
    matrix = torch.eye(3).to_sparse(layout=layout)
    state = {"epoch": 1, "operator": checkpoint_file.packed(matrix), "models": [], "optimizers": []}
    checkpoint_file.write(tmp_path / "file", state)
    got = checkpoint_file.read(tmp_path / "file")["operator"]
    assert got.layout == layout
    assert torch.equal(got.to_dense(), torch.eye(3))


INDEX = torch.tensor([[2**40], [0]])
OUT_OF_BOUNDS: list[Callable[[], torch.Tensor]] = [
    lambda: torch.sparse_coo_tensor(INDEX, torch.ones(1), (4, 4), check_invariants=False),
    lambda: torch.sparse_coo_tensor(-INDEX, torch.ones(1), (4, 4), check_invariants=False),
    lambda: torch.sparse_csr_tensor(INDEX[:, 0].sort()[0], INDEX[1], torch.ones(1), (1, 4), check_invariants=False),
    lambda: torch.sparse_csc_tensor(torch.tensor([0, 1]), INDEX[0], torch.ones(1), (4, 1), check_invariants=False),
]


@pytest.mark.parametrize("make", OUT_OF_BOUNDS)
@pytest.mark.filterwarnings("ignore:Sparse CS. tensor support")
def test_sparse_tensors_with_values_outside_are_refused(make: Callable[[], torch.Tensor], tmp_path: Path) -> None:
    state = {"epoch": 1, "operator": [{"mask": make()}], "models": [], "optimizers": []}
    checkpoint_file.write(tmp_path / "sealed", state)
    torch.save(state, tmp_path / "archive")
    torch.save(state, tmp_path / "old", _use_new_zipfile_serialization=False)
    for name in ("sealed", "archive", "old"):
        with pytest.raises(CheckpointCorruptedError, match=f"{name}`"):
            checkpoint_file.read(tmp_path / name)
    assert not torch.sparse.check_sparse_tensor_invariants.is_enabled()


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(2, dtype=torch.bfloat16),
        torch.ones(2, dtype=torch.complex64).conj(),
        torch.ones(2, dtype=torch.float8_e4m3fn),
        torch.ones(2, dtype=torch.uint16),
        torch.ones(2, 3).T,
        torch.ones(0, 3),
        torch.tensor(True),
        torch.nn.Parameter(torch.ones(2), requires_grad=False),
        torch.ones(2, requires_grad=True),
        torch.empty(10**12, device="meta"),
    ],
    ids=lambda tensor: f"{type(tensor).__name__} {tensor.dtype} {tuple(tensor.shape)}",
)
@pytest.mark.parametrize("form", ["ours", "archive", "old"])
def test_tensors_of_all_kinds_come_back(tensor: torch.Tensor, form: str, tmp_path: Path) -> None:
    if form == "old" and tensor.dtype in (torch.float8_e4m3fn, torch.uint16):
        return  # younger than that format
    state = {"epoch": 1, "operator": tensor, "models": [], "optimizers": []}
    if form == "ours":
        checkpoint_file.write(tmp_path / "file", state)
    else:
        torch.save(state, tmp_path / "file", _use_new_zipfile_serialization=form == "archive")
    got = checkpoint_file.read(tmp_path / "file")["operator"]
    assert (type(got), got.dtype, got.shape, got.stride()) == (
        type(tensor),
        tensor.dtype,
        tensor.shape,
        tensor.stride(),
    )
    assert (got.requires_grad, got.is_conj()) == (tensor.requires_grad, tensor.is_conj())
    assert tensor.is_meta or torch.equal(got.to(torch.complex64), tensor.to(torch.complex64))


def test_files_of_another_byte_order_are_read(tmp_path: Path) -> None:
    torch.save({"epoch": 1, "operator": torch.arange(3), "models": [], "optimizers": []}, tmp_path / "file")
    with zipfile.ZipFile(tmp_path / "file") as archive:
        members = {info.filename: archive.read(info) for info in archive.infolist()}
    changed = {
        name: b"big" if name.endswith("byteorder") else np.frombuffer(content, "<i8").astype(">i8").tobytes()
        if "/data/" in name else content
        for name, content in members.items()
    }  # fmt: skip
    (tmp_path / "file").write_bytes(archived(changed))
    assert checkpoint_file.read(tmp_path / "file")["operator"].tolist() == [0, 1, 2]


# ------------------------------------------------------------------------------------------------ states


def damaged(state: dict[str, Any], *path: Any, value: Any) -> dict[str, Any]:
    """A copy in which something else is at a place."""
    first, *rest = path
    copy = dict(state) if isinstance(state, dict) else list(state)
    copy[first] = damaged(copy[first], *rest, value=value) if rest else value
    return copy  # type: ignore[return-value]


DAMAGES: list[tuple[tuple[Any, ...], Any, str]] = [
    (("epoch",), "one", "`epoch` is a `str`, not a count"),
    (("epoch",), -1, "`epoch` is -1, not a count"),
    (("resume", "global_step"), 2**53, "`global_step` is 9007199254740992, not a count"),
    (("epoch",), True, "`epoch` is a `bool`"),
    (("resume",), [1], "is a `list`, not a dict"),
    (("resume", "global_step"), -3, "`global_step`"),
    (("resume", "position"), 5, "position in the data is a `int`"),
    (("resume", "position", "consumed"), 10**6, "after the end of the data"),
    (("resume", "position", "consumed"), None, "`consumed`"),
    (("resume", "position", "pass_index"), 0.5, "`pass_index`"),
    (("resume", "position", "seed"), "x", "seed"),
    (("resume", "rng"), 3, "random states"),
    (("resume", "rng", 0), 3, "lacks"),
    (("resume", "rng", 0, "numpy_position"), 10**7, "outside of its words"),
    (("resume", "rng", 0, "numpy_words"), b"short", "no words"),
    (("resume", "rng", 0, "python_words"), b"short", "damaged"),
    (("resume", "rng", 0, "python_gauss"), "x", "next number"),
    (("resume", "rng", 0, "torch"), b"short", "damaged"),
    (("resume", "rng", 0, "torch_cuda"), b"short", "CUDA"),
    (("models",), 3, "'models' is a `int` instead of a list"),
    (("models", 0), [1], "the state of a model is a `list`"),
    (("models", 0, "0.weight"), 5, "weight: a `int`"),
    (("models", 0, "0.weight"), torch.empty(1, 4, device="meta"), "0.weight"),
    (("optimizers", 0), 4, "the state of an optimizer is a `int`"),
    (("optimizers", 0, "param_groups"), 4, "groups of an optimizer"),
    (("optimizers", 0, "param_groups", 0), 4, "has no parameters"),
    (("optimizers", 0, "param_groups", 0, "params"), ["a", "b"], "has no parameters"),
    (("optimizers", 0, "param_groups", 0, "params"), [0, 0, 1, 2], "a parameter twice"),
    (("optimizers", 0, "param_groups", 0, "lr"), "fast", "'lr' is a `str` instead of a `float`"),
    (("optimizers", 0, "param_groups", 0, "lr"), [0.1], "'lr' is a `list`"),
    (("optimizers", 0, "param_groups", 0, "betas"), (0.9,), "'betas'"),
    (("optimizers", 0, "state"), 7, "state of an optimizer's parameters"),
    (("optimizers", 0, "state", 0), 7, "state of an optimizer's parameter is"),
    (("optimizers", 0, "state", 0, "exp_avg"), torch.zeros(2, 9), "'exp_avg' of a parameter has another shape"),
    (("optimizers", 0, "state", 0, "exp_avg"), torch.zeros(1), "'exp_avg' of a parameter has another shape or type"),
    (("optimizers", 0, "state", 0, "step"), -9, "'step' of a parameter"),
    (("optimizers", 0, "state", 0), {"step": 1}, "`Adam` cannot load this state"),
    (("optimizers", 0), {"param_groups": [{"params": [0, 1, 2, 3]}]}, "lacks betas, eps, initial_lr, lr, weight_decay"),
    (("schedulers",), 3, "'schedulers' is a `int`"),
    (("schedulers", 0), [3], "not the state of a scheduler"),
    (("schedulers", 0, "step"), 3, "'step'"),
    (("schedulers", 0, "optimizer"), 3, "'optimizer'"),
    (("schedulers", 0, "last_epoch"), "x", "'last_epoch'"),
]  # fmt: skip


@pytest.fixture(scope="module")
def trained() -> Iterator[TorchTrainer]:
    trainer = stateful(lambda operator_cls, **options: TorchTrainer(
        training_operator_cls=operator_cls, use_local=True, **options
    ))  # fmt: skip
    trainer.train(num_steps=2)
    yield trainer
    trainer.shutdown()


@pytest.mark.parametrize(
    ("place", "value", "message"), DAMAGES, ids=[f"{'.'.join(map(str, row[0]))} {row[1]!r:.20}" for row in DAMAGES]
)
def test_a_file_with_anything_else_in_it_changes_nothing(
    place: tuple[Any, ...], value: Any, message: str, trained: TorchTrainer, tmp_path: Path
) -> None:
    trained.save(tmp_path / "real")
    state = checkpoint_file.read(tmp_path / "real")
    checkpoint_file.write(tmp_path / "changed", damaged(state, *place, value=value))
    before, random_before = trained.state_dict(), random_states.capture()
    with pytest.raises(ValueError, match=message):
        trained.load(tmp_path / "changed")
    assert equal(trained.state_dict(), before)
    assert random_states.capture() == random_before
    trained.load(tmp_path / "real")


@pytest.mark.parametrize("part", ["epoch", "operator", "models", "optimizers", "schedulers"])
def test_a_state_without_a_part_changes_nothing(part: str, trained: TorchTrainer) -> None:
    before = trained.state_dict()
    with pytest.raises(ValueError, match=f"has no '{part}', so nothing was loaded"):
        trained.load_state_dict({name: value for name, value in before.items() if name != part})
    assert equal(trained.state_dict(), before)


ESCAPE = "\x1b]0;owned\x07\u202e"


def test_no_text_of_a_file_moves_the_cursor_of_a_terminal(trained: TorchTrainer, tmp_path: Path) -> None:
    """Neither in an error nor in its causes."""
    real = trained.state_dict()
    contents: list[Any] = [
        {**real, "raysgd_format": ESCAPE},
        {**real, "remade": {"by": ESCAPE, "parts": [{ESCAPE: "x"}, {}]}},
        damaged(real, "models", 0, value={ESCAPE: torch.ones(1)}),
        damaged(real, "optimizers", 0, "state", 0, value={ESCAPE: "x"}),
        damaged(real, "schedulers", 0, value={ESCAPE: ESCAPE}),
        {**real, ESCAPE: 1, "epoch": ESCAPE, "models": {ESCAPE: 1}},
    ]
    paths = [tmp_path / f"{number}{ESCAPE}.pt" for number in range(len(contents) + 1)]
    for path, content in zip(paths, contents, strict=False):
        torch.save(content, path)
    paths[-1].write_bytes(archive_of(pickled(f"c{ESCAPE}\n{ESCAPE}\n)R".encode())))
    for path in paths:
        with pytest.raises(ValueError) as info:  # noqa: PT011  the texts differ
            trained.load(path)
        error: BaseException | None = info.value
        while error is not None:
            assert str(error).replace("\n", "").isprintable()
            error = error.__cause__ or error.__context__
    torch.save(damaged(real, "models", 0, value={ESCAPE: torch.ones(1)}), tmp_path / "report")
    assert str(trained.load(tmp_path / "report", strict=False)).isprintable()


def test_an_optimizer_without_slots_changes_nothing(trained: TorchTrainer, tmp_path: Path) -> None:
    state = trained.state_dict()
    del state["optimizers"][0]["state"]
    before = trained.state_dict()
    with pytest.raises(ValueError, match="state of an optimizer's parameters is not a dict"):
        trained.load_state_dict(state)
    assert equal(trained.state_dict(), before)


def test_a_file_does_not_say_what_only_snapshots_say(trained: TorchTrainer, tmp_path: Path) -> None:
    """Which parameters are frozen, and gradients of any size."""
    trained.save(tmp_path / "real")
    state = checkpoint_file.read(tmp_path / "real")
    state["resume"] |= {"trained": {"frozen": [["0.weight"]], "groups": []}, "gradients": [{"0.weight": torch.ones(1)}]}
    checkpoint_file.write(tmp_path / "more", state)
    assert not {"trained", "gradients"} & checkpoint_file.read(tmp_path / "more")["resume"].keys()
    trained.load(tmp_path / "more")
    weight = trained.get_local_operator().model[0].weight
    assert weight.requires_grad
    assert weight.grad is None


def test_versions_of_layers_that_are_none_change_nothing(trained: TorchTrainer, tmp_path: Path) -> None:
    state = trained.state_dict()
    model = collections.OrderedDict(state["models"][0])
    model._metadata = {"": {"version": "new"}}  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="a layer's version"):
        trained.load_state_dict({**state, "models": [model]})


def test_a_file_does_not_replace_parameters(trained: TorchTrainer) -> None:
    """PyTorch would, if the state of a layer says so. The optimizer would go on with the former ones."""
    state = trained.state_dict()
    versions = {
        name: {**entry, "assign_to_params_buffers": True} for name, entry in state["models"][0]._metadata.items()
    }
    model = collections.OrderedDict(state["models"][0])
    model._metadata = versions  # type: ignore[attr-defined]
    before = list(trained.get_local_operator().model.parameters())
    trained.load_state_dict({**state, "models": [model]})
    after = list(trained.get_local_operator().model.parameters())
    assert [*map(id, after)] == [*map(id, before)]


# ------------------------------------------------------------------------------------------------ many files


def load_changed_files(kind: str, num_files: int, first_seed: int) -> dict[str, Any]:
    """What became of so many files, in a process with little memory."""
    found = subprocess.run(
        [sys.executable, "-m", "tests.torch.load_changed_files", kind, str(num_files), str(first_seed)],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "MALLOC_ARENA_MAX": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, f"{found.stdout[-1000:]}\n{found.stderr[-4000:]}"
    counts: dict[str, Any] = json.loads(found.stdout.splitlines()[-1])
    assert counts["taken"] + sum(counts["refused"].values()) == num_files
    return counts


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_75_changed_files_of_each_kind_do_no_harm(kind: str) -> None:
    counts = load_changed_files(kind, 75, first_seed=0)
    assert counts["taken"] > 5
    assert sum(counts["refused"].values()) > 25


@pytest.mark.soak
@pytest.mark.parametrize("first_seed", range(1_000_000, 1_010_000, 1000))
@pytest.mark.parametrize("kind", KINDS)
def test_10_000_changed_files_of_each_kind_do_no_harm(kind: str, first_seed: int) -> None:
    """In processes of 1,000 files, which are repeated with `python -m tests.torch.load_changed_files KIND 1 SEED`."""
    assert load_changed_files(kind, 1000, first_seed)["taken"] > 50
