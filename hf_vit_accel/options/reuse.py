"""Encode equal images and videos once: those of one call, and with `across_calls` those of earlier calls, too.

An image is one row of the grid: an image, or a video with all its frames. `read_grid` computes a checksum of every
image on the device, and reads it together with the grid, in one host sync. Images of equal checksums are compared bit
for bit. `Reuse`, called, encodes the distinct images alone, and puts the outputs of the call together.

Features of earlier calls are used while a checksum of all parameters and buffers stays the same. Version counters would
not do: they miss writes through `.data`, by which adapters are merged and some optimisers update weights.

`T` packed patch rows, `P` pixels of a patch, `W` 32-bit words of a row, `N` images, `C` chunks of weights.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor, nn

from hf_vit_accel import machine
from hf_vit_accel.config import ReuseConfig
from hf_vit_accel.engine.call import Batch, Encode, Reading, WeightMemory
from hf_vit_accel.layout import Grid, settle, to_device
from hf_vit_accel.machine import KERNELS, LRU, autocast_dtype, guarded, reasons_untraceable
from hf_vit_accel.ops import why_not_triton
from hf_vit_accel.ops.base import FunctionContext
from hf_vit_accel.options import checksum
from hf_vit_accel.options.checksum import CHUNK, words_of
from hf_vit_accel.watch import place_of

Fingerprint = tuple[int, ...]
"""Frames, height, width and checksum of an image."""

_IN_TORCH = checksum.sum_images_reference, checksum.sum_weights_reference
_BY_KERNELS = (
    guarded(KERNELS, checksum.sum_images),
    guarded(KERNELS, checksum.sum_weights),
)


@dataclass(frozen=True, kw_only=True)
class ReuseStatus:
    """Counts of reused images and videos.

    Attributes:
        items: Images and videos of the calls that were searched for equal ones.
        encoded: Images that were encoded.
        hits: Images whose features came from an earlier call. All others were equal to an image of their call.
        held: Images whose features are kept now.
        nbytes: Device memory of the kept features and pixels.
    """

    items: int
    encoded: int
    hits: int
    held: int
    nbytes: int

    def __str__(self) -> str:
        if not self.items:
            return "  reuse      no pictures compared so far"
        repeated = self.items - self.encoded - self.hits
        return (
            f"  reuse      {self.items} items: {self.encoded} encoded, {repeated} copies, {self.hits} from earlier "
            f"calls; {self.held} held ({self.nbytes / 2**20:.0f} MiB)"
        )


@dataclass(frozen=True)
class Kept:
    """Pixels and outputs of one image of an earlier call on the same stream."""

    bits_TW: Tensor
    outputs: list[Tensor]


@dataclass(frozen=True, kw_only=True)
class Repeats:
    """The repeated images of a call: where the features of every image come from.

    Attributes:
        sources: For every image: its own index if it must be encoded, the index of an equal image of this call, or
            features of an earlier call. Empty where nothing is reused.
        keys: The keys under which features are kept; empty where they are not.
    """

    unmet: tuple[str, ...] = ()
    sources: tuple[int | Kept, ...] = ()
    bits: tuple[Tensor, ...] = ()
    keys: tuple[Hashable, ...] = ()

    @property
    def encoded(self) -> list[int]:
        """Return the indices of the images that must be encoded."""
        return [index for index, source in enumerate(self.sources) if source == index]

    def distinct(self, grid: Grid) -> Grid:
        """Return the grid of the images that must be encoded."""
        return tuple(grid[index] for index in self.encoded) if self.sources else grid


class Reuse:
    """Encodes the distinct images of a batch alone; holds the features that one tower has kept, and counts."""

    def __init__(self, encode: Encode, config: ReuseConfig, *, has_score_mod: bool) -> None:
        self._encode = encode
        self._config = config
        self._has_score_mod = has_score_mod
        self._images = 0
        self._encoded = 0
        self._hits = 0
        self._kept: LRU[Kept] = LRU(entries=1 << 20, cost=int(config.gigabytes * 1e9))
        self._table: WeightTable | None = None

    def __call__(self, batch: Batch) -> list[Tensor]:
        """Return the outputs of a batch, of which equal images, and those that are known, are encoded once."""
        repeats = batch.plan.inputs.beside_grid
        if not isinstance(repeats, Repeats):
            outputs = self._encode(batch)
            if batch.plan.why_whole is not None:
                batch.note([f"equal pictures are encoded again: {batch.plan.why_whole}"])
            return outputs
        grid = repeats.distinct(batch.grid)
        fresh: list[Tensor] = []
        if grid:
            pixels_TP = batch.pixels_TP
            if len(repeats.encoded) < len(repeats.sources):
                pieces_of_call = pixels_TP.split([frames * height * width for frames, height, width in batch.grid])
                pieces = [pieces_of_call[index] for index in repeats.encoded]
                pixels_TP = torch.cat(pieces) if len(pieces) > 1 else pieces[0]
            fresh = self._encode(replace(batch, grid=grid, pixels_TP=pixels_TP))
        batch.note(repeats.unmet)
        return self._collect(repeats, batch.grid, fresh)

    def status(self) -> ReuseStatus:
        counts = dict(items=self._images, encoded=self._encoded, hits=self._hits)
        return ReuseStatus(**counts, held=len(self._kept), nbytes=self._kept.total_cost)

    def drop_features(self) -> None:
        self._kept.clear()
        self._table = None

    def read_grid(
        self,
        reading: Reading,
        parameters: Sequence[nn.Parameter],
        weights: WeightMemory,
        no_kernels: str | None,
        pixels_TP: Tensor,
        grid_N3: Tensor,
    ) -> tuple[list[list[int]], Repeats]:
        """Read the grid in one host sync, and find equal images. With candidates, their comparison is a second sync."""
        sizes = grid_N3.tolist() if grid_N3.device.type == "cpu" else None
        # Equal pixels that require gradients have gradients of their own.
        if (torch.is_grad_enabled() and pixels_TP.requires_grad) or reasons_untraceable():
            return sizes or grid_N3.tolist(), Repeats()
        reasons = list(reading.mixing)
        if reading.unpredictable and reading.in_training_mode() and not reasons:
            reasons.append(f"{reading.unpredictable}, and may be random in training")
        if reasons or pixels_TP.is_meta:
            return sizes or grid_N3.tolist(), Repeats(unmet=tuple(reasons))
        device = pixels_TP.device
        images = len(grid_N3)
        tensors, table, reasons = self._table_of_weights(reading, parameters, weights, device)
        unmet = tuple(reasons)
        has_no_repeats = images < 2 or (sizes is not None and len(set(map(tuple, sizes))) == images)
        if not pixels_TP.numel() or not images or (has_no_repeats and table is None):
            return sizes or grid_N3.tolist(), Repeats(unmet=unmet)

        runs_kernels = no_kernels is None and why_not_triton(device, torch.float16) is None  # pixels of any dtype
        sum_images, sum_weights = _BY_KERNELS if runs_kernels else _IN_TORCH
        words_TW = words_of(pixels_TP)
        sums = torch.zeros(1 + 4 * images, dtype=torch.int64, device=device)
        if table is not None:
            sum_weights(tensors, table.chunks_2C, sums)
        sum_images(words_TW, grid_N3.to(device, torch.int64, non_blocking=True).contiguous(), sums)
        weights_sum, *flat = sums.tolist()

        fingerprints = [tuple(flat[start : start + 4]) for start in range(0, len(flat), 4)]  # sizes and checksum
        sizes = [list(fingerprint[:3]) for fingerprint in fingerprints]
        present = [fingerprint for fingerprint in fingerprints if fingerprint[0]]  # images without frames pad a batch
        counts = [frames * height * width for frames, height, width, _ in present]
        if min(counts, default=0) < 1 or sum(counts) != len(words_TW):
            return sizes, Repeats(unmet=unmet)  # the caller refuses this grid
        bits = words_TW.split(counts)
        keys: list[Hashable] = []
        if table is not None:
            autocast = autocast_dtype(device, weights.dtype)
            # Every stream has its own features: those of another one may be incomplete here.
            stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
            identity = weights_sum, table.form, pixels_TP.dtype, device, stream, autocast, *machine.numerics()
            keys = [(identity, fingerprint) for fingerprint in present]
        sources = self._find_sources(present, keys, bits)
        return sizes, Repeats(unmet=unmet, sources=tuple(sources), bits=bits, keys=tuple(keys))

    def _table_of_weights(
        self, reading: Reading, parameters: Sequence[nn.Parameter], weights: WeightMemory, device: torch.device
    ) -> tuple[list[Tensor], WeightTable | None, list[str]]:
        """Return all parameters and buffers, whose checksum keys features, and their table; or why none are kept."""
        is_trained = reading.unpredictable is not None or reading.is_trained(parameters)
        if not self._config.across_calls or (torch.is_grad_enabled() and is_trained):
            return [], None, []  # where gradients may flow, features are never kept: no reason is reported
        reasons: list[str] = []
        if reading.unpredictable:
            reasons.append(f"{reading.unpredictable}, and might act otherwise at a later call")
        if self._has_score_mod:
            reasons.append("a score_mod may read what changes between calls")
        if reading.sharded_layers or reading.offloaded or weights.places is None:
            reasons.append("weights are sharded, offloaded or of a class of their own: changes go unseen")
        if not reasons and reading.holds_plain_tensors():
            reasons.append("a module holds a tensor that is neither parameter nor buffer")
        if reasons:
            return [], None, reasons
        tensors = [*parameters, *reading.buffers()]
        # A table reads words in their order: other strides at the same addresses are another order.
        memory = [all(map(Tensor.is_contiguous, tensors)), weights, *map(place_of, reading.buffers())]
        table = self._table
        if table is None or table.memory != memory:
            self._table = table = WeightTable(tensors, memory)
        if table.reasons or tensors[0].device != device:
            return [], None, table.reasons
        if device.type == "cuda":
            table.chunks_2C.record_stream(torch.cuda.current_stream(device))
        return tensors, table, []

    def _find_sources(
        self, fingerprints: list[Fingerprint], keys: list[Hashable], bits: tuple[Tensor, ...]
    ) -> list[int | Kept]:
        """Return the `sources` of a call. Every image is compared with one candidate; where they differ, it is new."""
        first_index: dict[Fingerprint, int] = {}
        candidates: dict[int, int | Kept] = {}
        pairs: list[tuple[Tensor, Tensor]] = []
        for index, fingerprint in enumerate(fingerprints):
            earlier = self._kept.find(keys[index]) if keys else None
            if earlier is not None:
                candidates[index] = earlier
                pairs.append((bits[index], earlier.bits_TW))
            elif fingerprint in first_index:
                candidates[index] = first_index[fingerprint]
                pairs.append((bits[index], bits[first_index[fingerprint]]))
            else:
                first_index[fingerprint] = index
        sources: list[int | Kept] = list(range(len(fingerprints)))
        are_equal = checksum.equal_pairs(pairs) if pairs else []
        for (index, candidate), is_equal in zip(candidates.items(), are_equal, strict=True):
            if is_equal:
                sources[index] = candidate
        return sources

    def _collect(self, repeats: Repeats, grid: Grid, fresh: list[Tensor]) -> list[Tensor]:
        sources = repeats.sources
        encoded = repeats.encoded
        self._images += len(sources)
        self._encoded += len(encoded)
        self._hits += sum(isinstance(source, Kept) for source in sources)
        is_complete = len(encoded) == len(sources)
        if is_complete and not repeats.keys:
            return fresh
        patches = [frames * height * width for frames, height, width in repeats.distinct(grid)]
        sizes_by_output = [[count * len(rows) // sum(patches) for count in patches] for rows in fresh]
        if not repeats.keys:
            position_of = {index: position for position, index in enumerate(encoded)}
            order = [position_of[source] for source in sources if not isinstance(source, Kept)]
            return [_Repeat.apply(rows, sizes, order) for rows, sizes in zip(fresh, sizes_by_output, strict=True)]

        fresh_by_index: dict[int, list[Tensor]] = {index: [] for index in encoded}
        for rows, sizes in zip(fresh, sizes_by_output, strict=True):
            for index, piece in zip(encoded, rows.split(sizes), strict=True):
                fresh_by_index[index].append(piece)
        self._keep(repeats, fresh_by_index)
        if is_complete:
            return fresh
        by_item = [source.outputs if isinstance(source, Kept) else fresh_by_index[source] for source in sources]
        return [torch.cat(pieces) for pieces in zip(*by_item, strict=True)]

    def _keep(self, repeats: Repeats, fresh_by_index: dict[int, list[Tensor]]) -> None:
        """Keep clones of pixels and outputs, since callers may write to both, unless they exceed the bound."""
        # Inference tensors could not be used where gradients are recorded later.
        with torch.inference_mode(False), torch.no_grad():
            for index, outputs in fresh_by_index.items():
                tensors = [repeats.bits[index], *outputs]
                nbytes = sum(tensor.nbytes for tensor in tensors)
                if nbytes <= self._kept.cost:
                    bits_TW, *clones = [tensor.clone() for tensor in tensors]
                    self._kept.keep(repeats.keys[index], Kept(bits_TW, clones), nbytes)


class WeightTable:
    """Addresses of all parameters and buffers, in chunks, for a checksum of everything that they hold.

    Attributes:
        memory: Where the tensors lie. A table is valid while they stay there.
        form: A digest of all shapes and dtypes, which a checksum does not cover.
        reasons: Why the tensors cannot be read as words.
        chunks_2C: The address of every chunk, and its count of words.
    """

    def __init__(self, tensors: list[Tensor], memory: list[object]) -> None:
        self.memory = memory
        shapes_and_dtypes = [(tuple(tensor.shape), tensor.dtype) for tensor in tensors]
        self.form = blake2b(repr(shapes_and_dtypes).encode(), digest_size=16).digest()
        self.reasons: list[str] = []
        starts = np.array([tensor.data_ptr() for tensor in tensors], dtype=np.int64)
        nbytes = np.array([tensor.nbytes for tensor in tensors], dtype=np.int64)
        if not all(tensor.is_contiguous() for tensor in tensors) or (starts % 4).any() or (nbytes % 4).any():
            self.reasons.append("a parameter is not contiguous, or does not lie in whole words of memory")
        device = tensors[0].device
        if any(tensor.device != device for tensor in tensors):
            self.reasons.append("parameters or buffers are on several devices")
        if self.reasons:
            return
        words = nbytes // 4
        chunks = -(-words // CHUNK)
        first_word_C = np.concatenate([np.arange(0, count, CHUNK) for count in words])
        counts_C = np.minimum(np.repeat(words, chunks) - first_word_C, CHUNK)
        addresses_C = np.repeat(starts, chunks) + 4 * first_word_C
        self.chunks_2C = to_device({"chunks": np.stack([addresses_C, counts_C])}, device)["chunks"]
        settle(device)


class _Repeat(torch.autograd.Function):
    """Repeat pieces of rows, of these sizes, in an order.

    The backward adds up the gradients of the repetitions, in fp32 and rounded once. Its operations are plain torch:
    they work under `torch.autograd.grad(is_grads_batched=True)`, too.
    """

    @staticmethod
    def forward(ctx: FunctionContext, rows: Tensor, sizes: list[int], order: list[int]) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.sizes = sizes
        ctx.order = order
        pieces = rows.split(sizes)
        return torch.cat([pieces[index] for index in order])

    @staticmethod
    def backward(ctx: FunctionContext, grad: Tensor | None) -> tuple[Tensor | None, None, None]:
        if grad is None:
            return None, None, None
        starts = list(accumulate(ctx.sizes, initial=0))
        source_rows = np.concatenate([np.arange(starts[piece], starts[piece + 1]) for piece in ctx.order])
        source_rows_T = to_device({"rows": source_rows}, grad.device)["rows"]
        dtype = torch.promote_types(grad.dtype, torch.float32)
        zeros = torch.zeros(starts[-1], *grad.shape[1:], dtype=dtype, device=grad.device)
        return zeros.index_add(0, source_rows_T, grad.to(dtype)).to(grad.dtype), None, None
