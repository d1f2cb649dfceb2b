"""`raysgd migrate`: what becomes of a program's text, and of its files.

Covers `raysgd.compat.migrate.names` and `raysgd.compat.migrate.calls`, which have no face of their own.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import os
import random
import re
import subprocess
import tokenize
from collections import Counter
from io import StringIO
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
from click.testing import CliRunner, Result

from raysgd.cli.main import main
from raysgd.compat.migrate import calls as _calls
from raysgd.compat.migrate.calls import RENAMED, RETIRED
from raysgd.compat.migrate.source import MigratedProgram, migrate
from raysgd.compat.paths import Paths, renamed, table
from tests.helpers.run_if import RunIf


def migrated(text: str, ray_train: bool = False) -> str:
    found = migrate(dedent(text).encode(), ray_train)
    assert not found.has_failed, found.findings
    assert migrate(found.text, ray_train).text == found.text, "a second time changes nothing"
    ast.parse(found.text)
    return found.text.decode()


def failed(text: str | bytes) -> MigratedProgram:
    found = migrate(text if isinstance(text, bytes) else dedent(text).encode())
    assert found.has_failed
    return found


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("from ray.util.sgd import TorchTrainer", "from raysgd import TorchTrainer"),
        ("from ray.util.sgd import TorchTrainer as T  # ours", "from raysgd import TorchTrainer as T  # ours"),
        ("from ray.util.sgd import PyTorchTrainer", "from raysgd import TorchTrainer as PyTorchTrainer"),
        (
            "from ray.util.sgd.torch.examples.dcgan import GANOperator as G",
            "from raysgd.torch.examples.dcgan import GANOperator as G",
        ),
        ("from ray.util.sgd.pytorch import TrainingOperator", "from raysgd.torch import TrainingOperator"),
        ("from ray.util.sgd.utils import *", "from raysgd.utils import *"),
        ("import ray.util.sgd.torch as sgd", "import raysgd.torch as sgd"),
        ("import ray.util.sgd", "import raysgd"),
        ("import os, ray.util.sgd.utils as u", "import os, raysgd.utils as u"),
        ("from ray.util.sgd import torch, utils", "from raysgd import torch, utils"),
        ("from ray.util import sgd", "import raysgd as sgd"),
        ("if x: import ray.util.sgd as s; import os", "if x: import raysgd as s; import os"),
        (
            "if x: from ray.util import sgd, iter as i  # c",
            "if x: import raysgd as sgd; from raysgd.util import iter as i  # c",
        ),
        ("from ray.util.sgd.v2.backends.torch import TorchConfig", "from raysgd.train.torch import TorchConfig"),
        ("import ray.tune.integration.torch as integration", "import raysgd.tune.torch as integration"),
        ("from ray.util.sgd.pytorch.utils import AverageMeter", "from raysgd.utils import AverageMeter"),
        ("from ray.experimental.sgd.tf import TFTrainer", "from raysgd.tf import TFTrainer"),
        ("from ray.experimental.sgd import utils", "from raysgd import utils"),
        (
            "from ray.experimental.sgd.pytorch.pytorch_trainer import PyTorchTrainer",
            "from raysgd import TorchTrainer as PyTorchTrainer",
        ),
        ("from ray.tune.suggest.hyperopt import HyperOptSearch", "from ray.tune.search.hyperopt import HyperOptSearch"),
        ("import ray.tune.suggest", "import ray.tune.search"),
        ("from ray.tune.trial import Trial", "from ray.tune.experiment import Trial"),
    ],
)
def test_an_import_leads_to_raysgd(old: str, new: str) -> None:
    assert migrated(old + "\n") == new + "\n"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (
            "from ray.train.torch.config import _TorchBackend",
            "from raysgd.train.torch import TorchBackend as _TorchBackend",
        ),
        (
            "from ray.train._internal.worker_group import WorkerGroup",
            "from raysgd.train.worker_group import WorkerGroup",
        ),
        ("from ray.train._internal.session import report", "from raysgd.air.session import report"),
        (
            "from ray.tune.tuner import TuneConfig, Tuner",
            "from raysgd.tune import TuneConfig\nfrom raysgd.tune.tuner import Tuner",
        ),
        ("from ray.ml.train.integrations.torch import TorchTrainer", "from raysgd.train.torch import TorchTrainer"),
        (
            "from ray.ml.config import RunConfig, ScalingConfig",
            "from raysgd.air.config import RunConfig, ScalingConfig",
        ),
        ("from ray.ml.preprocessors import StandardScaler", "from ray.data.preprocessors import StandardScaler"),
        (
            "from ray.ml import Checkpoint, Preprocessor",
            "from raysgd.air import Checkpoint\nfrom ray.data.preprocessor import Preprocessor",
        ),
    ],
)
def test_an_import_of_ray_train_leads_to_raysgd(old: str, new: str) -> None:
    assert migrated(old + "\n", ray_train=True) == new + "\n"


def test_names_of_ray_itself_follow_it() -> None:
    old = "import ray\nfrom ray import tune\n\nx = tune.sample.Float(0, 1), ray.services.get_node_ip_address()\n"
    new = (
        "import ray\nfrom ray import tune\nimport ray.tune.search.sample\nimport ray.util\n\n"
        "x = ray.tune.search.sample.Float(0, 1), ray.util.get_node_ip_address()\n"
    )
    assert migrated(old) == new


def test_a_program_for_ray_ml_is_said_to_need_the_option(tmp_path: Path) -> None:
    text = "from ray.ml.config import ScalingConfig\nfrom ray.ml.train.integrations.xgboost import XGBoostTrainer\n"
    assert migrated(text) == text
    (tmp_path / "old.py").write_text(text)
    assert "there is `ray.ml`, pass --ray-train" in run(tmp_path / "old.py").output
    assert migrated(text, ray_train=True) == (
        "from ray.train import ScalingConfig\nfrom ray.train.xgboost import XGBoostTrainer\n"
    )


def test_a_name_that_no_table_has_is_said_with_those_that_are_like_it() -> None:
    [finding] = failed("from ray.util.sgd.torch import TrainOperator\n").findings
    assert "of `ray.util.sgd.torch` raysgd has `TrainingOperator`, `CreatorOperator`" in finding.text
    [finding] = failed("from ray.util.sgd.pytorch.examples.dcgan import LeNet\n").findings
    assert "of `ray.util.sgd.pytorch.examples.dcgan` raysgd has `Discriminator`" in finding.text


def diffs_of_the_page() -> list[str]:
    page = Path(__file__).parents[2] / "docs" / "migration.md"
    return re.findall(r"^```diff\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def side(diff: str, mark: str) -> str:
    return "".join(line[1:] for line in diff.splitlines(keepends=True) if line[0] in (" ", mark))


@pytest.mark.parametrize("diff", diffs_of_the_page())
def test_the_page_shows_what_becomes_of_a_program(diff: str) -> None:
    before = side(diff, "-")
    assert migrated(before, ray_train="ray.train" in before) == side(diff, "+")


def test_each_section_of_the_tables_is_read() -> None:
    source = Path(_calls.__file__).read_text(encoding="utf-8")
    others = [title for title in _calls._TABLES if not re.fullmatch(r"(renamed|retired):( ray[\w.]+)+", title)]
    assert [title for title in others if f'_TABLES["{title}"]' not in source] == []
    assert len(others) == 7
    assert all(all(rows.values()) for rows in (*RENAMED.values(), *RETIRED.values()))


@RunIf(modules=["pandas", "pyarrow"])
def test_the_tables_of_arguments_are_those_of_todays_ray() -> None:
    import ray
    import ray.tune

    functions: dict[str, Any] = {
        "ray.init": ray.init,
        "ray.tune.run": ray.tune.run,
        "ray.tune.Experiment": ray.tune.Experiment,
    }
    for name, function in functions.items():
        there = {
            *inspect.signature(function).parameters,
            *re.findall(r'kwargs.pop\(\s*"(\w+)', inspect.getsource(function)),
        }
        assert there & {*RETIRED.get(name, ())} <= {"chdir_to_trial_dir"}, (
            "Ray takes it, and says that it has no effect"
        )
        assert {*RENAMED[name].values()} <= there
        assert there & {*RENAMED[name]} <= {"local_dir"}, "Ray takes it, and raises"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("'./x'", "os.path.abspath(os.path.expanduser('./x'))"),
        ("'~/x'", "os.path.abspath(os.path.expanduser('~/x'))"),
        ("'/x'", "'/x'"),
        ("'s3://x'", "'s3://x'"),
        ("None", "None"),
        ("os.path.abspath(x)", "os.path.abspath(x)"),
        ("os.path.expanduser('~/x')", "os.path.abspath(os.path.expanduser('~/x'))"),
        ("os.path.expanduser('x')", "os.path.abspath(os.path.expanduser('x'))"),
        ("args.x", "args.x and os.path.abspath(os.path.expanduser(args.x))"),
        ("f'{x}/y'", "os.path.abspath(os.path.expanduser(f'{x}/y'))"),
        ("os.path.join(x, 'y')", "os.path.abspath(os.path.expanduser(os.path.join(x, 'y')))"),
    ],
)
def test_the_folder_of_a_sweep_has_its_new_name_and_is_absolute(old: str, new: str) -> None:
    head = "import os, sys  # c\nfrom ray import tune\n\n"
    assert migrated(f"{head}tune.run(f, local_dir={old}, verbose=0)\n") == (
        f"{head}tune.run(f, storage_path={new}, verbose=0)\n"
    )


def test_the_module_for_an_absolute_folder_is_imported() -> None:
    new = migrated("from ray.tune import Experiment\n\nExperiment('a', f, local_dir='x')\n")
    assert new.startswith("from ray.tune import Experiment\nimport os\n\nExperiment('a', f, storage_path=os.path.")


def test_arguments_of_ray_get_their_names_of_today() -> None:
    old = "import ray\n\nray.init(redis_address=x, memory=2, include_webui=False, webui_host=h, temp_dir=t)\n"
    new = "import ray\n\nray.init(address=x, _memory=2, include_dashboard=False, dashboard_host=h, _temp_dir=t)\n"
    assert migrated(old) == new


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


def test_a_call_of_a_name_in_parentheses_keeps_its_lines() -> None:
    old = "import ray\n\nx = (ray.tune).Tuner(\n    t,  # mine\n).fit()\n"
    assert migrated(old, ray_train=True).endswith("\nx = raysgd.tune.Tuner(\n    t,  # mine\n).fit()\n")


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


class Value:
    """Stands for anything that a program imports or computes, and knows how."""

    def __init__(self, *how: Any) -> None:
        self.how = how

    def __getattr__(self, name: str) -> Value:
        is_named = self.how[0] == "name" and not name.startswith("__")
        return Value("name", f"{self.how[1]}.{name}") if is_named else Value("attribute", self.how, name)

    def __call__(self, *args: Any, **options: Any) -> Value:
        passed = [("", each) for each in args] + list(options.items())
        return Value("call", self.how, [(name, getattr(each, "how", each)) for name, each in passed])

    def __getitem__(self, key: Any) -> Value:
        return Value("item", self.how, getattr(key, "how", key))


def run_with_values(program: str) -> tuple[list[Any], set[str]]:
    """Return how each value came about that a program passes to `see`, and the modules that it imports."""
    seen: list[Any] = []
    modules: set[str] = set()

    def imported(name: str, *args: Any) -> Value:
        modules.add(name)
        return Value("name", name if args[2] else name.partition(".")[0])

    own = {**vars(builtins), "__import__": imported}
    exec(program, {"__builtins__": own, "see": lambda value: seen.append(value.how)})
    return seen, modules


def with_todays_names(how: Any, paths: Paths) -> Any:
    if isinstance(how, tuple) and how[:1] == ("name",):
        return ("name", paths.today(how[1]))
    return type(how)(with_todays_names(part, paths) for part in how) if isinstance(how, tuple | list) else how


def random_program(chance: random.Random) -> str:
    """A program with some imports of old names, in every form, and chains of attributes, calls and items of them."""
    rows = [(old, names.split()) for group in ("sgd", "train") for old, _, names in table(group) if names]
    rows += [(old.rpartition(".")[0], [old.rpartition(".")[2]]) for old in renamed()]
    lines, starts = ["import ray"], ["ray.init", "ray.tune.Tuner", "ray.util.sgd.TorchTrainer", "ray.train.get_context"]
    for number in range(chance.randint(1, 5)):
        module, names = chance.choice(rows)
        package, _, last = module.rpartition(".")
        name = chance.choice(names)
        line, start = chance.choice(
            [
                (f"import {module}", f"{module}.{name}"),
                (f"import {module} as m{number}", f"m{number}.{name}"),
                (f"from {package} import {last} as p{number}", f"p{number}.{name}"),
                (f"from {package} import {last}", f"{last}.{name}"),
                (f"from {module} import {name} as n{number}", f"n{number}"),
                (f"from {package} import {last} as q{number}, other as o{number}", f"q{number}.{name}(o{number})"),
            ]
        )
        if line.partition(" import ")[2].partition(" as ")[0] not in {each.split(".")[0] for each in starts}:
            lines.append(line)
            starts.append(start)

    def expression(depth: int) -> str:
        text = chance.choice(starts)
        for _ in range(chance.randint(0, 4)):
            inner = expression(depth - 1) if depth and chance.random() < 0.3 else str(chance.randint(0, 9))
            text += chance.choice([".fit", f"({inner})", f"(a={inner}, b=2)", f"[{inner}]", ".x", "()", "[0]"])
        return f"({text})" if chance.random() < 0.1 else text

    return "\n".join([*lines, *(f"see({expression(2)})" for _ in range(chance.randint(1, 6))), ""])


def test_random_programs_mean_the_same() -> None:
    for seed in range(150):
        check_that_it_means_the_same(random_program(random.Random(seed)))


def check_that_it_means_the_same(program: str) -> None:
    found = migrate(program.encode(), ray_train=True)
    paths = Paths(ray_train=True)
    (before, _), (after, modules) = run_with_values(program), run_with_values(found.text.decode())
    assert with_todays_names(after, paths) == with_todays_names(before, paths), f"{program}\n{found.text.decode()}"
    targets = [*renamed().values(), *(new for group in ("sgd", "train") for _, new, _ in table(group))]
    packages = {name.rpartition(".")[0] for name in targets} | set(targets) - set(renamed().values())
    assert {module for module in modules if module.startswith("raysgd")} <= packages


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


def test_a_program_with_a_trainer_of_ray_keeps_the_configs_of_ray() -> None:
    text = """\
    from ray import train, tune
    from ray.air.config import RunConfig, ScalingConfig
    from ray.train.xgboost import XGBoostTrainer

    tune.Tuner(XGBoostTrainer(train_loop, scaling_config=ScalingConfig(num_workers=2)), run_config=RunConfig())
    train.lightgbm.LightGBMTrainer(train_loop, run_config=train.RunConfig())
    """
    assert migrated(text, ray_train=True) == dedent(text)
    found = migrate(dedent(text).encode(), ray_train=True)
    assert [(finding.line, finding.is_error) for finding in found.findings] == [(3, False), (6, False)]
    assert "`ray.train.xgboost.XGBoostTrainer` is Ray's own" in found.findings[0].text
    assert "`ray.train.ScalingConfig`" in found.findings[0].text


def test_a_trainer_beside_one_of_ray_stays_too_and_a_person_is_told() -> None:
    text = """\
    from ray.train import ScalingConfig
    from ray.train.batch_predictor import BatchPredictor
    from ray.train.torch import TorchTrainer
    from ray.train.xgboost import XGBoostTrainer
    from ray.util.sgd import TFTrainer
    """
    found = migrate(dedent(text).encode(), ray_train=True)
    left, gone, others = dedent(text).partition("from ray.train.batch")
    gone = f"# raysgd: today's Ray has no module `ray.train.batch_predictor`\n{gone}"
    assert found.text.decode() == left + gone + others.replace("ray.util.sgd", "raysgd")
    assert "move them to a file without it" in found.findings[1].text


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
        four = TorchTrainer.as_trainable(model_creator=model, optimizer_creator=optimizer, num_workers=2)
        five = TorchTrainer(
            model_creator=model,
            optimizer_creator=optimizer,
            num_workers=2,
            training_operator_cls=work.Own)
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
    four = TorchTrainer.as_trainable(training_operator_cls=raysgd.TrainingOperator.from_creators(model_creator=model, \
optimizer_creator=optimizer), num_workers=2)
    five = TorchTrainer(
        training_operator_cls=work.Own.from_creators(model_creator=model, optimizer_creator=optimizer),
        num_workers=2)
    """
    assert new.endswith(dedent(wanted))


