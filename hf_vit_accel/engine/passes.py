"""Calls of many rows, encoded in passes: the memory that they take is a pass's, however long a video is.

Attention never crosses a frame (in a geometry of clips: an entry of the grid), and nothing else crosses a merged token.
So a call is cut between frames, and each pass computes what one forward does, on fewer rows. A frame is never cut.

`T` packed patch rows, `P` pixels of a patch.
"""

from __future__ import annotations

import copy
import sys
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache, partial
from itertools import accumulate, groupby
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from hf_vit_accel.engine.route import Spec
from hf_vit_accel.layout import Grid, rows_of

FREE = 36864
"""Rows of a pass under `max_rows="auto"` on CUDA, so that a forward takes at most 0.8 GB beyond weights and outputs.

A row takes 15 to 19 kB (Qwen3-VL-8B, Qwen2.5-VL-7B, Qwen2-VL-7B, bf16), by what is held at once while an MLP runs: the
stream, its norm, the hidden rows and the result, and the tables of the rotation. H200, 147,456 rows of Qwen3-VL-8B: one
pass 1.83 GB and 357 ms, 4 passes of 36,864 rows 0.62 GB and 359 ms, 10 of 16,128 0.27 GB and 363 ms.
"""

NEVER = sys.maxsize
_GONE = object()  # what a module holds by a name that it has no more


