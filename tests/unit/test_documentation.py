"""The reference lists every public name, and the table of contents every page."""

from __future__ import annotations

import re
from pathlib import Path

import zeropage

ROOT = Path(__file__).parents[2]


def test_every_public_name_is_in_the_reference() -> None:
    listed = set(re.findall(r"^::: zeropage\.(\w+)$", (ROOT / "docs/api.md").read_text(), flags=re.MULTILINE))
    assert listed == set(zeropage.__all__)


def test_every_page_is_in_the_table_of_contents() -> None:
    contents = (ROOT / "mkdocs.yml").read_text()
    docs = ROOT / "docs"
    assert [page for page in docs.rglob("*.md") if str(page.relative_to(docs)) not in contents] == []