def test_a_trainer_whose_creators_have_no_names_is_rewritten_once_they_have() -> None:
    start = "from ray.util.sgd import TorchTrainer\ntrainer = TorchTrainer("
    first = failed(f"{start}model, data, loss_creator=loss, num_replicas=2)\n").text.decode()
    assert "TorchTrainer(model, data, loss_creator=loss, num_replicas=2)" in first
    second = migrated(first.replace("model, data, loss", "model_creator=model, data_creator=data, loss"))
    assert "from_creators(model_creator=model, data_creator=data, loss_creator=loss), num_workers=2)" in second


def test_comments_beside_arguments_that_move_are_kept_above_the_statement() -> None:
    new = migrated(
        """\
        from ray.util.sgd import TorchTrainer

        t = TorchTrainer(  # drives
            model_creator=M,  # the model
            data_creator=D,  # the data
            # in step with the paper
            optimizer_creator=O,  # the optimizer
            # counts machines
            num_replicas=2,  # two
            batch_size=8,  # of all
            training_operator_cls=Own,  # mine
            config={"lr": 1})  # end
        u = TorchTrainer(
            num_workers=1, batch_size=8,  # small
            data_creator=D,  # one
            config=config,
            # nothing more
        )
        """
    )
    wanted = """\
    # the data
    # in step with the paper
    # the optimizer
    # counts machines
    # of all
    # mine
    t = TorchTrainer(  # drives
        training_operator_cls=Own.from_creators(model_creator=M, data_creator=D, optimizer_creator=O),  # the model
        num_workers=2,  # two
        config={"lr": 1, raysgd.utils.BATCH_SIZE: 8})  # end
    # small
    u = TorchTrainer(
        num_workers=1, training_operator_cls=raysgd.TrainingOperator.from_creators(data_creator=D),  # one
        config={**config, raysgd.utils.BATCH_SIZE: 8},
        # nothing more
    )
    """
    assert new.endswith(dedent(wanted)), new


