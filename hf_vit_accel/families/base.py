"""What a family of towers states about itself: where its parts are, and what of it decides a call's metadata.

Everything else is shared. `T` packed patch rows.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from hf_vit_accel.layout import Geometry


@dataclass(frozen=True, kw_only=True, eq=False)
class Block:
    """The modules of one layer. module: the block itself; attention: what holds heads, head dim and scale.

    qkv: one product for queries, keys and values, or three. head_norms: of each head of queries, and of keys.
    """

    module: Any
    norm1: Any
    attention: Any
    qkv: tuple[Any, ...]
    head_norms: tuple[Any, ...] = ()
    proj: Any
    norm2: Any
    mlp: Any

    @property
    def key_heads(self) -> int:
        """Heads of keys and of values: each serves as many heads of queries."""
        groups: int = getattr(self.attention, "num_key_value_groups", 1)
        return int(self.attention.num_heads // groups)

    @property
    def shaped(self) -> bool:
        """Whether something is done between the products and the rotation: norms of heads, or heads repeated."""
        return bool(self.head_norms) or self.key_heads != self.attention.num_heads


@dataclass(frozen=True, kw_only=True, eq=False)
class Parts:
    """Name the modules of a tower by what they do, in the order in which they run.

    All but patch_embed, projection and rotary may be None.

    Attributes:
        patch_embed: pixels to rows.
        projection: the convolution or Linear in the patch embedding, or patch_embed itself.
        embed_norm: norm of the embedded rows.
        table: learned positions that are added.
        rotary: positions to angles.
        full_layers: layers that attend per frame where others attend per window; None where all layers do.
        deepstack: layer -> the merger of its output, for the layers that run and in their order.
        final_norm: norm of the last layer's rows.
        downsample: a convolution over each merge block.
        merger: rows to features for the text.
        around: modules beside blocks and attention whose forwards are replaced by operations.
    """

    patch_embed: Any
    projection: Any
    embed_norm: Any = None
    table: Any = None
    rotary: Any
    blocks: tuple[Block, ...]
    full_layers: frozenset[int] | None = None
    deepstack: Mapping[int, Any] = field(default_factory=dict)
    final_norm: Any = None
    downsample: Any = None
    merger: Any = None
    around: tuple[Any, ...] = ()

    def full(self, layer: int) -> bool:
        """Whether a layer attends per frame."""
        return self.full_layers is None or layer in self.full_layers

    def mergers(self) -> list[nn.Module]:
        """The merger of the last layer, if there is one, then those of deepstack layers."""
        return [*([] if self.merger is None else [self.merger]), *self.deepstack.values()]

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
    block: Any, attention: str = "attn", proj: str = "proj", norms: tuple[str, str] = ("norm1", "norm2")
) -> Block:
    """A block by the names of its attention, of the product after that and of its norms."""
    attends = getattr(block, attention)
    names = next((names for names in _PRODUCTS if hasattr(attends, names[0])), _PRODUCTS[0])
    return Block(
        module=block,
        norm1=getattr(block, norms[0]),
        attention=attends,
        qkv=tuple(getattr(attends, name) for name in names),
        head_norms=tuple(getattr(attends, name) for name in ("q_norm", "k_norm") if hasattr(attends, name)),
        proj=getattr(attends, proj),
        norm2=getattr(block, norms[1]),
        mlp=block.mlp,
    )


_PRODUCTS = ("qkv",), ("q", "k", "v"), ("q_proj", "k_proj", "v_proj")


def qwen_parts(tower: Any, **more: Any) -> Parts:
    """The parts by the names that Qwen's towers, and most of those made after them, give them; more: other parts."""
    indexes = getattr(tower, "deepstack_visual_indexes", ())
    full_layers = getattr(tower, "fullatt_block_indexes", None)
    parts: dict[str, Any] = dict(
        patch_embed=tower.patch_embed,
        projection=tower.patch_embed.proj,
        table=getattr(tower, "pos_embed", None),
        rotary=tower.rotary_pos_emb,
        blocks=tuple(map(block_of, tower.blocks)),
        full_layers=None if full_layers is None else frozenset(full_layers),
        deepstack=_reached_mergers(len(tower.blocks), indexes, getattr(tower, "deepstack_merger_list", ())),
        merger=getattr(tower, "merger", None),
    )
    return Parts(**parts | more)


