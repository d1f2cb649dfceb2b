from __future__ import annotations

import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterable
from email import message_from_string
from email.message import Message
from importlib import metadata as installed
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import raysgd
from raysgd.cli.doctor import OLDEST, STOLEN

ROOT = Path(__file__).resolve().parent.parent
IN_ALL = {
    *("comet", "data", "datasets", "hf", "horovod", "lightning", "metrics", "migrate", "mlflow", "plot", "progress"),
    *("storage", "tensorboard", "tf", "torch", "tune", "wandb"),
}
USER_EXTRAS = IN_ALL | {"vision"}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the sources, because building leaves files beside them; without the link, as an archive makes one."""
    source = tmp_path_factory.mktemp("source")
    for name in ("setup.py", "pyproject.toml", "LICENSE", "README.md"):
        shutil.copy(ROOT / name, source)
    for name in ("raysgd", "operators"):
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    (source / "raysgd" / "operators").unlink()
    (source / "raysgd" / "operators").write_text("../operators")
    return source


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    folder = tmp_path_factory.mktemp("wheel")
    options = ("--no-deps", "--no-build-isolation", "--no-index", "-w", str(folder))
    subprocess.run([sys.executable, "-m", "pip", "wheel", *options, str(source)], check=True, capture_output=True)
    [path] = folder.glob("*.whl")
    return zipfile.ZipFile(path)


@pytest.fixture(scope="module")
def metadata(wheel: zipfile.ZipFile) -> Message:
    [name] = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
    return message_from_string(wheel.read(name).decode())


def requirements(metadata: Message, extra: str) -> set[str]:
    """Return what an extra installs, without the condition that it was asked for."""
    found = re.compile(rf"""(?P<name>[^;]+);.*\bextra == "{extra}"$""")
    return {match["name"].strip() for match in map(found.match, metadata.get_all("Requires-Dist", [])) if match}


def test_the_wheel_has_every_module_of_both_folders(wheel: zipfile.ZipFile) -> None:
    ours = {str(path.relative_to(ROOT)) for ending in ("py", "pyi") for path in (ROOT / "raysgd").rglob(f"*.{ending}")}
    ours |= {f"raysgd/{path.relative_to(ROOT)}" for path in (ROOT / "operators").glob("*.py*") if path.is_file()}
    assert {name for name in wheel.namelist() if name.endswith((".py", ".pyi"))} == ours
    assert {"raysgd/operators/__init__.py", "raysgd/operators/__init__.pyi"} <= ours


def test_the_wheel_has_every_file_that_a_module_reads(wheel: zipfile.ZipFile) -> None:
    paths = {path.relative_to(ROOT) for path in (ROOT / "raysgd").rglob("*") if path.suffix != ".py" and path.is_file()}
    files = {str(path) for path in paths if path.parts[1] != "operators" and "__pycache__" not in path.parts}
    assert files <= set(wheel.namelist())
    read = {"compat/paths.ini", "compat/migrate/calls.ini", "core/private_names.ini", "core/synonyms.ini"}
    others = {"core/text/cards.css", "detached/protocol.ini", "horovod/mends.txt"}
    assert {f"raysgd/{name}" for name in read | others} <= files


def test_the_wheel_says_that_it_is_typed_and_carries_the_licence(wheel: zipfile.ZipFile) -> None:
    assert "raysgd/py.typed" in wheel.namelist()
    assert any(name.endswith("LICENSE") for name in wheel.namelist())


def test_the_wheel_has_the_page_of_the_report_with_the_license_of_its_charts(wheel: zipfile.ZipFile) -> None:
    page = ROOT / "raysgd" / "callbacks" / "page"
    files = {str(path.relative_to(ROOT)) for path in page.rglob("*") if path.is_file()}
    assert files <= set(wheel.namelist())
    assert "raysgd/callbacks/page/uplot/LICENSE" in files


def test_type_checkers_find_an_editable_install_because_it_is_a_plain_path(source: Path, tmp_path: Path) -> None:
    source = shutil.copytree(source, tmp_path / "checkout")
    (source / "raysgd" / "operators").unlink()
    (source / "raysgd" / "operators").symlink_to("../operators")
    build = "import sys; from setuptools import build_meta; build_meta.build_editable(sys.argv[1])"
    subprocess.run([sys.executable, "-c", build, str(tmp_path)], cwd=source, check=True, capture_output=True)
    [path] = tmp_path.glob("*.whl")
    with zipfile.ZipFile(path) as built:
        files = {name: built.read(name).decode() for name in built.namelist() if ".dist-info/" not in name}
    assert [*files.values()] == [f"{source}\n"], "one `.pth` and no import hook"


def test_links_of_the_project_page_are_absolute(metadata: Message) -> None:
    page = metadata.get_payload()
    assert isinstance(page, str)
    links = re.findall(r"\]\(([^)\s]+)\)", page)
    assert len(links) > 20
    assert [link for link in links if not link.startswith(("https://", "#"))] == []


def test_the_version_is_that_of_the_package(metadata: Message) -> None:
    assert (metadata["Name"], metadata["Version"]) == ("raysgd", raysgd.__version__)


def test_the_base_install_needs_five_packages(metadata: Message) -> None:
    needed = {line for line in metadata.get_all("Requires-Dist", []) if "extra" not in line}
    assert {re.split(r"[<>=]", line)[0] for line in needed} == {"ray", "numpy", "click", "cloudpickle", "xxhash"}


def test_every_extra_exists_and_installs_something(metadata: Message) -> None:
    extras = set(metadata.get_all("Provides-Extra", []))
    assert extras == USER_EXTRAS | {"all"}
    assert [extra for extra in extras if not requirements(metadata, extra)] == []


def test_all_is_every_extra_of_users_but_one(metadata: Message) -> None:
    """That of the package index breaks an environment with PyTorch's build for CPUs."""
    [every] = requirements(metadata, "all")
    assert every == f"raysgd[{','.join(sorted(IN_ALL))}]"