def texts_of_tests() -> list[str]:
    """All programs of these tests: those that run, those of the page, and some that are drawn."""
    programs = [path.read_text(encoding="utf-8") for path in (Path(__file__).parent / "programs").glob("*.py")]
    drawn = [random_program(random.Random(seed)) for seed in range(30)]
    return [*programs, *(side(diff, "-") for diff in diffs_of_the_page()), *drawn]


def comments_of(text: str) -> Counter[str]:
    tokens = tokenize.generate_tokens(StringIO(text).readline)
    return Counter(token.string for token in tokens if token.type == tokenize.COMMENT)


def with_more_comments(text: str, chance: random.Random) -> str:
    """The program with a comment, and a new line, at many of the places within brackets where one may stand."""
    lines, depth, places = text.splitlines(keepends=True), 0, list[tuple[int, int]]()
    for token in tokenize.generate_tokens(StringIO(text).readline):
        if token.type == tokenize.OP:
            depth += (token.string in "([{") - (token.string in ")]}")
            if depth and token.string in "([{,=." and chance.random() < 0.6:
                places.append(token.end)
    for number, (row, column) in enumerate(reversed(places)):
        line = lines[row - 1]
        lines[row - 1] = f"{line[:column]}  # comment {number}\n{line[column:]}"
    return "".join(lines)


