"""What this machine offers: guarded, cached probes, the one source of facts for dispatch, doctor and errors.

Nothing here imports a heavy package or initialises CUDA when the module is imported; every probe runs when it is first
asked and answers from its cache afterwards. `reset()` forgets the answers.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import sys
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import cache, wraps
from pathlib import Path
from threading import Lock
from typing import Any, Generic, TypeVar

import torch
import transformers
from torch import Tensor
from torch.autograd.function import once_differentiable as torch_once_differentiable
from torch.utils import checkpoint
from torch.utils._python_dispatch import _disable_current_modes, is_in_torch_dispatch_mode

Function = TypeVar("Function", bound=Callable[..., Any])
V = TypeVar("V")
PROBES: list[Any] = []


def probe(function: Function) -> Function:
    """Cache a probe's answers until `reset`."""
    cached = cache(function)
    PROBES.append(cached)
    return cached  # type: ignore[return-value]


def apart(function: Callable[..., V], *arguments: Any) -> V:
    """What a function returns in a thread of its own, without the caller's hooks, modes, autocast, device and stream.

    A trial that is made while layers are checkpointed would else be taken for a part of them.
    """
    with ThreadPoolExecutor(1, "hf_vit_accel") as pool:
        return pool.submit(function, *arguments).result()


@contextmanager
def outside_modes() -> Iterator[None]:
    """Make tensors that later calls use, too: no inference tensors, none that a dispatch mode of this call has seen."""
    # torch's own context imports for half a second, so it is only entered where a mode is active.
    with torch.inference_mode(False), _disable_current_modes() if is_in_torch_dispatch_mode() else nullcontext():
        yield


@dataclass(frozen=True, kw_only=True)
class Package:
    """A third-party package that a backend needs: what is imported, what is installed, and how to get it."""

    module: str
    distribution: str
    install: str


@probe
def why_missing(package: Package) -> str | None:
    """None where the package can be found, else one sentence with the remedy. The package is not imported."""
    if package.module in sys.modules:
        return None
    try:
        spec = importlib.util.find_spec(package.module)
    except (ImportError, ValueError, AttributeError):
        spec = None
    if spec is None:
        return f"the package `{package.distribution}` is not installed ({package.install})"
    return None


@probe
def has_cuda() -> bool:
    """Whether torch can use a CUDA device here."""
    return torch.cuda.is_available()


@probe
def cuda_capability(index: int | None = None) -> tuple[int, int]:
    """(major, minor) of a CUDA device; the current one when no index is given."""
    return torch.cuda.get_device_capability(index)


@probe
def cuda_device_name(index: int | None = None) -> str:
    """The name of a CUDA device as its driver gives it."""
    return torch.cuda.get_device_name(index)


@probe
def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a CUDA device; 1 for any other device."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@probe
def versions() -> dict[str, str | None]:
    """Versions of everything that decides what runs here; None for what is not installed."""
    found: dict[str, str | None] = {"python": sys.version.split()[0], "torch": torch.__version__}
    names = "hf-vit-accel", "transformers", "accelerate", "triton", "flashinfer-python", "nvidia-cudnn-frontend"
    for name in (*names, "flash-attn-4"):
        found[name] = None
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    found["cuda"] = torch.version.cuda
    found["cudnn"] = str(torch.backends.cudnn.version()) if has_cuda() else None
    return found


_UPSTREAM = tuple(str(Path(str(package.__file__)).parent) + os.sep for package in (torch, transformers))


def is_upstream(function: Any) -> bool:
    """Whether a function's own code, and that of all it wraps, comes from transformers or torch, whatever its name."""
    while True:
        code = getattr(function, "__code__", None)
        if code is None or not code.co_filename.startswith(_UPSTREAM):
            return False
        function = getattr(function, "__wrapped__", None)
        if function is None:
            return True


def numerics() -> tuple[object, ...]:
    """What of torch's state decides how numbers are rounded, and by which kernels; by either way to set it."""
    backends: Any = torch.backends
    matmul = backends.cuda.matmul
    reduced = matmul.allow_bf16_reduced_precision_reduction, matmul.allow_fp16_reduced_precision_reduction
    precisions = (each.fp32_precision for each in (matmul, backends.cudnn.conv, backends.mkldnn.matmul))
    return torch.are_deterministic_algorithms_enabled(), *precisions, *reduced


KERNELS = "kernels"
"""The name under which all Triton kernels go together where something failed: what keeps one from running (no compiler,
a cache folder that cannot be written, a GPU that Triton does not know) keeps all."""


