"""A checkpoint made from one thing is read as another."""

from __future__ import annotations

import io
import json
import os
import pickle
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from raysgd.air import Checkpoint
from raysgd.exceptions import CheckpointCorruptedError
from raysgd.train.tensorflow import TensorflowCheckpoint
from tests.helpers.lazily import imported
from tests.helpers.run_if import RunIf
from tests.helpers.s3_server import S3Server

STATE = {"epoch": 3, "weights": [1.0, 2.0]}


class MyCheckpoint(Checkpoint):
    """One of a user."""


class Preprocessor:
    """Pickles, and is equal to others."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Preprocessor)

    __hash__ = None  # type: ignore[assignment]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of a user, with a file, a folder and a link."""
    path = tmp_path / "mine"
    (path / "shards").mkdir(parents=True)
    (path / "model.bin").write_bytes(b"model")
    (path / "shards" / "0").write_text("zero")
    return path


def content_of(path: str | Path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in Path(path).rglob("*") if file.is_file()}


class TestForms:
    def test_a_dict_comes_back(self) -> None:
        checkpoint = Checkpoint.from_dict(STATE)
        assert checkpoint.to_dict() == STATE
        checkpoint.to_dict().clear()
        assert checkpoint.to_dict() == STATE

    def test_a_dict_is_one_file_in_a_folder(self, tmp_path: Path) -> None:
        path = Checkpoint.from_dict(STATE).to_directory(tmp_path / "new" / "folder")
        assert path == str(tmp_path / "new" / "folder")
        assert os.listdir(path) == ["dict_checkpoint.pkl"]
        assert pickle.loads((Path(path) / "dict_checkpoint.pkl").read_bytes()) == STATE
        assert Checkpoint.from_directory(path).to_dict() == STATE

    def test_files_beside_a_dict_travel_with_it(self, tmp_path: Path, folder: Path) -> None:
        Checkpoint.from_dict(STATE).to_directory(folder)
        as_dict = Checkpoint.from_directory(folder).to_dict()
        assert as_dict.keys() == {*STATE, "_ray_additional_checkpoint_files"}
        assert as_dict["_ray_additional_checkpoint_files"].keys() == {"model.bin", "shards"}
        copy = Checkpoint.from_dict({**as_dict, "more": 1}).to_directory(tmp_path / "copy")
        assert Checkpoint.from_directory(copy).to_dict()["more"] == 1
        assert content_of(copy)["shards/0"] == b"zero"
        assert content_of(copy)["model.bin"] == b"model"

    def test_a_folder_is_one_archive_in_a_dict(self, tmp_path: Path, folder: Path) -> None:
        as_dict = Checkpoint.from_directory(folder).to_dict()
        assert as_dict.keys() == {"fs_checkpoint"}
        copy = Checkpoint.from_dict(as_dict).to_directory(tmp_path / "copy")
        assert content_of(copy) == content_of(folder)

    def test_values_beside_an_archive_are_files_in_the_folder(self, tmp_path: Path, folder: Path) -> None:
        as_dict = {**Checkpoint.from_directory(folder).to_dict(), "epoch": 3}
        copy = Checkpoint.from_dict(as_dict).to_directory(tmp_path / "copy")
        assert pickle.loads((Path(copy) / "epoch.meta.pkl").read_bytes()) == 3
        again = Checkpoint.from_directory(copy).to_dict()
        assert (again["epoch"], again.keys()) == (3, as_dict.keys())

    def test_bytes_come_back(self) -> None:
        data = Checkpoint.from_dict(STATE).to_bytes()
        assert pickle.loads(data) == STATE
        assert Checkpoint.from_bytes(data).to_dict() == STATE

    def test_other_pickles_become_a_dict(self) -> None:
        checkpoint = Checkpoint.from_bytes(pickle.dumps([1, 2]))
        assert checkpoint.to_dict() == {"bytes_data": [1, 2]}
        assert pickle.loads(checkpoint.to_bytes()) == [1, 2]

    def test_what_only_cloudpickle_can_pickle_is_saved_too(self, tmp_path: Path) -> None:
        checkpoint = Checkpoint.from_dict({"function": lambda: 3})
        assert Checkpoint.from_directory(checkpoint.to_directory(tmp_path)).to_dict()["function"]() == 3
        assert Checkpoint.from_bytes(checkpoint.to_bytes()).to_dict()["function"]() == 3

    @pytest.mark.parametrize(
        ("make", "kind"),
        [
            (lambda path: Checkpoint.from_dict(STATE), ("data_dict", STATE)),
            (lambda path: Checkpoint(data_dict=STATE), ("data_dict", STATE)),
            (lambda path: Checkpoint.from_directory(path), ("local_path", "{}")),
            (lambda path: Checkpoint(path), ("local_path", "{}")),
            (lambda path: Checkpoint(local_path=str(path)), ("local_path", "{}")),
            (lambda path: Checkpoint.from_uri(path.as_uri()), ("local_path", "{}")),
            (lambda path: Checkpoint(uri=path.as_uri()), ("local_path", "{}")),
            (lambda path: Checkpoint.from_uri("memory://air/x"), ("uri", "memory://air/x")),
        ],
    )
    def test_it_says_what_it_is_made_from(
        self, make: Callable[[Path], Checkpoint], kind: tuple[str, Any], folder: Path
    ) -> None:
        name, data = kind
        data = str(folder) if data == "{}" else data
        assert make(folder).get_internal_representation() == (name, data)
        assert repr(make(folder)) == f"Checkpoint({name}={data})"