def test_all_comments_before_are_there_after() -> None:
    texts, num_comments = texts_of_tests(), 0
    chance = random.Random(0)
    for text in [*texts, *(with_more_comments(each, chance) for each in texts)]:
        before = comments_of(text)
        new = migrate(text.encode(), ray_train=True).text.decode()
        num_comments += before.total()
        assert before - comments_of(new) == Counter(), f"{text}\n{new}"
        ast.parse(new)
    assert num_comments > 1000


def test_what_a_person_has_to_decide_is_named_with_its_line() -> None:
    text = """\
    from unittest.mock import patch
    from ray.util.sgd import TorchTrainer

    patch("ray.util.sgd.torch.TorchTrainer")
    TorchTrainer(training_operator_cls=Op, apex_args={}, data_loader_args={}, **more)
    TorchTrainer(Op)
    """
    found = migrate(dedent(text).encode())
    assert sorted((finding.line, finding.is_error) for finding in found.findings) == [
        (4, False),
        (5, False),
        *[(5, True)] * 2,
        (6, True),
    ]
    told = " ".join(finding.text for finding in found.findings)
    for words in ("'ray.util.sgd.torch.TorchTrainer'", "`apex_args`", "`data_loader_args`", "by name only", "(**...)"):
        assert words in told


def test_arguments_of_the_first_versions_are_named_with_what_to_write() -> None:
    text = """\
    from ray.util.sgd.pytorch import PyTorchTrainer, PyTorchTrainable

    def hook(runner):
        pass

    class Trial(PyTorchTrainable):
        def _train(self):
            return PyTorchTrainer(
                train_function=f, validation_function=g, dataloader_config={}, initialization_hook=hook, num_replicas=2)
    """
    found = failed(text)
    told = [(finding.line, finding.text) for finding in found.findings]
    for line, words in [
        (7, "rename `_train` to `step`"),
        (8, "`train_function` is no argument of `TorchTrainer` any more: override `train_epoch(self, iterator, info)`"),
        (8, "override `validate(self, val_iterator, info)`"),
        (8, "`dataloader_config` is no argument of `TorchTrainer` any more: make the `DataLoader`"),
        (8, "`initialization_hook` is called without arguments: write `def hook():`"),
    ]:
        assert [text for at, text in told if at == line and words in text], told
    assert b"num_workers=2" in found.text


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("x = 1\ndef f(:\n", 2, "no valid Python"),
        ("from ray.util.sgd.torch.torch_runner import TorchRunner\n", 1, "has no successor: it was an internal"),
        ("import ray.util.sgd\n\nray.util.sgd.Nothing()\n", 3, "`ray.util.sgd.Nothing` has no successor"),
        ("# -*- coding: nonsense -*-\n", 1, "no valid Python"),
        ("x = 1\0\n", 1, ""),
        (b"x = '\xff\xfe'\n", 1, "no valid Python"),
        ('"""A docstring."""; import os\nimport ray\nray.util.sgd.TorchTrainer()\n', 1, "its own line"),
        ("from __future__ import annotations; import os\nimport ray\nray.util.sgd.TorchTrainer()\n", 1, "its own line"),
        ("x = " + "(" * 3000 + ")" * 3000 + "\n", 1, ""),
    ],
)
def test_what_is_in_the_way_is_named_and_nothing_is_changed(text: str | bytes, line: int, words: str) -> None:
    [finding] = failed(text).findings
    assert finding.line == line
    assert words in finding.text


