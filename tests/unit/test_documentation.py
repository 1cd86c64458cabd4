"""The reference lists every public name, the table of contents every page, and no page says a thing twice."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

import zeropage

ROOT = Path(__file__).parents[2]


def test_every_public_name_is_in_the_reference() -> None:
    listed = set(re.findall(r"^::: zeropage\.(\w+)$", (ROOT / "docs/api.md").read_text(), flags=re.MULTILINE))
    assert listed == set(zeropage.__all__)


def test_every_page_is_in_the_table_of_contents() -> None:
    contents = (ROOT / "mkdocs.yml").read_text()
    docs = ROOT / "docs"
    assert [page for page in docs.rglob("*.md") if str(page.relative_to(docs)) not in contents] == []


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))], ids=lambda page: page.stem
)
def test_no_section_stands_twice(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)  # comments in examples
    headings = Counter(re.findall(r"^#+ .*$", text, flags=re.MULTILINE))
    assert [heading for heading, count in headings.items() if count > 1] == []