class TestFolders:
    def test_a_folder_is_shown_as_it_is_and_stays(self, folder: Path) -> None:
        with Checkpoint.from_directory(folder).as_directory() as shown:
            assert shown == str(folder)
        assert content_of(folder).keys() == {"model.bin", "shards/0"}

    def test_a_dict_is_shown_in_a_folder_that_is_deleted(self) -> None:
        with Checkpoint.from_dict(STATE).as_directory() as shown:
            assert Path(shown).name.startswith("checkpoint_tmp_")
            assert Checkpoint.from_directory(shown).to_dict() == STATE
        assert not Path(shown).exists()

    def test_a_folder_of_a_store_is_shown_in_a_folder_that_is_deleted(self, folder: Path) -> None:
        checkpoint = Checkpoint.from_uri(Checkpoint.from_directory(folder).to_uri("memory://air/shown"))
        with checkpoint.as_directory() as shown:
            assert content_of(shown) == content_of(folder)
        assert not Path(shown).exists()
        assert content_of(checkpoint.to_directory(folder.parent / "copy")) == content_of(folder)
        checkpoint._folder.delete()

    def test_without_a_path_a_new_folder_is_made(self) -> None:
        path = Checkpoint.from_dict(STATE).to_directory()
        assert Path(path).name.startswith("checkpoint_tmp_")
        assert Checkpoint.from_directory(path).to_dict() == STATE
        (Path(path) / "dict_checkpoint.pkl").unlink()
        Path(path).rmdir()

    def test_a_folder_can_be_written_onto_itself(self, folder: Path) -> None:
        assert Checkpoint.from_directory(folder).to_directory(folder) == str(folder)
        assert content_of(folder).keys() == {"model.bin", "shards/0"}

    def test_it_has_the_attributes_of_the_newer_generation(self, folder: Path) -> None:
        checkpoint = Checkpoint.from_directory(str(folder))
        assert checkpoint.path == str(folder)
        assert checkpoint.filesystem.type_name == "local"
        assert checkpoint.uri == folder.as_uri()
        assert Checkpoint(checkpoint.path, checkpoint.filesystem) == checkpoint
        assert len({Checkpoint(folder), checkpoint}) == 1
        assert checkpoint != Checkpoint(folder.parent)

    def test_one_in_memory_has_none_of_them(self) -> None:
        checkpoint = Checkpoint.from_dict(STATE)
        assert checkpoint.uri is None
        assert not hasattr(checkpoint, "path")
        with pytest.raises(AttributeError, match=r"in memory and has no `filesystem`.*to_directory"):
            _ = checkpoint.filesystem
        assert checkpoint != Checkpoint.from_dict(STATE)

    def test_no_function_of_the_system_takes_it_for_a_path(self, folder: Path) -> None:
        with pytest.raises(TypeError):
            os.fspath(Checkpoint.from_directory(folder))  # type: ignore[call-overload]


