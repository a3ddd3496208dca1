"""SUPPORT.md and the pages of docs/ say what is declared."""

from __future__ import annotations

from pathlib import Path

import pytest
from support_table import BLOCK, GENERATE_PAGE, PAGE, PAGES_WITH_BLOCKS, page, with_blocks

from hf_vit_accel.ops import rows


def test_the_page_is_what_is_declared() -> None:
    assert PAGE.read_text() == page(), "stale: run make support"


def test_what_a_backend_needs_on_cuda_alone_is_told() -> None:
    (flex,) = (line for line in page().splitlines() if line.startswith("| `flex` |"))
    assert "any; on CUDA bfloat16, float16, float32 |" in flex and "any; on CUDA a multiple of 8, up to 256 |" in flex


@pytest.mark.parametrize("path", PAGES_WITH_BLOCKS, ids=lambda path: path.name)
def test_the_docs_show_the_modules_that_treat_each_row_by_itself(path: Path) -> None:
    text = path.read_text()
    assert with_blocks(text) == text, "stale: run make support"
    assert text.count("<!-- rows:") == text.count("<!-- end of rows -->") == len(BLOCK.findall(text)) == 1
    assert all(entry.summary in text for entry in rows.TABLE)


def test_the_docs_show_every_argument_of_generate() -> None:
    text = GENERATE_PAGE.read_text()
    assert with_blocks(text) == text, "stale: run make support"
    assert "| `num_beams` | stock | beams |" in text
