"""Which frames of a traceback are code of the user, and where code is, in words.

What lies in the standard library, in an installed package or in raysgd is not the user's.
"""

from __future__ import annotations

import linecache
import os
import re
import sysconfig
from types import FrameType, TracebackType
from typing import Any

TRACEBACK_VARIABLE = "RAYSGD_TRACEBACK"

_PLACE_WITHOUT_CODE = re.compile(r"([^\n]+):(\d+) in [\w<>.]+")
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_STANDARD_LIBRARY = sysconfig.get_path("stdlib") + os.sep
_MADE_BY_TENSORFLOW = f"{os.sep}__autograph_generated_file"  # out of a function of the user
_FOLDERS_OF_PACKAGES = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")


def shows_all_frames() -> bool:
    """Return whether errors keep the frames of libraries, because `RAYSGD_TRACEBACK` is "full"."""
    return os.environ.get(TRACEBACK_VARIABLE, "").lower() == "full"


def is_of_user(frame: FrameType) -> bool:
    """Return whether the user wrote this code, in a file or at a prompt. What Python makes for a dataclass is not."""
    name, module = frame.f_code.co_filename, frame.f_globals
    if name.startswith("<"):
        return module.get("__name__") == "__main__" and module.get("__file__", name) == name
    return not is_of_library(name)


def is_of_library(filename: str) -> bool:
    """Return whether a file is part of Python, of an installed package, or of raysgd; or was made by TensorFlow."""
    parts = (*_FOLDERS_OF_PACKAGES, _MADE_BY_TENSORFLOW)
    return filename.startswith((_PACKAGE, _STANDARD_LIBRARY)) or any(part in filename for part in parts)


def frames_of_user(trace: TracebackType | None, most: int) -> TracebackType | None:
    """A traceback of the user's frames only, of many the first and the last ones; None if there are none."""
    links = []
    while trace is not None:
        if is_of_user(trace.tb_frame):
            links.append(trace)
        trace = trace.tb_next
    kept = None
    for link in reversed(links if len(links) <= most else [links[0], *links[1 - most :]]):
        kept = TracebackType(kept, link.tb_frame, link.tb_lasti, link.tb_lineno)
    return kept


def with_code(place: str) -> str:
    """A place, `file:line in function`, with its line of code where only this process has the file.

    That is the program of the driver on another node, or a cell of a notebook.
    """
    parts = _PLACE_WITHOUT_CODE.fullmatch(place)
    code = linecache.getline(parts[1], int(parts[2])).strip() if parts else ""
    return f"{place}: {code}" if code else place


def short_name(filename: str) -> str:
    """The name of a library's file from the folder of its package on; another file's name stays whole.

    >>> short_name("/venv/lib/python3.11/site-packages/torch/nn/modules/linear.py"), short_name("/home/me/train.py")
    ('torch/nn/modules/linear.py', '/home/me/train.py')
    """
    for part in _FOLDERS_OF_PACKAGES:
        if part in filename:
            return filename.rpartition(part)[2]
    for folder in (os.path.dirname(_PACKAGE.rstrip(os.sep)) + os.sep, _STANDARD_LIBRARY):
        if is_of_library(filename) and filename.startswith(folder):
            return filename.removeprefix(folder)
    return filename


def defined_at(owner: type[Any], method: str) -> str:
    """Where the user has written a method, as a sentence behind others; "" if it is not the user's.

    For errors about what a method has returned: by then none of its lines is running.
    """
    code = getattr(getattr(owner, method, None), "__code__", None)
    if code is None or is_of_library(code.co_filename):
        return ""
    return f" `{method}` is defined at {code.co_filename}:{code.co_firstlineno}."