class TestBadInput:
    def test_what_is_no_dict_is_refused(self) -> None:
        with pytest.raises(RuntimeError, match="`data=3`"):
            Checkpoint.from_dict(3)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="empty dict"):
            Checkpoint.from_dict({})

    def test_a_folder_has_to_be_there(self, folder: Path) -> None:
        with pytest.raises(RuntimeError, match="nowhere'` does not exist"):
            Checkpoint.from_directory(folder / "nowhere")
        with pytest.raises(RuntimeError, match=r"model\.bin'` is a file"):
            Checkpoint.from_directory(folder / "model.bin")

    def test_a_uri_needs_a_file_system(self) -> None:
        with pytest.raises(RuntimeError, match="nothing"):
            Checkpoint.from_uri("nothing://bucket/folder")
        with pytest.raises(RuntimeError, match="nothing"):
            Checkpoint.from_dict(STATE).to_uri("nothing://bucket/folder")

    @pytest.mark.parametrize("arguments", [{}, {"path": "a", "uri": "b"}, {"local_path": "a", "data_dict": {"a": 1}}])
    def test_it_is_made_from_one_thing(self, arguments: dict[str, Any]) -> None:
        with pytest.raises(ValueError, match=f"given: {', '.join(arguments) or 'none'}"):
            Checkpoint(**arguments)

    def test_only_a_checkpoint_becomes_another_class(self) -> None:
        with pytest.raises(TypeError, match="`other='x'`"):
            MyCheckpoint.from_checkpoint("x")  # type: ignore[arg-type]

    def test_a_dict_file_without_a_dict_is_corrupted(self, tmp_path: Path) -> None:
        (tmp_path / "dict_checkpoint.pkl").write_bytes(pickle.dumps(3))
        with pytest.raises(CheckpointCorruptedError, match="holds no dict"):
            Checkpoint.from_directory(tmp_path).to_dict()


def archive_of(member: tarfile.TarInfo, data: bytes = b"evil") -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        member.size = len(data) if member.isfile() else 0
        archive.addfile(member, io.BytesIO(data))
    return stream.getvalue()


def link(name: str, target: str, kind: bytes = tarfile.SYMTYPE) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, target
    return member


class TestArchivesFromElsewhere:
    @pytest.mark.parametrize(
        "member",
        [
            tarfile.TarInfo("../outside"),
            tarfile.TarInfo("a/../../outside"),
            link("x", "../outside"),
            link("x", "/etc/passwd"),
            link("x", "../outside", tarfile.LNKTYPE),
            link("x", "", tarfile.FIFOTYPE),
        ],
        ids=lambda member: f"{member.name} {member.linkname}",
    )
    @pytest.mark.parametrize("key", ["fs_checkpoint", "_ray_additional_checkpoint_files"])
    def test_nothing_is_written_outside(self, member: tarfile.TarInfo, key: str, tmp_path: Path) -> None:
        archive: Any = archive_of(member)
        archive = archive if key == "fs_checkpoint" else {"x": archive}
        checkpoint = Checkpoint.from_dict({"epoch": 1, key: archive})
        with pytest.raises(CheckpointCorruptedError, match="Nothing outside this folder was written"):
            checkpoint.to_directory(tmp_path / "target")
        assert os.listdir(tmp_path) == ["target"]

    def test_an_absolute_name_is_one_inside(self, tmp_path: Path) -> None:
        archive = archive_of(tarfile.TarInfo(str(tmp_path / "outside")))
        Checkpoint.from_dict({"fs_checkpoint": archive}).to_directory(tmp_path / "target")
        assert os.listdir(tmp_path) == ["target"]

    @pytest.mark.parametrize("key", ["../outside", "/outside", "a/b", "..", "."])
    def test_no_key_leads_outside(self, key: str, tmp_path: Path) -> None:
        archive = archive_of(tarfile.TarInfo("x"))
        content = {"fs_checkpoint": archive, key: 1}
        if key in ("..", "."):  # with the ending of its file, an ordinary name
            Checkpoint.from_dict(content).to_directory(tmp_path / "target")
        else:
            with pytest.raises(CheckpointCorruptedError, match="cannot be the name of a file"):
                Checkpoint.from_dict(content).to_directory(tmp_path / "target")
        assert os.listdir(tmp_path) == ["target"]

    @pytest.mark.parametrize("archive", [b"no archive", b"", 3, "text"])
    def test_what_is_no_archive_is_corrupted(self, archive: Any, tmp_path: Path) -> None:
        with pytest.raises(CheckpointCorruptedError, match="cannot be unpacked"):
            Checkpoint.from_dict({"fs_checkpoint": archive}).to_directory(tmp_path)