def test_every_extra_named_in_a_message_exists(metadata: Message) -> None:
    sources = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "raysgd").rglob("*.py"))
    named = set(re.findall(r'require\(\s*"[\w.]+",\s*(?:extra=)?"(\w+)"', sources)) | set(
        re.findall(r"raysgd\[(\w+)\]", sources)
    )
    assert named >= {"metrics"}
    assert named <= set(metadata.get_all("Provides-Extra", []))


def pins(name: str = "constraints-dev.txt") -> dict[str, str]:
    """The versions of an environment, by default that of development, by the names of the packages."""
    lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
    found = [line.partition(" ;")[0].split("==") for line in lines if not line.startswith("#")]
    return {canonicalize_name(name): version for name, version in found}


def needed(requirement: Requirement) -> list[Requirement]:
    """What a package needs in this environment, as far as it is installed. What PyTorch needs depends on the build."""
    if requirement.name == "torch":
        return []
    try:
        declared = [Requirement(line) for line in installed.requires(requirement.name) or []]
    except installed.PackageNotFoundError:
        return []
    extras = {"", *requirement.extras}
    return [each for each in declared if each.marker is None or any(each.marker.evaluate({"extra": e}) for e in extras)]


def declared(metadata: Message) -> list[str]:
    """What raysgd and its extras need."""
    base = [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
    return base + [line for extra in USER_EXTRAS for line in requirements(metadata, extra)]


def lower_bounds(lines: Iterable[str]) -> dict[str, Version]:
    found = [(Requirement(line).name, spec) for line in lines for spec in Requirement(line).specifier]
    return {canonicalize_name(name): Version(spec.version) for name, spec in found if spec.operator == ">="}


def all_needed(metadata: Message) -> list[Requirement]:
    """All that the development environment needs, directly or not."""
    waiting = [Requirement(line) for line in (*declared(metadata), *development_groups())]
    found: dict[str, Requirement] = {}
    while waiting:
        requirement = waiting.pop()
        if requirement.name != "raysgd" and str(requirement) not in found:
            found[str(requirement)] = requirement
            waiting += needed(requirement)
    return list(found.values())


def test_every_requirement_of_the_development_environment_is_pinned(metadata: Message) -> None:
    if any(Version(installed.version(name)).public != pins()[name] for name in ("ray", "torch")):
        pytest.skip("this is another environment, whose packages need others")
    pinned, stale = pins(), []
    for requirement in all_needed(metadata):
        version = pinned.get(canonicalize_name(requirement.name))
        if version is None or not requirement.specifier.contains(version, prereleases=True):
            stale.append(f"{requirement} (has {version})")
    assert stale == [], "run `make lock`"
    assert len(pinned) > 150


def test_every_lower_bound_is_the_version_that_make_test_lowest_installs(metadata: Message) -> None:
    lowest = {name: Version(version) for name, version in pins("constraints-lowest.txt").items()}
    bounds = lower_bounds([*declared(metadata), *development_groups("dev", "full")])
    assert {name: lowest.get(name) for name in bounds} == bounds, "run `make lock` and `make test-lowest`"
    assert len(bounds) > 40


def test_the_doctor_and_the_pages_name_the_lower_bounds(metadata: Message) -> None:
    bounds = lower_bounds(declared(metadata))
    assert {name: Version(oldest) for name, oldest in OLDEST.items()} == {name: bounds[name] for name in OLDEST}
    words = "PyTorch {torch} or later, TensorFlow {tensorflow} or later, Ray {ray} or later".format(**bounds)
    assert [page for page in ("README.md", "docs/install.md") if words not in (ROOT / page).read_text()] == []


def test_versions_that_strangers_have_published_are_excluded(metadata: Message) -> None:
    for package, versions in STOLEN.items():
        specifiers = [each.specifier for each in map(Requirement, declared(metadata)) if each.name == package]
        assert specifiers
        assert [version for version in versions for each in specifiers if each.contains(version)] == []
        assert not {pins()[package], pins("constraints-lowest.txt")[package]} & set(versions)


@pytest.mark.parametrize("name", ["constraints-dev.txt", "constraints-lowest.txt"])
def test_pins_name_no_place_and_no_build(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    assert not re.search(r"://|^-|\+| @ ", text, re.MULTILINE)


def development_groups(*names: str) -> list[str]:
    """What those need who work on the project, from `pyproject.toml`; Python 3.10 has no reader for it."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    groups = re.split(r"^(\w+) = ", text.partition("[dependency-groups]")[2].partition("\n[")[0], flags=re.MULTILINE)
    chosen = [group for name, group in zip(groups[1::2], groups[2::2], strict=True) if name in (names or (name,))]
    found = re.findall(r'"([^"\s]+)"', "".join(chosen))
    assert len(found) > 15
    return found


def test_the_groups_of_development_are_not_shipped(metadata: Message) -> None:
    assert not any("mypy" in line or "mkdocs" in line for line in metadata.get_all("Requires-Dist", []))
    assert metadata["License-Expression"] == "Apache-2.0"
    assert any("Source" in url for url in metadata.get_all("Project-URL", []))


def test_a_checkout_without_its_link_says_what_to_do(source: Path) -> None:
    code = f"import sys; sys.path.insert(0, {str(source)!r}); import raysgd"
    done = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True)
    assert "ImportError: `raysgd/operators` is no folder" in done.stderr
    assert "Run `pip install .` in it" in done.stderr


def test_the_supported_versions_of_python_are_stated(metadata: Message) -> None:
    assert metadata["Requires-Python"] == ">=3.10"