def _reached_mergers(depth: int, indexes: Sequence[int], mergers: Sequence[nn.Module]) -> dict[int, nn.Module]:
    """Return the merger of every deepstack layer, in the order in which the forward reaches them.

    An index without a block is never reached, as after an early exit or under a smaller `depth`. The first of two equal
    indexes decides which merger runs, as in transformers.

    Args:
        depth: how many blocks run.
        indexes: layers whose outputs are merged, one for each merger.
        mergers: the modules that merge them.

    Raises:
        ValueError: a layer is listed that has no merger.
    """
    places = {layer: indexes.index(layer) for layer in range(depth) if layer in indexes}
    if max(places.values(), default=-1) >= len(mergers):
        raise ValueError(f"deepstack_visual_indexes {list(indexes)} lists more layers than there are mergers")
    return {layer: mergers[place] for layer, place in places.items()}


TINY: Mapping[str, Any] = dict(
    depth=4, hidden_size=32, num_heads=2, intermediate_size=40, patch_size=2, spatial_merge_size=2
)
"""The sizes of most families' towers of four layers, by the names that most give them."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """What differs between families of towers.

    towers: (module, class) of each tower class in transformers. output: name of the output class in that module.
    geometry: tower -> what decides its metadata; a ValueError says why that is not known. parts: tower -> `Parts`.
    windows: whether layers attend per window. deepstack: whether chosen layers' outputs are merged and returned too.
    arguments: names of the forward's arguments, in order; the first is the pixels. pixel_dims: of the pixels: 2 for
    (T, P), 5 for (1, T, channels, side, side). videos: whether an entry of the grid may have several frames.
    attention_only: whether the tower's own forward always runs, on our attention; then parts are of no use.
    tiny: the fields of the vision config that make a tower of four layers which runs in milliseconds.
    """

    name: str
    towers: tuple[tuple[str, str], ...]
    output: str = "BaseModelOutputWithPooling"
    geometry: Callable[[Any], Geometry]
    parts: Callable[[Any], Parts] = qwen_parts
    windows: bool = False
    deepstack: bool = False
    arguments: tuple[str, ...] = ("hidden_states", "grid_thw")
    pixel_dims: int = 2
    videos: bool = True
    attention_only: bool = False
    tiny: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def pixels(self, tower: Any, pixels_TP: Tensor) -> Tensor:
        """Flattened patches (T, P) in the shape that the tower takes."""
        if self.pixel_dims == 2:
            return pixels_TP
        return pixels_TP.view(1, len(pixels_TP), *self.parts(tower).projection.weight.shape[1:])

    def tower_class(self, module: nn.Module) -> type[nn.Module] | None:
        """The tower class that a module is an instance of, or None. Imports nothing: an instance has its class."""
        return next((kind for kind in type(module).__mro__ if (kind.__module__, kind.__name__) in self.towers), None)

    def output_of(self, tower: nn.Module, tensors: list[Tensor]) -> Any:
        """The stock tower's output class around the last rows, the merged features, if any, and deepstack's."""
        home = next(module for module, _ in self.towers if any(k.__module__ == module for k in type(tower).__mro__))
        extra = {"deepstack_features": tensors[2:]} if self.deepstack else {}
        kind = getattr(sys.modules[home], self.output)
        return kind(last_hidden_state=tensors[0], pooler_output=tensors[1] if len(tensors) > 1 else None, **extra)

    def tensors_of(self, output: Any) -> list[Tensor]:
        """The inverse of `output_of`."""
        tensors = [output.last_hidden_state, output.pooler_output, *(output.get("deepstack_features") or ())]
        return [tensor for tensor in tensors if tensor is not None]