class TestWhatItCarries:
    @pytest.mark.parametrize("make", [Checkpoint.from_dict, MyCheckpoint.from_dict])
    def test_it_becomes_another_class(self, make: Callable[[dict[str, Any]], Checkpoint]) -> None:
        retyped = MyCheckpoint.from_checkpoint(make(STATE))
        assert type(retyped) is MyCheckpoint
        assert retyped.to_dict() == STATE

    def test_a_preprocessor_is_found(self, tmp_path: Path, folder: Path) -> None:
        in_dict = Checkpoint.from_dict({**STATE, "_preprocessor": Preprocessor()})
        assert in_dict.get_preprocessor() == Preprocessor()
        assert Checkpoint.from_directory(in_dict.to_directory(tmp_path / "dict")).get_preprocessor() == Preprocessor()
        assert Checkpoint.from_dict(STATE).get_preprocessor() is None
        assert Checkpoint.from_directory(folder).get_preprocessor() is None
        (folder / "_preprocessor").write_bytes(pickle.dumps(Preprocessor()))
        assert Checkpoint.from_directory(folder).get_preprocessor() == Preprocessor()

    def test_metadata_is_a_file_in_a_folder(self, folder: Path) -> None:
        checkpoint = Checkpoint.from_directory(folder)
        assert checkpoint.get_metadata() == {}
        checkpoint.set_metadata({"a": 1})
        checkpoint.update_metadata({"b": [2]})
        assert json.loads((folder / ".metadata.json").read_text()) == {"a": 1, "b": [2]}
        assert Checkpoint(folder).get_metadata() == {"a": 1, "b": [2]}
        checkpoint.set_metadata({"c": 3})
        assert checkpoint.get_metadata() == {"c": 3}

    def test_metadata_of_a_dict_is_no_part_of_it(self, tmp_path: Path) -> None:
        checkpoint = Checkpoint.from_dict(STATE)
        checkpoint.set_metadata({"a": 1})
        copy = Checkpoint.from_directory(checkpoint.to_directory(tmp_path))
        assert (copy.get_metadata(), copy.to_dict()) == ({"a": 1}, STATE)

    def test_a_folder_that_is_written_again_loses_the_metadata_from_before(self, tmp_path: Path, folder: Path) -> None:
        before = Checkpoint.from_dict(STATE)
        before.set_metadata({"epoch": 1})
        for checkpoint in (Checkpoint.from_dict(STATE), Checkpoint.from_directory(folder)):
            target = before.to_directory(tmp_path / "target")
            assert Checkpoint.from_directory(checkpoint.to_directory(target)).get_metadata() == {}

    @pytest.mark.parametrize("metadata", [{"a": object()}, {"a": {1, 2}}])
    def test_metadata_has_to_fit_into_json(self, metadata: dict[str, Any], folder: Path) -> None:
        for checkpoint in (Checkpoint.from_dict(STATE), Checkpoint.from_directory(folder)):
            with pytest.raises(ValueError, match="JSON"):
                checkpoint.set_metadata(metadata)
            with pytest.raises(ValueError, match="JSON"):
                checkpoint.update_metadata(metadata)
            assert checkpoint.get_metadata() == {}

    def test_metadata_has_to_be_a_dict(self, folder: Path) -> None:
        with pytest.raises(TypeError, match="`metadata=3`"):
            Checkpoint.from_dict(STATE).set_metadata(3)  # type: ignore[arg-type]
        (folder / ".metadata.json").write_text("[1]")
        with pytest.raises(CheckpointCorruptedError, match="holds no dict"):
            Checkpoint.from_directory(folder).get_metadata()


