"""The contract of a family of towers: where the parts of a tower are, and what decides the metadata of a call.

Everything else is shared by all families. `T` packed patch rows, `P` pixels of a patch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from torch import Tensor, nn

from hf_vit_accel.layout import Geometry, Grid

Tower: TypeAlias = Any
"""A tower of transformers. Its attributes have no types."""
Model: TypeAlias = Any
"""A model of transformers, or a wrapper around one. Its attributes have no types."""
Config: TypeAlias = Any
"""A config of transformers. Its fields have no types."""
Part: TypeAlias = Any
"""A module inside a tower, or None where a tower has no such part. Its attributes have no types."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Block:
    """The modules of one layer, and the block itself.

    Args:
        attention: The module that holds heads, head dim and scale.
        qkv: One Linear for queries, keys and values, or three.
        head_norms: The norms of every head of queries, and of keys; empty without.
    """

    module: Part
    norm1: Part
    attention: Part
    qkv: tuple[Part, ...]
    head_norms: tuple[Part, ...] = ()
    proj: Part
    norm2: Part
    mlp: Part

    @property
    def key_heads(self) -> int:
        """The number of heads of keys, and of values. With fewer than of queries, several queries share one."""
        groups: int = getattr(self.attention, "num_key_value_groups", 1)
        return int(self.attention.num_heads // groups)

    @property
    def shapes_heads(self) -> bool:
        """Whether heads are normed or repeated between the Linears and the rotation."""
        return bool(self.head_norms) or self.key_heads != self.attention.num_heads


@dataclass(frozen=True, kw_only=True, eq=False)
class Parts:
    """The modules of a tower by their role, in the order of the forward, whatever their names.

    Args:
        patch_embed: Pixels to rows.
        projection: The convolution or Linear in `patch_embed`, or `patch_embed` itself.
        embed_norm: The norm of the embedded rows.
        table: Learned positions, which are added to the rows.
        rotary: Positions to angles.
        blocks: The layers.
        full_layers: The layers that attend per frame, if the others attend per window. None if all attend per frame.
        deepstack: The merger of a layer's output, by layer, for the layers that run and in their order.
        final_norm: The norm of the last layer's rows.
        downsample: A convolution over every merge block.
        merger: Rows to features for the text model.
        around: Modules beside blocks and attention whose forwards our operations replace.
    """

    patch_embed: Part
    projection: Part
    embed_norm: Part = None
    table: Part = None
    rotary: Part
    blocks: tuple[Block, ...]
    full_layers: frozenset[int] | None = None
    deepstack: Mapping[int, Part] = field(default_factory=dict)
    final_norm: Part = None
    downsample: Part = None
    merger: Part = None
    around: tuple[Part, ...] = ()

    def full(self, layer: int) -> bool:
        """Return whether a layer attends per frame."""
        return self.full_layers is None or layer in self.full_layers

    def mergers(self) -> list[nn.Module]:
        """Return the merger of the last layer, if there is one, then the mergers of deepstack layers."""
        last = [] if self.merger is None else [self.merger]
        return [*last, *self.deepstack.values()]

    def modules(self) -> Iterator[nn.Module]:
        """Yield every module that does a part of the work, with all modules inside; none twice."""
        parts = [self.patch_embed, self.embed_norm, self.table, self.rotary, self.final_norm, self.downsample]
        parts += [*(block.module for block in self.blocks), *self.mergers(), *self.around]
        seen: set[nn.Module] = set()
        for part in parts:
            if part is not None:
                for _, module in part.named_modules(seen):
                    yield module


def block_of(
    block: Part, attention: str = "attn", proj: str = "proj", norms: tuple[str, str] = ("norm1", "norm2")
) -> Block:
    """Describe a block of transformers, by the names of its modules that families call otherwise."""
    module = getattr(block, attention)
    # A tower of another version may have none of these names: the missing attribute is reported.
    qkv_names = next((names for names in _QKV_NAMES if hasattr(module, names[0])), _QKV_NAMES[0])
    return Block(
        module=block,
        norm1=getattr(block, norms[0]),
        attention=module,
        qkv=tuple(getattr(module, name) for name in qkv_names),
        head_norms=tuple(getattr(module, name) for name in ("q_norm", "k_norm") if hasattr(module, name)),
        proj=getattr(module, proj),
        norm2=getattr(block, norms[1]),
        mlp=block.mlp,
    )


_QKV_NAMES = (("qkv",), ("q", "k", "v"), ("q_proj", "k_proj", "v_proj"))
"""The names of the Linears for queries, keys and values."""


def qwen_parts(tower: Tower, **other_parts: Part | tuple[Part, ...]) -> Parts:
    """Describe a tower by the names in Qwen's towers, which most other families use, too.

    `other_parts` are added to Qwen's, or replace one. The tower still needs `patch_embed`, `rotary_pos_emb` and
    `blocks`.
    """
    indexes = getattr(tower, "deepstack_visual_indexes", ())
    full_layers = getattr(tower, "fullatt_block_indexes", None)
    if full_layers is not None:
        full_layers = frozenset(index for index in range(len(tower.blocks)) if index in full_layers)
    parts: dict[str, Any] = dict(
        patch_embed=tower.patch_embed,
        projection=other_parts.get("projection") or tower.patch_embed.proj,
        table=getattr(tower, "pos_embed", None),
        rotary=tower.rotary_pos_emb,
        blocks=tuple(block_of(block) for block in tower.blocks),
        full_layers=full_layers,
        deepstack=_reached_mergers(len(tower.blocks), indexes, getattr(tower, "deepstack_merger_list", ())),
        merger=getattr(tower, "merger", None),
    )
    return Parts(**parts | other_parts)


def _reached_mergers(depth: int, indexes: Sequence[int], mergers: Sequence[nn.Module]) -> dict[int, nn.Module]:
    """Return the merger of every deepstack layer, in the order in which the forward reaches them.

    An index without a block is never reached, as after an early exit or under a smaller `depth`. The first of two equal
    indexes decides which merger runs, as in transformers.
    """
    merger_indices = {layer: indexes.index(layer) for layer in range(depth) if layer in indexes}
    if max(merger_indices.values(), default=-1) >= len(mergers):
        raise ValueError(f"deepstack_visual_indexes {list(indexes)} lists more layers than there are mergers")
    return {layer: mergers[index] for layer, index in merger_indices.items()}


TINY: Mapping[str, int] = dict(
    depth=4, hidden_size=32, num_heads=2, intermediate_size=40, patch_size=2, spatial_merge_size=2
)
"""Config fields of a tiny tower of four layers, under the names that most families use."""


def frames_and_sides(tower: Tower, sizes: Sequence[Sequence[int]]) -> Grid:
    """Return a grid as most towers take it: each row has frames, height and width, in patches."""
    return tuple((t, h, w) for t, h, w in sizes)


@dataclass(frozen=True, kw_only=True)
class Family:
    """The differences between families of towers, as data.

    Args:
        towers: (module, class) of every tower class in transformers.
        output: The name of the output class, in the same module.
        geometry: Returns a tower's geometry. A ValueError says why it cannot.
        parts: Returns a tower's parts.
        windows: Whether layers attend per window.
        deepstack: Whether the outputs of chosen layers are merged and returned, too.
        arguments: The names of the forward's arguments, in order. The first one is the pixels.
        pixel_dims: The dimensions of the pixels: 2 for (T, P), 5 for (1, T, channels, side, side).
        videos: Whether a grid entry may have several frames.
        attention_only: Whether the tower's own forward always runs, with our attention. Then no parts are needed.
        grid: Returns the grid of a tower that is attention only, from the rows of its second argument.
        options_of_proof: Arguments of a copy's forward, with which it computes in another dtype than bf16.
        tiny: The fields of the vision config that make a tower of four layers, which runs in milliseconds.
    """

    name: str
    towers: tuple[tuple[str, str], ...]
    output: str = "BaseModelOutputWithPooling"
    geometry: Callable[[Tower], Geometry]
    parts: Callable[[Tower], Parts] = qwen_parts
    windows: bool = False
    deepstack: bool = False
    arguments: tuple[str, ...] = ("hidden_states", "grid_thw")
    pixel_dims: int = 2
    videos: bool = True
    attention_only: bool = False
    grid: Callable[[Tower, Sequence[Sequence[int]]], Grid] = frames_and_sides
    options_of_proof: Mapping[str, object] = field(default_factory=dict, hash=False)
    tiny: Mapping[str, object] = field(default_factory=dict, hash=False)

    def pixels(self, tower: Tower, pixels_TP: Tensor) -> Tensor:
        """Return flattened patches (T, P) in the shape that the tower takes."""
        if self.pixel_dims == 2:
            return pixels_TP
        return pixels_TP.view(1, len(pixels_TP), *self.parts(tower).projection.weight.shape[1:])

    def tower_class(self, module: nn.Module) -> type[nn.Module] | None:
        """Return the tower class that a module is an instance of, or None. Imports nothing of transformers."""
        kinds = (kind for kind in type(module).__mro__ if (kind.__module__, kind.__name__) in self.towers)
        return next((kind for kind in kinds if "forward" in vars(kind)), None)  # a former name is a bare subclass

    def output_class(self, tower: nn.Module) -> type | None:
        """Return the stock output class of a tower, from the module of its class; None if that has none."""
        kind = self.tower_class(tower)
        assert kind is not None
        return getattr(sys.modules[kind.__module__], self.output, None)


def heads_of(parts: Parts, values: list[Any]) -> list[Any]:
    """Return (heads, head dim, scale); fill in the defaults where a tower names the heads only."""
    heads, head_dim, scale = values
    head_dim = head_dim or parts.projection.weight.shape[0] // heads
    return [heads, head_dim, scale or head_dim**-0.5]
