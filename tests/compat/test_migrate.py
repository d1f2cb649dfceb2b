"""`raysgd migrate`: what becomes of a program's text, and of its files.

Covers `raysgd.compat.migrate.names`, which has no face of its own.
"""

from __future__ import annotations

import ast
import os
import re
from pathlib import Path
from textwrap import dedent

import pytest
from click.testing import CliRunner, Result

from raysgd.compat.migrate.command import migrate as command
from raysgd.compat.migrate.source import MigratedProgram, migrate


def migrated(text: str, ray_train: bool = False) -> str:
    found = migrate(dedent(text).encode(), ray_train)
    assert not found.has_failed, found.findings
    assert migrate(found.text, ray_train).text == found.text, "a second time changes nothing"
    ast.parse(found.text)
    return found.text.decode()


def failed(text: str) -> MigratedProgram:
    before = dedent(text).encode()
    found = migrate(before)
    assert found.has_failed
    assert found.or_nothing(before).text == before, "nothing is half-written"
    return found


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("from ray.util.sgd import TorchTrainer", "from raysgd import TorchTrainer"),
        ("from ray.util.sgd import TorchTrainer as T  # ours", "from raysgd import TorchTrainer as T  # ours"),
        ("from ray.util.sgd import PyTorchTrainer", "from raysgd import TorchTrainer as PyTorchTrainer"),
        ("from ray.util.sgd.utils import *", "from raysgd.utils import *"),
        ("import ray.util.sgd.torch as sgd", "import raysgd.torch as sgd"),
        ("import ray.util.sgd", "import raysgd"),
        ("import os, ray.util.sgd.utils as u", "import os, raysgd.utils as u"),
        ("from ray.util.sgd import torch, utils", "from raysgd import torch, utils"),
        ("from ray.util import sgd", "import raysgd as sgd"),
        ("from ray.util.sgd.v2.backends.torch import TorchConfig", "from raysgd.train.torch import TorchConfig"),
        ("import ray.tune.integration.torch as integration", "import raysgd.tune.torch as integration"),
    ],
)
def test_an_import_leads_to_raysgd(old: str, new: str) -> None:
    assert migrated(old + "\n") == new + "\n"