@lru_cache(maxsize=128)
def cut(grid: Grid, most: int, *, clips: bool) -> tuple[Grid, ...]:
    """A call as few passes of at most `most` rows each (more only where a frame has), in order and nearly equal.

    clips: all frames of an entry stay together. Passes of one long video differ by a frame at most: they share routes.
    """
    units = [(entry, t if clips else 1, h, w) for entry, (t, h, w) in enumerate(grid) for _ in range(1 if clips else t)]
    rows = [0, *accumulate(t * h * w for _, t, h, w in units)]

    def ends(begin: int, bound: int) -> list[int]:
        """Where passes end that take what still fits into them, one unit at least."""
        found = []
        while begin < len(units):
            begin = max(bisect_right(rows, rows[begin] + bound) - 1, begin + 1)
            found.append(begin)
        return found

    passes, begin = [], 0
    for left in range(len(ends(0, most)), 0, -1):
        # The lowest bound that needs no more passes for what is left makes the longest of them as short as can be.
        bounds = range(min(-(-(rows[-1] - rows[begin]) // left), most), most)
        bound = bisect_left(bounds, True, key=lambda bound: len(ends(begin, bound)) <= left) + bounds.start
        end = ends(begin, bound)[0]
        alike = (list(each) for _, each in groupby(units[begin:end]))
        passes.append(tuple((len(each) * each[0][1], *each[0][2:]) for each in alike))
        begin = end
    return tuple(passes)


def reasons_whole(facts: Any, checkpoints: Sequence[Any]) -> list[str]:
    """Why no call of a tower may be cut. checkpoints: of its layers, in a call with gradients."""
    # All ranks, each with its pictures, would have to make as many passes.
    reasons = ["FSDP2 brings weights at each pass"] if facts.sharded_layers else []
    if any(each is not None and each.reentrant for each in checkpoints):
        reasons.append("reentrant checkpoints bring gradients to weights at each pass")
    return [f"not cut by max_rows: {why}" for why in (*reasons, *facts.mixing)]


class Passes:
    """How the calls of one tower are cut, and what was learnt of its memory.

    max_rows: what the user asked for. fewer: rows of a pass since memory ran out, of calls with gradients and without.
    calls, count: calls that were cut, and their passes.
    """

    def __init__(self, max_rows: int | Literal["auto"] | None) -> None:
        self.max_rows = max_rows
        self.fewer: dict[bool, int] = {}
        self.calls = self.count = 0

    def most(self, device: torch.device, *, grad: bool, whole: bool) -> int | None:
        """Rows from which on a call is cut, NEVER where memory must run out first; None: not even then.

        With gradients a pass runs forward twice, so "auto" waits for that. whole: no call may be cut, see
        `reasons_whole`.
        """
        if self.max_rows is None or whole or (self.max_rows == "auto" and device.type != "cuda"):
            return None
        asked = self.max_rows if self.max_rows != "auto" else NEVER if grad else FREE
        return self.fewer.get(grad, asked)

    def halve(self, grid: Grid, spec: Spec) -> bool:
        """Whether a pass whose memory ran out is to be tried in shorter ones; later calls keep to those. Only once."""
        grad, clips = spec.request.grad, spec.geometry.clips
        if spec.max_rows is None or grad in self.fewer:
            return False
        fewer = (rows_of(grid) if spec.max_rows == NEVER else spec.max_rows) // 2
        if len(cut(grid, fewer, clips=clips)) == 1:
            return False  # a frame that alone is too large
        self.fewer[grad] = fewer
        return True

    def __str__(self) -> str:
        told = [f"{self.calls} calls in {self.count} passes"] if self.calls else []
        told += [
            f"at most {rows} rows{' with gradients' if grad else ''} since memory ran out"
            for grad, rows in self.fewer.items()
        ]
        return ", ".join(told)


def checkpointed(facts: Any, encode: Callable[..., list[Tensor]], *args: Any) -> list[Tensor]:
    """Return the outputs of a pass that keeps nothing for its gradients: it runs again in the backward pass."""
    return checkpoint(encode, *args, use_reentrant=False, context_fn=partial(_contexts, facts))


def _contexts(facts: Any) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """In which a pass runs first, and again."""
    parts = facts.parts
    roots = [*(block.module for block in parts.blocks), *parts.mergers()] if facts.third_party else []
    return nullcontext(), _Again(facts.parameter_homes, roots)


class _Again(AbstractContextManager[None]):
    """In which a pass runs again: with the weights of the first time, whatever modules hold by then (`functional_call`,
    other weights assigned, one that is frozen meanwhile). Raises RuntimeError where one was written to in place, or
    adapters were switched.

    places: what modules hold their parameters in. roots: modules in which there may be adapters.
    """

    def __init__(self, places: Sequence[dict[str, Any]], roots: Sequence[Any]) -> None:
        held: list[Any] = [(place, name, x) for place in places for name, x in place.items() if x is not None]
        self._then = [(place, name, x, _alias(x), _version(x)) for place, name, x in held]
        self._others: list[tuple[dict[str, Any], str, Any]] = []  # what modules held when it was entered
        self._roots, self._adapters = roots, _adapters(roots)

    def __enter__(self) -> None:
        written = any(_version(alias) != version for *_, alias, version in self._then)
        if written or _adapters(self._roots) != self._adapters:
            what = "a weight of the vision tower was modified in place" if written else "an adapter was switched"
            raise RuntimeError(
                f"{what} since its forward, whose passes (max_rows) run again for its gradients; call backward first"
            )
        for place, name, x, alias, _ in self._then:
            other = place.get(name, _GONE)
            if other is not x or (x.data_ptr(), x.requires_grad) != (alias.data_ptr(), alias.requires_grad):
                self._others.append((place, name, other))
                place[name] = alias

    def __exit__(self, *_: object) -> None:
        for place, name, other in self._others:
            if other is _GONE:
                del place[name]
            else:
                place[name] = other
        self._others.clear()


def _adapters(roots: Sequence[Any]) -> list[Any]:
    """Which adapters of PEFT act, Linear by Linear."""
    wrapped = [vars(each) for root in roots for each in root.modules() if "base_layer" in each._modules]
    names = "_active_adapter", "_disable_adapters", "merged_adapters"
    return [copy.copy(own.get(name)) for own in wrapped for name in names]


def _alias(x: Tensor) -> Tensor:
    """The same memory and version, whatever becomes of the parameter's `data`."""
    return x.detach().requires_grad_() if x.requires_grad else x.detach()


def _version(x: Tensor) -> int:
    return 0 if x.is_inference() else x._version


def _put(found: Sequence[Tensor], into: Sequence[Tensor]) -> None:
    """A pass's outputs to where they are to lie, unless they were made there."""
    for each, place in zip(found, into, strict=True):
        if each is not place:
            place.copy_(each)
