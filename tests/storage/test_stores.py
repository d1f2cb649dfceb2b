"""Stores that fail, are missing, or are given as objects.

Covers `raysgd.storage._filesystems` and how `raysgd.storage._store` opens folders.
"""

from __future__ import annotations

import logging
import pickle
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem
from pyarrow import fs

from raysgd.storage import StorageError, _filesystems, open_folder
from tests.helpers.azure_server import AzureServer
from tests.helpers.run_if import RunIf
from tests.helpers.s3_server import BUCKET, KEYS, S3Server

ONCE = fs.AwsStandardS3RetryStrategy(max_attempts=1)
"""Saves time where no attempt can succeed."""


def native(server: S3Server, **options: Any) -> fs.S3FileSystem:
    return fs.S3FileSystem(
        access_key=KEYS[0],
        secret_key=KEYS[1],
        scheme="http",
        endpoint_override=f"127.0.0.1:{server.port}",
        region="us-east-1",
        **options,
    )


@pytest.mark.long
def test_a_server_that_is_away_for_a_while_is_tried_again(
    own_server: S3Server, caplog: pytest.LogCaptureFixture
) -> None:
    folder = open_folder(f"{BUCKET}/x", native(own_server, retry_strategy=ONCE))
    folder.write("a", b"before")
    own_server.freeze()

    class ThawAtFirstRetry(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            own_server.thaw()

    handler = ThawAtFirstRetry()
    logging.getLogger("raysgd.storage._retrying").addHandler(handler)
    try:
        folder.write("a", b"after")
    finally:
        own_server.thaw()
        logging.getLogger("raysgd.storage._retrying").removeHandler(handler)
    assert folder.read("a") == b"after"
    assert "trying again" in caplog.text


@pytest.mark.long
def test_a_server_that_goes_away_in_the_middle_is_named(
    own_server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    filesystem = native(own_server, retry_strategy=ONCE)
    before = open_folder(f"{BUCKET}/x", filesystem)  # as patient as ever with a server that lives
    before.staged("a").write("first", b"1")
    before.staged("b").write("first", b"1")
    before.commit("a")
    monkeypatch.setenv("RAYSGD_STORAGE_TIMEOUT_S", "1")
    folder = open_folder(f"{BUCKET}/x", filesystem)
    source = tmp_path / "source"
    source.mkdir()
    for number in range(20):
        (source / f"part-{number}").write_bytes(b"x" * 1000)
    own_server.kill()
    by_uri = open_folder(own_server.uri("x"))
    for call in (lambda: folder.staged("b").upload(source), lambda: folder.commit("b"), by_uri.committed, folder.make):
        with pytest.raises(StorageError) as caught:
            call()
        message = str(caught.value)
        assert f"{BUCKET}/x" in message
        assert "tried again for 1 s (RAYSGD_STORAGE_TIMEOUT_S)" in message
        assert KEYS[1] not in message
        assert isinstance(pickle.loads(pickle.dumps(caught.value)), StorageError)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("raysgd-storage")]


def test_a_folder_of_a_store_is_neither_on_a_disk_nor_in_memory(s3_server: S3Server) -> None:
    folder = open_folder(s3_server.uri("x"))
    assert not folder.is_local
    places = (folder, open_folder("/x"), open_folder("memory://x/y"))
    assert [each.is_in_memory for each in places] == [False, False, True]
    with pytest.raises(ValueError, match="is not on a disk of this machine: use `download`"):
        _ = folder.local_path


def test_a_large_file_travels_in_parts(s3_server: S3Server) -> None:
    content = bytes(range(256)) * (25 * 2**12)  # 25 MiB: more than S3 takes in one part
    folder = open_folder(s3_server.uri("large"))
    folder.write("a", content)
    assert folder.read("a") == content
    folder.delete()


def test_a_large_file_is_given_up_before_all_of_it_is_sent(
    own_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAYSGD_STORAGE_TIMEOUT_S", "0")
    folder = open_folder(own_server.uri("large"))
    drawn = 0

    def content() -> Iterator[bytes]:
        nonlocal drawn
        for drawn in range(1, 101):
            yield bytes(2**23)
            if drawn == 1:
                own_server.kill()

    with pytest.raises(StorageError, match="could not write"):
        (folder / "a")._send(content)  # type: ignore[attr-defined]
    assert drawn <= 10


def test_a_file_system_may_be_passed(s3_server: S3Server, tmp_path: Path) -> None:
    folder = pickle.loads(pickle.dumps(open_folder(f"{BUCKET}/given", native(s3_server))))
    folder.write("a", b"1")
    assert open_folder(s3_server.uri("given")).read("a") == b"1"
    assert str(folder) == f"s3://{BUCKET}/given"
    assert folder.path == f"{BUCKET}/given"
    in_memory = open_folder("/given/memory", MemoryFileSystem())
    in_memory.write("a", b"2")
    assert open_folder("memory://given/memory").read("a") == b"2"
    for local in (fs.LocalFileSystem(), LocalFileSystem()):
        assert open_folder(tmp_path / "given", local).local_path == tmp_path / "given"


def test_with_a_file_system_goes_a_path_in_it() -> None:
    with pytest.raises(ValueError, match=r"`storage_path='s3://b/x'`: with `filesystem=`, pass a path inside it"):
        open_folder("s3://b/x", fs.LocalFileSystem(), argument="storage_path")
    with pytest.raises(TypeError, match="`filesystem='s3'`: need a file system of PyArrow or fsspec"):
        open_folder("b/x", "s3")


def test_an_unknown_scheme_is_refused() -> None:
    with pytest.raises(ValueError, match=r"`storage_path='nowhere://x'`: `nowhere` is unknown. Allowed are .*`s3`"):
        open_folder("nowhere://x", argument="storage_path")


@pytest.mark.parametrize("uri", ["s3://", "s3:///folder", "s3://?region=eu", "s3://key:secret@", "gs://", "az://"])
def test_a_uri_without_a_bucket_is_refused(uri: str) -> None:
    with pytest.raises(ValueError, match=r"need the name of a bucket, such as `\w+://bucket/folder`") as error:
        open_folder(uri)
    assert "secret" not in str(error.value)


def test_a_missing_package_is_named_before_anything_is_connected() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"`path='oss://bucket/x'`.*ossfs.* on all nodes"):
        open_folder("oss://bucket/x")


class WithoutPyArrow:
    def find_spec(self, name: str, *rest: Any) -> None:
        if name == "pyarrow":
            raise ModuleNotFoundError("not there", name=name)


def test_without_pyarrow_the_command_that_installs_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("pyarrow", "pyarrow.fs"):
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [WithoutPyArrow(), *sys.meta_path])
    with pytest.raises(ModuleNotFoundError, match=r'needs `pyarrow`, which .* Run: pip install "pyarrow>='):
        open_folder("s3://never-opened-before/x")


