"""Reads tables from `.ini` files: people edit them without quotation marks, and only programs that use them load them.

Python 3.10 reads no TOML without another package, and JSON has no comments.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path


@cache
def read_table(module_file: str) -> dict[str, dict[str, str]]:
    """Return the sections of the `.ini` file that stands beside a module, under the same name.

    A row is a line `key = value`. Indented lines continue the value.

    Args:
        module_file: The `__file__` of the module.
    """
    from configparser import RawConfigParser  # few programs read a table

    parser = RawConfigParser(delimiters="=", comment_prefixes="#", empty_lines_in_values=False)
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read_string(Path(module_file).with_suffix(".ini").read_text(encoding="utf-8"))
    return {title: {key: value.replace("\n", " ") for key, value in parser.items(title)} for title in parser.sections()}
