"""Run the tests named "interpreted" of all files in this folder, in one process where Triton interprets kernels."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.interpreter import INTERPRETED

from hf_vit_accel.ops.launch import triton

IMPORT = "support.interpreter import"


@pytest.mark.skipif(triton is None or INTERPRETED, reason="needs Triton, and a process that compiles")
def test_by_the_interpreter(request: pytest.FixtureRequest) -> None:
    this = Path(__file__)
    files = [path for path in sorted(this.parent.glob("test_*.py")) if IMPORT in path.read_text() and path != this]
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "-k", "interpreted"]
    command += ["--matrix"] * request.config.getoption("--matrix")
    done = subprocess.run([*command, *files], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert " passed" in done.stdout and "failed" not in done.stdout
