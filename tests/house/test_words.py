"""The words that users read are plain, and one thing has one word.

The pages, and the docstrings, comments, messages and names of the code, use the words of the house style. Old entries
of the changelog keep the names of their time; only the `TRANSLATED` words are gone.
"""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DECISIONS = sorted((ROOT / "docs" / "adr").glob("*.md"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")), *DECISIONS]
RECORDS = [ROOT / "CHANGELOG.md", ROOT / "examples" / "README.md"]
MODULES = [path for folder in ("raysgd", "operators", "examples") for path in sorted((ROOT / folder).rglob("*.py"))]

# What people do not say to a colleague, and what to write instead. A space stands for any white space.
TRANSLATED = {
    r"anew": "again",
    r"nobody": "no one, no worker, no rank",
    r"whoever": "the user, the worker that",
    r"likewise": "also, the same way",
    r"thereby|thereupon": "so, then, or a new sentence",
    r"of (?:yours|ours)": "your, our",
    r"of (?:its|one's) own": "its own ..., a separate ..., another ...",
    r"is told (?:of|by)": "the log says, ... tells",
    r"comes? again": "is repeated",
    r"at hand": "available",
}
PHRASES = {
    **TRANSLATED,
    r"(?<!there\s)(?:is|are) (?-i:none)(?! of)": "is not one, is not",
    r"as (?:it is|they are|it was|they were)(?= ?[.,;:)]|$)": "unchanged",
    r"nothing but": "only",
    r"(?:finds|found) out(?! of)": "raises, notices, the log says",
    r"(?:is|are|was|were) asked for": "you need, you request",
    r"(?:is|are|was|were) told of": "the log says",
    r"in vain": "for nothing, without a result",
    r"(?:gone|going) on with": "continued, continuing",
    r"come to an end": "stop, finish",
    r"joined batch": "global batch",
    r"by and by": "over time",
    r"drop(?:ped)? dead": "die",
}

# Goals of a benchmark are printed by its script. A page says what came out.
GOALS = {r"bars?(?=:)|bars?(?= \|)|the bars? (?:is|are) \d+|met": "the figure alone"}

# Names of the first design, and those that took their place.
NAMES = {
    r"joint batch(?:es)?|Joint batch(?:es)?|joint_batch": "global batch",
    r"[Rr]ejoin(?:s|ed|ing)?": "continue in place",
    r"an? rebuild": "restart from the snapshot",
    r"Party": "NextGroup",
    r"Muster|assembl(?:e|ing) (?:the )?party": "Recovery.form",
    r"Recruits?|Enlisted": "StandbyWorker, standby worker",
    r"HostedTrainer|HostedCall|TrainerHost": "DetachedTrainer, DetachedCall, TrainerProcess",
    r"Seats?": "Slot",
    r"Pulse|Beat": "Heartbeat",
    r"Standing": "ReplicaProgress",
    r"Watch": "Monitor",
    r"Captures": "StateCopies",
    r"InsideSnapshots": "StateCopies",
    r"Parcel": "CheckpointRef",
    r"HandOff": "Mailbox",
    r"practi[sc]e": "warm_up",
}

# Lines that may keep a word, by page or module: each with the reason.
KEPT: dict[str, tuple[str, ...]] = {
    # The name of a built wheel has a digest of the recipe: other words would build Horovod again for every user.
    "raysgd/horovod/recipe.py": ("a rank that waits in vain",),
}


@dataclass(frozen=True)
class Found:
    """One word that is to be replaced."""

    path: Path
    line: int
    word: str
    instead: str

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line}: {self.word!r}; write: {self.instead}"


Patterns = list[tuple[re.Pattern[str], str]]


def as_patterns(words: dict[str, str], flags: int = 0) -> Patterns:
    return [(re.compile(rf"\b(?:{word})\b".replace(" ", r"\s+"), flags), instead) for word, instead in words.items()]


TRANSLATED_PATTERNS = as_patterns(TRANSLATED, re.IGNORECASE)
PHRASE_PATTERNS = as_patterns(PHRASES, re.IGNORECASE)
NAME_PATTERNS = as_patterns(NAMES)
GOAL_PATTERNS = as_patterns(GOALS, re.IGNORECASE)


def found_in(
    text: str, path: Path, first_line: int = 1, patterns: Patterns = PHRASE_PATTERNS + NAME_PATTERNS
) -> Iterator[Found]:
    for pattern, instead in patterns:
        for match in pattern.finditer(text):
            line = first_line + text.count("\n", 0, match.start())
            yield Found(path, line, " ".join(match[0].split()), instead)


def without_code(page: str) -> str:
    """The page with its blocks and the code inside of lines blanked out, so that lines keep their numbers."""
    page = re.sub(r"^```.*?^```$", lambda block: "\n" * block[0].count("\n"), page, flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"`[^`\n]*`", "`", page)


def words_of_page(path: Path, patterns: Patterns = PHRASE_PATTERNS + NAME_PATTERNS) -> list[Found]:
    return list(found_in(without_code(path.read_text(encoding="utf-8")), path, patterns=patterns))


TEXTS = {tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}


def words_of_module(source: str, path: Path) -> list[Found]:
    """What is found in comments, docstrings and messages; and of names, in names of the code as well."""
    found: list[Found] = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in TEXTS:
            found += found_in(re.sub(r"`[^`\n]*`", "`", token.string), path, token.start[0])
        elif token.type == tokenize.NAME:
            found += [
                Found(path, token.start[0], token.string, instead)
                for pattern, instead in NAME_PATTERNS
                if pattern.fullmatch(token.string)
            ]
    return found


def to_replace(found: list[Found]) -> list[str]:
    lines = {path: path.read_text(encoding="utf-8").splitlines() for path in {each.path for each in found}}
    return [
        str(each)
        for each in found
        if not any(kept in lines[each.path][each.line - 1] for kept in KEPT.get(str(each.path.relative_to(ROOT)), ()))
    ]


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_a_page_uses_plain_words(path: Path) -> None:
    assert to_replace(words_of_page(path)) == []


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_a_page_says_what_came_out_and_not_what_was_wanted(path: Path) -> None:
    assert to_replace(words_of_page(path, GOAL_PATTERNS)) == []


@pytest.mark.parametrize("path", RECORDS, ids=name_of)
def test_a_record_reads_as_written_not_as_translated(path: Path) -> None:
    assert to_replace(words_of_page(path, TRANSLATED_PATTERNS)) == []


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_a_module_uses_plain_words(path: Path) -> None:
    assert to_replace(words_of_module(path.read_text(encoding="utf-8"), path)) == []


def test_words_are_found_across_lines_and_by_their_line() -> None:
    source = '"""First.\n\nHere nothing\n    but this.\n"""\nx = 1  # set anew\nclass Party: ...\ny = "`nobody`"\n'
    found = words_of_module(source, ROOT / "raysgd" / "module.py")
    assert [(each.line, each.word) for each in found] == [(3, "nothing but"), (6, "anew"), (7, "Party")]
    assert str(found[1]) == "raysgd/module.py:6: 'anew'; write: again"


def test_decisions_that_the_code_names_exist() -> None:
    decisions = {int(path.name[:4]) for path in DECISIONS}
    named = {
        (name_of(path), int(number))
        for path in MODULES
        for number in re.findall(r"\bADR (\d+)", path.read_text(encoding="utf-8"))
    }
    assert len(named) > 20
    assert sorted(each for each in named if each[1] not in decisions) == []
