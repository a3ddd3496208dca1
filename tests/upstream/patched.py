"""A pytest plugin: every tower is patched before it is called, and the calls that were served are counted.

(Not as soon as it is built: patching gives its config another attention name, which some of the tests look at. And not
the towers that a proof runs beside ours: they are stock, and patching one asks for that very proof.)
"""

from __future__ import annotations

import importlib
import threading
from contextlib import suppress
from typing import Any

import pytest
from torch import nn

import hf_vit_accel
from hf_vit_accel.families import FAMILIES
from hf_vit_accel.tower.state import TowerState, state_of

STATES: list[TowerState] = []


def _call(tower: Any, *args: Any, **kwargs: Any) -> Any:
    if state_of(tower) is None and not threading.current_thread().name.startswith("hf_vit_accel"):
        hf_vit_accel.patch(tower)
        state = state_of(tower)
        assert state is not None
        STATES.append(state)
    return nn.Module.__call__(tower, *args, **kwargs)


def pytest_configure() -> None:
    for family in FAMILIES:
        for module, name in family.towers:
            with suppress(ImportError):  # of what this transformers does not have yet
                getattr(importlib.import_module(module), name).__call__ = _call


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    fast, stock = sum(state.calls for state in STATES), sum(state.stock_calls for state in STATES)
    terminalreporter.write_line(f"{len(STATES)} towers patched, {fast} calls fast, {stock} stock")
    if not fast or not stock:
        pytest.exit("no call went one of the two ways: nothing was tested", returncode=1)
