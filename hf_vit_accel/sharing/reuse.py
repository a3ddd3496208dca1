"""Equal images and videos encoded once: those of one call, and with `across_calls` those of earlier calls, too.

An item is an image or a video. Its fingerprint is made on the device and read together with `grid_thw`, in the one host
sync of a call. Features of earlier calls serve while the weights are what they were, by a fingerprint of all that they
hold: version counters do not see what is written through `.data`, as adapters are merged and some optimisers write.

`T` packed patch rows, `P` pixels of a patch, `W` 32-bit words of them, `N` items, `C` chunks of memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hf_vit_accel import machine
from hf_vit_accel.config import Settings
from hf_vit_accel.engine.route import Spec
from hf_vit_accel.layout import Grid, settle, to_device
from hf_vit_accel.machine import KERNELS, LRU, guarded
from hf_vit_accel.ops import why_not_triton
from hf_vit_accel.sharing.fingerprint import (
    CHUNK,
    Desk,
    hash_items,
    hash_items_reference,
    hash_memory,
    hash_memory_reference,
)
from hf_vit_accel.tower import snapshot as guard
from hf_vit_accel.tower.snapshot import Snapshot, Weights

_BY_TORCH: tuple[Any, Any] = hash_items_reference, hash_memory_reference
_BY_KERNELS: tuple[Any, Any] = guarded(KERNELS, hash_items), guarded(KERNELS, hash_memory)

Serve = Callable[[Grid, Tensor], list[Tensor]]
"""(grid, pixels (T, P)) of whole items to their outputs."""


class Memory:
    """Where a tower's parameters and buffers lie, cut into chunks of words, for a fingerprint of all that they hold.

    form: another object whenever shapes or dtypes are others. reasons: why they cannot be read as words.
    """

    def __init__(self, tensors: list[Tensor], weights: Weights, snapshot: Snapshot, former: Memory | None) -> None:
        self.place, self.shapes = _place(tensors, weights), _shapes(tensors)
        same = former is not None and former.place[2] == self.place[2] and former.shapes == self.shapes
        self.form: object = former.form if former is not None and same else object()
        self.reasons: list[str] = []
        if snapshot.loose():
            self.reasons.append("a module holds a tensor that is neither parameter nor buffer")
        starts = np.array(list(map(Tensor.data_ptr, tensors)), dtype=np.int64)
        nbytes = np.array([tensor.nbytes for tensor in tensors], dtype=np.int64)
        if not all(map(Tensor.is_contiguous, tensors)) or (starts % 4).any() or (nbytes % 4).any():
            self.reasons.append("a parameter is not contiguous, or does not lie in whole words of memory")
        device = tensors[0].device
        if any(tensor.device != device for tensor in tensors):
            self.reasons.append("parameters or buffers are on several devices")
        if self.reasons:
            return
        words = nbytes // 4
        chunks = -(-words // CHUNK)
        within_C = np.concatenate([np.arange(each) for each in chunks])
        arrays = {
            "addresses": np.repeat(starts, chunks) + within_C * (4 * CHUNK),
            "counts": np.minimum(np.repeat(words, chunks) - within_C * CHUNK, CHUNK),
        }
        if former is not None and device.type == "cuda":
            torch.cuda.synchronize(device)  # another stream may read the former tables
        self.tables = to_device(arrays, device)
        settle(device)

    @classmethod
    def of(cls, tensors: list[Tensor], weights: Weights, snapshot: Snapshot, former: Memory | None) -> Memory:
        """That of parameters and buffers; the former one while they lie where they did, and are as long.

        weights: another object when parameters have moved. Whether it `fits` is to be asked, too: for that there is
        time while a kernel reads what lies there.
        """
        lies = former is not None and former.place == _place(tensors, weights)
        if former is not None and lies and (not former.reasons or former.fits(tensors)):
            return former
        return cls(tensors, weights, snapshot, former)

    def fits(self, tensors: list[Tensor]) -> bool:
        """Whether what lies where it did has the shapes and dtypes that it had."""
        return self.shapes == _shapes(tensors)


def _place(tensors: list[Tensor], weights: Weights) -> tuple[Any, ...]:
    buffers = tensors[weights.count :]
    return weights, list(map(Tensor.data_ptr, buffers)), list(map(Tensor.numel, tensors))


def _shapes(tensors: list[Tensor]) -> list[Any]:
    """What tells that contiguous tensors of as many numbers have the shapes and dtypes that they had."""
    reads: Any = Tensor.is_contiguous, Tensor.stride, attrgetter("dtype")
    return [list(map(read, tensors)) for read in reads]


# --- what is handed out -----------------------------------------------------------------------------------------------


class _HandOut(torch.autograd.Function):
    """Pieces of rows (of sizes `sizes`), each to where the call has its item; gradients of copies are added up in fp32.

    order: for each item of the call, which piece is its own.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sizes: list[int], order: list[int]) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.sizes, ctx.order = sizes, order
        pieces = rows.split(sizes)
        return torch.cat([pieces[index] for index in order])

    @staticmethod
    @machine.once_differentiable
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, None, None]:
        if grad is None:
            return None, None, None
        places: list[list[int]] = [[] for _ in ctx.sizes]
        for place, index in enumerate(ctx.order):
            places[index].append(place)
        if (steps := _steps(places)) is not None and len(set(ctx.sizes)) == 1:  # read once, written once
            pieces = grad.contiguous().view(len(ctx.order), -1)
            shape, strides = (*np.shape(places), pieces.shape[1]), (*(pieces.shape[1] * step for step in steps), 1)
            return pieces.as_strided(shape, strides).sum(1).view(-1, *grad.shape[1:]), None, None
        pieces_of_call = grad.split([ctx.sizes[index] for index in ctx.order])
        sums: list[Any] = [None] * len(places)
        for count in set(map(len, places)):  # items of as many copies at once: each as one sum, rounded once
            chosen = [index for index, each in enumerate(places) if len(each) == count]
            added = torch.cat([pieces_of_call[places[index][copy]] for copy in range(count) for index in chosen])
            added = added.unflatten(0, (count, -1)).sum(0) if count > 1 else added
            for index, piece in zip(chosen, added.split([ctx.sizes[index] for index in chosen]), strict=True):
                sums[index] = piece
        return torch.cat(sums), None, None


