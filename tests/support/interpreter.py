"""Say whether Triton interprets kernels in this process, on a CPU, and where tests run kernels."""

import os

import pytest

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether Triton interprets kernels in this process. Triton reads the variable when a kernel is defined, so
`test_interpreted.py` starts a process for the interpreted tests."""
interpreted = pytest.mark.skipif(not INTERPRETED, reason="test_interpreted.py runs it")
DEVICES = [
    pytest.param("cpu", id="interpreted", marks=interpreted),
    pytest.param("cuda", id="gpu", marks=pytest.mark.gpu),
]
"""Where kernels run in tests."""
