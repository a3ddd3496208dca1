"""Run the command line, by `python -m hf_vit_accel` or `hf-vit-accel`."""

from __future__ import annotations

import atexit
import os
import sys


def run() -> None:
    """Run the command line, and silence standard error when Python ends.

    The bindings of cuDNN's frontend then report each of their objects that is left, in hundreds of useless lines.
    """
    atexit.register(_be_silent)  # before the libraries register theirs, so it runs after them
    from hf_vit_accel.tools.cli import app

    app()


def _be_silent() -> None:
    """Send standard error to nowhere, once everything printed so far is out."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


if __name__ == "__main__":
    run()