def _steps(places: list[list[int]]) -> tuple[int, int] | None:
    """How far items, and copies of one, lie apart where all have as many copies and all lie evenly, the first at 0."""
    between = (places[1] if len(places) > 1 else [0])[0], (places[0] if len(places[0]) > 1 else [0, 0])[1]
    counts = range(len(places)), range(len(places[0]))
    even = [[between[0] * item + between[1] * copy for copy in counts[1]] for item in counts[0]]
    return between if places == even else None


# --- a tower's --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Marks:
    """What is known of a call's items before it is served. prints: of each, None where they were not asked for.

    weights: what tells the weights, None where nothing is kept for later calls. unmet: why less than what was asked
    for is reused.
    """

    prints: tuple[tuple[int, int], ...] | None = None
    weights: Any = None
    unmet: list[str] = field(default_factory=list)

    def distinct(self, grid: Grid) -> Grid:
        """A call's grid without copies."""
        prints = self.prints
        return grid if prints is None else tuple(each for _, each in dict.fromkeys(zip(prints, grid, strict=True)))


@dataclass(frozen=True, kw_only=True)
class ReuseStatus:
    """What was reused. items: images and videos of calls that were looked through; encoded: those that were encoded;
    hits: those whose features came from earlier calls; the others were copies of another in their call.

    held, nbytes: items whose features are kept now, and device memory that they take.
    """

    items: int
    encoded: int
    hits: int
    held: int
    nbytes: int

    def __str__(self) -> str:
        copies = self.items - self.encoded - self.hits
        return (
            f"  reuse      {self.items} items: {self.encoded} encoded, {copies} copies, {self.hits} from earlier "
            f"calls; {self.held} held ({self.nbytes / 2**20:.0f} MiB)"
        )


