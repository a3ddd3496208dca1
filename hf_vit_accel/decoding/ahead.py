"""Loops that queue a step before they know whether the last one was the end: a GPU computes it meanwhile.

Newer loops of transformers have a check for that, for "mps" alone. It takes one step more than it returns.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from transformers.generation import utils as generation_utils

_STOP_CHECK = "DeferredStopCheck"
_DEVICES = ("cuda",)


class _StopCheck(getattr(generation_utils, _STOP_CHECK, object)):  # type: ignore[misc]
    """Looks whether all rows had ended a step before; and at once where the next forward would be no step of ours.

    So stock's forwards, which may run code of the user's, are as many as without it.
    """

    def __init__(self, has_next_step: Callable[[], bool], *args: Any) -> None:
        super().__init__(*args)
        self._has_next_step = has_next_step

    def __call__(self, unfinished_sequences: Tensor, tokens: Tensor, length: int) -> bool:
        if super().__call__(unfinished_sequences, tokens, length):
            return True
        return not self._has_next_step() and bool(unfinished_sequences.max() == 0)


def can_run_ahead(device: torch.device) -> bool:
    """Return whether a loop of this transformers may run ahead of a device."""
    return device.type in _DEVICES and hasattr(generation_utils, _STOP_CHECK)


def running_ahead(sample: Any, has_next_step: Callable[[], bool]) -> Callable[..., Any]:
    """Return transformers' loop with one other global: its check whether all rows have ended."""
    stop_check: Any = partial(_StopCheck, has_next_step)
    stop_check.is_supported = lambda *_, **__: True
    names = sample.__globals__ | {_STOP_CHECK: stop_check}
    return FunctionType(sample.__code__, names, sample.__name__, sample.__defaults__, sample.__closure__)