def diffs_of_the_page() -> list[str]:
    page = Path(__file__).parents[2] / "docs" / "migration.md"
    return re.findall(r"^```diff\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def side(diff: str, mark: str) -> str:
    return "".join(line[1:] for line in diff.splitlines(keepends=True) if line[0] in (" ", mark))


@pytest.mark.parametrize("diff", diffs_of_the_page())
def test_the_page_shows_what_becomes_of_a_program(diff: str) -> None:
    before = side(diff, "-")
    assert migrated(before, ray_train="ray.train" in before) == side(diff, "+")


def test_formatting_and_comments_are_kept() -> None:
    old = """\
    #!/usr/bin/env python
    # -*- coding: utf-8 -*-
    from ray.util.sgd.torch import (
        TorchTrainer,   # drives
        TrainingOperator,
    )

    x = { 'a':1 }   # ü
    """
    assert migrated(old) == dedent(old).replace("ray.util.sgd.torch", "raysgd.torch")


def test_names_of_several_modules_become_several_lines() -> None:
    new = migrated("from ray.util import sgd, placement_group  # both\n")
    assert new.splitlines() == ["import raysgd as sgd  # both", "from ray.util import placement_group"]


def test_dotted_names_follow_and_ray_stays_imported_where_it_is_used() -> None:
    new = migrated(
        """\
        import ray.util.sgd.torch

        ray.init()
        trainer = ray.util.sgd.torch.TorchTrainer(training_operator_cls=None)
        """
    )
    assert "trainer = raysgd.torch.TorchTrainer(" in new
    assert "import raysgd.torch" in new.splitlines()
    assert "import ray" in new.splitlines()
    assert "ray.init()" in new


def test_a_name_of_somebody_else_called_ray_is_left_alone() -> None:
    text = "from light import ray\n\nray.util.sgd.torch.TorchTrainer()\n"
    assert migrated(text) == text


def test_todays_ray_train_is_left_alone_unless_the_user_means_the_old_one() -> None:
    text = "from ray import train, tune\nfrom ray.air import session\n\ntrain.report(loss=1)\nsession.report({})\n"
    assert migrated(text) == text
    assert migrated(text, ray_train=True) == (
        "from raysgd import train\nfrom ray import tune\nfrom raysgd.air import session\n\n"
        "train.report(loss=1)\nsession.report({})\n"
    )


def test_names_of_ray_tune_that_mean_trainers_follow_and_the_others_stay() -> None:
    text = """\
    import ray.tune as t
    from ray import tune
    from ray.tune import TuneConfig, Tuner
    from ray.tune.tuner import Tuner as T

    space = tune.grid_search([1])
    tuner = tune.Tuner(trainer, tune_config=TuneConfig())
    grid: t.ResultGrid = Tuner.restore("sweep")
    """
    assert migrated(text) == dedent(text)
    new = migrated(text, ray_train=True)
    assert (
        "from ray.tune import TuneConfig\nfrom raysgd.tune import Tuner\nfrom raysgd.tune.tuner import Tuner as T"
        in new
    )
    assert "import raysgd.tune\n" in new
    assert new.partition("\n\n")[2] == (
        "space = tune.grid_search([1])\ntuner = raysgd.tune.Tuner(trainer, tune_config=TuneConfig())\n"
        'grid: raysgd.tune.ResultGrid = Tuner.restore("sweep")\n'
    )


def test_iterators_follow_only_beside_other_old_names() -> None:
    alone = "from ray.util.iter import from_items\n"
    assert migrated(alone) == alone
    beside = alone + "from ray.util.data import from_parallel_iter\n"
    assert migrated(beside) == beside.replace("ray.util", "raysgd.util")


def test_retired_arguments_are_rewritten() -> None:
    new = migrated(
        """\
        from ray.util.sgd import TorchTrainer

        BATCH_SIZE = 64
        one = TorchTrainer(
            model_creator=model,
            data_creator=data,
            optimizer_creator=optimizer,
            loss_creator=torch.nn.MSELoss,
            num_replicas=2,
            batch_size=BATCH_SIZE,
            config={"lr": 0.1},
        )
        two = TorchTrainer(training_operator_cls=Op, batch_size=8)
        three = TorchTrainer(training_operator_cls=Op, config=config, batch_size=8, num_workers=1)
        """
    )
    assert "import raysgd.utils" in new.splitlines()
    wanted = """\
    one = TorchTrainer(
        training_operator_cls=raysgd.TrainingOperator.from_creators(model_creator=model, data_creator=data, \
optimizer_creator=optimizer, loss_creator=torch.nn.MSELoss),
        num_workers=2,
        config={"lr": 0.1, raysgd.utils.BATCH_SIZE: BATCH_SIZE},
    )
    two = TorchTrainer(training_operator_cls=Op, config={raysgd.utils.BATCH_SIZE: 8})
    three = TorchTrainer(training_operator_cls=Op, config={**config, raysgd.utils.BATCH_SIZE: 8}, num_workers=1)
    """
    assert new.endswith(dedent(wanted))


def test_what_a_person_has_to_decide_is_named_with_its_line() -> None:
    text = """\
    from unittest.mock import patch
    from ray.util.sgd import TorchTrainer

    patch("ray.util.sgd.torch.TorchTrainer")
    TorchTrainer(training_operator_cls=Op, apex_args={}, data_loader_args={}, **more)
    TorchTrainer(Op)
    """
    found = migrate(dedent(text).encode())
    assert [(finding.line, finding.is_error) for finding in found.findings] == [
        (4, False),
        *[(5, False)] * 3,
        (6, False),
    ]
    told = " ".join(finding.text for finding in found.findings)
    for words in ("'ray.util.sgd.torch.TorchTrainer'", "`apex_args`", "`data_loader_args`", "by name only", "(**...)"):
        assert words in told


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("x = 1\ndef f(:\n", 2, "no valid Python"),
        ("from ray.util.sgd.torch.torch_runner import TorchRunner\n", 1, "has no successor: it was an internal"),
        ("import ray.util.sgd\n\nray.util.sgd.Nothing()\n", 3, "`ray.util.sgd.Nothing` has no successor"),
        ("# -*- coding: nonsense -*-\n", 1, "no valid Python"),
        ("x = 1\0\n", 1, ""),
        ("x = " + "(" * 3000 + ")" * 3000 + "\n", 1, ""),
    ],
)
def test_what_is_in_the_way_is_named_and_nothing_is_changed(text: str, line: int, words: str) -> None:
    [finding] = failed(text).findings
    assert finding.line == line
    assert words in finding.text


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (
            """\
            from ray.util.sgd.torch import TorchTrainer
            from ray.util.sgd.torch.torch_runner import TorchRunner  # theirs
            """,
            """\
            from raysgd.torch import TorchTrainer
            # raysgd: `ray.util.sgd.torch.torch_runner.TorchRunner` has no successor: INTERNAL
            from ray.util.sgd.torch.torch_runner import TorchRunner  # theirs
            """,
        ),
        (
            """\
            from ray.util.sgd.torch.torch_dataset import TorchMLDataset, convert_to_tensor
            """,
            """\
            from raysgd.torch.torch_dataset import TorchMLDataset
            # raysgd: `ray.util.sgd.torch.torch_dataset.convert_to_tensor` has no successor: `TorchMLDataset` converts
            from ray.util.sgd.torch.torch_dataset import convert_to_tensor
            """,
        ),
        (
            """\
            import ray.util.sgd.torch

            class Mine:
                def run(self):
                    # why
                    if ray.util.sgd.torch.worker_group.A():
                        return ray.util.sgd.torch.TorchTrainer()
            """,
            """\
            import raysgd.torch

            class Mine:
                def run(self):
                    # why
                    # raysgd: `ray.util.sgd.torch.worker_group.A` has no successor: INTERNAL
                    if ray.util.sgd.torch.worker_group.A():
                        return raysgd.torch.TorchTrainer()
            """,
        ),
        (
            """\
            from ray.util.sgd.torch.examples.segmentation.coco_utils import get_coco
            """,
            """\
            # raysgd: `ray.util.sgd.torch.examples.segmentation.coco_utils.get_coco` has no successor: \
`examples/segmentation.py` trains in its place, with a `SegmentationOperator`
            from ray.util.sgd.torch.examples.segmentation.coco_utils import get_coco
            """,
        ),
    ],
    ids=["import", "part of an import", "name", "helper of an example"],
)
def test_a_line_for_a_person_gets_a_comment_once_and_all_others_are_rewritten(old: str, new: str) -> None:
    found = migrate(dedent(old).encode())
    assert found.has_failed
    internal = "it was an internal of the old library, and raysgd's internals are different"
    wanted = dedent(new).replace("INTERNAL", internal)
    text = found.text.decode()
    assert [line for line in wanted.splitlines() if line not in text.splitlines()] == []
    again = migrate(found.text)
    assert again.text == found.text, "a second time changes nothing"
    assert again.has_failed, "and still says what is left"