class FallbackError(RuntimeError):
    """Under `strict=True`: a call that would have left the fast path or the named backend, with the reasons.

    With a score_mod also without it: a call whose attention could not apply it.
    """


def refuse(reasons: list[str], what: str = "this call", *, wanted: str = "strict=True") -> None:
    """Raise FallbackError for any reasons."""
    if reasons:
        raise FallbackError(f"{wanted} and {what} cannot be served as asked: " + "; ".join(reasons))


def one_line(error: Exception) -> str:
    """The class of an error and what it says."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


class Fault(RuntimeError):
    """What failed when it ran: a backend by its name, or the kernels. why: one line about the error that it raised."""

    def __init__(self, name: str, error: Exception) -> None:
        self.name, self.why = name, f"failed when it ran: {one_line(error)}"[:300]
        super().__init__(f"{name} {self.why}")


_NO_FAULTS = (Fault, MemoryError, torch.OutOfMemoryError)
# What checkpointing raises, to end a forward that it runs again: torch has no public name for it (2.11 to 2.15).
_NO_FAULTS += tuple(filter(None, [getattr(checkpoint, "_StopRecomputationError", None)]))


def once_differentiable(backward: Function) -> Function:
    """torch's `once_differentiable`, which raises at a second derivative also where the gradient given is a constant.

    torch's own hands out a constant then: a penalty on a gradient would be dropped without a word.
    """
    once = torch_once_differentiable(backward)

    @wraps(backward)
    def run(ctx: Any, *given: Any) -> Any:
        if torch.is_grad_enabled():  # create_graph
            given = tuple(x.detach().requires_grad_() if isinstance(x, Tensor) else x for x in given)
        return once(ctx, *given)

    return run  # type: ignore[return-value]


_LIBRARIES = {"cudnn", "cutlass", "flash_attn", "flash_attn_interface", "flashinfer", "triton", "tvm_ffi"}
"""They assert what they ask of their arguments, and of the machine."""


def _is_ours(error: Exception) -> bool:
    """Whether it is a failed assertion, and none of a library that we call."""
    at = error.__traceback__
    while at is not None and at.tb_next is not None:
        at = at.tb_next
    raised_in = "" if at is None else str(at.tb_frame.f_globals.get("__name__"))
    return isinstance(error, AssertionError) and raised_in.partition(".")[0] not in _LIBRARIES


def guarded(name: str, function: Function) -> Function:
    """The function, whose errors are raised as a `Fault` of that name.

    Memory that ran out is the user's to deal with (people catch it, and try a smaller batch), a failed assertion of
    ours is ours.
    """

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except _NO_FAULTS:
            raise
        except Exception as error:
            if _is_ours(error):
                raise
            raise Fault(name, error) from error

    return call  # type: ignore[return-value]


class LRU(Generic[V]):
    """A bounded map from hashable keys to values made on demand; the least recently used one goes first.

    Bounded by the number of entries and by the sum of their costs (bytes, say); one that alone costs more than the
    bound is handed out but not kept. Safe to use from several threads; two may then make the same value.
    """

    def __init__(self, *, entries: int, cost: int) -> None:
        self.entries, self.cost = entries, cost
        self.hits = self.misses = self.held = 0
        self._values: OrderedDict[Hashable, tuple[V, int]] = OrderedDict()
        self._lock = Lock()

    def get(self, key: Hashable, make: Callable[[], tuple[V, int]]) -> V:
        """The value for `key`, from `make() -> (value, cost)` if it is not there."""
        with self._lock:
            if key in self._values:
                self.hits += 1
                self._values.move_to_end(key)
                return self._values[key][0]
            self.misses += 1
        value, cost = make()
        self.keep(key, value, cost)
        return value

    def find(self, key: Hashable) -> V | None:
        """The value for `key`, None if it is not there."""
        with self._lock:
            if key not in self._values:
                return None
            self._values.move_to_end(key)
            return self._values[key][0]

    def keep(self, key: Hashable, value: V, cost: int) -> None:
        """Hold a value, in the place of a former one; the least recently used go."""
        if cost <= self.cost:
            with self._lock:
                self.held += cost - self._values.pop(key, (value, 0))[1]
                self._values[key] = value, cost
                while len(self._values) > self.entries or self.held > self.cost:
                    self.held -= self._values.popitem(last=False)[1][1]

    def __len__(self) -> int:
        return len(self._values)

    def clear(self) -> None:
        """Drop every value."""
        with self._lock:
            self._values.clear()
            self.held = 0


def reset() -> None:
    """Forget every cached answer (after installing a package, or between tests)."""
    for cached in PROBES:
        cached.cache_clear()
