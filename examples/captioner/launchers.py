"""End the processes of a run when the launcher that started them is killed."""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from pathlib import Path

import psutil

__all__ = ["end_with_launcher"]

_PROGRAMS = {"accelerate", "accelerate-launch", "torchrun"}
_MODULES = ("accelerate.commands.", "torch.distributed.")
_INTERVAL = 0.1  # seconds
_MESSAGE = b"\nthe launcher of this process was killed, so the process ends, too\n"


def end_with_launcher() -> None:
    """End this process if `accelerate launch` or `torchrun` started it and is killed.

    A launcher that SIGKILL ends cannot end its processes. They would go on, and keep the output folder locked. A
    process that was started from a shell outlives the shell.
    """
    launcher = os.getppid()
    if _is_launcher(launcher):
        threading.Thread(target=_end_after, args=(launcher,), name="launcher", daemon=True).start()


def _is_launcher(process: int) -> bool:
    try:
        words = psutil.Process(process).cmdline()
    except psutil.Error:
        return False
    return any(Path(word).name in _PROGRAMS or word.startswith(_MODULES) for word in words[:4])


def _end_after(launcher: int) -> None:
    """Wait until another process has adopted this one, then end."""
    while os.getppid() == launcher:
        time.sleep(_INTERVAL)
    with suppress(OSError):  # nobody may read the output any more
        os.write(2, _MESSAGE)
    os._exit(1)  # from a thread nothing else ends a process that waits for another one