def test_pipelines_of_ray_data_are_warned_of() -> None:
    found = migrate(b"from ray.data.dataset_pipeline import DatasetPipeline\n")
    [finding] = found.findings
    assert "no `DatasetPipeline` any more" in finding.text
    assert not found.has_failed


def test_calls_that_todays_keras_refuses_are_rewritten_or_named() -> None:
    text = """\
    import tensorflow as tf
    from tensorflow.keras.optimizers import Adam
    from keras import optimizers

    opts = [Adam(lr=0.1), tf.keras.optimizers.SGD(lr=0.1, momentum=0.9), optimizers.Adam(learning_rate=1), mine(lr=1)]
    weights = self.optimizer.get_weights() + model.get_weights()
    model.save("folder")
    model.save("file.keras")
    """
    found = migrate(dedent(text).encode())
    assert found.text.decode() == dedent(text).replace("Adam(lr", "Adam(learning_rate").replace(
        "SGD(lr", "SGD(learning_rate"
    )
    assert [finding.line for finding in found.findings] == [6, 7]
    assert "optimizer.variables" in found.findings[0].text
    assert "`.keras`" in found.findings[1].text
    assert not found.has_failed


def test_functions_in_configs_need_no_wrapping() -> None:
    assert migrated("from ray import tune\n\nconfig = {'f': tune.function(len)}\n") == (
        "from ray import tune\nimport raysgd.tune\n\nconfig = {'f': raysgd.tune.function(len)}\n"
    )


def test_bytes_that_are_no_text_are_refused() -> None:
    found = migrate(b"x = '\xff\xfe'\n")
    assert found.has_failed
    assert "no valid Python" in found.findings[0].text


# ------------------------------------------------------------------------------------------------ files


def run(*arguments: object) -> Result:
    return CliRunner().invoke(command, [str(argument) for argument in arguments])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "sub").mkdir()
    (tmp_path / ".hidden").mkdir()
    for name in ("a.py", "sub/b.py", ".hidden/c.py"):
        (tmp_path / name).write_text("from ray.util.sgd import TorchTrainer\r\n", newline="")
    (tmp_path / "other.py").write_text("import ray\n")
    return tmp_path


def test_nothing_is_written_without_being_asked(folder: Path) -> None:
    found = run(folder, "--diff")
    assert found.exit_code == 0, found.output
    assert "2 of 3 files would change (nothing is written without --write)" in found.output
    assert "-from ray.util.sgd import TorchTrainer" in found.output
    assert "+from raysgd import TorchTrainer" in found.output
    assert (folder / "a.py").read_bytes() == b"from ray.util.sgd import TorchTrainer\r\n"


