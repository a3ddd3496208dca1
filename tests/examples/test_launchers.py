"""Processes of a killed launcher end, and leave the output folder to the next run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from captioner.files import lock
from programs import EXAMPLES

LAUNCHER = """
import subprocess, sys
worker = subprocess.Popen([sys.executable, *sys.argv[1:]])
print(worker.pid, flush=True)
worker.wait()
"""
WORKER = """
import sys, time
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from captioner.files import lock
from captioner.files import end_with_launcher
end_with_launcher()
with lock(Path(sys.argv[2]), alone=True):
    print("locked", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def started() -> Iterator[list[psutil.Process]]:
    """Hold the processes of a test, and kill those that are left after it."""
    processes: list[psutil.Process] = []
    yield processes
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()


def start(folder: Path, started: list[psutil.Process], **variables: str) -> tuple[psutil.Process, psutil.Process]:
    """Start a process whose worker locks a folder; return both when the folder is locked."""
    command = [sys.executable, "-c", LAUNCHER, "-c", WORKER, str(EXAMPLES), str(folder)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("ACCELERATE_", "LOCAL_"))}
    process = psutil.Popen(command, stdout=subprocess.PIPE, text=True, env=environment | variables)
    started.append(process)
    worker = psutil.Process(int(process.stdout.readline()))
    started.append(worker)
    assert process.stdout.readline() == "locked\n"
    return process, worker


def test_a_process_ends_with_its_launcher(tmp_path: Path, started: list[psutil.Process]) -> None:
    launcher, worker = start(tmp_path / "out", started, LOCAL_RANK="0")
    launcher.send_signal(signal.SIGKILL)
    launcher.wait()
    assert psutil.wait_procs([worker], timeout=10)[0], "the worker went on"
    with lock(tmp_path / "out", alone=True):
        pass


def test_a_process_outlives_the_shell_that_started_it(tmp_path: Path, started: list[psutil.Process]) -> None:
    shell, worker = start(tmp_path / "out", started)
    shell.send_signal(signal.SIGKILL)
    shell.wait()
    end = time.monotonic() + 0.5
    while time.monotonic() < end:
        assert worker.is_running() and worker.status() != psutil.STATUS_ZOMBIE
        time.sleep(0.1)
    with pytest.raises(ValueError, match="another run is writing"), lock(tmp_path / "out", alone=True):
        pass
