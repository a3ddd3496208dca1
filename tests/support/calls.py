"""Count the functions of the package that a call enters."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import hf_vit_accel

PACKAGE = str(Path(hf_vit_accel.__file__).parent)
COMPREHENSIONS = ("<listcomp>", "<genexpr>", "<dictcomp>", "<setcomp>")


def entered(act: Callable[[], object]) -> Counter[tuple[str, str, int]]:
    """Run something; count how often it enters each function of the package, by file, name and line."""
    counts: Counter[tuple[str, str, int]] = Counter()

    def trace(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE) and code.co_name not in COMPREHENSIONS:
            counts[code.co_filename.removeprefix(PACKAGE), code.co_name, code.co_firstlineno] += 1

    sys.setprofile(trace)
    try:
        act()
    finally:
        sys.setprofile(None)
    return counts
