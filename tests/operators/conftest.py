"""What tests of Hugging Face share."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(scope="session")
def lab() -> Any:
    """The models. They import `transformers`, which is too much for whoever only collects tests."""
    return importlib.import_module("tests.operators.hugging_face_lab")


@pytest.fixture
def keeps_the_environment() -> Iterator[None]:
    """`TrainingArguments` writes into it."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)
