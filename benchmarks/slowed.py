"""Run a module on one CPU core beside a busy process, to time a slow or loaded host. It needs Linux.

    python benchmarks/slowed.py hf_vit_accel bench --sizes "one 448²"

The arguments of the module follow its name. The busy process ends with this one, also if this one is killed.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import sys


def keep_busy(parent: int) -> None:
    """Use all time that the core gives, until the parent process has ended."""
    while os.getppid() == parent:
        for _ in range(100_000):
            pass


if __name__ == "__main__":
    if not sys.argv[1:] or sys.argv[1] in ("-h", "--help"):
        print(__doc__)
        raise SystemExit
    _, module, *arguments = sys.argv
    core = min(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {core})  # threads and processes that start later inherit it
    context = multiprocessing.get_context("fork")
    context.Process(target=keep_busy, args=(os.getpid(),), daemon=True).start()  # the exit terminates a daemon
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
