"""SUPPORT.md says what is declared."""

from __future__ import annotations

from support import PAGE, page


def test_the_page_is_what_is_declared() -> None:
    assert PAGE.read_text() == page(), "stale: run make support"
