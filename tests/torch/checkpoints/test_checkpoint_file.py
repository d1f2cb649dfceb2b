"""The checkpoint file: whole or not at all, and checked."""

from __future__ import annotations

import collections
import errno
import os
import pickle
import signal
import stat
import subprocess
import sys
import textwrap
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash

from raysgd.core.files import replacing
from raysgd.torch.checkpoints import checkpoint_file
from raysgd.torch.checkpoints.checkpoint_file import (
    CheckpointCorruptedError,
    UnsafeCheckpointError,
    mapped,
    packed,
    read,
    seal_at_end_of,
    write,
)

RAN: list[str] = []


class Mischief:
    """Unpickling it leaves a trace."""

    def __reduce__(self) -> tuple[Any, ...]:
        return RAN.append, ("code ran",)


class Setting:
    """An operator's own class."""

    def __init__(self, value: int) -> None:
        self.value = value


def training_state(epoch: int = 1, *, width: int = 8, operator: Any = None) -> dict[str, Any]:
    """The state of a small model after one step."""
    model = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.BatchNorm1d(width))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.randn(4, width)).square().sum().backward()
    optimizer.step()
    return {
        "epoch": epoch,
        "operator": operator,
        "models": [model.state_dict()],
        "optimizers": [optimizer.state_dict()],
    }


def assert_same(got: Any, expected: Any) -> None:
    """Compare states that contain tensors, their types and the order of their keys."""
    assert type(got) is type(expected)
    if isinstance(expected, torch.Tensor):
        assert got.dtype == expected.dtype
        assert torch.equal(got, expected)
    elif isinstance(expected, dict):
        assert list(got) == list(expected)
        for key in expected:
            assert_same(got[key], expected[key])
    elif isinstance(expected, (list, tuple)):
        assert len(got) == len(expected)
        for one, other in zip(got, expected, strict=True):
            assert_same(one, other)
    else:
        assert got == expected


PRELUDE = """
import os, sys, torch
from raysgd.torch.checkpoints.checkpoint_file import write

def training_state(epoch, num_floats):
    return {"epoch": epoch, "operator": None, "models": [{"w": torch.zeros(num_floats)}], "optimizers": []}
"""


