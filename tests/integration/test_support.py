"""SUPPORT.md and the pages of docs/ say what is declared."""

from __future__ import annotations

from pathlib import Path

import pytest
from support_table import BLOCK, PAGES_WITH_BLOCKS, with_blocks


@pytest.mark.parametrize("path", PAGES_WITH_BLOCKS, ids=lambda path: path.name)
def test_a_page_says_what_is_declared(path: Path) -> None:
    text = path.read_text()
    assert with_blocks(text) == text, "stale: run make support"
    assert text.count("<!-- rows:") == text.count("<!-- end of rows -->") == len(BLOCK.findall(text)) > 0
