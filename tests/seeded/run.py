"""Seed every fault into a copy of the package, run the tests that should catch it, and print those that none caught.

    python tests/seeded/run.py [--only WORD] [--workers 2]

A run takes some minutes on many cores, so it is a session of nox of its own: `nox -s seeded`. It exits with 1 if any
fault goes uncaught.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from faults import FAULTS, Fault

ROOT = Path(__file__).parents[2]
TIMEOUT = 900
"""Seconds: a fault may also let a test wait for ever, which counts as caught."""


def seeded_copy(fault: Fault, folder: Path) -> None:
    """Copy the package and its tests, and put the fault in."""
    for name in ("hf_vit_accel", "tests", "examples", "benchmarks", "docs"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for path in ROOT.glob("*.*"):
        if path.is_file():
            shutil.copy(path, folder)
    target = folder / "hf_vit_accel" / fault.path
    source = target.read_text()
    assert source.count(fault.before) == 1, f"{fault.path} does not hold {fault.before!r} once"
    target.write_text(source.replace(fault.before, fault.after))


def is_caught(fault: Fault) -> bool:
    """Return whether a test fails with the fault."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        seeded_copy(fault, folder)
        environment = os.environ | dict(PYTHONPATH=name, OMP_NUM_THREADS="1", PYTHONDONTWRITEBYTECODE="1")
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *fault.tests.split()]
        try:
            run = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=TIMEOUT)
        except subprocess.TimeoutExpired:
            return True
    if run.returncode not in (0, 1):
        raise RuntimeError(f"{fault.kind}: pytest could not run\n{run.stdout[-2000:]}{run.stderr[-2000:]}")
    return run.returncode == 1


def main() -> int:
    """Run all faults, or those whose kind or file has a word in it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    faults = [fault for fault in FAULTS if options.only in f"{fault.path}: {fault.kind}"]
    if not faults:
        parser.error(f"no fault has {options.only!r} in its kind or its file")
    uncaught = []
    with ThreadPoolExecutor(options.workers) as pool:
        for fault, caught in zip(faults, pool.map(is_caught, faults), strict=True):
            print("caught  " if caught else "UNCAUGHT", fault.kind, flush=True)
            if not caught:
                uncaught.append(fault.kind)
    print(f"{len(faults) - len(uncaught)} of {len(faults)} caught")
    return 1 if uncaught else 0


if __name__ == "__main__":
    sys.exit(main())
