"""SUPPORT.md and the pages of docs/ say what is declared."""

from __future__ import annotations

from pathlib import Path

import pytest
from support_table import BLOCK, PAGES_WITH_BLOCKS, backends_table, with_blocks


@pytest.mark.parametrize("path", PAGES_WITH_BLOCKS, ids=lambda path: path.name)
def test_pages_say_what_is_declared(path: Path) -> None:
    text = path.read_text()
    assert with_blocks(text) == text, "stale: run make support"
    assert text.count("<!-- rows:") == text.count("<!-- end of rows -->") == len(BLOCK.findall(text)) >= 1


def test_what_a_backend_needs_on_cuda_alone_is_told() -> None:
    (flex,) = (line for line in backends_table() if line.startswith("| `flex` |"))
    assert "any; on CUDA bfloat16, float16, float32 |" in flex and "any; on CUDA a multiple of 8, up to 256 |" in flex
