"""Shared set-up: tests marked gpu run only where a CUDA device is present, those marked matrix only with --matrix."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import settings

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from standins import model, on_cpu, references  # noqa: F401  (fixtures)

settings.register_profile("few", deadline=None, max_examples=30)
settings.register_profile("all", deadline=None)  # --hypothesis-profile=all, as noxfile.py gives it
settings.load_profile("few")
torch.set_num_threads(1)  # tiny tensors: more threads only wait for each other


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--matrix", action="store_true", help="run every cell of the matrix, not one of each row")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--matrix"):
        left_out = [item for item in items if item.get_closest_marker("matrix")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("matrix")]
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