class HangsUp(threading.Thread):
    """A server that takes connections and ends them. Counts them."""

    def __init__(self) -> None:
        super().__init__(name="hangs-up", daemon=True)
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.num_connections = 0

    def run(self) -> None:
        with suppress(OSError):
            while True:
                self.socket.accept()[0].close()
                self.num_connections += 1

    def end(self) -> None:
        self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()
        self.join()


def test_a_server_that_does_not_answer_is_asked_as_often_as_we_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYSGD_STORAGE_TIMEOUT_S", "0")
    server = HangsUp()
    server.start()
    folder = open_folder(S3Server(server.socket.getsockname()[1], None).uri("x"))  # type: ignore[arg-type]
    with pytest.raises(StorageError, match="could not look at"):
        folder.has("a")
    server.end()
    assert server.num_connections == 1


def test_a_uri_of_s3_has_the_options_that_pyarrow_gives_it() -> None:
    options = "region=x&scheme=http&endpoint_override=host%3A9000&allow_bucket_creation=true"
    for uri in ("s3://bucket/a/b?region=eu-north-1", f"s3://an%2Fid:a%2Bsecret@bucket/a/b?{options}"):
        filesystem, base = _filesystems.opened(uri)
        assert base == "bucket/a/b"
        assert filesystem == fs.FileSystem.from_uri(uri)[0]


def test_google_is_given_up_in_time() -> None:
    filesystem, base = _filesystems.opened("gs://anonymous@bucket/x")
    assert isinstance(filesystem, fs.GcsFileSystem)
    assert base == "bucket/x"


