from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from raysgd.train.utils import construct_path, without_arguments


@pytest.mark.parametrize(
    ("path", "parent", "expected"),
    [
        ("/a", "/b", Path("/a")),
        ("~/a", "/b", Path.home() / "a"),
        ("a", "/b", Path("/b/a")),
        ("a", "~/b", Path.home() / "b" / "a"),
        ("a", "b", Path.cwd() / "b" / "a"),
        ("../a", "/b/c", Path("/b/a")),
    ],
)
def test_where_a_path_is(path: str, parent: str, expected: Path) -> None:
    assert construct_path(path, parent) == construct_path(Path(path), Path(parent)) == expected


@pytest.mark.parametrize(
    ("function", "config", "expected"),
    [
        (lambda: "none", {"a": 1}, "none"),
        (lambda config: config, {"a": 1}, {"a": 1}),
        (lambda config: config, None, {}),
        (lambda config=5: config, None, {}),
        (lambda *args: args, None, ({},)),
        (lambda config: config, Namespace(a=1), Namespace(a=1)),
        (lambda config: config, [], []),
    ],
)
def test_the_config_is_bound_where_it_is_wanted(function: Any, config: Any, expected: Any) -> None:
    assert without_arguments(function, config)() == expected


def test_the_config_is_passed_on_as_it_is() -> None:
    class Config(dict[str, int]):
        pass

    config = Config(a=1)
    assert without_arguments(lambda config: config, config)() is config


@pytest.mark.parametrize("function", [lambda **kwargs: kwargs, lambda *, config: config])
def test_a_function_that_takes_its_argument_by_name_only_is_refused(function: Any) -> None:
    with pytest.raises(TypeError, match="only by name"):
        without_arguments(function, {})
