"""Run the tests named "interpreted" of all files in this folder, in processes where Triton interprets kernels."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.interpreter import INTERPRETED

from hf_vit_accel.ops.launch import triton

IMPORT = "support.interpreter import"
FILES = {path.name for path in Path(__file__).parent.glob("test_*.py") if IMPORT in path.read_text()}
"""The files with interpreted tests, which import `INTERPRETED`."""
PARTS = {"gradients": {"test_backward.py"}, "the rest": FILES - {"test_backward.py", Path(__file__).name}}
"""What one process runs. Parts take about as long, so that they run side by side."""


@pytest.mark.skipif(triton is None or INTERPRETED, reason="needs Triton, and a process that compiles")
@pytest.mark.parametrize("part", PARTS)
def test_by_the_interpreter(part: str, request: pytest.FixtureRequest) -> None:
    files = [Path(__file__).parent / name for name in sorted(PARTS[part])]
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "-k", "interpreted"]
    command += ["--matrix"] * request.config.getoption("--matrix")
    done = subprocess.run([*command, *files], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert " passed" in done.stdout and "failed" not in done.stdout
