"""Formats: the same rows from the first one and from the middle, on a disk and in a store; files that are found.

And what is no file: iterables, and streamed datasets of Hugging Face.

Covers `raysgd.streams.formats`: each format promises the same.
"""

from __future__ import annotations

import gzip
import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pyarrow as pa
import pytest
from pyarrow import feather, ipc, parquet

from raysgd.exceptions import StorageError, StreamError
from raysgd.storage import Folder, open_folder
from raysgd.streams import formats
from raysgd.streams.formats import (
    ArrowStream,
    FileStream,
    HuggingFaceStream,
    IterableStream,
    JSONLinesStream,
    ParquetStream,
    TarStream,
)
from raysgd.streams.stream import Stream, check_shards
from tests.helpers.s3_server import S3Server
from tests.streams.made import joint, pass_of, read_together

Write = Callable[[Folder, str, list[int]], None]


def table(numbers: list[int]) -> pa.Table:
    points = pa.FixedSizeListArray.from_arrays(pa.array([float(n) for n in numbers for _ in range(2)]), 2)
    return pa.table({"number": numbers, "text": [str(number) for number in numbers], "point": points})


def written(write: Callable[[Any], Any]) -> bytes:
    content = io.BytesIO()
    write(content)
    return content.getvalue()


def as_parquet(numbers: list[int]) -> bytes:
    return written(lambda content: parquet.write_table(table(numbers), content, row_group_size=7))


def as_file(numbers: list[int]) -> bytes:
    return written(lambda content: feather.write_feather(table(numbers), content, chunksize=5))


def as_arrow_stream(numbers: list[int]) -> bytes:
    def write(content: Any) -> None:
        with ipc.new_stream(content, table(numbers).schema) as writer:
            writer.write_table(table(numbers), max_chunksize=5)

    return written(write)


def as_tar(numbers: list[int], mode: Any = "w") -> bytes:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode=mode) as tar:
        folder = tarfile.TarInfo("a.b")
        folder.type = tarfile.DIRTYPE
        tar.addfile(folder)
        for number in numbers:
            for field, text in (("number", str(number)), ("text.txt", "x" * number)):
                member = tarfile.TarInfo(f"a.b/{number}.{field}")
                member.size = len(text)
                tar.addfile(member, io.BytesIO(text.encode()))
    return content.getvalue()


def as_lines(numbers: list[int]) -> bytes:
    return "".join(f"{json.dumps({'number': number})}\n\n" for number in numbers).encode()


FORMATS: dict[str, tuple[type[FileStream], str, Callable[[list[int]], bytes]]] = {
    "parquet": (ParquetStream, "parquet", as_parquet),
    "feather": (ArrowStream, "feather", as_file),
    "arrow": (ArrowStream, "arrow", as_arrow_stream),
    "tar": (TarStream, "tar", as_tar),
    "tgz": (TarStream, "tar.gz", lambda numbers: as_tar(numbers, "w:gz")),
    "lines": (JSONLinesStream, "jsonl", as_lines),
    "gzip": (JSONLinesStream, "jsonl.gz", lambda numbers: gzip.compress(as_lines(numbers))),
}


def filled(folder: Folder, name: str) -> tuple[type[FileStream], list[str]]:
    """Three files of a format, with 60 rows in all."""
    kind, ending, content_of = FORMATS[name]
    files = [f"part-{part}.{ending}" for part in range(3)]
    for file, numbers in zip(files, (range(20), range(20, 21), range(21, 60)), strict=True):
        folder.write(file, content_of(list(numbers)))
    folder.write("README.txt", b"no data")
    return kind, files


def number_of(row: dict[str, Any]) -> int:
    return int(row["number"])


def all_rows(stream: Stream, world_size: int = 2) -> list[int]:
    steps = read_together(pass_of(stream.map(number_of).batch(7)), world_size)
    return sorted(row for step in steps for row in joint(step))


IN_STORES = ("parquet", "lines")  # one that is read in pieces, and one that is fetched