class TestAzure:
    URI = "abfs://container@account.dfs.core.windows.net/x/y"

    @pytest.mark.parametrize(
        "uri",
        [
            "abfs://account:a-secret@127.0.0.1:10000/container/x",
            "abfss://container:a-secret@account.dfs.core.windows.net/x",
            f"{URI}?enable_tls=true",
            f"{URI}?account_key=a-secret",
        ],
    )
    def test_a_uri_with_a_key_or_with_options_is_refused(self, uri: str) -> None:
        with pytest.raises(ValueError, match="Set `AZURE_STORAGE_ACCOUNT_KEY`") as refused:
            open_folder(uri)
        assert "a-secret" not in str(refused.value)

    @RunIf(modules=["adlfs"])
    def test_the_account_and_the_container_are_those_of_the_uri(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "YS1zZWNyZXQ=")
        filesystem, base = _filesystems.opened(self.URI)
        assert (filesystem.handler.fs.account_name, base) == ("account", "container/x/y")
        assert _filesystems.is_whole_at_close(filesystem)

    @pytest.mark.soak  # it asks for credentials everywhere
    @RunIf(modules=["adlfs"])
    def test_without_credentials_the_error_says_so(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """PyArrow's file system ended the process here."""
        monkeypatch.setenv("RAYSGD_STORAGE_TIMEOUT_S", "0")
        with pytest.raises(StorageError, match=r"DefaultAzureCredential failed .*Check the address, your credentials"):
            open_folder(self.URI).read("a")

    def test_a_uri_is_enough_where_the_environment_names_the_account(
        self, azure_server: AzureServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", azure_server.connection_string)
        folder = open_folder(f"abfs://{BUCKET}/by-uri")
        folder.staged("x").write("a", b"content")
        assert folder.committed() == []
        folder.commit("x")
        assert (open_folder(f"az://{BUCKET}/by-uri").committed(), folder.names()) == (["x"], ["x"])


def test_connections_are_used_again(s3_server: S3Server) -> None:
    first, second = (open_folder(s3_server.uri("x")) for _ in range(2))
    assert first.filesystem is (second / "y").filesystem


def test_chained_uris_of_fsspec_are_refused() -> None:
    with pytest.raises(ValueError, match="to chain file systems, pass an fsspec file system"):
        open_folder("simplecache::s3://bucket/x")


class Lying(MemoryFileSystem):
    """A store that says what is not so."""

    named: tuple[str, ...] = ()
    missing_bytes = 0

    def find(self, path: str, **options: Any) -> Any:
        found = super().find(path, **options)
        for name in self.named:
            found[f"{path}/{name}"] = {"name": f"{path}/{name}", "type": "directory", "size": 0}
        return found

    def info(self, path: str, **options: Any) -> Any:
        info = super().info(path, **options)
        return info | {"size": info["size"] + self.missing_bytes} if info["type"] == "file" else info


class TestALyingStore:
    @pytest.mark.parametrize("name", ["../outside", "a/../../outside", "/outside", "a//b", "."])
    def test_makes_no_folder_elsewhere(self, tmp_path: Path, name: str) -> None:
        store = Lying(skip_instance_cache=True)
        folder = open_folder("/lying/folder", store)
        folder.write("a", b"1")
        store.named = (name,)
        with pytest.raises(StorageError, match=r"could not read `.*`: the store lists the entry .*"):
            folder.download(tmp_path / "there" / "target")
        assert list(tmp_path.iterdir()) == []
        assert folder.names() == ["a"]
        store.named = ()
        folder.delete()

    def test_gives_no_file_of_another_size(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("RAYSGD_STORAGE_TIMEOUT_S", "0")
        store = Lying(skip_instance_cache=True)
        folder = open_folder("/lying/size", store)
        folder.write("a", bytes(90))
        store.missing_bytes = 10
        for call in (lambda: folder.read("a"), lambda: folder.fetch("a", tmp_path / "a")):
            with pytest.raises(StorageError, match=r"could not read .*: received 90 bytes of a file of 100"):
                call()
        assert list(tmp_path.iterdir()) == []
        store.missing_bytes = 0
        assert folder.read("a") == bytes(90)
        folder.delete()
