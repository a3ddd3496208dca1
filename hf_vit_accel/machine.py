"""Probe this machine: facts for the choice of backends, for doctor and for error messages.

Importing this module imports no heavy package but torch and transformers, and initialises no CUDA. A probe runs at its
first call; later calls return the cached answer. `reset()` forgets all answers.

The module also tells which modes and transforms of torch are active (autocast, tracing, torch.func). And it holds what
every room needs to report failures: `guarded`, `Fault`, `FallbackError` and `raise_if_any`.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
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
from torch.autograd import forward_ad
from torch.autograd.function import once_differentiable as torch_once_differentiable
from torch.jit._trace import is_tracing
from torch.utils import checkpoint
from torch.utils._python_dispatch import (
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
    is_in_torch_dispatch_mode,
)

Function = TypeVar("Function", bound=Callable[..., object])
V = TypeVar("V")
PROBES: list[Any] = []


def probe(function: Function) -> Function:
    """Cache the answers of a function until `reset()`."""
    cached = cache(function)
    PROBES.append(cached)
    return cached  # type: ignore[return-value]


def run_isolated(function: Callable[..., V], *arguments: object) -> V:
    """Run a function in a new thread, without the caller's hooks, modes, autocast, device and stream.

    Otherwise, activation checkpointing would record a trial as a part of the checkpointed layers.
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
    """A third-party package that a backend needs.

    Args:
        distribution: The name of the distribution that provides the module.
        install: How to install it, for error messages.
    """

    module: str
    distribution: str
    install: str


@probe
def why_missing(package: Package) -> str | None:
    """Return why a package cannot be imported, with the remedy; None if it is installed.

    The package itself is not imported.
    """
    if package.module in sys.modules:
        return None
    try:
        spec = importlib.util.find_spec(package.module)
    except ImportError:  # `find_spec` imports `flash_attn` to find `flash_attn.cute`
        spec = None
    if spec is None:
        return f"the package `{package.distribution}` is not installed ({package.install})"
    return None


@probe
def has_cuda() -> bool:
    return torch.cuda.is_available()


def cuda_capability(index: int | None = None) -> tuple[int, int]:
    """Return the compute capability (major, minor) of a CUDA device, by default the current one."""
    return _capability_of(torch.cuda.current_device() if index is None else index)