@pytest.fixture(params=["disk", "s3"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Folder:
    if request.param == "disk":
        return open_folder(tmp_path)
    server: S3Server = request.getfixturevalue("s3_server")
    return open_folder(server.uri(f"streams/{tmp_path.name}"))


# In stores, files of the other formats are opened in one of the same two ways.
@pytest.mark.parametrize(
    ("name", "folder"),
    [*((name, "disk") for name in FORMATS), *((name, "s3") for name in IN_STORES)],
    indirect=["folder"],
)
def test_each_row_is_read_once_from_any_row_on(name: str, folder: Folder) -> None:
    kind, files = filled(folder, name)
    stream = kind(folder.uri)
    assert all_rows(stream) == all_rows(stream.shuffle(100), 3) == list(range(60))
    shards = check_shards(stream)
    assert [shard.name for shard in shards if "#" not in shard.name] == (
        [] if name == "parquet" else [str(folder / file) for file in files]
    )
    whole = [list(map(number_of, stream.open(shard.name, 0))) for shard in shards]
    assert [number for rows in whole for number in rows] == list(range(60))
    for shard, rows in zip(shards, whole, strict=True):
        for start in {0, 1, len(rows) // 2, len(rows)}:
            assert list(map(number_of, stream.open(shard.name, start))) == rows[start:]
        with pytest.raises(ValueError, match="shard"):
            list(stream.open(shard.name, len(rows) + 1))
    again = cloudpickle.loads(cloudpickle.dumps(stream))
    assert again.shards() == stream.shards()


def test_what_rows_are(tmp_path: Path) -> None:
    folder = open_folder(tmp_path)
    kinds = {name: filled(folder, name)[0] for name in FORMATS}
    for name in ("parquet", "feather", "arrow"):
        stream = kinds[name](f"{tmp_path}/*.{name}")
        row = list(stream.open(stream.shards()[-1].name, 0))[-1]
        assert (row["number"], row["text"], list(row)) == (59, "59", ["number", "text", "point"])
        assert isinstance(row["point"], np.ndarray)
        assert row["point"].tolist() == [59.0, 59.0]
        chosen: Any = kinds[name](f"{tmp_path}/*.{name}", columns=["text"])  # type: ignore[call-arg]
        assert next(chosen.open(chosen.shards()[0].name, 1)) == {"text": "1"}
    stream = TarStream(tmp_path / "part-0.tar")
    assert next(stream.open(stream.shards()[0].name, 3)) == {"__key__": "a.b/3", "number": b"3", "text.txt": b"xxx"}


@pytest.mark.skipif(int(pa.__version__.split(".")[0]) < 19, reason="an older pyarrow writes no such file")
def test_tables_keep_what_is_missing_and_no_row_depends_on_its_neighbors(tmp_path: Path) -> None:
    points = pa.array([[1.0, 2.0], None, [3.0, None], [4.0, 5.0]], pa.list_(pa.float64(), 2))
    columns = {"a": [1, None, 3, 4], "point": points, "many": [[1], [], [3], None]}
    parquet.write_table(pa.table(columns), tmp_path / "x.parquet")
    stream = ParquetStream(tmp_path)
    whole = list(stream.open(stream.shards()[0].name, 0))
    assert repr(whole) == repr(
        [
            {"a": 1, "point": np.array([1.0, 2.0]), "many": [1]},
            {"a": None, "point": None, "many": []},
            {"a": 3, "point": [3.0, None], "many": [3]},
            {"a": 4, "point": np.array([4.0, 5.0]), "many": None},
        ]
    )
    assert repr(list(stream.open(stream.shards()[0].name, 3))) == repr(whole[3:])


def test_few_parquet_files_are_divided_into_row_groups_of_known_lengths(tmp_path: Path) -> None:
    filled(open_folder(tmp_path), "parquet")
    stream = ParquetStream(tmp_path)
    assert [shard.num_rows for shard in stream.shards()] == [7, 7, 6, 1, 7, 7, 7, 7, 7, 4]
    assert len(stream) == 60
    for number in range(70):
        (tmp_path / f"more-{number:02}.parquet").write_bytes(as_parquet([60 + number, 200 + number]))
    many = ParquetStream(tmp_path)
    assert {shard.num_rows for shard in many.shards()} == {None}
    assert all_rows(many, 3) == sorted([*range(130), *range(200, 270)])
    [part] = [shard.name for shard in many.shards() if "part-2" in shard.name]
    assert number_of(next(many.open(part, 30))) == 51  # in its fifth row group


@pytest.mark.parametrize("name", IN_STORES)
def test_files_are_found_by_name_folder_and_pattern(name: str, folder: Folder) -> None:
    kind, files = filled(folder, name)
    path, _, query = folder.uri.partition("?")
    query = f"?{query}" if query else ""

    def numbers(*paths: str) -> list[int]:
        stream = kind([f"{each}{query}" for each in paths])
        return [number_of(row) for shard in stream.shards() for row in stream.open(shard.name, 0)]

    assert numbers(path) == numbers(f"{path}/") == numbers(f"{path}/part-*") == list(range(60))
    assert numbers(f"{path}/{files[1]}", f"{path}/{files[0]}") == [20, *range(20)]
    assert numbers(f"{path}/part-[12].*") == list(range(20, 60))
    with pytest.raises(FileNotFoundError, match=r"has no file that fits 'none-\*'"):
        numbers(f"{path}/none-*")
    with pytest.raises(FileNotFoundError, match=r"has no file that ends with \.|no file"):
        numbers(f"{path}/empty")
    with pytest.raises(ValueError, match="two shards have the name"):
        check_shards(kind([f"{path}/{files[0]}{query}"] * 2))
    missing = kind(f"{path}/none.{FORMATS[name][1]}{query}")
    with pytest.raises((FileNotFoundError, StreamError, StorageError), match=r"none\."):
        all_rows(missing)


def test_keys_of_a_store_are_in_no_name(s3_server: S3Server) -> None:
    folder = open_folder(s3_server.uri("streams/secret"))
    kind, _ = filled(folder, "lines")
    key = folder.uri.partition("://")[2].partition("@")[0]
    assert len(key) > 3
    assert not [shard for shard in kind(folder.uri).shards() if key in shard.name]


def test_folders_of_spark_are_folders(tmp_path: Path) -> None:
    (tmp_path / "table.parquet").mkdir()
    filled(open_folder(tmp_path / "table.parquet"), "parquet")
    assert all_rows(ParquetStream(tmp_path / "table.parquet")) == list(range(60))


def test_broken_files_are_named_with_the_row(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"number": 1}\n{"number": 2}\n{"number"')
    with pytest.raises(StreamError, match=r"a\.jsonl', row 2: `loads` failed with JSONDecodeError"):
        all_rows(JSONLinesStream(tmp_path), 1)
    (tmp_path / "a.tar").write_bytes(as_tar(list(range(9)))[:-11_000])
    with pytest.raises(StreamError, match=r"a\.tar' cannot be read from row \d on: ReadError: .*truncated"):
        all_rows(TarStream(tmp_path), 1)
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as tar:
        for _ in range(2):
            tar.addfile(tarfile.TarInfo("0.jpg"), io.BytesIO())
    (tmp_path / "a.tar").write_bytes(content.getvalue())
    with pytest.raises(StreamError, match="sample '0' has two files 'jpg'"):
        all_rows(TarStream(tmp_path), 1)


def left_out(stream: Stream, world_size: int) -> tuple[list[int], int]:
    """The rows of a stream with rows that cannot be read, and how many of these were counted."""
    steps = read_together(pass_of(stream.map(number_of).batch(7, on_error="skip")), world_size)
    [counted] = {batch.after.left_out for batches in steps[-1] for batch in batches}
    return sorted(row for step in steps for row in joint(step)), counted


@pytest.mark.parametrize("bad", [range(10, 13), range(290, 300), range(0, 300, 6), [*range(5), *range(100, 105)]])
def test_lines_that_cannot_be_parsed_are_counted_and_take_no_other_line_with_them(bad: Any, tmp_path: Path) -> None:
    lines = ["{no" if number in bad else json.dumps({"number": number}) for number in range(300)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines[:120]))
    (tmp_path / "b.jsonl").write_text("\n".join(lines[120:]))
    for world_size in (1, 3):
        assert left_out(JSONLinesStream(tmp_path), world_size) == (sorted({*range(300)} - {*bad}), len(bad))


def test_a_damaged_end_of_a_file_is_named_and_counted_as_far_as_lengths_are_known(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    parquet.write_table(
        pa.table({"number": range(60)}), tmp_path / "a.parquet", row_group_size=20, use_dictionary=False
    )
    content = bytearray((tmp_path / "a.parquet").read_bytes())
    start = parquet.ParquetFile(tmp_path / "a.parquet").metadata.row_group(1).column(0).data_page_offset
    content[start : start + 30] = bytes(30)
    (tmp_path / "a.parquet").write_bytes(content)
    assert left_out(ParquetStream(tmp_path), 2) == ([*range(20), *range(40, 60)], 20)
    assert "skipped in a stream: the rest of shard" in caplog.text
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(as_lines(list(range(9000))))[:-5000])
    rows, counted = left_out(JSONLinesStream(tmp_path), 2)
    assert rows == list(range(len(rows)))
    assert counted == 4  # the row at which the file is cut off, and three tries behind it
    assert f"a.jsonl.gz', from row {len(rows) + 4} on" in caplog.text


def test_files_that_change_have_another_version(tmp_path: Path) -> None:
    def version(kind: type[FileStream]) -> Any:
        return [shard.version for shard in kind(tmp_path).shards()]

    (tmp_path / "a.jsonl").write_bytes(as_lines(list(range(20, 40))))
    saved = version(JSONLinesStream)
    assert version(JSONLinesStream) == saved
    for numbers in (list(range(40)), list(range(20, 39)), list(range(40, 60))):
        (tmp_path / "a.jsonl").write_bytes(as_lines(numbers))
        assert version(JSONLinesStream) != saved
    found = []
    for rows in ([1, 2, 3], [1, 2, 4]):  # of the same length and size
        parquet.write_table(pa.table({"x": rows}), tmp_path / "a.parquet")
        found.append([(tmp_path / "a.parquet").stat().st_size, version(ParquetStream)])
    assert (found[0][0], found[0][1] != found[1][1]) == (found[1][0], True)
    for number in range(100):
        (tmp_path / f"{number:03}.jsonl").write_bytes(as_lines([number]))
    saved = version(JSONLinesStream)
    (tmp_path / "051.jsonl").write_bytes(as_lines([51, 52]))  # not among those that are looked into
    assert sum(before != after for before, after in zip(saved, version(JSONLinesStream), strict=True)) == 1


@pytest.mark.parametrize(
    ("paths", "error"), [([], ValueError), (3, TypeError), ([3], TypeError), ("", ValueError), (b"x", TypeError)]
)
def test_paths_are_checked(paths: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="paths"):
        check_shards(JSONLinesStream(paths))
    with pytest.raises(TypeError, match="columns='x'"):
        ParquetStream("x.parquet", columns="x")


def test_columns_and_files_that_a_stream_cannot_read_are_named(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text("1\n")
    with pytest.raises(ValueError, match=r"x.jsonl'`: a `ParquetStream` reads files that end with '.parquet' or '.pq'"):
        check_shards(ParquetStream(tmp_path / "x.jsonl"))
    parquet.write_table(pa.table({"id": [1], "at": [{"x": 1, "y": 2}]}), tmp_path / "x.parquet")
    for columns in (["nope"], ["id", "nope"], ["at.nope"]):
        with pytest.raises(
            StreamError, match=rf"`columns=\['{columns[-1]}'\]` are not in the file. Available: \['id', 'at'\]"
        ):
            check_shards(ParquetStream(tmp_path, columns=columns))
    stream = ParquetStream(tmp_path, columns=["at.y"])
    assert list(stream.open(stream.shards()[0].name, 0)) == [{"at": {"y": 2}}]


def test_anything_that_can_be_read_again_is_a_stream() -> None:
    def rows() -> Any:
        yield from range(60)

    for stream, length in (
        (IterableStream(rows), None),
        (IterableStream(range(60)), 60),
        (IterableStream(rows, 60), 60),
    ):
        steps = read_together(pass_of(stream.batch(7)), 3)
        assert [row for step in steps for row in sorted(joint(step))] == list(range(60))
        assert stream.shards()[0].num_rows == length
    with pytest.raises(ValueError, match="`start=61`: the shard has only 60 rows"):
        IterableStream(rows).open("rows", 61)


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (iter([1]), "can be read only once"),
        ((n for n in [1]), "without calling it"),
        (3, "need an iterable"),
        ("ab", "`str`"),
    ],
)
def test_what_cannot_be_read_again_is_refused(rows: Any, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        IterableStream(rows)
    with pytest.raises(ValueError, match="`num_rows=-1`"):
        IterableStream([1], num_rows=-1)


@pytest.mark.parametrize("name", ["lines", "tar"])
def test_rows_of_a_shared_shard_that_no_lane_here_needs_are_not_made(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []
    if name == "lines":
        loads = json.loads
        monkeypatch.setattr(json, "loads", lambda line: [made.append(line), loads(line)][1])
        (tmp_path / "a.jsonl").write_text("".join(f"{number}\n" for number in range(640)))
        stream: Stream = JSONLinesStream(tmp_path)
    else:
        read = formats._sample
        monkeypatch.setattr(formats, "_sample", lambda tar, key, each: [made.append(key), read(tar, key, each)][1])
        (tmp_path / "a.tar").write_bytes(as_tar(list(range(640))))
        stream = TarStream(tmp_path)
    steps = read_together(pass_of(stream.batch(64)), 4)
    assert sum(len(joint(step)) for step in steps) == 640
    assert 640 <= len(made) < 900  # those of neighboring lanes, too, and not four times all


# ------------------------------------------------------------------------------------------------ Hugging Face


def test_rows_are_those_of_the_dataset() -> None:
    datasets: Any = pytest.importorskip("datasets")
    dataset = datasets.Dataset.from_dict({"number": list(range(60))}).to_iterable_dataset(num_shards=5)
    stream = HuggingFaceStream(dataset)
    assert [shard.name for shard in stream.shards()] == [f"shard-{index}" for index in range(5)]
    steps = read_together(pass_of(stream.shuffle(70).map(lambda row: row["number"]).batch(7)), 3)
    assert sorted(row for step in steps for row in joint(step)) == list(range(60))
    assert [row["number"] for row in stream.open("shard-1", 10)] == [22, 23]
    with pytest.raises(ValueError, match="`start=13`: the shard has only 12 rows"):
        stream.open("shard-1", 13)


def test_a_process_that_has_read_a_row_gets_near_it_again_without_reading_the_shard(tmp_path: Any) -> None:
    datasets: Any = pytest.importorskip("datasets")

    def rows(shards: list[int]) -> Any:
        for shard in shards:
            for number in range(2000):
                yield {"number": 2000 * shard + number}

    dataset = datasets.Dataset.from_generator(rows, gen_kwargs={"shards": [0, 1]}, cache_dir=str(tmp_path))
    stream = HuggingFaceStream(dataset.to_iterable_dataset(num_shards=2))
    first = stream.open("shard-1", 0)
    for _ in range(1500):
        next(first)
    assert len(stream._states["shard-1"]) == 4
    assert [row["number"] for row in stream.open("shard-1", 1490)] == list(range(3490, 4000))
    assert [row["number"] for row in stream.open("shard-1", 3)] == list(range(2003, 4000))
    with pytest.raises(ValueError, match="`start=2001`: the shard has only 2000 rows"):
        stream.open("shard-1", 2001)


MADE: dict[str, tuple[int, Callable[[Any, Any, Any], Any]]] = {
    "take": (1, lambda datasets, first, second: first.take(10).map(lambda row: row)),
    "skip": (1, lambda datasets, first, second: first.skip(7).take(30)),
    "interleaved": (1, lambda datasets, first, second: datasets.interleave_datasets([first, second])),
    "by chance": (1, lambda datasets, first, second: datasets.interleave_datasets([first, second], [0.3, 0.7], seed=1)),
    "with indices": (1, lambda datasets, first, second: first.filter(lambda row, at: at < 20, with_indices=True)),
    "joined": (10, lambda datasets, first, second: datasets.concatenate_datasets([first, second])),
    "joined parts": (1, lambda datasets, first, second: datasets.concatenate_datasets([first.take(3), second])),
    "mapped": (5, lambda datasets, first, second: first.map(lambda row: row).filter(lambda row: row["number"] % 2)),
}


@pytest.mark.parametrize("form", MADE)
def test_rows_are_those_of_the_dataset_also_where_it_counts_over_its_shards(form: str) -> None:
    datasets: Any = pytest.importorskip("datasets")
    sources = [
        datasets.Dataset.from_dict({"number": list(range(first, first + 60))}).to_iterable_dataset(num_shards=5)
        for first in (0, 100)
    ]
    num_shards, make = MADE[form]
    stream = HuggingFaceStream(make(datasets, *sources))
    expected = [row["number"] for row in make(datasets, *sources)]
    assert [row["number"] for shard in stream.shards() for row in stream.open(shard.name, 0)] == expected
    assert len(stream.shards()) == num_shards
    if num_shards == 1:
        assert [row["number"] for row in stream.open("shard-0", 2)] == expected[2:]


def test_something_else_is_refused() -> None:
    with pytest.raises(TypeError, match=r"got a `list`: need a `datasets\.IterableDataset`"):
        HuggingFaceStream([1])


VALUES: dict[str, Any] = {
    "number": list(range(90)),
    "some missing": [None if number % 50 == 7 else number for number in range(90)],
    "text": [f"row {number}" for number in range(90)],
    "list": [[number] * (number % 4) for number in range(90)],
    "list with a hole": [[number, None if number == 40 else 1] for number in range(90)],
    "dict": [{"a": number, "b": [number]} for number in range(90)],
}


@pytest.mark.parametrize("form", [None, "torch", "numpy"])
@pytest.mark.parametrize("name", VALUES)
def test_rows_of_tables_are_what_the_dataset_yields_one_by_one(name: str, form: str | None) -> None:
    datasets: Any = pytest.importorskip("datasets")
    dataset = datasets.Dataset.from_dict({name: VALUES[name]}).to_iterable_dataset().with_format(form)
    rows = list(HuggingFaceStream(dataset).open("shard-0", 5))
    assert [(type(row), repr(row)) for row in rows] == [(type(row), repr(row)) for row in dataset][5:]
