"""torchvision beside a PyTorch for CPUs. PyPI's cannot be imported there, because its library is linked to CUDA.

Nor can transformers, Lightning and torchmetrics be, as soon as they find it. So `make test-all` puts it into a folder
of its own, and it gets what its import misses: the types of two operations, which no example calls.
"""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / ".venv" / "vision"
TYPES = """
if not _has_ops():
    for _name in ("nms", "qnms"):
        torch.library.define(f"torchvision::{_name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""


def put_torchvision(folder: Path) -> None:
    """Let the programs in this folder import torchvision; skips the test if there is none."""
    if importlib.util.find_spec("torchvision") is not None:
        return
    if not FOLDER.exists():
        pytest.skip("needs torchvision, which `make test-all` installs")
    ignored = shutil.ignore_patterns("*.so", "__pycache__")
    copy = shutil.copytree(FOLDER / "torchvision", folder / "torchvision", ignore=ignored)
    with (copy / "extension.py").open("a", encoding="utf-8") as file:
        file.write(TYPES)
