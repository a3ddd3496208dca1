"""Shared set-up: tests marked gpu run only where a CUDA device is present, those marked matrix only with --matrix."""

from __future__ import annotations

import gc
import os

import pytest
from hypothesis import settings

os.environ.setdefault("HF_HUB_OFFLINE", "1")

settings.register_profile("few", deadline=None, max_examples=30)
settings.register_profile("all", deadline=None)  # --hypothesis-profile=all, as noxfile.py gives it
settings.load_profile("few")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--matrix", action="store_true", help="run every cell of the matrix, not one of each row")


def pytest_configure(config: pytest.Config) -> None:
    """torch and the shared fixtures, which take seconds to import: not in the process that only hands out tests."""
    if config.getoption("numprocesses", None) and not hasattr(config, "workerinput"):
        return
    import torch

    torch.set_num_threads(1)  # tiny tensors: more threads only wait for each other
    for fixtures in ("towers", "references", "cpu_graphs"):
        config.pluginmanager.import_plugin(f"support.{fixtures}")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    import torch

    left_out = {"matrix": not config.getoption("--matrix"), "gpu": not torch.cuda.is_available()}
    marks = [mark for mark, is_left_out in left_out.items() if is_left_out]
    kept = [item for item in items if not any(map(item.get_closest_marker, marks))]
    config.hook.pytest_deselected(items=list(set(items) - set(kept)))
    items[:] = kept


def pytest_collection_finish() -> None:
    """Whatever is there now stays: no collection of garbage, of which one took 0.3 s, need look at it again."""
    gc.collect()
    gc.freeze()
