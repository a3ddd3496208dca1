"""Gives the memory of graphs back when any allocation on their GPU fails, also one of the user's program."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Protocol

import torch


class Store(Protocol):
    """Whoever keeps graphs of one device, with the buffers that they write."""

    @property
    def device(self) -> torch.device | None:
        """None while there are none."""

    def give_up(self, why: str) -> bool:
        """Drop all graphs and buffers; return whether it does, now or at its next call."""


_stores: weakref.WeakSet[Store] = weakref.WeakSet()
_is_observing = False
_capturing_threads: set[int] = set()
stores_given_up = 0
"""Stores whose graphs went since memory ran out. A call that ran out of memory may find theirs when it tries again."""


def has_given_up_since(earlier: int) -> bool:
    """Return whether stores gave up since `stores_given_up` was this number."""
    return stores_given_up > earlier


@contextmanager
def capture_of_ours() -> Iterator[None]:
    """Keep all graphs if memory runs out within a capture of ours.

    A capture cannot free cached memory. The recorder frees it and tries again, and whoever captures counts a failure.
    """
    thread = threading.get_ident()
    is_outermost = thread not in _capturing_threads
    _capturing_threads.add(thread)
    try:
        yield
    finally:
        if is_outermost:
            _capturing_threads.discard(thread)


def _is_within_capture() -> bool:
    """Return whether this thread captures, or computes gradients while one does: autograd has threads of its own."""
    computes_gradients = torch._C._current_graph_task_id() != -1
    return threading.get_ident() in _capturing_threads or (computes_gradients and bool(_capturing_threads))


def drop_when_memory_runs_out(store: Store) -> None:
    """Register a store whose graphs go as soon as an allocation on their GPU fails. Trying again finds their memory.

    torch calls observers of failed allocations before it raises. Without such observers (their function is not
    public) the graphs stay. A CUDA build of torch without a GPU, where tests stand in for one, cannot attach any.
    """
    global _is_observing
    _stores.add(store)
    attach = getattr(torch._C, "_cuda_attach_out_of_memory_observer", None)
    if not _is_observing and attach is not None and torch.cuda.is_available():
        attach(_give_up_graphs)
        _is_observing = True


def _give_up_graphs(device: int, requested: int, allocated: int, free: int) -> None:
    """Drop the graphs of a device; torch calls this with the failed allocation, in its thread."""
    if _is_within_capture():
        return
    global stores_given_up
    for store in list(_stores):
        # CUDA refuses to wait for replays within a capture: the next call drops them.
        # Another thread may change a store meanwhile: it decodes.
        with suppress(RuntimeError):
            of_store = store.device
            if of_store is not None and of_store.index not in (None, device):
                continue
            if store.give_up("device memory ran out after graphs were captured"):
                stores_given_up += 1
                _stores.discard(store)
