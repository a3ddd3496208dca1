"""Capture CUDA graphs on a CPU, truly: record every operation on its tensors, and replay those, without any Python."""

from __future__ import annotations

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
    """One recorded operation.

    Args:
        function: The operation of aten.
        args: Its arguments, tensors by reference.
        kwargs: Its named arguments.
        outputs: The tensors that a replay writes; empty for an operation that writes its arguments.
    """

    function: Any
    args: Any
    kwargs: Any
    outputs: list[Tensor]

    def replay(self) -> None:
        """Run the operation on what its tensors hold now."""
        results = tree_leaves(self.function(*self.args, **self.kwargs))
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


class OperationRecorder:
    """Stand in for `CudaRecorder`: a replay runs the recorded operations on the same tensors.

    Before each replay all its intermediate tensors are spoilt, as if other graphs of the pool had run.
    """

    captures = 0
    replays = 0
    fail: Exception | None = None

    def __init__(self, device: torch.device) -> None:
        self.is_used = False

    def record(
        self, *runs: Callable[[], None], after_each: Callable[[], None] = lambda: None
    ) -> tuple[list[Callable[[], None]], int]:
        """Run the functions to warm up, then record each; return a replay of each and the memory that they took."""
        for run in runs:
            run()
            after_each()
        if self.fail is not None:
            raise self.fail
        return [self._record(run, after_each) for run in runs], 1000

    def _record(self, run: Callable[[], None], after_each: Callable[[], None]) -> Callable[[], None]:
        with _Capture() as capture:
            run()
        after_each()
        type(self).captures += 1
        kind = type(self)

        def replay() -> None:
            kind.replays += 1
            for operation in capture.operations:
                for output in operation.outputs:
                    output.fill_(float("nan") if output.is_floating_point() else 0)
            with torch.no_grad():
                for operation in capture.operations:
                    operation.replay()

        return replay

    @staticmethod
    def borrow(tensor: Tensor) -> Tensor:
        """Return the tensor: replays write to it."""
        return tensor

    def wait(self) -> None:
        """Do nothing: a CPU has one stream."""

    def done(self) -> None:
        """Do nothing: a CPU runs nothing in the background."""

    def settle(self) -> None:
        """Do nothing: a CPU runs nothing in the background."""
