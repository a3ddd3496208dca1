"""What failed while a tower ran, told from where it was raised: an attention backend, or the Triton kernels.

What a machine lacks is known before a call. A library that builds no plan here, or a kernel that finds no compiler,
shows only when it runs. Nothing is caught in a layer: the tower's boundary asks once what an error came from, goes
without it, and runs the call again.
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Mapping
from itertools import pairwise
from types import FrameType

import torch

from hf_vit_accel import backends

__all__ = ["KERNELS", "blame"]

KERNELS = "kernels"
"""The name under which all Triton kernels go together: what keeps one from running (no compiler, a cache folder that
cannot be written, a GPU that Triton does not know) keeps all."""

_LONGEST = 300  # characters of an error's message


def blame(error: Exception) -> Mapping[str, str]:
    """What to go without, and why: KERNELS where the error came out of one of them, else the backend that was called.

    A backend may be built on another one's code, and fail in it: what was called is the outermost.
    Empty for what must reach the user as it is: memory that ran out (people catch that, and try a smaller batch), our
    own invariants, and whatever came from elsewhere: a user's module, torch, a signal (people raise TimeoutError from
    one, wherever the program is). So are errors of the last backend, which has nothing to go to.
    """
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return {}
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    if any(_interrupts(inner, outer) for outer, inner in pairwise(frames)):
        return {}
    modules = [str(frame.f_globals.get("__name__")) for frame in frames]
    if isinstance(error, AssertionError) and modules[-1].startswith("hf_vit_accel."):
        return {}
    names = {type(backend).__module__: backend.name for backend in (*backends.ORDER[:-1], backends.FP8)}
    passed = [KERNELS if module.startswith("hf_vit_accel.ops.") else names.get(module) for module in modules]
    found = [name for name in passed if name is not None]
    if not found:
        return {}
    message = " ".join(str(error).split())
    name = KERNELS if found[-1] == KERNELS else found[0]
    return {name: f"failed when it ran: {type(error).__name__}: {message}"[:_LONGEST]}


def _interrupts(inner: FrameType, outer: FrameType) -> bool:
    """Whether a frame is of a signal's handler: it was given the frame below it, which was interrupted.

    (What `signal.getsignal` knows may be a partial or an object around it, or set back by the handler itself.)
    """
    code = inner.f_code
    count = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & inspect.CO_VARARGS)
    given = [inner.f_locals.get(name) for name in code.co_varnames[:count]]
    return any(value is outer or (isinstance(value, tuple) and any(x is outer for x in value)) for value in given)