@pytest.mark.parametrize(
    ("old", "new"),
    [
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
    ],
    ids=["part of an import", "name"],
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


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("ray.remote(TorchTrainer).remote(model_creator=m)", "instead of creator functions pass"),
        ("ray.remote(num_cpus=2)(TorchTrainer).remote(model_creator=m)", "instead of creator functions pass"),
        ("Remote = ray.remote(TorchTrainer)\nRemote.remote(data_creator=m)", "instead of creator functions pass"),
        (
            "class Own(TrainingOperator):\n    def __init__(self, config):\n        pass",
            "`setup(self, config)`",
        ),
        (
            "class Own(TrainingOperator):\n    def __init__(self, config, **kwargs):\n        x = kwargs['world_rank']",
            "`setup(self, config)`",
        ),
        ("from ray.tune.suggest.skopt import SkOptSearch", "`ray.tune.search.optuna.OptunaSearch()`"),
        ("r = ray.tune.resources.Resources(cpu=1, gpu=0)", "`ray.tune.PlacementGroupFactory("),
        ("from ray_lightning.tests.utils import LightningMNISTClassifier", "copy the `LightningModule`"),
        ("from ray.data.preprocessors import BatchMapper, Chain", "`map_batches`"),
        ("from ray.data.dataset_pipeline import DatasetPipeline", "read while it is used"),
        ("predictor.predict_pipelined(dataset)", "call `predict`"),
        ("for each in pipe.iter_epochs(): pass", "once for each epoch"),
        ("pipe = data.repeat().random_shuffle_each_window(seed=1)", "`random_shuffle` of it"),
        ("data.fully_executed()", "`materialize()`"),
        ("ray.init(lru_evict=True, num_cpus=1)", "today's `ray.init` takes no `lru_evict`: leave it out"),
        ("ray.init(load_code_from_local=True)", "today's `ray.init` takes no `load_code_from_local`"),
        ("ray.init(address=None, redis_address=x)", "takes `address` and no `redis_address`: leave it out"),
        ("trials = tune.run(f, return_trials=True)", "take `.trials` of what `ray.tune.run` returns"),
        ("ray.train.xgboost.XGBoostTrainer(params={})", "as `train_loop_per_worker`"),
        ("import keras\nkeras.models.save_model(model, 'folder')", "`model.export(path)` writes a SavedModel"),
        ("tune.run(f, trial_executor=None)", "today's `ray.tune.run` takes no `trial_executor`"),
        ("from ray.tune.utils.util import merge_nothing, merge_dicts", "no `merge_nothing` in `ray.tune.utils.util`"),
        ("class Own(tune.Trainable):\n    def _train(self):\n        pass", "rename `_train` to `step`"),
        ("from ray.util.sgd.torch.training_operator import amp", "`self.backward(loss)`"),
        ("from ray.util.sgd.torch.distributed_torch_runner import DistributedTorchRunner", "an internal"),
        ("with tune.checkpoint_dir(3) as folder:\n    pass", "`checkpoint=ray.tune.Checkpoint.from_directory(folder)`"),
        ("tune.report(loss, accuracy=1)", '{"_metric": ..., ...}'),
        ("if x:\n    pass\nelif tune.track.x:\n    pass", "`ray.tune.report({...})`"),
        ("from ray_lightning import RayPlugin, HorovodRayStrategy", "`raysgd.TrainingOperator.from_ptl`"),
        ("from ray_lightning.tune import TuneReportCallback", "`raysgd.tune.Tuner`"),
        ("from ray.rllib.agents.ppo import PPOTrainer", "today's Ray has no module `ray.rllib.agents.ppo`"),
        ("rows = ray.data.range_table(8)", "no `range_table` in `ray.data`"),
        ("x = [n for n in ray.worker_state.nodes()]", "no `worker_state` in `ray`"),
        ("import ray.tune.trial", "today's Ray has no module `ray.tune.trial`"),
        ("from horovod.ray import RayExecutor", '`raysgd.train.Trainer("horovod", num_workers=...)`'),
        ("import horovod.ray\nx = horovod.ray.ElasticRayExecutor(s)", "`From horovod.ray`"),
    ],
)
def test_a_line_that_cannot_work_gets_a_comment_with_what_to_write(text: str, words: str) -> None:
    head = "import ray\nfrom ray import tune\nfrom ray.util.sgd.torch import TorchTrainer, TrainingOperator\n\n"
    found = migrate((head + text + "\n").encode())
    assert found.has_failed
    assert words in "".join(line for line in found.text.decode().splitlines() if line.strip().startswith("# raysgd: "))
    code = "".join(line for line in found.text.decode().splitlines(True) if not line.strip().startswith("# raysgd: "))
    assert ast.dump(ast.parse(code)).endswith(ast.dump(ast.parse(text)).removeprefix("Module(body=["))
    assert migrate(found.text).text == found.text, "a second time changes nothing"