class TestPickling:
    def test_a_local_folder_travels_with_all_that_it_holds(self, tmp_path: Path, folder: Path) -> None:
        checkpoint = MyCheckpoint.from_directory(folder)
        checkpoint.set_metadata({"a": 1})
        data, before = pickle.dumps(checkpoint), content_of(folder)
        folder.rename(tmp_path / "gone")
        there = pickle.loads(data)
        assert type(there) is MyCheckpoint
        assert there.get_internal_representation()[0] == "data_dict"
        assert there.get_metadata() == {"a": 1}
        assert content_of(there.to_directory(tmp_path / "copy")) == before

    def test_a_dict_in_a_local_folder_travels_as_a_dict(self, tmp_path: Path) -> None:
        checkpoint = Checkpoint.from_directory(Checkpoint.from_dict(STATE).to_directory(tmp_path))
        assert pickle.loads(pickle.dumps(checkpoint)).get_internal_representation() == ("data_dict", STATE)

    def test_a_local_folder_may_travel_by_its_place(self, tmp_path: Path, folder: Path) -> None:
        checkpoint = MyCheckpoint.from_directory(folder).by_place()
        data = pickle.dumps(checkpoint)
        there = pickle.loads(data)
        assert (type(there), there.path) == (MyCheckpoint, str(folder))
        assert len(data) < 1000
        folder.rename(tmp_path / "gone")
        with (
            pytest.raises(FileNotFoundError, match=f"The checkpoint is in {folder}, .*all machines have mounted"),
            pickle.loads(data).as_directory(),
        ):
            pass

    def test_a_dict_travels_with_its_place_where_that_may_not_be_there(self, tmp_path: Path) -> None:
        path = Path(Checkpoint.from_dict(STATE).to_directory(tmp_path / "saved"))
        data = pickle.dumps(Checkpoint.from_directory(path).by_place())
        assert pickle.loads(data).path == str(path)
        path.rename(tmp_path / "gone")
        assert pickle.loads(data).to_dict() == STATE

    def test_one_in_memory_travels_as_it_is(self) -> None:
        assert pickle.loads(pickle.dumps(Checkpoint.from_dict(STATE).by_place())).to_dict() == STATE

    def test_a_remote_folder_travels_by_its_place(self) -> None:
        pytest.importorskip("pyarrow")
        checkpoint = Checkpoint.from_uri("s3://bucket/folder?region=eu-north-1")
        there = pickle.loads(pickle.dumps(checkpoint))
        assert there == checkpoint
        assert there.get_internal_representation() == ("uri", "s3://bucket/folder?region=eu-north-1")

    def test_a_folder_that_only_this_process_sees_travels_by_value(self) -> None:
        checkpoint = Checkpoint.from_uri(Checkpoint.from_dict(STATE).to_uri("memory://air/pickled"))
        assert pickle.loads(pickle.dumps(checkpoint)).get_internal_representation() == ("data_dict", STATE)
        checkpoint._folder.delete()