@pytest.mark.parametrize(("flags", "is_told"), [([], True), (["--ray-train"], False)])
def test_a_program_for_ray_train_is_told_of_the_option(tmp_path: Path, flags: list[str], is_told: bool) -> None:
    program = tmp_path / "old.py"
    program.write_text("from ray.train import Trainer\n")
    assert ("pass --ray-train" in run(program, *flags).stderr) is is_told


def test_without_libcst_one_line_says_how_to_install_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    found = run(folder)
    [line] = found.output.splitlines()
    assert line.startswith('Error: `raysgd migrate` needs `libcst`, which is not installed. Run: pip install "libcst>=')


def test_files_are_replaced_with_their_line_ends_and_permissions(folder: Path) -> None:
    os.chmod(folder / "a.py", 0o755)
    found = run(folder, "--write")
    assert found.exit_code == 0
    assert "2 of 3 files rewritten" in found.output
    assert (folder / "a.py").read_bytes() == b"from raysgd import TorchTrainer\r\n"
    assert (folder / "a.py").stat().st_mode & 0o777 == 0o755
    assert "ray.util.sgd" in (folder / ".hidden/c.py").read_text()
    assert "0 of 3 files" in run(folder, "--write").output


def test_a_file_that_cannot_be_migrated_does_not_stop_the_others(folder: Path) -> None:
    (folder / "broken.py").write_text("def f(:\n")
    (folder / "gone.py").write_text("from ray.util.sgd import TorchTrainer\nimport ray.util.sgd.torch.torch_runner\n")
    found = run(folder, "--write")
    assert found.exit_code == 1
    assert "broken.py:1: error: this is no valid Python" in found.output
    assert "gone.py:2: error: `ray.util.sgd.torch.torch_runner` has no successor" in found.output
    assert "1 could not be migrated" in found.output
    assert "1 lines are left for you, below `# raysgd:`" in found.output
    assert (folder / "gone.py").read_text().startswith("from raysgd import TorchTrainer\n# raysgd: `ray.util.sgd.torch")
    assert "raysgd" in (folder / "a.py").read_text()


def test_a_file_is_rewritten_as_a_whole_or_not_at_all_if_you_say_so(folder: Path) -> None:
    (folder / "gone.py").write_text("from ray.util.sgd import TorchTrainer\nimport ray.util.sgd.torch.torch_runner\n")
    found = run(folder, "--write", "--strict")
    assert found.exit_code == 1
    assert "1 could not be migrated and are unchanged" in found.output
    assert "raysgd" not in (folder / "gone.py").read_text()
    assert "raysgd" in (folder / "a.py").read_text()


def test_a_program_with_endless_expressions_does_not_stop_the_others(folder: Path) -> None:
    joined = " + ".join(f"'{number}'" for number in range(600))
    (folder / "long.py").write_text(f"from ray.util.sgd import TorchTrainer\nx = {joined}\n")
    found = run(folder, "--write")
    assert found.exit_code == 1
    assert "long.py:1: error: its code is nested too deeply" in found.output
    assert "raysgd" in (folder / "a.py").read_text()


def test_pipes_links_and_files_that_may_not_be_written_stay(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    outside = tmp_path_factory.mktemp("outside") / "x.py"
    outside.write_text("from ray.util.sgd import TorchTrainer\n")
    (folder / "link.py").symlink_to(outside)
    os.mkfifo(folder / "pipe.py")
    (folder / "a.py").chmod(0o444)
    found = run(folder, "--write")
    assert found.exit_code == 1
    assert f"link.py:1: look: left alone: it is a link to `{outside}`" in found.output
    assert "pipe.py:1: look: left alone: it is not a regular file" in found.output
    assert "is read-only" in found.output
    assert "raysgd" not in outside.read_text() + (folder / "a.py").read_text()
    assert "raysgd" in (folder / "sub/b.py").read_text()


def test_a_notebook_is_rewritten_too(folder: Path) -> None:
    text = '{"nbformat": 4, "cells": [{"cell_type": "code", "source": ["import ray.util.sgd"]}]}'
    (folder / "n.ipynb").write_text(text)
    assert run(folder, "--write").exit_code == 0
    assert (folder / "n.ipynb").read_text() == text.replace("ray.util.sgd", "raysgd")


def test_a_notebook_that_is_none_is_named(folder: Path) -> None:
    (folder / "n.ipynb").write_text('{"cells": [{"source": ["import ray.util.sgd"]}]}')
    found = run(folder)
    assert found.exit_code == 1
    assert "n.ipynb:1: error: this is no notebook" in found.output


@pytest.mark.parametrize("name", ["missing", "empty"])
def test_a_path_without_python_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    found = run(tmp_path / name)
    assert found.exit_code == 1
    assert name in found.output
