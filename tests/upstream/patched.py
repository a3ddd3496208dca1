"""A pytest plugin that patches every tower before its first call, and counts fast and stock calls.

A tower is not patched as soon as it is built, because patching changes the attention's name in its config, which some
tests compare. The stock towers of a proof are not patched, because patching one would start the same proof.
"""

from __future__ import annotations

import importlib
import threading
from contextlib import suppress

import pytest
from torch import nn

import hf_vit_accel
from hf_vit_accel.families import FAMILIES
from hf_vit_accel.tower.state import TowerState, state_of

STATES: list[TowerState] = []


def _call(tower: nn.Module, *args: object, **kwargs: object) -> object:
    """Patch a tower before its first call."""
    if state_of(tower) is None and not threading.current_thread().name.startswith("hf_vit_accel"):
        hf_vit_accel.patch(tower)
        state = state_of(tower)
        assert state is not None
        STATES.append(state)
    return nn.Module.__call__(tower, *args, **kwargs)


def pytest_configure() -> None:
    """Replace `__call__` of every class of towers."""
    for family in FAMILIES:
        for module, name in family.towers:
            with suppress(ImportError):  # this version of transformers may lack the class
                getattr(importlib.import_module(module), name).__call__ = _call


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the counts; fail if one of the two ways was not tested."""
    fast = sum(state.fast_calls for state in STATES)
    stock = sum(state.stock_calls for state in STATES)
    terminalreporter.write_line(f"{len(STATES)} towers patched, {fast} calls fast, {stock} stock")
    if not fast or not stock:
        pytest.exit(f"fast and stock calls must both occur, got {fast} fast and {stock} stock", returncode=1)
