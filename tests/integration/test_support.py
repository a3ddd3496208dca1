"""SUPPORT.md says what is declared."""

from __future__ import annotations

from support_table import PAGE, page


def test_the_page_is_what_is_declared() -> None:
    assert PAGE.read_text() == page(), "stale: run make support"


def test_what_a_backend_needs_on_cuda_alone_is_told() -> None:
    (flex,) = (line for line in page().splitlines() if line.startswith("| `flex` |"))
    assert "any; on CUDA bfloat16, float16, float32 |" in flex and "any; on CUDA a multiple of 8, up to 256 |" in flex
