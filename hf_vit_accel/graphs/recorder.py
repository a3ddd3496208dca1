"""Captures and orders work on a device: all that the runners need of CUDA."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial

import torch
from torch import Tensor

from hf_vit_accel.machine import keep_in_children


def why_not_graphs(device: torch.device) -> str | None:
    """Return why a device cannot capture graphs, or None if it can."""
    return None if device.type == "cuda" else f"the tensors are on {device}, CUDA graphs need cuda"


def free_bytes(device: torch.device) -> int:
    """Return the bytes of a device that no program has taken, torch's cached memory included in those taken."""
    free, _ = torch.cuda.mem_get_info(device)
    return free


_CAPTURES = threading.Lock()
"""Held during a capture and its warm-up: captures of two threads could disturb one another."""
_DEVICE_WAITS = threading.Lock()
"""Held during a capture, and by other threads that wait for the whole device meanwhile."""


@contextmanager
def others_wait() -> Iterator[None]:
    """Let `torch.cuda.synchronize` of other threads wait until the with block ends.

    CUDA raises an error in any thread that waits for the whole device while a graph is captured.
    """
    capturing_thread = threading.get_ident()

    def synchronize_after_capture(device: torch.device | str | int | None = None) -> None:
        if threading.get_ident() == capturing_thread:
            synchronize(device)
            return
        with _DEVICE_WAITS:
            synchronize(device)

    with _DEVICE_WAITS:
        synchronize = torch.cuda.synchronize
        torch.cuda.synchronize = synchronize_after_capture
        try:
            yield
        finally:
            if torch.cuda.synchronize is synchronize_after_capture:  # else another library has replaced it meanwhile
                torch.cuda.synchronize = synchronize


class _Memory:
    """Device memory as other libraries see it; does not own it."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.__cuda_array_interface__ = {
            "shape": (storage.nbytes(),),
            "typestr": "|u1",
            "data": (storage.data_ptr(), False),
            "version": 3,
        }


class CudaRecorder:
    """Captures CUDA graphs on one device, into one private memory pool."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device, priority=-1)
        self._event = torch.cuda.Event()
        self._last_stream: torch.cuda.Stream | None = None
        keep_in_children(self)

    def record(
        self, *runs: Callable[[], None], after_each: Callable[[], None] = lambda: None
    ) -> tuple[list[Callable[[], None]], int]:
        """Run all functions to warm up, then capture each in a graph; return their replays, and the bytes they take.

        A function may read tensors that the one before it left. Its replay finds them at the same addresses,
        unless another graph of the pool was replayed in between. `after_each` runs between captures.
        """
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        try:
            with _CAPTURES, torch.cuda.stream(self._stream):
                for run in runs:
                    run()  # compiles kernels and builds library plans
                    after_each()
                with suppress(torch.OutOfMemoryError):
                    return self._capture_all(runs, after_each)
                torch.cuda.empty_cache()  # a capture cannot free cached memory, such as the warm-up's
                return self._capture_all(runs, after_each)
        finally:  # even a failed warm-up uses buffers that others may take from here on
            current.wait_stream(self._stream)

    def _capture_all(
        self, runs: Sequence[Callable[[], None]], after_each: Callable[[], None]
    ) -> tuple[list[Callable[[], None]], int]:
        # not the free memory of the device, which other processes change
        reserved_before = torch.cuda.memory_reserved(self._device)
        graphs = [torch.cuda.CUDAGraph() for _ in runs]
        for graph, run in zip(graphs, runs, strict=True):
            self._capture(graph, run)
            after_each()
        nbytes = torch.cuda.memory_reserved(self._device) - reserved_before
        replays = [partial(graph.replay) for graph in graphs]
        for replay in replays:
            keep_in_children(replay)
        return [*replays], max(nbytes, 0)

    def _capture(self, graph: torch.cuda.CUDAGraph, run: Callable[[], None]) -> None:
        # cuBLAS keeps scratch memory per stream. Without clearing it, graphs of two towers would share it.
        torch._C._cuda_clearCublasWorkspaces()
        torch.clear_autocast_cache()  # replays would read a weight that was cast before the capture
        is_collecting = gc.isenabled()
        is_complete = False
        gc.disable()  # a collection could free device memory, which a capture forbids
        try:
            with others_wait():
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    run()
                    is_complete = True
                finally:
                    self._end(graph, is_complete)
        finally:
            torch._C._cuda_clearCublasWorkspaces()
            torch.clear_autocast_cache()
            if is_collecting:
                gc.enable()

    def _end(self, graph: torch.cuda.CUDAGraph, is_complete: bool) -> None:
        """End a capture. Replace the pool where the capture broke off."""
        pool = self._pool
        if not is_complete:  # a pool cannot be used again once its graphs are gone
            self._pool = torch.cuda.graph_pool_handle()
        try:
            graph.capture_end()
        except RuntimeError:
            # The allocator may believe that the capture goes on, so this pool is not used again.
            with suppress(RuntimeError):
                torch._C._cuda_endAllocateToPool(self._stream.device_index, pool)
            self._pool = torch.cuda.graph_pool_handle()
            if is_complete:
                raise

    @staticmethod
    def borrow(tensor: Tensor) -> Tensor:
        """Return a tensor over the same device memory that does not own it.

        The memory stays with the pool, whose graphs write there. A capture or a replay may use it for other tensors.
        """
        memory = torch.as_tensor(_Memory(tensor.untyped_storage()), device=tensor.device)
        return memory.view(tensor.dtype).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    def wait(self) -> None:
        """Let work that is queued from now on begin after the last `done`."""
        last = self._last_stream
        if last is not None and last.cuda_stream == torch._C._cuda_getCurrentRawStream(self._stream.device_index):
            return  # the work of one stream runs in order
        self._last_stream = torch.cuda.current_stream(self._device)
        if last is not None:
            self._last_stream.wait_event(self._event)

    def done(self) -> None:
        """Mark the static buffers as free for the next `wait`, on the stream of the last one."""
        if self._last_stream is None:  # a call of decoding that made this recorder could not wait
            self._last_stream = torch.cuda.current_stream(self._device)
        self._event.record(self._last_stream)

    def settle(self) -> None:
        """Block the host until no replay is running."""
        self._event.synchronize()
        self._stream.synchronize()