@pytest.mark.parametrize(
    "text",
    [
        "ray.remote(TorchTrainer).remote(training_operator_cls=Own, num_workers=2)",
        "Mine.remote(model_creator=m)",
        "class Own(TrainingOperator):\n    def __init__(self, config, **m):\n        super().__init__(config, **m)",
        "class Mine(Other):\n    def __init__(self, config):\n        pass",
        "from horovod.torch import init",
        "from ray._raylet import ObjectRef",
        "from ray.tune.schedulers import ASHAScheduler",
        "from ray.train.callbacks import JsonLoggerCallback",
        "x = tune.sample_from(f)",
        "x: ray.data.Dataset = ray.data.from_items([ray.util.client.ray.is_connected(), ray.__version__])",
        "group = ray.util.placement_group([{'CPU': 1}])",
    ],
)
def test_a_line_that_works_gets_no_comment(text: str) -> None:
    head = "import ray\nfrom ray import tune\nfrom raysgd.torch import TorchTrainer, TrainingOperator\n\n"
    assert migrated(f"{head}{text}\n") == f"{head}{text}\n"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("tune.report(loss=1)", 'tune.report({"loss": 1})'),
        ("tune.report(loss=x.item(), **more)", 'tune.report({"loss": x.item(), **more})'),
        ("tune.report(**metrics)", "tune.report({**metrics})"),
        ("tune.report(loss=1, checkpoint=2)", 'tune.report({"loss": 1, "checkpoint": 2})'),
        (
            "tune.report(\n    loss=1,  # of all\n    acc=2,\n)",
            'tune.report({\n    "loss": 1,  # of all\n    "acc": 2,\n})',
        ),
        ("tune.report({'loss': 1})", "tune.report({'loss': 1})"),
        ("tune.report(metrics, checkpoint=c)", "tune.report(metrics, checkpoint=c)"),
        ("tune.report(metrics=m, checkpoint=c)", "tune.report(metrics=m, checkpoint=c)"),
        ("tune.report()", "tune.report()"),
    ],
)
def test_what_a_trial_reports_becomes_a_dict(old: str, new: str) -> None:
    assert migrated(f"from ray import tune\n\n{old}\n") == f"from ray import tune\n\n{new}\n"
    assert migrated(f"import ray.tune as t\nt.{old[5:]}\n") == f"import ray.tune as t\nt.{new[5:]}\n"


