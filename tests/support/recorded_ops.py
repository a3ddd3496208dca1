"""Stand in for CUDA graphs on a CPU: a replay runs a function again, or the operations that were recorded."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_SYNCS = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select", "unique")
"""Operations whose results the host must know, which no capture allows."""


@dataclass(frozen=True)
class Operation:
    function: Any
    args: Any
    kwargs: Any
    outputs: list[Tensor]  # what a replay writes; empty for an operation that writes its arguments

    def replay(self) -> None:
        """Run the operation on what its tensors hold now."""
        results = [leaf for leaf in tree_leaves(self.function(*self.args, **self.kwargs)) if isinstance(leaf, Tensor)]
        for output, result in zip(self.outputs, results if self.outputs else [], strict=True):
            output.copy_(result)


class _Capture(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Operation] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._schema.name.removeprefix("aten::") in _SYNCS:
            raise RuntimeError("operation not permitted when stream is capturing")
        result = func(*args, **kwargs)
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        sources = {
            leaf.untyped_storage().data_ptr() for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)
        }
        if func._schema.is_mutable:
            self.operations.append(Operation(func, args, kwargs, []))
        elif any(output.untyped_storage().data_ptr() not in sources for output in outputs):
            self.operations.append(Operation(func, args, kwargs, outputs))
        return result


class Recorder:
    """Stand in for `CudaRecorder`: replay a graph by running the function again.

    As on a GPU, a replay writes to the memory of tensors that were borrowed from an earlier run.
    """

    fail: Exception | None = None
    """Raised in place of a capture."""
    nbytes = 1000
    """The memory of every capture."""
    free_bytes = 64 << 30
    """The free memory of the device."""

    def __init__(self, device: torch.device) -> None:
        self.waiting = False
        self._borrowed: list[torch.Tensor] = []

    def record(
        self, *runs: Callable[[], None], after_each: Callable[[], None] = lambda: None
    ) -> tuple[list[Callable[[], None]], int]:
        """Run the functions once; return a replay of each and the memory that they took."""
        for run in runs:
            run()
            after_each()
        if self.fail is not None:
            raise self.fail
        return [self._replay_of(run, after_each) for run in runs], self.nbytes

    def _replay_of(self, run: Callable[[], None], after_each: Callable[[], None]) -> Callable[[], None]:
        def replay() -> None:
            assert self.waiting, "replayed without waiting for the last replay"
            for tensor in self._borrowed:
                tensor.fill_(float("nan"))
            self._borrowed.clear()
            run()
            after_each()

        return replay

    def borrow(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor, whose memory the next replay of any graph may use."""
        self._borrowed.append(tensor)
        return tensor

    def wait(self) -> None:
        """Begin a use, which must follow the end of the last use."""
        assert not self.waiting, "the last use never said that it was done"
        self.waiting = True

    def done(self) -> None:
        assert self.waiting
        self.waiting = False

    def settle(self) -> None:
        """Do nothing: a CPU runs nothing in the background."""


class OperationRecorder(Recorder):
    """Replay the recorded operations on the same tensors, without any Python.

    Before each replay all its intermediate tensors are spoilt, as if other graphs of the pool had run.
    """

    captures = 0
    replays = 0

    def _replay_of(self, run: Callable[[], None], after_each: Callable[[], None]) -> Callable[[], None]:
        with _Capture() as capture:
            run()
        after_each()
        kind = type(self)
        kind.captures += 1

        def replay() -> None:
            kind.replays += 1
            for operation in capture.operations:
                for output in operation.outputs:
                    output.fill_(float("nan") if output.is_floating_point() else 0)
            with torch.no_grad():
                for operation in capture.operations:
                    operation.replay()

        return replay

    def wait(self) -> None:
        """Do nothing: a CPU has one stream."""

    def done(self) -> None:
        """Do nothing: decoding ends a use that had no replay, too."""