@pytest.mark.integration
@RunIf(modules=["pyarrow", "moto"])
class TestStores:
    def test_a_checkpoint_goes_there_and_comes_back(self, s3_server: S3Server, tmp_path: Path, folder: Path) -> None:
        uri = s3_server.uri("air/dict")
        assert Checkpoint.from_dict(STATE).to_uri(uri) == uri
        checkpoint = Checkpoint.from_uri(uri)
        checkpoint.set_metadata({"a": 1})
        there = pickle.loads(pickle.dumps(checkpoint))
        assert (there.to_dict(), there.get_metadata()) == (STATE, {"a": 1})
        assert there.get_internal_representation() == ("uri", uri)
        assert Checkpoint(there.path, there.filesystem).to_dict() == STATE
        copy = Checkpoint.from_uri(Checkpoint.from_directory(folder).to_uri(s3_server.uri("air/folder")))
        assert content_of(copy.to_directory(tmp_path / "copy")) == content_of(folder)

    def test_keys_are_not_shown(self, s3_server: S3Server) -> None:
        uri = s3_server.uri("air/dict")
        secret = uri.removeprefix("s3://").partition("@")[0].partition(":")[2]
        assert secret
        assert secret not in repr(Checkpoint.from_uri(uri))


@pytest.mark.integration
@pytest.mark.usefixtures("ray_cluster")
class TestObjectReferences:
    def test_a_reference_comes_back(self, tmp_path: Path) -> None:
        reference = Checkpoint.from_dict(STATE).to_object_ref()
        checkpoint = Checkpoint.from_object_ref(reference)
        assert checkpoint.get_internal_representation() == ("object_ref", reference)
        assert checkpoint.to_object_ref() is reference
        assert checkpoint.to_dict() == STATE
        checkpoint.set_metadata({"a": 1})
        copy = Checkpoint.from_directory(checkpoint.to_directory(tmp_path))
        assert (copy.to_dict(), copy.get_metadata()) == (STATE, {"a": 1})

    def test_a_reference_to_something_else_is_no_checkpoint(self) -> None:
        import ray

        with pytest.raises(CheckpointCorruptedError, match="leads to 3"):
            Checkpoint.from_object_ref(ray.put(3)).to_dict()


keras = imported("tensorflow", "keras")


def net(value: float) -> Any:
    model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1, kernel_initializer="zeros")])
    model.set_weights([weight + value for weight in model.get_weights()])
    return model


def test_weights_come_back_through_all_forms(tmp_path: Path) -> None:
    checkpoint = TensorflowCheckpoint.from_model(net(3.0), preprocessor="scaler")
    read = TensorflowCheckpoint.from_directory(checkpoint.to_directory(tmp_path))
    for each in (checkpoint, read):
        assert [weight.tolist() for weight in each.get_model_weights()] == [[[3.0], [3.0]], [3.0]]
        assert each.get_preprocessor() == "scaler"


def test_a_model_gets_them() -> None:
    checkpoint, target = TensorflowCheckpoint.from_model(net(3.0)), net(0.0)
    assert checkpoint.get_model(target) is target
    for model in (target, checkpoint.get_model(lambda: net(0.0))):
        assert model.get_weights()[0].tolist() == [[3.0], [3.0]]


@RunIf(modules=["tensorflow"])
def test_a_model_that_keras_saved_becomes_a_checkpoint(tmp_path: Path) -> None:
    import tensorflow as tf

    path = tmp_path / "model.h5"
    model = tf.keras.Sequential([tf.keras.Input((2,)), tf.keras.layers.Dense(1)])
    model.save(path)
    checkpoint = TensorflowCheckpoint.from_h5(str(path), preprocessor="scaler")
    assert checkpoint.get_model_weights()[0].tolist() == model.get_weights()[0].tolist()
    assert checkpoint.get_preprocessor() == "scaler"
    with pytest.raises(ValueError, match=r"need a file that ends in `\.h5`"):
        TensorflowCheckpoint.from_h5(tmp_path)


def test_a_checkpoint_without_weights_says_so() -> None:
    with pytest.raises(RuntimeError, match=r'no "model"\. Available: \[\'epoch\'\]'):
        TensorflowCheckpoint.from_dict({"epoch": 1}).get_model_weights()


def test_what_is_no_model_is_refused() -> None:
    with pytest.raises(TypeError, match="`model=3`"):
        TensorflowCheckpoint.from_model(3)
