"""Folders of every kind, all empty."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from raysgd.storage import Folder, open_folder
from tests.helpers.azure_server import AzureServer
from tests.helpers.gcs_server import GcsServer
from tests.helpers.s3_server import BUCKET, S3Server

MISSING_FOR_AZURE = AzureServer.missing()
AZURE = pytest.param(
    "abfs",
    marks=[pytest.mark.skip(MISSING_FOR_AZURE)] if MISSING_FOR_AZURE else [],  # one line for all tests of a file
)
KINDS = ("local", "file-uri", "s3", "gs", AZURE, "memory", "subtree")
_numbers = itertools.count()

Places = Callable[[str], Folder]


@pytest.fixture(scope="session")
def gcs_server() -> Iterator[GcsServer]:
    """A store in the language of Google's."""
    pytest.importorskip("gcp_storage_emulator")
    server = GcsServer.started()
    yield server
    server.kill()


@pytest.fixture(scope="session")
def azure_server() -> Iterator[AzureServer]:
    """A store in the language of Azure's."""
    if MISSING_FOR_AZURE:
        pytest.skip(MISSING_FOR_AZURE)
    server = AzureServer.started()
    yield server
    server.kill()


@pytest.fixture
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Places:
    """Makes an empty folder of a kind."""

    def make(kind: str) -> Folder:
        name = f"test-{next(_numbers)}"
        if kind == "s3":
            server: S3Server = request.getfixturevalue("s3_server")
            return open_folder(server.uri(f"tests/{name}"))
        if kind == "gs":
            google: GcsServer = request.getfixturevalue("gcs_server")
            return open_folder(google.uri(f"tests/{name}"))
        if kind == "abfs":
            azure: AzureServer = request.getfixturevalue("azure_server")
            return open_folder(f"{BUCKET}/tests/{name}", azure.filesystem())
        if kind == "memory":
            return open_folder(f"memory://{name}/folder")
        if kind == "subtree":  # a disk that is not known to be one, with files that are seen while they are written
            from pyarrow import fs

            return open_folder(name, fs.SubTreeFileSystem(str(tmp_path), fs.LocalFileSystem()))
        return open_folder((tmp_path / name).as_uri() if kind == "file-uri" else tmp_path / name)

    return make


@pytest.fixture(params=KINDS)
def folder(request: pytest.FixtureRequest, place: Places) -> Folder:
    """One folder, of each kind in turn."""
    return place(request.param)


@pytest.fixture
def own_server() -> Iterator[S3Server]:
    """A server that the test may freeze and kill."""
    server = S3Server.started()
    yield server
    server.kill()