@dataclass(frozen=True, kw_only=True)
class _Kept:
    """One item's outputs. stream, ready: where they were made, and when; None but on CUDA."""

    outputs: list[Tensor]
    stream: Any
    ready: Any

    def taken(self, stream: Any) -> list[Tensor]:
        """The outputs, for work on a stream."""
        if self.stream != stream:
            stream.wait_event(self.ready)
            for output in self.outputs:
                output.record_stream(stream)  # it may go while this stream still reads it
        return self.outputs


class Reuse:
    """What one tower has encoded, and what of it is kept."""

    def __init__(self, settings: Settings) -> None:
        assert settings.reuse is not None
        self.settings, self.config = settings, settings.reuse
        self._items = self._encoded = self._hits = 0
        self._desks: LRU[Desk] = LRU(entries=16, cost=0)  # by device
        self._kept: LRU[_Kept] = LRU(entries=1 << 20, cost=int(self.config.gigabytes * 1e9))
        self._memory: Memory | None = None

    def status(self) -> ReuseStatus:
        """What happened so far."""
        counts = dict(items=self._items, encoded=self._encoded, hits=self._hits)
        return ReuseStatus(**counts, held=len(self._kept), nbytes=self._kept.total_cost)

    def close(self) -> None:
        """Drop all that is kept."""
        self._kept.clear()
        self._desks.clear()
        self._memory = None

    def look(
        self,
        snapshot: Snapshot,
        parameters: list[nn.Parameter],
        weights: Weights,
        no_kernels: str | None,
        meanwhile: Callable[[], object],
        pixels_TP: Tensor,
        grid_N3: Tensor,
    ) -> tuple[list[list[int]], Marks]:
        """The grid on the host, and in the same sync what tells its items and the weights.

        no_kernels: why kernels are not tried. meanwhile: what the host does while they run. The grid may be any:
        nothing is known of it yet.
        """
        trains = torch.is_grad_enabled()
        if (trains and pixels_TP.requires_grad) or guard.reasons_untraceable() or pixels_TP.is_meta:
            return grid_N3.tolist(), Marks()  # a copy's pixels have a gradient of their own
        if snapshot.mixing:
            return grid_N3.tolist(), Marks(unmet=snapshot.mixing)
        if snapshot.foreign and snapshot.training():
            return grid_N3.tolist(), Marks(unmet=[f"{snapshot.foreign}, and may be random in training"])
        unmet: list[str] = []
        tensors: list[Tensor] = []
        device = pixels_TP.device
        across = self.config.across_calls and not (trains and (snapshot.foreign or snapshot.trained(parameters)))
        if across:
            unmet += self._reasons_against_keeping(snapshot, weights)
            if not unmet:
                tensors = [*parameters, *snapshot.buffers()]
                self._memory = memory = Memory.of(tensors, weights, snapshot, self._memory)
                unmet += memory.reasons
            across = not unmet and tensors[0].device == device
        rows = grid_N3.tolist() if grid_N3.device.type == "cpu" else None
        items = grid_N3.shape[0]
        distinct = items < 2 or (rows is not None and len(set(map(tuple, rows))) == items)
        if not pixels_TP.numel() or not items or (distinct and not across):
            return rows or grid_N3.tolist(), Marks(unmet=unmet)
        kernels = no_kernels is None and why_not_triton(device, torch.float16) is None  # pixels of any dtype
        of_items, of_memory = _BY_KERNELS if kernels else _BY_TORCH
        desk = self._desks.get(device, lambda: (Desk(device), 0))
        found = desk.zeros(2 + 5 * items)
        if across:  # first, since it takes longest: what follows is done meanwhile
            of_memory(tensors, memory.tables, desk.keys, found)
        grid_N3 = grid_N3.to(device, torch.int64, non_blocking=True).contiguous()
        of_items(pixels_TP, grid_N3, desk.keys, found)
        meanwhile()
        if across and not memory.fits(tensors):
            self._memory = None
            settle(device)  # the kernels still write
            return self.look(snapshot, parameters, weights, no_kernels, meanwhile, pixels_TP, grid_N3)
        decided = (memory.form, pixels_TP.dtype, *machine.numerics()) if across else ()
        low, high, *flat = found.tolist()
        items_N5 = [flat[start : start + 5] for start in range(0, len(flat), 5)]
        marks = Marks(
            prints=tuple((low, high) for frames, *_, low, high in items_N5 if frames),  # others pad a batch
            weights=(low, high, *decided) if across else None,
            unmet=unmet,
        )
        return [item[:3] for item in items_N5] if rows is None else rows, marks

    def _reasons_against_keeping(self, snapshot: Snapshot, weights: Weights) -> list[str]:
        """Why features cannot serve later calls: something else than what the weights hold may decide them."""
        reasons = [f"{snapshot.foreign}, and might act otherwise at a later call"] if snapshot.foreign else []
        if self.settings.score_mod is not None:
            reasons.append("a score_mod may read what changes between calls")
        if snapshot.sharded or snapshot.offloaded or weights.pointers is None:
            reasons.append("weights are sharded, offloaded or of a class of their own, and cannot be told from others")
        return reasons

    def serve(self, serve: Serve, spec: Spec, marks: Marks, grid: Grid, pixels_TP: Tensor) -> list[Tensor]:
        """The outputs of a call, of which only what is new and no copy is encoded, by `serve`, all at once."""
        if marks.prints is None:
            return serve(grid, pixels_TP)
        keys = list(zip(marks.prints, grid, strict=True))
        first: dict[Any, int] = {}
        for index, key in enumerate(keys):
            first.setdefault(key, index)
        found: dict[Any, _Kept] = {}  # of earlier calls
        owner: Any = None
        if marks.weights is not None and not spec.request.grad:
            owner = weakref.ref(spec), marks.weights
            kept = {key: self._kept.find((owner, key)) for key in first}
            found = {key: each for key, each in kept.items() if each is not None}
        missing = [key for key in first if key not in found]
        whole = len(missing) == len(keys)
        chosen = [first[key] for key in missing]
        fresh = serve(grid, pixels_TP) if whole else self._encode(serve, keys, chosen, pixels_TP)
        self._items, self._encoded = self._items + len(keys), self._encoded + len(missing)
        self._hits += sum(key in found for key in keys) if found else 0
        if whole and owner is None:
            return fresh
        patches = [t * h * w for _, (t, h, w) in missing]
        sizes = [[each * len(rows) // sum(patches) for each in patches] for rows in fresh]
        if owner is None:
            place = {key: index for index, key in enumerate(missing)}
            order = [place[key] for key in keys]
            return [_HandOut.apply(*each, order) for each in zip(fresh, sizes, strict=True)]
        stream = torch.cuda.current_stream(pixels_TP.device) if pixels_TP.is_cuda else None
        split = (rows.split(each) for rows, each in zip(fresh, sizes, strict=True))
        pieces = dict(zip(missing, map(list, zip(*split, strict=True)), strict=True))
        pieces |= {key: each.taken(stream) for key, each in found.items()}
        outputs = fresh if whole else [torch.cat(each) for each in zip(*(pieces[key] for key in keys), strict=True)]
        if missing:
            self._keep({(owner, key): pieces[key] for key in missing}, stream)
        return outputs

    def _encode(self, serve: Serve, keys: list[Any], chosen: list[int], pixels_TP: Tensor) -> list[Tensor]:
        """The outputs of items that are part of a call, by their index; none if there are none."""
        if not chosen:
            return []
        starts = [0, *accumulate(t * h * w for _, (t, h, w) in keys)]
        pieces = [pixels_TP[starts[index] : starts[index + 1]] for index in chosen]
        return serve(tuple(keys[index][1] for index in chosen), torch.cat(pieces) if len(pieces) > 1 else pieces[0])

    def _keep(self, fresh: dict[Any, list[Tensor]], stream: Any) -> None:
        """Copies, since whoever gets an output may write to it; of no kind that gradients would refuse later."""
        kept = {}
        with torch.inference_mode(False), torch.no_grad():
            for key, outputs in fresh.items():
                if sum(output.nbytes for output in outputs) <= self._kept.cost:
                    kept[key] = [output.clone() for output in outputs]
        ready = None if stream is None else stream.record_event()
        for key, outputs in kept.items():
            cost = sum(output.nbytes for output in outputs)
            self._kept.keep(key, _Kept(outputs=outputs, stream=stream, ready=ready), cost)
