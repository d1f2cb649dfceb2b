"""What the site needs beyond its pages: formulae as MathML, links to the sources.

It also refuses to be built while a public name has no docstring.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS))
from public_names import listed, without_docstring  # noqa: E402

CODE = re.compile(r"(^```.*?^```|`[^`\n]+`)", re.DOTALL | re.MULTILINE)
FORMULA = re.compile(r"\$\$(.+?)\$\$|\$([^$\n]+?)\$", re.DOTALL)
OUTSIDE = re.compile(r"\]\((?:\.\./)+((?!docs/)[^)\s]+)\)")


def on_config(config: Any) -> Any:
    """Says at the foot of each page for which version it is."""
    source = (DOCS.parent / "raysgd" / "_version.py").read_text(encoding="utf-8")
    [version] = re.findall(r'^__version__ = "(.+)"', source, re.MULTILINE)
    config["copyright"] = f"raysgd {version}"
    return config


def on_pre_build(config: Any) -> None:
    """Looks at every public name of the reference.

    Raises:
        ValueError: One has no docstring.
    """
    if bare := without_docstring(listed()):
        raise ValueError(f"public names without a docstring: {', '.join(bare)}")


def on_post_page(output: str, page: Any, config: Any) -> str:
    """Keeps the theme from asking GitHub for the stars of the repository: nothing is loaded from elsewhere."""
    return output.replace(' data-md-component="source"', "")


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Leaves code as it is; changes formulae, and links to files beside the pages.

    A search finds guides before the names and decisions that have the same words.
    """
    if page.file.src_path.startswith(("reference/", "adr/")):
        page.meta["search"] = {"boost": 0.2}
    return "".join(
        part if part.startswith("`") else _with_links(_with_formulae(part), page, config)
        for part in CODE.split(markdown)
    )


def _with_formulae(text: str) -> str:
    return FORMULA.sub(lambda found: convert(found[1] or found[2], display="block" if found[1] else "inline"), text)


def _with_links(text: str, page: Any, config: Any) -> str:
    def absolute(found: re.Match[str]) -> str:
        target = (DOCS / page.file.src_path).parent / found[0][2:-1].partition("#")[0]
        if target.resolve().is_relative_to(DOCS):
            return found[0]
        kind = "tree" if target.is_dir() else "blob"
        if not target.exists():
            raise ValueError(f"`{page.file.src_path}` links to `{found[0][2:-1]}`, which does not exist")
        return f"]({config['repo_url']}/{kind}/main/{target.resolve().relative_to(DOCS.parent)})"

    return OUTSIDE.sub(absolute, text)