@probe
def _capability_of(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


@probe
def multiprocessors(device: torch.device) -> int:
    """Return the number of multiprocessors of a CUDA device; 1 for any other device."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


_OWNERS: weakref.WeakValueDictionary[int, object] = weakref.WeakValueDictionary()
_INHERITED: list[object] = []


def keep_in_children(owner: object) -> None:
    """Keep the owner of CUDA graphs or events alive in forked processes, such as a data loader's workers.

    Destroying a graph or an event there aborts the process, and the garbage collector may do so at any time. The owner
    is an object of a Python class: torch's events leave weak references to them dangling.
    """
    _OWNERS[id(owner)] = owner


def _inherit() -> None:
    """Hold all owners of the parent process for ever."""
    _INHERITED.extend(_OWNERS.values())


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_inherit)


def versions() -> dict[str, str | None]:
    """Return the versions of Python, CUDA and the main packages; None for a package that is not installed."""
    versions_by_name: dict[str, str | None] = {"python": sys.version.split()[0], "torch": torch.__version__}
    names = "hf-vit-accel", "transformers", "accelerate", "triton", "flashinfer-python", "nvidia-cudnn-frontend"
    for name in (*names, "flash-attn-4"):
        versions_by_name[name] = None
        with suppress(importlib.metadata.PackageNotFoundError):
            versions_by_name[name] = importlib.metadata.version(name)
    versions_by_name["cuda"] = torch.version.cuda
    versions_by_name["cudnn"] = str(torch.backends.cudnn.version()) if has_cuda() else None
    return versions_by_name


_UPSTREAM = tuple(str(Path(str(package.__file__)).parent) + os.sep for package in (torch, transformers))


def is_upstream(function: object) -> bool:
    """Return whether a function's code, and the code of every function it wraps, is torch's or transformers'.

    The file of the code decides, so a function that only borrows an upstream name does not pass.
    """
    while True:
        code = getattr(function, "__code__", None)
        if code is None or not code.co_filename.startswith(_UPSTREAM):
            return False
        function = getattr(function, "__wrapped__", None)
        if function is None:
            return True


def numerics() -> tuple[object, ...]:
    """Return the process-wide settings of torch that decide how kernels round.

    `fp32_precision` reflects both ways to set it: `torch.backends` and `torch.set_float32_matmul_precision`.
    """
    settings: Any = torch._C  # of which `torch.backends` reads them, too, in Python code that takes 5 to 10 us
    return (
        torch.are_deterministic_algorithms_enabled(),
        settings._get_fp32_precision_getter("cuda", "matmul"),
        settings._get_fp32_precision_getter("cuda", "conv"),  # cuDNN's
        settings._get_fp32_precision_getter("mkldnn", "matmul"),
        settings._get_cublas_allow_bf16_reduced_precision_reduction(),
        settings._get_cublas_allow_fp16_reduced_precision_reduction(),
    )


KERNELS = "kernels"
"""The name under which all Triton kernels are disabled together after a failure. They share its usual causes: no
compiler, a cache folder that cannot be written, a GPU that Triton does not support."""


class FallbackError(RuntimeError):
    """A call would leave the fast path or the named backend, under `strict=True`; the message holds the reasons.

    With a `score_mod` the error is raised without `strict`, too, if the attention of a call cannot apply it.
    """


def raise_if_any(reasons: Sequence[str], what: str = "this call", *, because: str = "strict=True") -> None:
    if reasons:
        raise FallbackError(f"{because} and {what} cannot be served as asked: " + "; ".join(reasons))


def one_line(error: Exception) -> str:
    """Format an error as its class and its message, on one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


class Fault(RuntimeError):
    """A backend or the kernels raised an error when they ran."""

    def __init__(self, name: str, error: Exception) -> None:
        self.name = name
        self.why = f"failed when it ran: {one_line(error)}"[:300]
        super().__init__(f"{name} {self.why}")


# Checkpointing raises the last of these to end a recomputed forward early. It has no public name (torch 2.11 to 2.15).
_NO_FAULTS = (Fault, MemoryError, torch.OutOfMemoryError, checkpoint._StopRecomputationError)


def once_differentiable(backward: Function) -> Function:
    """Wrap a backward so that every second derivative raises.

    torch's own `once_differentiable` returns a constant if the incoming gradient is a constant. A gradient penalty
    would then be ignored silently.
    """
    once = torch_once_differentiable(backward)

    @wraps(backward)
    def run(ctx: object, *gradients: object) -> object:
        if torch.is_grad_enabled():  # create_graph=True
            gradients = tuple(x.detach().requires_grad_() if isinstance(x, Tensor) else x for x in gradients)
        return once(ctx, *gradients)

    return run  # type: ignore[return-value]


def guarded(name: str, function: Function) -> Function:
    """Wrap a function so that its errors are raised as a `Fault` with this name.

    Out-of-memory errors pass unchanged: users catch them to try a smaller batch.
    """

    @wraps(function)
    def call(*args: object, **kwargs: object) -> object:
        try:
            return function(*args, **kwargs)
        except _NO_FAULTS:
            raise
        except Exception as error:
            raise Fault(name, error) from error

    return call  # type: ignore[return-value]


def autocast_dtype(device: torch.device, weights_dtype: torch.dtype) -> torch.dtype | None:
    """Return the dtype of autocast on a device; None where it is off, and for fp64 weights, which it does not cast."""
    device_type = device.type
    if weights_dtype == torch.float64 or not torch.amp.is_autocast_available(device_type):
        return None
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None


def reasons_fake() -> list[str]:
    """Return why neither tower nor inputs may be read: cached arrays would be fake, and reach the next real call.

    Modes that only observe (`FlopCounterMode`) do not matter: caches are made outside of them.
    """
    modes = [type(mode).__name__ for mode in _get_current_dispatch_mode_stack() if mode.is_infra_mode()]
    return [f"{modes[0]} is active, as in torch.export"] if modes else []


def reasons_untraceable() -> list[str]:
    """Return what kernels and backends do not support: torch.func, forward-mode gradients, tracing, fake tensors."""
    if forward_ad._current_level >= 0 or torch._C._functorch.peek_interpreter_stack() is not None:
        return ["a transform of torch.func or forward-mode differentiation is at work"]
    if is_tracing():
        return ["torch.jit.trace is at work"]
    return reasons_fake() if is_in_torch_dispatch_mode() else []


class LRU(Generic[V]):
    """A bounded cache that evicts the least recently used entry first.

    Several threads may use it; two of them may then make the same value.

    Args:
        cost: The largest sum of the entries' costs, in bytes for instance. A single value above it is never cached.
    """

    def __init__(self, *, entries: int, cost: int) -> None:
        self.entries = entries
        self.cost = cost
        self.total_cost = 0
        self.misses = 0
        self._values: OrderedDict[Hashable, tuple[V, int]] = OrderedDict()
        self._lock = Lock()

    def get(self, key: Hashable, make: Callable[[], tuple[V, int]]) -> V:
        """Return the value of a key. A missing value is made by `make() -> (value, cost)` and cached."""
        value = self.find(key)
        if value is None:
            self.misses += 1
            value, cost = make()
            self.keep(key, value, cost)
        return value

    def find(self, key: Hashable) -> V | None:
        """Return the value of a key, or None if it is not cached."""
        with self._lock:
            if key not in self._values:
                return None
            self._values.move_to_end(key)
            return self._values[key][0]

    def keep(self, key: Hashable, value: V, cost: int) -> None:
        """Cache a value, replacing a former one, and evict the least recently used entries beyond the bounds."""
        if cost > self.cost:
            return
        with self._lock:
            _, former_cost = self._values.pop(key, (value, 0))
            self._values[key] = value, cost
            self.total_cost += cost - former_cost
            while len(self._values) > self.entries or self.total_cost > self.cost:
                _, (_, evicted_cost) = self._values.popitem(last=False)
                self.total_cost -= evicted_cost

    def __len__(self) -> int:
        return len(self._values)

    def clear(self) -> None:
        with self._lock:
            self._values.clear()
            self.total_cost = 0


def reset() -> None:
    """Forget all cached answers, after installing a package or between tests."""
    for cached in PROBES:
        cached.cache_clear()
