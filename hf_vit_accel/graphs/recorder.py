"""How work is captured and ordered on a device: what runners need of CUDA, and nothing else."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from contextlib import suppress

import torch
from torch import Tensor


def why_not_graphs(device: torch.device) -> str | None:
    """Why nothing can be captured on a device; None if it can."""
    return None if device.type == "cuda" else f"the tensors are on {device}, CUDA graphs need cuda"


class CudaRecorder:
    """CUDA graphs on one device, in one private memory pool."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._pool = device, torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device, priority=-1)
        self._event = torch.cuda.Event()
        self._last: torch.cuda.Stream | None = None

    def against(self) -> str | None:
        """Why nothing can be captured or replayed just now."""
        if torch.compiler.is_compiling():
            return "torch.compile is tracing the call"
        if torch.cuda.is_current_stream_capturing():
            return "a CUDA graph is being captured around the call"
        return None

    def record(self, *runs: Callable[[], None]) -> tuple[list[Callable[[], None]], int]:
        """Run all in turn to warm up, capture each, and return what replays each and the device memory they took.

        What one leaves for the next is where it was when that replays, if nothing else was replayed between them.
        """
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream):
                for run in runs:
                    run()  # kernels are compiled, library plans built
                with suppress(torch.OutOfMemoryError):
                    return self._capture_all(runs)
                torch.cuda.empty_cache()  # what is cached, the warm-up's memory too, is not given back within a capture
                return self._capture_all(runs)
        finally:  # the warm-up reads and writes buffers that are free for others from here on, whatever happened
            current.wait_stream(self._stream)

    def _capture_all(self, runs: Sequence[Callable[[], None]]) -> tuple[list[Callable[[], None]], int]:
        free, graphs = torch.cuda.mem_get_info(self._device)[0], [torch.cuda.CUDAGraph() for _ in runs]
        for graph, run in zip(graphs, runs, strict=True):
            self._capture(graph, run)
        return [graph.replay for graph in graphs], max(free - torch.cuda.mem_get_info(self._device)[0], 0)

    def _capture(self, graph: torch.cuda.CUDAGraph, run: Callable[[], None]) -> None:
        # cuBLAS keeps its scratch memory per stream: inside the capture it must come from the graphs' own pool, or
        # graphs of two towers (and whoever is handed the same stream) would share it.
        torch._C._cuda_clearCublasWorkspaces()
        torch.clear_autocast_cache()  # else replays would read a weight cast before, later calls one of theirs
        collecting, complete = gc.isenabled(), False
        gc.disable()  # nothing may be freed by the way while the stream is captured
        try:
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                run()
                complete = True
            finally:
                self._end(graph, complete)
        finally:
            torch._C._cuda_clearCublasWorkspaces()
            torch.clear_autocast_cache()
            if collecting:
                gc.enable()

    def _end(self, graph: torch.cuda.CUDAGraph, complete: bool) -> None:
        pool = self._pool
        if not complete:  # once its graphs are gone, a pool cannot be used again
            self._pool = torch.cuda.graph_pool_handle()
        try:
            graph.capture_end()
        except RuntimeError:
            # The allocator may take the capture for one that goes on: its pool is not used again.
            with suppress(RuntimeError):
                torch._C._cuda_endAllocateToPool(self._stream.device_index, pool)
            self._pool = torch.cuda.graph_pool_handle()
            if complete:
                raise

    def wait(self) -> None:
        """Let work queued from now on begin after the last `done`."""
        stream = torch.cuda.current_stream(self._device)
        if self._last is not None and self._last != stream:
            stream.wait_event(self._event)

    def uses(self, tensor: Tensor) -> None:
        """Keep a tensor's memory until work queued so far on the current stream is over, even if it is dropped."""
        tensor.record_stream(torch.cuda.current_stream(self._device))

    def done(self) -> None:
        """The static buffers are free for whoever waits."""
        self._last = torch.cuda.current_stream(self._device)
        self._event.record(self._last)

    def settle(self) -> None:
        """Let the host wait until nothing that was replayed is running."""
        self._event.synchronize()
        self._stream.synchronize()
