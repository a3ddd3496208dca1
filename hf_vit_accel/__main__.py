"""`python -m hf_vit_accel`, and what `hf-vit-accel` runs."""

from __future__ import annotations

import atexit
import os
import sys


def run() -> None:
    """The command line, which has the last word on the terminal.

    When Python ends, the bindings of cuDNN's frontend report each of their objects that is left, in hundreds of lines
    on standard error. Nothing is lost by not hearing them.
    """
    atexit.register(_be_silent)  # before the libraries register theirs, so it runs after them
    from hf_vit_accel.tools.cli import app

    app()


def _be_silent() -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


if __name__ == "__main__":
    run()
