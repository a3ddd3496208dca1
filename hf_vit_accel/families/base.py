"""What a family of towers states about itself: where its parts are, and what of it decides a call's metadata.

Everything else is shared. `T` packed patch rows.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from hf_vit_accel.metadata import Geometry

__all__ = ["Block", "Family", "Parts", "qwen_parts"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Block:
    """The modules of one layer. module: the block itself; attention: what holds heads, head dim and scale."""

    module: Any
    norm1: Any
    attention: Any
    qkv: Any
    proj: Any
    norm2: Any
    mlp: Any


@dataclass(frozen=True, kw_only=True, eq=False)
class Parts:
    """The modules of a tower by what they do, under whatever names.

    patch_embed: pixels to rows; projection: the convolution in it. table: learned positions, or None. rotary: positions
    to angles. full_layers: layers that attend per frame where others attend per window, None where all do. deepstack:
    layer -> the merger of its output.
    """

    patch_embed: Any
    projection: Any
    table: Any
    rotary: Any
    blocks: tuple[Block, ...]
    full_layers: frozenset[int] | None
    merger: Any
    deepstack: Mapping[int, Any]

    def full(self, layer: int) -> bool:
        """Whether a layer attends per frame."""
        return self.full_layers is None or layer in self.full_layers

    def mergers(self) -> list[nn.Module]:
        """The merger of the last layer, then those of deepstack layers."""
        return [self.merger, *self.deepstack.values()]


def qwen_parts(tower: Any) -> Parts:
    """The parts by the names that Qwen's towers, and most of those made after them, give them."""
    deepstack = zip(getattr(tower, "deepstack_visual_indexes", ()), getattr(tower, "deepstack_merger_list", ()))  # noqa: B905
    full_layers = getattr(tower, "fullatt_block_indexes", None)
    return Parts(
        patch_embed=tower.patch_embed,
        projection=tower.patch_embed.proj,
        table=getattr(tower, "pos_embed", None),
        rotary=tower.rotary_pos_emb,
        blocks=tuple(
            Block(
                module=block,
                norm1=block.norm1,
                attention=block.attn,
                qkv=block.attn.qkv,
                proj=block.attn.proj,
                norm2=block.norm2,
                mlp=block.mlp,
            )
            for block in tower.blocks
        ),
        full_layers=None if full_layers is None else frozenset(full_layers),
        merger=tower.merger,
        deepstack=dict(deepstack),
    )


@dataclass(frozen=True, kw_only=True)
class Family:
    """What differs between families of towers.

    towers: (module, class) of each tower class in transformers. output: name of the output class in that module.
    geometry: tower -> what decides its metadata; a ValueError says why that is not known. parts: tower -> `Parts`.
    windows: whether layers attend per window. deepstack: whether chosen layers' outputs are merged and returned too.
    tiny: the fields of the vision config that make a tower of four layers which runs in milliseconds.
    """

    name: str
    towers: tuple[tuple[str, str], ...]
    output: str
    geometry: Callable[[Any], Geometry]
    parts: Callable[[Any], Parts] = qwen_parts
    windows: bool = False
    deepstack: bool = False
    tiny: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def tower_class(self, module: nn.Module) -> type[nn.Module] | None:
        """The tower class that a module is an instance of, or None. Imports nothing: an instance has its class."""
        for module_name, class_name in self.towers:
            known = getattr(sys.modules.get(module_name), class_name, None)
            if known is not None and isinstance(module, known):
                return known  # type: ignore[no-any-return]
        return None

    def output_of(self, tower: nn.Module, tensors: list[torch.Tensor]) -> Any:
        """The stock tower's output class around the residual stream, the merged features and deepstack's."""
        home = next(module for module, _ in self.towers if any(k.__module__ == module for k in type(tower).__mro__))
        extra = {"deepstack_features": tensors[2:]} if self.deepstack else {}
        kind = getattr(sys.modules[home], self.output)
        return kind(last_hidden_state=tensors[0], pooler_output=tensors[1], **extra)

    def tensors_of(self, output: Any) -> list[torch.Tensor]:
        """The inverse of `output_of`."""
        return [output.last_hidden_state, output.pooler_output, *(output.get("deepstack_features") or ())]
