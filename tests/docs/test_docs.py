"""The documentation does what it shows, names what there is, and its links lead somewhere."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import raysgd.exceptions
from tests.docs.page_runner import PageRunner, page_runner

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FIRST_PAGE = "README.md"
PAGES_WITH_RAY = {
    FIRST_PAGE,
    *(f"docs/{name}.md" for name in ("data", "lightning", "train", "training-runs", "tune", "tutorial")),
}
FENCE = re.compile(r"^```(.*)$")
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
TREE_LINE = re.compile(r"^( *)(\S+)")


@dataclass(frozen=True)
class Block:
    """One fenced block of a page.

    Attributes:
        kind: What stands behind the opening fence.
        first_line: Number of the first line inside, from 1.
        lines: The lines inside.
    """

    kind: str
    first_line: int
    lines: tuple[str, ...]


def blocks(page: Path) -> Iterator[Block]:
    kind, inside = None, []
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), start=1):
        fence = FENCE.match(line)
        if fence is None:
            inside.append(line)
        elif kind is None:
            kind, inside = fence[1].strip(), []
        else:
            yield Block(kind, number - len(inside), tuple(inside))
            kind = None
    assert kind is None, f"{name_of(page)}: a block is not closed"


def python_blocks(page: Path, *kinds: str) -> list[Block]:
    return [block for block in blocks(page) if block.kind in kinds]


def program(found: list[Block]) -> str:
    """The blocks as one program, each on the lines where it stands in the page, so that tracebacks point there."""
    lines: list[str] = []
    for block in found:
        lines += [""] * (block.first_line - 1 - len(lines))
        lines += block.lines
    return "\n".join(lines) + "\n"


def prose(page: Path) -> str:
    """The page without its blocks and without code inside of lines."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"`[^`\n]*`", "", text)


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def anchors(page: Path) -> set[str]:
    """The names under which the headings of a page can be linked to."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(page: Path) -> list[str]:
    broken = []
    for link in LINK.findall(prose(page)):
        if link.startswith(("http://", "https://", "mailto:")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    return broken


def pages_to_run(*, with_workers: bool) -> list[str]:
    """The pages behind the first that have Python to run: those that start workers, or the others."""
    names = [name_of(page) for page in PAGES if python_blocks(page, "python")]
    return [name for name in names if name != FIRST_PAGE and (name in PAGES_WITH_RAY) == with_workers]


def script_of(name: str, folder: Path, *kinds: str) -> Path:
    """The program of a page, in a folder of its own: the blocks of these kinds."""
    script = folder / "page" / f"page_{Path(name).stem}.py"
    script.parent.mkdir()
    script.write_text(program(python_blocks(ROOT / name, *(kinds or ("python",)))), encoding="utf-8")
    return script


def environment_of_pages(**variables: str) -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"} | variables


def skip_without_horovod(name: str, *kinds: str) -> None:
    if "import horovod" in program(python_blocks(ROOT / name, *kinds)):
        pytest.importorskip("horovod", reason="Horovod does not build with every Python")


@pytest.fixture(scope="module")
def runner(ray_cluster: None) -> Iterator[PageRunner]:
    """Comes after the cluster: a process that imported Ray before would not be let in, though it is told the token."""
    with page_runner() as runner:
        yield runner


@pytest.mark.integration
def test_the_first_page_prints_what_it_shows(tmp_path: Path) -> None:
    """In a process and with a Ray cluster of its own, as it does for whoever reads it."""
    script = script_of(FIRST_PAGE, tmp_path)
    result = subprocess.run(
        [sys.executable, script.name],
        cwd=script.parent,
        env=environment_of_pages(),
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"
    assert_prints_what_it_shows(result.stdout)


@pytest.mark.integration
@pytest.mark.parametrize("num_workers", [1, 4])
def test_the_first_page_prints_the_same_with_another_number_of_workers(
    num_workers: int, runner: PageRunner, ray_cluster: None, tmp_path: Path
) -> None:
    script, output = script_of(FIRST_PAGE, tmp_path), tmp_path / "output"
    text = script.read_text(encoding="utf-8")
    assert text.count("num_workers=2") == 1
    script.write_text(text.replace("num_workers=2", f"num_workers={num_workers}"), encoding="utf-8")
    assert runner.run(script, environment_on_cluster(), output) == 0, output.read_text()
    assert_prints_what_it_shows(output.read_text())


def assert_prints_what_it_shows(output: str) -> None:
    [shown] = [block for block in blocks(ROOT / FIRST_PAGE) if block.kind == "text"]
    printed = [line for line in output.splitlines() if line.startswith("epoch ")]
    assert numbers(printed) == pytest.approx(numbers(shown.lines), abs=1.5e-3)


def numbers(lines: Iterable[str]) -> list[float]:
    return [float(number) for line in lines for number in re.findall(r"\d+\.\d+", line)]


def environment_on_cluster() -> dict[str, str]:
    import ray

    return environment_of_pages(RAY_ADDRESS=ray.get_runtime_context().gcs_address)


@pytest.mark.integration
@pytest.mark.parametrize("name", pages_to_run(with_workers=True))
def test_the_python_of_a_page_runs_with_workers(
    name: str, runner: PageRunner, ray_cluster: None, tmp_path: Path
) -> None:
    output = tmp_path / "output"
    assert runner.run(script_of(name, tmp_path), environment_on_cluster(), output) == 0, output.read_text()


@pytest.mark.soak
@pytest.mark.integration
@pytest.mark.parametrize("name", [name_of(page) for page in PAGES if python_blocks(page, "python soak")])
def test_the_python_that_takes_long_runs_too(name: str, runner: PageRunner, ray_cluster: None, tmp_path: Path) -> None:
    skip_without_horovod(name, "python", "python soak")
    script = script_of(name, tmp_path, "python", "python soak")
    output = tmp_path / "output"
    assert runner.run(script, environment_on_cluster(), output) == 0, output.read_text()


@pytest.mark.soak
@pytest.mark.integration
@pytest.mark.parametrize(
    ("name", "num_alone", "more"),
    [
        ("docs/migration.md", 3, [('"num_workers": 1', '"num_workers": 2', 1)]),
        ("docs/lightning.md", 5, []),  # schedules end where they end on one worker
    ],
)
def test_the_programs_of_a_page_run_on_two_workers_too(
    name: str, num_alone: int, more: list[tuple[str, str, int]], runner: PageRunner, ray_cluster: None, tmp_path: Path
) -> None:
    script = script_of(name, tmp_path)
    text = script.read_text(encoding="utf-8")
    for alone, together, number in (("use_local=True", "num_workers=2", num_alone), *more):
        assert text.count(alone) == number
        text = text.replace(alone, together)
    script.write_text(text, encoding="utf-8")
    output = tmp_path / "output"
    assert runner.run(script, environment_on_cluster(), output) == 0, output.read_text()


@pytest.mark.program
@pytest.mark.parametrize("name", pages_to_run(with_workers=False))
def test_the_python_of_a_page_runs(name: str, runner: PageRunner, tmp_path: Path) -> None:
    skip_without_horovod(name, "python")
    output = tmp_path / "output"
    assert runner.run(script_of(name, tmp_path), environment_of_pages(), output) == 0, output.read_text()


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_all_python_compiles_also_what_takes_long(page: Path) -> None:
    for block in python_blocks(page, "python", "python soak"):
        compile(program([block]), name_of(page), "exec")


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_python_is_marked_in_a_way_that_this_test_knows(page: Path) -> None:
    """So that all of it runs, at least in `make soak`."""
    kinds = {block.kind for block in blocks(page)}
    assert kinds <= {"python", "python soak", "bash", "diff", "text"}


def test_only_some_pages_start_ray() -> None:
    starting = {
        name_of(page)
        for page in PAGES
        if re.search(r"num_workers=[2-9]|validation_workers=[1-9]|ray\.data\.", program(python_blocks(page, "python")))
    }
    assert starting == PAGES_WITH_RAY


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    assert broken_links(page) == []


def test_the_map_leads_to_every_page() -> None:
    maps = [ROOT / "docs" / name for name in ("index.md", "decisions.md")]
    linked = {(page.parent / link.partition("#")[0]).resolve() for page in maps for link in LINK.findall(prose(page))}
    assert [name_of(page) for page in PAGES if page not in linked] == ["docs/index.md"]


def test_every_public_exception_is_in_the_table_of_errors() -> None:
    public = [
        name
        for name, value in vars(raysgd.exceptions).items()
        if inspect.isclass(value) and issubclass(value, BaseException) and not name.startswith("_")
    ]
    text = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
    assert len(public) >= 9
    assert [name for name in public if f"`{name}`" not in text] == []


def test_the_page_about_installing_lists_the_extras() -> None:
    settings = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    table = settings.partition("[project.optional-dependencies]")[2].partition("\n[")[0]
    extras = set(re.findall(r"^(\w+) = \[", table, flags=re.MULTILINE))
    page = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`[^|]*`) \|", page, flags=re.MULTILINE)
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row)} == extras
    assert len(extras) > 10


def tree_of_the_architecture_page() -> set[str]:
    """The paths in the tree that the page shows; folders end in a slash."""
    [tree] = [block for block in blocks(ROOT / "docs" / "architecture.md") if "raysgd/" in block.lines]
    paths: set[str] = set()
    folders: list[str] = []
    for line in tree.lines:
        match = TREE_LINE.match(line)
        assert match, f"not a line of a tree: {line!r}"
        depth = len(match[1]) // 2
        path = "".join(folders[:depth]) + match[2]
        if path.endswith("/"):
            folders[depth:] = [match[2]]
        paths.add(path)
    return paths


def test_the_tree_in_the_architecture_page_is_the_tree_there_is() -> None:
    shown = tree_of_the_architecture_page()
    folded = {path for path in shown if path.endswith("/") and not any(p != path and p.startswith(path) for p in shown)}
    there = {str(path.relative_to(ROOT)) for path in (ROOT / "raysgd").rglob("*.py")}
    modules = {path for path in there if not path.endswith("/__init__.py") and not path.startswith(tuple(folded))}
    assert sorted(modules - shown) == [], "these need a line in the tree of docs/architecture.md"
    assert sorted(path for path in shown if not (ROOT / path).exists()) == [], "these are not where the tree has them"


def test_the_files_to_open_for_a_change_are_there() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    section = page.partition("## Where to change what\n")[2].partition("\n## ")[0]
    named = set(re.findall(r"`([\w/]+\.py)`", section))
    assert len(named) > 50
    assert sorted(name for name in named if not any((ROOT / top / name).exists() for top in ("raysgd", "."))) == []