def test_functions_of_several_workers_report_to_raysgd() -> None:
    text = "from ray import tune\nfrom raysgd.tune.torch import DistributedTrainableCreator\ntune.report(loss=1)\n"
    found = migrate(text.encode())
    assert b"calls `raysgd.train.report(...)`, with the same arguments\ntune.report(loss=1)" in found.text
    assert found.has_failed


def test_a_trainer_loads_what_it_restored_and_other_objects_restore() -> None:
    old = """\
    import ray.util.sgd as sgd
    from ray.tune import Tuner
    from ray.util.sgd.torch.ptl_operator import LightningOperator

    trainer = sgd.TorchTrainer(training_operator_cls=LightningOperator)
    trainer.restore("a.pt")  # the newest
    self.my_trainer.restore(path)
    grid, values = Tuner.restore("sweep"), saver.restore("b")
    """
    new = (
        dedent(old)
        .replace("trainer.restore", "trainer.load")
        .replace("ray.util.sgd.torch.ptl_", "raysgd.torch.lightning_")
    )
    assert migrated(dedent(old)) == new.replace("ray.util.sgd", "raysgd")


def test_calls_that_todays_keras_refuses_are_rewritten_or_named() -> None:
    text = """\
    import tensorflow as tf
    from tensorflow.keras.optimizers import Adam
    from keras import optimizers

    opts = [Adam(lr=0.1), tf.keras.optimizers.SGD(lr=0.1, momentum=0.9), optimizers.Adam(learning_rate=1), mine(lr=1)]
    weights = self.optimizer.get_weights() + model.get_weights()
    model.save("folder")
    model.save("file.keras")
    tf.keras.models.save_model(model, "file.keras")
    """
    found = migrate(dedent(text).encode())
    code = "".join(line for line in found.text.decode().splitlines(True) if not line.startswith("# raysgd: "))
    assert code == dedent(text).replace("Adam(lr", "Adam(learning_rate").replace("SGD(lr", "SGD(learning_rate")
    assert [finding.line for finding in found.findings] == [6, 7]
    assert found.text.count(b"# raysgd: ") == 2
    assert "optimizer.variables" in found.findings[0].text
    assert "`.keras`" in found.findings[1].text
    assert all("`TF_USE_LEGACY_KERAS=1`" in finding.text for finding in found.findings)


def test_methods_that_datasets_of_ray_no_longer_have_are_named_and_those_of_others_stay() -> None:
    text = """\
    import ray, torch
    from ray import train
    import ray.data as rd

    def loop():
        shard = train.get_dataset_shard("train")
        shard.to_torch(batch_size=2)
        for each in shard.window(): pass

    data = rd.range(10).map(f)
    data.repeat(2)
    first, second = data.train_test_split(0.5)
    first.to_torch()
    ray.data.read_csv("x").repartition(2).window(blocks_per_window=1)
    def other(data):
        data.repeat(2)
    torch.ones(2).repeat(3)
    data = data.take(5)
    data.repeat(2)
    for epoch in pipeline.iter_datasets(): pass
    class Own:
        def __init__(self):
            self.data: object = ray.data.from_items([1])
            self.data.cache()
    """
    found = failed(text)
    assert [(finding.line, finding.is_error) for finding in found.findings] == [
        (7, False),
        *((line, True) for line in (8, 11, 13, 14, 20, 24)),
    ]
    told = " ".join(finding.text for finding in found.findings)
    for words in (
        "`iter_torch_batches(batch_size=...)`",
        "no windows",
        "no `repeat`",
        "no pipelines",
        "`materialize()`",
    ):
        assert words in told


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("x = stats['mean_train_loss']", "results have no `mean_train_loss`: it is `train_loss`"),
        ("print(trainer.validate().get('mean_accuracy', 0))", "`val_accuracy`"),
        ("x = stats['mean_train_loss'], {'mean_train_loss': 1}", ""),
        ("x = stats['train_loss']", ""),
    ],
)
def test_results_of_the_first_versions_have_their_names_of_today(line: str, words: str) -> None:
    text = f"from ray.util.sgd import TorchTrainer\n{line}\n"
    assert bool(words) is migrate(text.encode()).has_failed
    assert words in "".join(finding.text for finding in migrate(text.encode()).findings)