def run_python(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run a program that begins with `PRELUDE` in a process of its own."""
    return subprocess.run(
        [sys.executable, "-c", PRELUDE + textwrap.dedent(code), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )


class TestRoundTrip:
    def test_a_state_comes_back_as_it_was_written(self, tmp_path: Path) -> None:
        state = training_state(operator={"best": 0.5, "seen": [1, (2, "x")], "rng": b"\x00\x01", "none": None})
        keys = list(state)
        write(tmp_path / "last.pt", state)
        assert_same(read(tmp_path / "last.pt"), state)
        assert list(state) == keys

    @pytest.mark.parametrize("weights_only", [True, False])
    def test_a_plain_torch_load_reads_the_file(self, tmp_path: Path, weights_only: bool) -> None:
        state = training_state()
        write(tmp_path / "last.pt", state)
        loaded = torch.load(tmp_path / "last.pt", weights_only=weights_only)
        assert list(loaded)[-1] == "raysgd_format"
        assert loaded.pop("raysgd_format") == 1
        assert_same(loaded, state)

    def test_what_was_read_can_be_written_again(self, tmp_path: Path) -> None:
        state = training_state()
        write(tmp_path / "a.pt", state)
        write(tmp_path / "b.pt", read(tmp_path / "a.pt"))
        write(tmp_path / "c.pt", torch.load(tmp_path / "b.pt"))
        assert_same(read(tmp_path / "c.pt"), state)
        assert list(torch.load(tmp_path / "c.pt"))[-1] == "raysgd_format"

    def test_tied_weights_stay_tied(self, tmp_path: Path) -> None:
        first, second = torch.nn.Linear(200, 200), torch.nn.Linear(200, 200)
        second.weight = first.weight
        state = training_state() | {"models": [torch.nn.Sequential(first, second).state_dict()]}
        write(tmp_path / "last.pt", state)

        weights = read(tmp_path / "last.pt")["models"][0]

        assert weights["0.weight"].data_ptr() == weights["1.weight"].data_ptr()
        assert torch.equal(weights["0.weight"], first.weight)
        assert os.path.getsize(tmp_path / "last.pt") < 1.5 * first.weight.nbytes

    def test_tensors_do_not_depend_on_the_file_afterwards(self, tmp_path: Path) -> None:
        state = training_state(width=300)
        write(tmp_path / "last.pt", state)
        got = read(tmp_path / "last.pt")
        (tmp_path / "last.pt").write_bytes(b"")
        assert_same(got, state)
        got["models"][0]["0.weight"].zero_()

    @pytest.mark.parametrize("weights_only", [True, False])
    def test_numpy_values_come_back(self, tmp_path: Path, weights_only: bool) -> None:
        operator = {"scores": np.arange(5000.0), "best": np.float32(0.5)}
        write(tmp_path / "last.pt", packed(training_state(operator=operator)))
        got = read(tmp_path / "last.pt", weights_only=weights_only)["operator"]
        assert type(got["scores"]) is np.ndarray
        np.testing.assert_array_equal(got["scores"], operator["scores"])
        assert type(got["best"]) is float
        assert torch.equal(
            torch.load(tmp_path / "last.pt")["operator"]["scores"]["raysgd_numpy"], torch.arange(5000.0).double()
        )

    def test_tensors_always_come_to_the_cpu(self, tmp_path: Path) -> None:
        write(tmp_path / "last.pt", training_state())
        content = (tmp_path / "last.pt").read_bytes()
        with (
            zipfile.ZipFile(tmp_path / "last.pt") as archive,
            zipfile.ZipFile(tmp_path / "gpu.pt", "w") as other,
        ):
            for name in archive.namelist():  # What a machine with a GPU would have written.
                other.writestr(name, archive.read(name).replace(b"X\x03\x00\x00\x00cpu", b"X\x06\x00\x00\x00cuda:1"))
        assert b"cuda:1" in (tmp_path / "gpu.pt").read_bytes()
        assert b"cuda:1" not in content
        assert read(tmp_path / "gpu.pt")["models"][0]["0.weight"].device.type == "cpu"

    @pytest.mark.parametrize("is_ours", [True, False])
    def test_what_torch_allows_stays_as_it_was(self, is_ours: bool, tmp_path: Path) -> None:
        state = packed(training_state(operator=np.zeros(2)))
        write(tmp_path / "last.pt", state) if is_ours else torch.save(state, tmp_path / "last.pt")
        with torch.serialization.safe_globals([Setting]):
            before = set(torch.serialization.get_safe_globals())
            read(tmp_path / "last.pt")
            assert set(torch.serialization.get_safe_globals()) == before


def make_special(kind: str, path: Path) -> None:
    """Make something that is no regular file."""
    if kind == "fifo":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/null")


class TestWrite:
    def test_a_pipe_is_not_replaced(self, tmp_path: Path) -> None:
        path = tmp_path / "last.pt"
        make_special("fifo", path)
        before = path.stat()
        with pytest.raises(FileExistsError, match=r"not a regular file.*last\.pt"):
            write(path, training_state())
        assert path.stat() == before
        assert os.listdir(tmp_path) == ["last.pt"]

    def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(self, tmp_path: Path) -> None:
        write(tmp_path / "last.pt", training_state(1))
        with pytest.raises((AttributeError, pickle.PicklingError)):
            write(tmp_path / "last.pt", training_state(2, operator=lambda: None))
        assert read(tmp_path / "last.pt")["epoch"] == 1
        assert os.listdir(tmp_path) == ["last.pt"]

    def test_a_killed_write_leaves_the_old_file(self, tmp_path: Path) -> None:
        write(tmp_path / "last.pt", training_state(1))
        killed = run_python(
            """
            import signal
            from raysgd.torch.checkpoints.checkpoint_file import _ChecksummedStream

            write_all = _ChecksummedStream.write

            def write_and_be_killed(stream, content):
                num_written = write_all(stream, content)
                if num_written > 2**20:
                    stream.flush()
                    os.kill(os.getpid(), signal.SIGKILL)
                return num_written

            _ChecksummedStream.write = write_and_be_killed
            state = training_state(2, 2**20)
            state["models"].append({"w": torch.zeros(2**20)})
            write(os.path.join(sys.argv[1], "last.pt"), state)
            """,
            tmp_path,
        )
        assert killed.returncode == -signal.SIGKILL, killed.stderr
        assert read(tmp_path / "last.pt")["epoch"] == 1
        rest = [name for name in os.listdir(tmp_path) if name != "last.pt"]
        assert len(rest) == 1
        assert rest[0].startswith(".raysgd-")
        with replacing(str(tmp_path / "other.pt")) as file:
            file.write(b"other")
            write(tmp_path / "last.pt", training_state(2))  # removes what is left of the writer that was killed
        assert sorted(os.listdir(tmp_path)) == ["last.pt", "other.pt"]

    @pytest.mark.parametrize("raised", [KeyboardInterrupt, SystemExit])
    def test_a_write_that_a_signal_ends_raises_what_its_handler_raises(
        self, raised: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        write_all = checkpoint_file._ChecksummedStream.write

        def write_or_end(stream: Any, content: memoryview | bytes) -> int:
            if len(content) > 2**20:
                raise raised
            return write_all(stream, content)

        monkeypatch.setattr(checkpoint_file._ChecksummedStream, "write", write_or_end)
        with pytest.raises(raised):
            write(tmp_path / "last.pt", {**training_state(1), "models": [{"w": torch.zeros(2**20)}]})
        assert os.listdir(tmp_path) == []

    def test_what_killed_writers_left_is_deleted_once_it_is_old(self, tmp_path: Path) -> None:
        old, new = tmp_path / ".raysgd-old.tmp", tmp_path / ".raysgd-new.tmp"
        for path in (old, new):
            path.write_bytes(b"half a file")
        os.utime(old, (0, 0))
        write(tmp_path / "last.pt", training_state(1))
        assert (old.exists(), new.exists()) == (False, True)

    def test_a_limit_on_file_sizes_leaves_the_old_file_and_nothing_else(self, tmp_path: Path) -> None:
        write(tmp_path / "last.pt", training_state(1))
        done = run_python(
            """
            import resource, signal
            write(sys.argv[1] + ".size", training_state(2, 1000))
            overhead = os.path.getsize(sys.argv[1] + ".size") - 4000
            os.unlink(sys.argv[1] + ".size")

            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))
            for num_too_many in (2**22, 200, 8):  # bytes: in the data, in the directory, in the checksum
                try:
                    write(sys.argv[1], training_state(2, (2**20 + num_too_many - overhead) // 4))
                except OSError as error:
                    print(error.errno if "last.pt'" in str(error) else error)
            """,
            tmp_path / "last.pt",
        )
        assert done.stdout.split() == [str(errno.EFBIG)] * 3, done.stderr
        assert os.listdir(tmp_path) == ["last.pt"]
        assert read(tmp_path / "last.pt")["epoch"] == 1

    def test_a_missing_folder_is_made(self, tmp_path: Path) -> None:
        write(tmp_path / "new" / "inside" / "last.pt", training_state())
        assert os.listdir(tmp_path / "new" / "inside") == ["last.pt"]

    def test_a_file_is_no_folder(self, tmp_path: Path) -> None:
        write(tmp_path / "last.pt", training_state())
        with pytest.raises(FileExistsError, match=r"/last\.pt'"):
            write(tmp_path / "last.pt" / "inside.pt", training_state())

    def test_a_folder_is_no_target(self, tmp_path: Path) -> None:
        (tmp_path / "last.pt").mkdir()
        with pytest.raises(IsADirectoryError):
            write(tmp_path / "last.pt", training_state())
        assert os.listdir(tmp_path) == ["last.pt"]

    def test_a_state_without_the_required_keys_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match=r"lacks \['models', 'optimizers'\]"):
            write(tmp_path / "last.pt", {"epoch": 1, "operator": None})
        assert os.listdir(tmp_path) == []

    @pytest.mark.parametrize("target", ["notes.txt", "nothing", "store", "/dev/null"])
    def test_a_link_is_replaced_and_not_followed(self, target: str, tmp_path: Path) -> None:
        (tmp_path / "store").mkdir()
        (tmp_path / "notes.txt").write_text("mine")
        (tmp_path / "last.pt").symlink_to(target)
        write(tmp_path / "last.pt", training_state(3))
        assert read(tmp_path / "last.pt")["epoch"] == 3
        assert not (tmp_path / "last.pt").is_symlink()
        assert (tmp_path / "notes.txt").read_text() == "mine"
        assert os.listdir(tmp_path / "store") == []

    def test_permissions_are_those_of_the_old_file_or_the_umask(self, tmp_path: Path) -> None:
        before = os.umask(0o027)
        try:
            write(tmp_path / "last.pt", training_state())
        finally:
            os.umask(before)
        assert stat.S_IMODE(os.stat(tmp_path / "last.pt").st_mode) == 0o640
        os.chmod(tmp_path / "last.pt", 0o604)
        write(tmp_path / "last.pt", training_state())
        assert stat.S_IMODE(os.stat(tmp_path / "last.pt").st_mode) == 0o604

    def test_a_name_outside_of_ascii_is_written_and_read(self, tmp_path: Path) -> None:
        write(tmp_path / "époque.pt", training_state(4))
        assert read(tmp_path / "époque.pt")["epoch"] == 4


class TestMapped:
    def test_tensors_lie_in_the_file_inside_the_block(self, tmp_path: Path) -> None:
        state = training_state(width=300)
        write(tmp_path / "last.pt", state)
        with mapped(tmp_path / "last.pt") as found:
            assert num_mappings_of(tmp_path / "last.pt")
            assert_same(found["models"], state["models"])
            assert_same(found["optimizers"], state["optimizers"])
        del found
        assert not num_mappings_of(tmp_path / "last.pt")

    def test_writing_to_a_tensor_does_not_reach_the_file(self, tmp_path: Path) -> None:
        state = training_state(width=300)
        write(tmp_path / "last.pt", state)
        with mapped(tmp_path / "last.pt") as found:
            found["models"][0]["0.weight"].fill_(7)
        assert_same(read(tmp_path / "last.pt"), state)

    def test_a_file_that_is_replaced_meanwhile_is_read_to_its_end(self, tmp_path: Path) -> None:
        state = training_state(1, width=300)
        write(tmp_path / "last.pt", state)
        with mapped(tmp_path / "last.pt") as found:
            write(tmp_path / "last.pt", training_state(2, width=300))
            assert_same(found, state)

    def test_a_file_that_is_written_to_meanwhile_is_found(self, tmp_path: Path) -> None:
        write(tmp_path / "last.pt", training_state(width=300))
        os.utime(tmp_path / "last.pt", (1, 1))
        with (
            pytest.raises(CheckpointCorruptedError, match="written to while it was read"),
            mapped(tmp_path / "last.pt"),
        ):
            (tmp_path / "last.pt").open("r+b").write(b"PK")

    def test_a_file_that_cannot_be_mapped_is_read(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(*args: Any, **options: Any) -> None:
            raise OSError(errno.ENODEV, "no mapping on this file system")

        state = training_state(width=300)
        write(tmp_path / "last.pt", state)
        monkeypatch.setattr(checkpoint_file.mmap, "mmap", refuse)
        with mapped(tmp_path / "last.pt") as found:
            assert not num_mappings_of(tmp_path / "last.pt")
            assert_same(found, state)

    @pytest.mark.parametrize("use", [read, lambda path: mapped(path).__enter__()])
    def test_the_name_says_nothing_about_the_format(self, tmp_path: Path, use: Callable[[Path], Any]) -> None:
        write(tmp_path / "last.safetensors", training_state(4))
        assert use(tmp_path / "last.safetensors")["epoch"] == 4


def num_mappings_of(path: Path) -> int:
    """How many times the file is mapped into this process."""
    return Path("/proc/self/maps").read_text().count(str(path))


@pytest.fixture(scope="module")
def small_file(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("small") / "last.pt"
    write(path, training_state(operator={"note": "x" * 50}))
    return path.read_bytes()


@pytest.fixture(scope="module")
def large_file(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """One of several blocks, with a tensor that is read in several pieces."""
    path = tmp_path_factory.mktemp("large") / "last.pt"
    write(path, training_state(operator=[torch.eye(600), torch.full((200_000,), 1.0), torch.zeros(200_000)]))
    return path.read_bytes()


def assert_corrupted(path: Path, content: bytes | bytearray) -> None:
    path.write_bytes(content)
    for weights_only in (True, False):
        with pytest.raises(CheckpointCorruptedError, match=r"last\.pt` is not an intact checkpoint"):
            read(path, weights_only=weights_only)
        with (
            pytest.raises(CheckpointCorruptedError, match=r"last\.pt` is not an intact checkpoint"),
            mapped(path, weights_only=weights_only),
        ):
            pass


class TestSeal:
    def test_it_is_the_xxh128_of_the_archive_without_the_comment(self, small_file: bytes) -> None:
        assert small_file[-48:-32] == b"raysgd:1:xxh128:"
        assert xxhash.xxh128_hexdigest(small_file[:-50] + b"\0\0") == small_file[-32:].decode()

    @pytest.mark.parametrize("tail", [b"", b"raysgd:1:xxh128:00", b"\x14\0raysgd:1:sha1:00000000"])
    def test_anything_else_is_none(self, tail: bytes) -> None:
        assert seal_at_end_of(tail) is None


class TestDamage:
    @pytest.mark.filterwarnings("ignore:Detected pickle protocol")
    def test_flipped_bits_all_over_a_small_file_are_found(self, tmp_path: Path, small_file: bytes) -> None:
        num_bits = len(small_file) * 8
        for bit in [*range(0, num_bits, 37), *range(num_bits - 110 * 8, num_bits, 7)]:
            damaged = bytearray(small_file)
            damaged[bit // 8] ^= 1 << bit % 8
            (tmp_path / "last.pt").write_bytes(damaged)
            with pytest.raises(CheckpointCorruptedError):
                read(tmp_path / "last.pt")

    def test_flipped_bits_of_a_large_file_are_found(self, tmp_path: Path, large_file: bytes) -> None:
        positions = np.random.default_rng(0).integers(0, len(large_file), 25)
        for position in positions:
            damaged = bytearray(large_file)
            damaged[position] ^= 1 << int(position) % 8
            assert_corrupted(tmp_path / "last.pt", damaged)

    @pytest.mark.parametrize("missing", [1, 10, 86, 90, 1000, 4096])
    def test_a_truncated_file_is_found(self, tmp_path: Path, large_file: bytes, missing: int) -> None:
        assert_corrupted(tmp_path / "last.pt", large_file[:-missing])

    def test_appended_bytes_are_found(self, tmp_path: Path, small_file: bytes) -> None:
        for extra in (b"x", bytes(100), small_file):
            assert_corrupted(tmp_path / "last.pt", small_file + extra)

    @pytest.mark.parametrize("content", [b"", b"PK", b"hello " * 100, b"PK\x03\x04" + bytes(500), bytes(5000)])
    def test_what_is_no_checkpoint_is_found(self, tmp_path: Path, content: bytes) -> None:
        assert_corrupted(tmp_path / "last.pt", content)

    def test_damaged_code_does_not_run(self, tmp_path: Path) -> None:
        write(tmp_path / "last.pt", training_state(operator=Mischief()))
        damaged = bytearray((tmp_path / "last.pt").read_bytes())
        damaged[-200] ^= 1
        RAN.clear()
        assert_corrupted(tmp_path / "last.pt", damaged)
        assert RAN == []

    def test_the_message_says_what_to_do(self, tmp_path: Path, small_file: bytes) -> None:
        (tmp_path / "last.pt").write_bytes(small_file[:-1])
        with pytest.raises(CheckpointCorruptedError, match=r"its end is missing.*load an earlier checkpoint"):
            read(tmp_path / "last.pt")

    def test_a_missing_file_is_not_a_damaged_one(self, tmp_path: Path) -> None:
        with pytest.raises(FileNotFoundError):
            read(tmp_path / "absent.pt")
        with pytest.raises(IsADirectoryError):
            read(tmp_path)


class TestOlderFiles:
    @pytest.mark.parametrize("zipped", [True, False])
    def test_a_file_of_the_former_library_is_read(self, tmp_path: Path, zipped: bool) -> None:
        state = training_state(7)
        state["optimizers"][0]["param_groups"][0]["lr"] = np.float64(0.1)
        torch.save(state, tmp_path / "old.pt", _use_new_zipfile_serialization=zipped)
        assert_same(read(tmp_path / "old.pt"), state)
        assert_same(read(tmp_path / "old.pt", weights_only=False), state)
        with mapped(tmp_path / "old.pt") as found:
            assert_same(found, state)

    @pytest.mark.parametrize("zipped", [True, False])
    @pytest.mark.parametrize("share", [0.02, 0.3, 0.9, 0.999])
    def test_a_truncated_one_is_found(self, tmp_path: Path, zipped: bool, share: float) -> None:
        torch.save(training_state(width=50), tmp_path / "last.pt", _use_new_zipfile_serialization=zipped)
        content = (tmp_path / "last.pt").read_bytes()
        assert_corrupted(tmp_path / "last.pt", content[: int(len(content) * share)])

    @pytest.mark.parametrize("zipped", [True, False])
    def test_one_with_foreign_objects_is_refused(self, tmp_path: Path, zipped: bool) -> None:
        state = training_state(operator=Setting(3))
        torch.save(state, tmp_path / "old.pt", _use_new_zipfile_serialization=zipped)
        with pytest.raises(UnsafeCheckpointError, match=rf"needs `{__name__}\.Setting`"):
            read(tmp_path / "old.pt")
        assert read(tmp_path / "old.pt", weights_only=False)["operator"].value == 3


class TestContent:
    def test_code_is_refused_and_does_not_run(self, tmp_path: Path) -> None:
        write(tmp_path / "last.pt", training_state(operator=Mischief()))
        RAN.clear()
        with pytest.raises(UnsafeCheckpointError, match=r"last\.pt` needs `.*`.*`load\(path, weights_only=False\)`"):
            read(tmp_path / "last.pt")
        assert RAN == []

    def test_a_trusted_file_gives_back_objects(self, tmp_path: Path) -> None:
        write(tmp_path / "last.pt", training_state(operator=[Setting(5), collections.deque([1])]))
        got = read(tmp_path / "last.pt", weights_only=False)["operator"]
        assert got[0].value == 5
        assert got[1] == collections.deque([1])

    def test_an_object_whose_class_is_gone_is_no_damage(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        write(tmp_path / "last.pt", training_state(operator=Setting(5)))
        monkeypatch.delattr(sys.modules[__name__], "Setting")
        with pytest.raises(AttributeError, match="Setting"):
            read(tmp_path / "last.pt", weights_only=False)

    def test_a_newer_format_asks_for_an_upgrade(self, tmp_path: Path) -> None:
        torch.save(training_state() | {"raysgd_format": 2}, tmp_path / "last.pt")
        with pytest.raises(ValueError, match=r"format 2; .* formats up to 1\. Upgrade raysgd") as caught:
            read(tmp_path / "last.pt")
        assert not isinstance(caught.value, CheckpointCorruptedError)

    @pytest.mark.parametrize(
        ("content", "finding"),
        [
            ({"epoch": 1, "models": []}, r"lacks \['operator', 'optimizers'\]"),
            ([1, 2], "holds a `list`"),
            (torch.nn.Linear(1, 1).state_dict(), r"lacks \['epoch'"),
            (torch.zeros(1), "holds a `Tensor`"),
        ],
    )
    def test_another_content_is_named(self, tmp_path: Path, content: Any, finding: str) -> None:
        torch.save(content, tmp_path / "other.pt")
        with pytest.raises(ValueError, match=finding) as caught:
            read(tmp_path / "other.pt")
        assert not isinstance(caught.value, CheckpointCorruptedError)
