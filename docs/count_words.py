"""Counts pages, and the words of their prose: `python docs/count_words.py`.

Prose is what stands outside of blocks of code and tables. Pages to look something up, and those for contributors, are
pages like the others, but their words do not count.
"""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).parent
LOOKED_UP = {"command-line", "errors", "glossary", "migration", "security"}
FOR_CONTRIBUTORS = {"architecture", "decisions"}
BLOCK = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
TABLE_LINE = re.compile(r"^\|.*$", re.MULTILINE)


def pages() -> list[Path]:
    """All pages of the site but the decisions, each of which the page of decisions leads to."""
    return sorted(page for page in DOCS.rglob("*.md") if page.parent.name != "adr")


def words(page: Path) -> int:
    """The number of words in the prose of a page."""
    text = page.read_text(encoding="utf-8")
    return len(TABLE_LINE.sub("", BLOCK.sub("", text)).split())


def counted() -> dict[str, int]:
    """The words of each page that counts."""
    left_out = LOOKED_UP | FOR_CONTRIBUTORS
    return {page.stem: words(page) for page in pages() if page.parent == DOCS and page.stem not in left_out}


def main() -> None:
    numbers = counted()
    for name, number in sorted(numbers.items(), key=lambda item: -item[1]):
        print(f"{number:6,} {name}")
    print(f"{sum(numbers.values()):6,} words of prose; {len(pages())} pages")


if __name__ == "__main__":
    main()