def test_functions_in_configs_need_no_wrapping() -> None:
    assert migrated("from ray import tune\n\nconfig = {'f': tune.function(len)}\n") == (
        "from ray import tune\nimport raysgd.tune\n\nconfig = {'f': raysgd.tune.function(len)}\n"
    )


# ------------------------------------------------------------------------------------------------ files


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["migrate", *(str(argument) for argument in arguments)])


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


@RunIf(programs=["git"])
@pytest.mark.parametrize(
    "text",
    [
        b"x = 1\nfrom ray.util.sgd import TorchTrainer",
        b"x = 1\n\x0c\nfrom ray.util.sgd import TorchTrainer\n",
        b"# coding: latin-1\nx = '\xe4'\nfrom ray.util.sgd import TorchTrainer\n",
    ],
)
def test_git_applies_the_diff(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: bytes) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.py").write_bytes(text)
    diff = run("a.py", "--diff").stdout_bytes
    subprocess.run(["git", "apply", "-"], input=diff, check=True)
    assert Path("a.py").read_bytes() == text.replace(b"ray.util.sgd", b"raysgd")


@pytest.mark.parametrize(("flags", "is_told"), [([], True), (["--ray-train"], False)])
def test_a_program_for_ray_train_is_told_of_the_option(tmp_path: Path, flags: list[str], is_told: bool) -> None:
    program = tmp_path / "old.py"
    program.write_text("from ray.train import Trainer\n")
    assert ("pass --ray-train" in run(program, *flags).output) is is_told


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
    joined = " + ".join(f"'{number}'" for number in range(600))
    (folder / "long.py").write_text(f"from ray.util.sgd import TorchTrainer\nx = {joined}\n")
    found = run(folder, "--write")
    assert found.exit_code == 1
    assert "long.py:1: error: its code is nested too deeply" in found.output
    assert "broken.py:1: error: this is no valid Python" in found.output
    assert "gone.py:2: error: `ray.util.sgd.torch.torch_runner` has no successor" in found.output
    assert "2 could not be migrated" in found.output
    assert "1 lines are left for you, below `# raysgd:`" in found.output
    assert (folder / "gone.py").read_text().startswith("from raysgd import TorchTrainer\n# raysgd: `ray.util.sgd.torch")
    assert "raysgd" in (folder / "a.py").read_text()


def test_pipes_links_and_files_that_may_not_be_written_stay(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    outside = tmp_path_factory.mktemp("outside") / "x.py"
    outside.write_text("from ray.util.sgd import TorchTrainer\n")
    (folder / "link.py").symlink_to(outside)
    pipe = folder / "pipe.py"
    os.mkfifo(pipe)
    (folder / "a.py").chmod(0o444)
    found = run(folder, "--write")
    assert found.exit_code == 1
    assert f"link.py:1: look: left alone: it is a link to `{outside}`" in found.output
    words = "pipe.py:1: look: left alone: it is not a regular file"
    assert words in found.output
    assert words in run(pipe).output
    assert "is read-only" in found.output
    assert "1 of 5 files rewritten; 1 could not be written" in found.output
    assert "raysgd" not in outside.read_text() + (folder / "a.py").read_text()
    assert "raysgd" in (folder / "sub/b.py").read_text()


@pytest.mark.parametrize(("line", "flags"), [("import ray.util.sgd", []), ("from ray.air import x", ["--ray-train"])])
def test_a_notebook_stays_and_the_lines_to_write_are_said(folder: Path, line: str, flags: list[str]) -> None:
    text = f'{{"cells": [{{"source": ["{line}"]}}]}}'
    (folder / "n.ipynb").write_text(text)
    (folder / "other.ipynb").write_text('{"cells": [{"source": ["import torch"]}]}')
    found = run(folder, "--write", *flags)
    assert found.exit_code == 1
    assert "n.ipynb:1: error: a notebook is not rewritten" in found.output
    assert f"`jupytext --to py:percent {folder}/n.ipynb`" in found.output
    assert "other.ipynb" not in found.output
    assert (folder / "n.ipynb").read_text() == text


@pytest.mark.parametrize("name", ["missing", "empty"])
def test_a_path_without_python_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    found = run(tmp_path / name)
    assert found.exit_code == 1
    assert name in found.output
