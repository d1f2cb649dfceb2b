"""Writes tables of the pages: `python docs/make_tables.py`.

Those of names in `reference/old-names.md` come from the one table that raysgd has, that of options in
`reference/trainers.md` from the trainers, goodput and the record run in `performance.md` from what was measured, in
`measured/`. `index.md` is made from README and from the menu, `reference/claims.md` from
`tests/repository/claims.toml`, the picture of a recovery in `architecture.md` from the runs of its table.
"""

from __future__ import annotations

import inspect
import json
import re
import sys
from pathlib import Path
from typing import Any

import yaml

from raysgd import Recovery, TFTrainer, TorchTrainer
from raysgd.compat.paths import Group, gone, table

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS.parent))
from tests.core.engine.recovery.test_machine import following_states  # noqa: E402
from tests.repository.claims import Claim, claims  # noqa: E402

PAGE = DOCS / "reference" / "old-names.md"
OPTIONS_PAGE = DOCS / "reference" / "trainers.md"
GROUPS: tuple[Group, ...] = ("sgd", "train")
MEASURED_PAGE = DOCS / "performance.md"
STATES_PAGE = DOCS / "architecture.md"
BUSY_LOAD = 2
CPU = "Intel(R) Xeon(R) Processor"  # one machine to a table
PEERS = {"ray_train": "Ray Train", "torchft": "torchft 0.2.0", "torchft_tuned": "torchft 0.2.0 with short time-outs"}


def moved_modules() -> str:
    """The table of the modules that are not where the rule of the page says."""
    rows = [(old, new) for group in GROUPS for old, new, _ in table(group) if new != by_rule(old)]
    return "\n".join(["| old module | now |", "|---|---|", *(f"| `{old}` | `{new}` |" for old, new in rows)])


def options() -> str:
    """The table of the trainers' options, with the default of each trainer that has the option."""
    of_trainers = [inspect.signature(each).parameters for each in (TorchTrainer, TFTrainer)]
    names = dict.fromkeys(name for parameters in of_trainers for name in parameters if name not in ("self", "unknown"))
    rows = [[name, *(_default(parameters.get(name)) for parameters in of_trainers)] for name in names]
    lines = [f"| `{name}` | {of_torch} | {of_tensorflow} |" for name, of_torch, of_tensorflow in rows]
    return "\n".join(["| option | default of `TorchTrainer` | default of `TFTrainer` |", "|---|---|---|", *lines])


def _default(parameter: inspect.Parameter | None) -> str:
    if parameter is None:
        return "-"
    if parameter.default is parameter.empty:
        return "required"
    default = parameter.default
    return f'`"{default}"`' if isinstance(default, str) else "`Recovery()`" if default == Recovery() else f"`{default}`"


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
        here = re.sub("; the page of old names says how, under .*", "; see below", reason)
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


def record_of(record: dict[str, Any]) -> str:
    """What the record run did, and what it found."""
    return (
        f"It killed {record['kills']:,} worker processes in {record['seconds'] / 3600:.2f} hours: "
        f"{record['kills_of_rank_0']} times rank 0, {record['pairs']} times two at once, {record['nodes']} times a "
        "node. "
        f"Parts with a sample that was not used once in each epoch: {record['samples_off']} of {record['parts']}. "
        f"Largest difference of a weight: {record['largest_difference']:.1e}."
    )


def with_measured(page: str) -> str:
    """The text of the page with tables of what was measured."""
    return _replaced(page, {"goodput": goodput_of(_measured("goodput")), "record": record_of(_measured("record"))})


def _measured(name: str) -> Any:
    return json.loads((DOCS / "measured" / f"{name}.json").read_text(encoding="utf-8"))


def with_tables(page: str) -> str:
    """The text of the page with today's tables in it."""
    return _replaced(page, {"moved": moved_modules(), "gone": gone_names()})


def with_options(page: str) -> str:
    """The text of the page with today's table of options."""
    return _replaced(page, {"options": options()})


def with_states(page: str) -> str:
    """The page with the picture of a recovery: which states follow which, without the end that each may lead to."""
    arrows = [f"    {state} --> {' & '.join(following)}" for state, following in following_states().items()]
    return _replaced(page, {"states": "\n".join(["```mermaid", "flowchart LR", *arrows, "```"])})


def index() -> str:
    """The first page of the site: README up to its installation, where to start, and a list of all pages."""
    readme = (DOCS.parent / "README.md").read_text(encoding="utf-8")
    start = "## Start from what you have\n"
    first, doors = readme.partition("## Install\n")[0], readme.partition(start)[2].partition("\n\nThen ")[0]
    here = re.sub(r"\]\((?!https?:)(?=[^)]*\))", "](../", first + start + doors).replace("](../docs/", "](")
    menu = yaml.safe_load((DOCS.parent / "mkdocs.yml").read_text(encoding="utf-8"))["nav"][1:]
    groups = [f"- **{name}**: {_linked(pages)}" for group in menu for name, pages in group.items()]
    return "\n".join([here, "\n## All pages\n", *groups]) + "\n"


CLAIMS_PAGE = DOCS / "reference" / "claims.md"
CLAIMS_HEAD = """# Check our claims

Each sentence of the README and of [the comparison](../compare.md) that states a fact or a figure is in this table,
with the command that shows it. `make claims` runs those that take less than a minute. If a command fails, the claim is
wrong. [Performance](../performance.md) has the times, with their commands.

| claim | shown by | what would refute it |
|---|---|---|
"""


def claims_page() -> str:
    """The page that lists each claim with what shows it."""
    return CLAIMS_HEAD + "\n".join(map(_claim_row, claims())) + "\n"


def _claim_row(claim: Claim) -> str:
    text = re.sub(r"!?\[([^]]*)\]\([^)]*\)", r"\1", " ".join(claim.text.split())).replace("|", r"\|")
    shown_by = f"`{claim.command}`" if claim.shown else f"no command ({claim.machine})"
    page = f"../../{claim.page}".replace("../docs/", "")
    return f"| [{Path(page).stem}]({page}): {text} | {shown_by} | {claim.refuted_by} |"


def _linked(pages: list[Any]) -> str:
    """Links to the pages of a part of the menu, and of the groups in it."""
    entries = [next(iter(page.items())) if isinstance(page, dict) else ("All recipes", page) for page in pages]
    return ", ".join(_linked(value) if isinstance(value, list) else f"[{title}]({value})" for title, value in entries)


def _replaced(page: str, tables: dict[str, str]) -> str:
    for name, rows in tables.items():
        begin, end = f"<!-- begin table {name} -->", f"<!-- end table {name} -->"
        page = re.sub(f"{begin}.*?{end}", lambda _, text=f"{begin}\n{rows}\n{end}": text, page, flags=re.DOTALL)
    return page


if __name__ == "__main__":
    makers = {PAGE: with_tables, OPTIONS_PAGE: with_options, MEASURED_PAGE: with_measured, STATES_PAGE: with_states}
    for path, with_its_tables in makers.items():
        path.write_text(with_its_tables(path.read_text(encoding="utf-8")), encoding="utf-8")
    (DOCS / "index.md").write_text(index(), encoding="utf-8")
    CLAIMS_PAGE.write_text(claims_page(), encoding="utf-8")
