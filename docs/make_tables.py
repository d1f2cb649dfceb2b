"""Writes tables of the pages: `python docs/make_tables.py`.

Those of names in `reference/old-names.md` come from the one table that raysgd has, those of goodput and of the record
run in `performance.md` from what was measured, in `measured/`. `index.md` is made from README and from the menu.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import yaml

from raysgd.compat.paths import Group, gone, table

DOCS = Path(__file__).parent
PAGE = DOCS / "reference" / "old-names.md"
GROUPS: tuple[Group, ...] = ("sgd", "train")
MEASURED_PAGE = DOCS / "performance.md"
BUSY_LOAD = 2
CPU = "Intel(R) Xeon(R) Processor"  # one machine to a table
PEERS = {"ray_train": "Ray Train", "torchft": "torchft 0.2.0", "torchft_tuned": "torchft 0.2.0 with short time-outs"}


def moved_modules() -> str:
    """The table of the modules that are not where the rule of the page says."""
    rows = [(old, new) for group in GROUPS for old, new, _ in table(group) if new != by_rule(old)]
    return "\n".join(["| old module | now |", "|---|---|", *(f"| `{old}` | `{new}` |" for old, new in rows)])


RULES = {
    "ray.util.sgd.pytorch": "raysgd.torch",
    "ray.util.sgd": "raysgd",
    "ray.tune.suggest": "ray.tune.search",
    "ray.ml": "raysgd.air",
    "ray": "raysgd",
}


def by_rule(module: str) -> str:
    """Where the page says that an old module is, if the table does not list it."""
    start = next(start for start in RULES if f"{module}.".startswith(f"{start}."))
    return module.replace(start, RULES[start], 1)


def gone_names() -> str:
    """The table of what has no successor, the names with one reason in one row."""
    names: dict[str, list[str]] = {}
    for old, reason in gone().items():
        here = re.sub("; the migration page says how, under .*", "; see below", reason)
        names.setdefault(here, []).append(f"`{old}`")
    rows = [f"| {', '.join(them)} | {reason} |" for reason, them in names.items()]
    return "\n".join(["| gone | why, or what to use instead |", "|---|---|", *rows])


def goodput_of(rows: list[dict[str, Any]]) -> str:
    """The table of goodput: for each contender and rate of kills the longest run on one machine that was not busy."""
    calm = [row for row in rows if row["load"] <= BUSY_LOAD and row["cpu"] == CPU]
    longest = {(row["contender"], row["every_s"]): row for row in sorted(calm, key=lambda row: float(row["seconds"]))}
    lines = [
        f"| {PEERS.get(row['contender'], row['contender'])}, {row['every_s']:g} s | {row['goodput']:.3f} "
        f"| {row['kills']} in {row['wall_s']:.0f} | {row['samples_lost']:g}, {row['samples_twice']:g} "
        f"| {row['again']:.2f} % |"
        for row in sorted(longest.values(), key=lambda row: (row["every_s"], -row["goodput"]))
    ]
    head = "| contender, one kill each | goodput | kills in how many s | samples lost, used twice | done again |"
    return "\n".join([head, "|---|---|---|---|---|", *lines])


def _growth(row: dict[str, Any]) -> str:
    words = {"driver_mib_grown": "{:.1f} MiB", "driver_fds_grown": "{:g} files", "store_mib_grown": "store {:.1f} MiB"}
    return ", ".join(said.format(row[name]) for name, said in words.items() if name in row)


def record_of(record: dict[str, Any]) -> str:
    """The table of the record run: how far it is."""
    lines = {
        "kills": f"{record['kills']} of 2,000",
        "kills of rank 0": record["kills_of_rank_0"],
        "two at once": record["pairs"],
        "nodes lost": f"{record['nodes']} of 50",
        "hours with kills": f"{record['seconds'] / 3600:.2f}",
        "trainings, parts, passes over the data": f"{record['trainings']}, {record['parts']}, {record['passes']}",
        "parts in which a sample was not used once in each pass": record["samples_off"],
        "largest difference of a weight": f"{record['largest_difference']:.1e}",
        "driver grew within a part by, at most": _growth(_most_grown(record)),
    }
    return "\n".join(["| what | how much |", "|---|---|", *(f"| {what} | {told} |" for what, told in lines.items())])


def _most_grown(record: dict[str, Any]) -> dict[str, float]:
    lists = {f"driver_{name}": record[name] for name in ("mib_grown", "fds_grown")}
    lists["store_mib_grown"] = record["store_mib_grown"]
    return {name: max(values) for name, values in lists.items() if values}


def with_measured(page: str) -> str:
    """The text of the page with tables of what was measured."""
    return _replaced(page, {"goodput": goodput_of(_measured("goodput")), "record": record_of(_measured("record"))})


def _measured(name: str) -> Any:
    return json.loads((DOCS / "measured" / f"{name}.json").read_text(encoding="utf-8"))


def with_tables(page: str) -> str:
    """The text of the page with today's tables in it."""
    return _replaced(page, {"moved": moved_modules(), "gone": gone_names()})


def index() -> str:
    """The first page of the site: README up to its installation, where to start, and a list of all pages."""
    readme = (DOCS.parent / "README.md").read_text(encoding="utf-8")
    start = "## Start from what you have\n"
    first, doors = readme.partition("## Install\n")[0], readme.partition(start)[2].partition("\n\nThen ")[0]
    here = re.sub(r"\]\((?!https?:)(?=[^)]*\))", "](../", first + start + doors).replace("](../docs/", "](")
    menu = yaml.safe_load((DOCS.parent / "mkdocs.yml").read_text(encoding="utf-8"))["nav"][1:]
    groups = [f"- **{name}**: {', '.join(map(_linked, pages))}" for group in menu for name, pages in group.items()]
    return "\n".join([here, "\n## All pages\n", *groups]) + "\n"


def _linked(page: str | dict[str, str]) -> str:
    [(title, path)] = page.items() if isinstance(page, dict) else [("All recipes", page)]
    return f"[{title}]({path})"


def _replaced(page: str, tables: dict[str, str]) -> str:
    for name, rows in tables.items():
        begin, end = f"<!-- begin table {name} -->", f"<!-- end table {name} -->"
        page = re.sub(f"{begin}.*?{end}", lambda _, text=f"{begin}\n{rows}\n{end}": text, page, flags=re.DOTALL)
    return page


if __name__ == "__main__":
    for path, with_its_tables in {PAGE: with_tables, MEASURED_PAGE: with_measured}.items():
        path.write_text(with_its_tables(path.read_text(encoding="utf-8")), encoding="utf-8")
    (DOCS / "index.md").write_text(index(), encoding="utf-8")
