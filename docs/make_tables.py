"""Writes the tables of names in `migration.md` from the one table that raysgd has: `python docs/make_tables.py`."""

from __future__ import annotations

import re
from pathlib import Path

from raysgd.compat.paths import Group, gone, table

PAGE = Path(__file__).parent / "migration.md"


def names_of(group: Group) -> str:
    """The table of the modules of a group."""
    rows = [f"| `{old}` | `{new}` | {_listed(names)} |" for old, new, names in table(group)]
    return "\n".join(["| old module | now | names |", "|---|---|---|", *rows])


def gone_names() -> str:
    """The table of what has no successor."""
    rows = [f"| `{old}` | {reason} |" for old, reason in gone().items()]
    return "\n".join(["| gone | why, or what to use instead |", "|---|---|", *rows])


def with_tables(page: str) -> str:
    """The text of the page with today's tables in it."""
    tables = {"sgd": names_of("sgd"), "train": names_of("train"), "gone": gone_names()}
    for name, rows in tables.items():
        begin, end = f"<!-- begin table {name} -->", f"<!-- end table {name} -->"
        page = re.sub(f"{begin}.*?{end}", lambda _, text=f"{begin}\n{rows}\n{end}": text, page, flags=re.DOTALL)
    return page


def _listed(names: str) -> str:
    return ", ".join(f"`{name}`" for name in names.split()) or "its modules"


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
