"""A pytest plugin: every tower is patched as soon as it is built, and the calls that were served are counted."""

from __future__ import annotations

import functools
import importlib
from typing import Any

import pytest
import transformers

import hf_vit_accel
from hf_vit_accel.families import FAMILIES
from hf_vit_accel.tower import TowerState, state_of

STATES: list[TowerState] = []


def _patch(kind: Any) -> None:
    init = kind.__init__

    @functools.wraps(init)
    def build(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        if type(self).__init__ is build:
            hf_vit_accel.patch(self)
            state = state_of(self)
            assert state is not None
            STATES.append(state)

    kind.__init__ = build


def pytest_configure() -> None:
    for family in FAMILIES:
        for module, name in family.towers:
            _patch(getattr(importlib.import_module(module), name))
    assert transformers


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    fast, stock = sum(state.calls for state in STATES), sum(state.stock_calls for state in STATES)
    terminalreporter.write_line(f"{len(STATES)} towers patched, {fast} calls fast, {stock} stock")
    if not fast or not stock:
        pytest.exit("no call went one of the two ways: nothing was tested", returncode=1)
