"""Every script in `examples/proofs` learns, and so does `survive.py`: what it prints at its end says so.

Here each trains briefly in one process, which takes no Ray and next to no time. `make soak` runs each as a user would:
as a program of its own, from somewhere else, on two workers, and looks at what it leaves behind.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.docs.page_runner import PageRunner, page_runner

Result = Mapping[str, Any]

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
PROOFS = EXAMPLES / "proofs"
SCRIPTS = sorted(["survive.py", *(path.name for path in PROOFS.glob("[!_]*.py"))])
PATIENCE_S = 60


def lost_nothing(found: Result) -> bool:
    """Whether the run in which a worker was killed is the run in which none was, and that of one process."""
    assert found["recovery"] == "continued"
    assert found["times_seen"] == [found["epochs"]] * 2
    return max(found["difference_of_weights"], found["difference_to_one_process"]) < 1e-5


def ended_early_and_resumed(found: Result) -> bool:
    """Whether some trials ended early, and the best one is the training of one process although it was interrupted."""
    assert min(found["epochs_of_trials"]) < max(found["epochs_of_trials"]) == found["epochs"]
    assert found["learning_rate"] == 0.003  # that trial is interrupted
    return abs(found["test_accuracy"] - found["test_accuracy_of_one_process"]) < 1e-3


def lost_a_node(found: Result) -> bool:
    """Whether half of the workers died, and the training is that of one process."""
    assert (found["lost_workers"], found["each_used_once"]) == (2, True)
    return found["difference_to_one_process"] < 1e-5


def all_alike(found: Result) -> bool:
    """Whether a model computes the same in every format."""
    return max(value for name, value in found.items() if name.startswith("difference_of_")) < 1e-4


LEARNED: dict[str, Callable[[Result], bool]] = {
    "active_learning.py": lambda found: found["test_accuracy"] > 0.8,
    "dcgan.py": lambda found: found["score"] > found["score_untrained"] + 0.1,
    "federated.py": lambda found: found["test_accuracy"] > max(0.5, found["test_accuracy_of_one_client"] - 0.05),
    "export_model.py": lambda found: found["test_accuracy"] > 0.7 and all_alike(found),
    "function_digits.py": lambda found: found["test_accuracy"] > 0.7,  # there are ten digits: guessing reaches 0.1
    "lightning_digits.py": lambda found: min(found["test_accuracy"], found["test_accuracy_of_lightning"]) > 0.8,
    "mixed_precision.py": lambda found: min(found["accuracy"], found["accuracy_in_fp32"]) > 0.8,
    "population.py": lambda found: found["test_accuracy"] > 0.7,
    "quickstart.py": lambda found: found["test_accuracy"] > 0.8,
    "ray_data.py": lambda found: found["accuracy"] > 0.7,
    "regression_diabetes.py": lambda found: found["test_r2"] > 0.2,  # of always predicting the mean: 0
    "segmentation.py": lambda found: found["test_iou"] > 0.3,  # of a digit everywhere: 0.1
    "survive.py": lambda found: found["accuracy"] > 0.9 and lost_nothing(found),
    "tf_digits.py": lambda found: found["test_accuracy"] > 0.7,
    "torchmetrics_digits.py": lambda found: found["f1"] > 0.8 and abs(found["f1"] - found["f1_of_scikit_learn"]) < 1e-6,
    "tune_digits.py": lambda found: found["test_accuracy"] > 0.8 and ended_early_and_resumed(found),
    "two_nodes.py": lambda found: found["accuracy"] > 0.8 and lost_a_node(found),
    "fsdp_transformer.py": lambda found: found["score"] > 0.1,  # guessing reaches 0.03
    "horovod_digits.py": lambda found: found["accuracy"] > 0.8,
}
"""Whether a short training led to a score that an untrained model does not have. Every script needs a line here."""

NEEDS_WORKERS = {"function_digits.py", "population.py", "ray_data.py", "survive.py", "tune_digits.py", "two_nodes.py"}
"""Scripts that train on workers even with `--num-workers 1`."""

PRINT_THE_SAME = {
    "active_learning.py",
    "fsdp_transformer.py",
    "horovod_digits.py",
    "lightning_digits.py",
    "mixed_precision.py",
    "regression_diabetes.py",
    "torchmetrics_digits.py",
}
"""Scripts that print the same numbers in one process and on workers. For the others the table of examples says why."""

SCORE_ANOTHER_WAY = {"fsdp_transformer.py"}
"""Scripts of the above whose losses are the same to a thousandth, and whose scores differ by a few places of 6,144."""

LONG = {
    "dcgan.py",
    "fsdp_transformer.py",
    "export_model.py",
    "function_digits.py",
    "horovod_digits.py",
    "lightning_digits.py",
    "mixed_precision.py",
    "population.py",
    "ray_data.py",
    "segmentation.py",
    "tf_digits.py",
    "tune_digits.py",
    "two_nodes.py",
}
"""Scripts that take too long for every run of the tests, most of them because of what they import."""

ALONE = {"active_learning.py", "torchmetrics_digits.py"}
"""Scripts that every run of the tests runs in one process only: their workers do what those of others do."""

# Not the scripts' own: Ray's logs of its sessions, PyTorch's cache, what TensorFlow leaves of a process that is killed,
# and the lock of data creators, which stays so that nobody locks a file that somebody else removes.
MAY_STAY = re.compile(r"ray|_ray_\w+|torchinductor_.*|__autograph_generated_file.*|__pycache__|\.raydata-\d+\.lock")


# What libraries say unasked.
UNASKED = re.compile(r"INFO|WARNING|^[IWE]\d{4} |\(raylet\)")


@dataclass(frozen=True)
class Surroundings:
    """Folders for one program only."""

    working: Path
    temporary: Path

    def environment(self) -> dict[str, str]:
        inherited = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
        return {**inherited, "TMPDIR": str(self.temporary)}


@pytest.fixture
def surroundings(tmp_path: Path) -> Iterator[Surroundings]:
    (tmp_path / "working").mkdir()
    # Not below `tmp_path`: Ray puts sockets there, whose paths have a limit.
    with tempfile.TemporaryDirectory(prefix="e-", ignore_cleanup_errors=True) as temporary:
        yield Surroundings(tmp_path / "working", Path(temporary))


@pytest.fixture(scope="module")
def runner(ray_cluster: None) -> Iterator[PageRunner]:
    """Comes after the cluster: a process that imported Ray before would not be let in, though it is told the token."""
    with page_runner("sklearn.datasets", "sklearn.model_selection") as runner:
        yield runner


@pytest.fixture
def address(ray_cluster: None) -> str:
    """Where the cluster of the tests is."""
    import ray

    found: str = ray.get_runtime_context().gcs_address
    return found


def path_of(script: str) -> Path:
    return (EXAMPLES if script == "survive.py" else PROOFS) / script


def run_forked(
    script: str, runner: PageRunner, surroundings: Surroundings, *arguments: str
) -> tuple[list[str], Result]:
    """Run it in a process that has imported PyTorch already, and return what it printed, and its result."""
    output = surroundings.temporary / "output"
    status = runner.run(
        path_of(script),
        surroundings.environment(),
        output,
        ["--smoke-test", "--json", *arguments],
        surroundings.working,
    )
    text = output.read_text()
    assert status == 0, text
    output.unlink()
    *lines, last = [line for line in text.splitlines() if not line.startswith("(")]  # where Ray tells of a worker
    return lines, json.loads(last)


def run(script: str, surroundings: Surroundings, *arguments: str) -> tuple[list[str], Result]:
    """Run it as a program and return what it printed, and its result: the last line."""
    finished = subprocess.run(
        [sys.executable, str(path_of(script)), "--json", *arguments],
        cwd=surroundings.working,
        env=surroundings.environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    *lines, last = finished.stdout.splitlines()
    return lines, json.loads(last)


def processes_of(surroundings: Surroundings) -> list[str]:
    """Return what still runs and names the temporary folder, after a while in which it may end."""
    deadline = time.monotonic() + PATIENCE_S
    while (found := _processes_naming(str(surroundings.temporary))) and time.monotonic() < deadline:
        time.sleep(0.1)
    return found


def _processes_naming(folder: str) -> list[str]:
    found = []
    for process in psutil.process_iter(["cmdline"]):
        command = " ".join(process.info["cmdline"] or ())
        if folder in command:
            found.append(command)
    return found


def assert_tidy(surroundings: Surroundings) -> None:
    assert processes_of(surroundings) == []
    assert not [path for path in surroundings.temporary.iterdir() if not MAY_STAY.fullmatch(path.name)]
    assert list(surroundings.working.iterdir()) == []


def assert_scores_are_comparable(result: Result) -> None:
    """The number of one process stands beside that of the workers."""
    beside = [name for name in result if name.endswith("_of_one_process")]
    assert beside
    assert all(name.removesuffix("_of_one_process") in result for name in beside)


def assert_prints_the_same(script: str, lines: list[str], result: Result) -> None:
    """The lines of the training on workers, and its scores, are those of the training in one process."""
    lines = [line for line in lines if not UNASKED.search(line)]
    alone, together = (
        lines.index("training in one process"),
        lines.index(f"training on {result['num_workers']} workers"),
    )
    of_one = lines[alone + 1 : together]
    assert numbers(lines[together + 1 :][: len(of_one)]) == pytest.approx(numbers(of_one), rel=1e-3, abs=1.001e-3)
    for name, value in result.items():
        if f"{name}_of_one_process" in result and script not in SCORE_ANOTHER_WAY:
            assert value == pytest.approx(result[f"{name}_of_one_process"], rel=1e-3, abs=1e-3)


def numbers(lines: list[str]) -> list[float]:
    return [float(number) for line in lines for number in re.findall(r"-?\d+(?:\.\d+)?", line)]


def reasons() -> dict[str, str]:
    """What the table of examples says of the numbers that each script prints with 1, 2 and 4 workers."""
    page = (PROOFS / "README.md").read_text(encoding="utf-8")
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| [")]
    return {re.sub(r"\[(.*?)\].*", r"\1", cells[0]): cells[3] for cells in rows}


def test_it_is_known_of_every_script_when_it_has_learned() -> None:
    assert sorted(LEARNED) == SCRIPTS
    assert {*NEEDS_WORKERS, *LONG, *PRINT_THE_SAME} <= {*SCRIPTS}


def test_the_table_says_which_examples_print_the_same_numbers_and_why_the_others_do_not() -> None:
    said = reasons()
    assert said.keys() == {*SCRIPTS, "notebook.ipynb"}
    assert {name for name, reason in said.items() if reason.startswith("the same")} == {
        *PRINT_THE_SAME,
        "survive.py",
        "tune_digits.py",
        "two_nodes.py",
        "notebook.ipynb",
    }
    assert all(len(reason) > 10 for reason in said.values() if not reason.startswith("the same"))


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_is_short_and_says_on_what_it_trains(script: str) -> None:
    source = path_of(script).read_text(encoding="utf-8")
    docstring = ast.get_docstring(ast.parse(source)) or ""
    assert len(source.splitlines()) < 150
    assert "\n\nData: " in docstring
    if script == "survive.py":
        assert "_common" not in source
    else:
        assert "ray.init(" not in source
        for shared in ("parse_arguments(__doc__", "print_result("):
            assert shared in source


@pytest.mark.program
@pytest.mark.parametrize(
    "script",
    [
        pytest.param(name, marks=[pytest.mark.soak] * (name in LONG))
        for name in SCRIPTS
        if name not in NEEDS_WORKERS and (name in LONG | ALONE or name not in PRINT_THE_SAME)
    ],
)
def test_a_script_learns_in_one_process(script: str, runner: PageRunner, surroundings: Surroundings) -> None:
    _, result = run_forked(script, runner, surroundings, "--num-workers", "1")
    assert LEARNED[script](result), result
    assert result["num_workers"] == 1
    assert_scores_are_comparable(result)
    assert_tidy(surroundings)


@pytest.mark.integration
@pytest.mark.parametrize(
    "script", [pytest.param(name, marks=[pytest.mark.soak] * (name in LONG | ALONE)) for name in sorted(PRINT_THE_SAME)]
)
def test_a_script_prints_the_same_with_4_workers_as_in_one_process(
    script: str, runner: PageRunner, surroundings: Surroundings, address: str
) -> None:
    if "horovod" in script:
        pytest.importorskip("horovod", reason="Horovod does not build with every Python")
    lines, result = run_forked(script, runner, surroundings, "--num-workers", "4", "--address", address)
    assert LEARNED[script](result), result
    assert_prints_the_same(script, lines, result)
    assert_scores_are_comparable(result)
    assert_tidy(surroundings)


@pytest.mark.integration
@pytest.mark.parametrize("script", sorted(NEEDS_WORKERS - LONG))
def test_a_script_that_needs_workers_learns(
    script: str, runner: PageRunner, surroundings: Surroundings, address: str
) -> None:
    _, result = run_forked(script, runner, surroundings, "--address", address)
    assert LEARNED[script](result), result
    assert_scores_are_comparable(result)
    assert_tidy(surroundings)


@pytest.mark.soak
@pytest.mark.integration
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_learns_as_a_program_on_workers(script: str, surroundings: Surroundings, address: str) -> None:
    lines, result = run(script, surroundings, "--smoke-test", "--address", address)
    assert LEARNED[script](result), result
    assert result["num_workers"] >= 2
    assert result["seconds"] > 0
    assert lines, "nothing for people to read"
    if script in PRINT_THE_SAME:
        assert_prints_the_same(script, lines, result)
    assert not [line for line in lines if UNASKED.search(line)]
    assert_scores_are_comparable(result)
    assert_tidy(surroundings)


@pytest.mark.soak
@pytest.mark.integration
def test_the_quickstart_learns_to_read_digits(surroundings: Surroundings) -> None:
    """With a Ray cluster of its own, as for whoever tries it first."""
    lines, result = run("quickstart.py", surroundings)
    assert result["test_accuracy"] > 0.95
    assert len([line for line in lines if line.startswith("epoch ")]) == 2 * result["epochs"]
    assert_tidy(surroundings)
