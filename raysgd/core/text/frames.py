"""Decides which frames of a traceback are the user's code, and describes locations in code.

Code of the standard library, of installed packages and of raysgd does not count as the user's.
"""

from __future__ import annotations

import linecache
import os
import re
import sysconfig
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from raysgd.core.text.secrets import masked

TRACEBACK_VARIABLE = "RAYSGD_TRACEBACK"

_PLACE_WITHOUT_CODE = re.compile(r"([^\n]+):(\d+) in [\w<>.]+")
_PACKAGE = str(Path(__file__).absolute().parents[2]) + os.sep
_STANDARD_LIBRARY = sysconfig.get_path("stdlib") + os.sep
# Occurs in the name of each file that TensorFlow generates from a user's function.
_MADE_BY_TENSORFLOW = f"{os.sep}__autograph_generated_file"
_FOLDERS_OF_PACKAGES = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")


def shows_all_frames() -> bool:
    """Return True if `RAYSGD_TRACEBACK` is "full". Errors then show the frames of raysgd and other libraries, too."""
    return os.environ.get(TRACEBACK_VARIABLE, "").lower() == "full"


def is_of_user(frame: FrameType) -> bool:
    """Return True if the user wrote the frame's code, in a file or at a prompt.

    Code that Python generates does not count as the user's.
    """
    name, module = frame.f_code.co_filename, frame.f_globals
    if name.startswith("<"):
        return module.get("__name__") == "__main__" and module.get("__file__", name) == name
    return not is_of_library(name)


def is_of_library(filename: str) -> bool:
    """Return True if a file belongs to the standard library, an installed package, raysgd or TensorFlow's AutoGraph."""
    parts = (*_FOLDERS_OF_PACKAGES, _MADE_BY_TENSORFLOW)
    return filename.startswith((_PACKAGE, _STANDARD_LIBRARY)) or any(part in filename for part in parts)


def frames_of_user(trace: TracebackType | None, most: int) -> TracebackType | None:
    """Return a traceback with only the frames of the user's code. Return None if there are none.

    If there are more than `most` such frames, keep the first frame and the last `most - 1` frames.
    """
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
    """Return a location, `file:line in function`, followed by its line of code if this process can read the file.

    Any other text is returned unchanged.

    The process that raised the error may lack the file. A worker on another node has neither the driver's script nor a
    notebook's cells.
    """
    parts = _PLACE_WITHOUT_CODE.fullmatch(place)
    code = linecache.getline(parts[1], int(parts[2])).strip() if parts else ""
    return masked(f"{place}: {code}") if code else place


def short_name(filename: str) -> str:
    """Shorten the path of a library's file: start the path at the package's folder. Other paths stay unchanged.

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
    """Return a sentence, with a leading space, that says where the user defined a method of a class.

    Return "" if the user did not define it. Errors about the method contain this sentence, because their traceback does
    not point to the method.
    """
    code = getattr(getattr(owner, method, None), "__code__", None)
    if code is None or is_of_library(code.co_filename):
        return ""
    return f" `{method}` is defined at {code.co_filename}:{code.co_firstlineno}."
