"""What the fast path relies on in transformers' own code, and what of it changed in the version that is installed.

The fast path computes what a tower, its blocks and its attention modules compute without calling them. Whether they
still compute that is told by the words in their code (attributes, functions, globals): an operation that came or went
is a word that came or went, while comments, decorators and the order of lines may change.
"""

from __future__ import annotations

import inspect
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import CodeType
from typing import Any

import torch
import transformers
from torch import nn

__all__ = ["KNOWN", "Known", "changes", "is_upstream", "rotation_of", "tower_changes", "warn_of"]

_UPSTREAM = tuple(str(Path(str(package.__file__)).parent) + os.sep for package in (torch, transformers))


@dataclass(frozen=True, kw_only=True)
class Known:
    """One forward as it is known. parameters: beside self, exactly these. words: all there may be. needed: must be."""

    parameters: frozenset[str] | None
    words: frozenset[str]
    needed: frozenset[str] = frozenset()


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


KNOWN: dict[str, Known] = {
    "tower": Known(
        parameters=_words("hidden_states grid_thw kwargs"),
        words=_words(
            """BaseModelOutputWithPooling BaseModelOutputWithDeepstackFeatures append argsort blocks cat config cos
            deepstack_merger_list deepstack_visual_indexes dtype enumerate fullatt_block_indexes get_max_seqlen
            get_vision_attention_seqlens get_vision_interpolation_indices_and_weights get_vision_position_ids
            get_vision_window_index index interpolation_align_corners interpolation_mode merger num_grid_per_side
            patch_embed patch_size permute_input_for_window_attn pos_embed reshape rotary_pos_emb sin size
            spatial_merge_size spatial_merge_unit sum to torch tuple window_size"""
        ),
        needed=_words("blocks merger patch_embed rotary_pos_emb get_vision_attention_seqlens get_vision_position_ids"),
    ),
    "block": Known(
        parameters=_words("hidden_states cu_seqlens position_embeddings kwargs"),
        words=_words("attn mlp norm1 norm2"),
        needed=_words("attn mlp norm1 norm2"),
    ),
    "attention": Known(
        parameters=_words("hidden_states cu_seqlens position_embeddings max_seqlen kwargs"),
        words=_words(
            """ALL_ATTENTION_FUNCTIONS _attn_implementation apply_rotary_pos_emb_vision attention_dropout cat config
            contiguous eager_attention_forward get_interface get_max_seqlen is_flash_attention_requested num_heads
            permute proj qkv reshape scaling shape split tolist torch training transpose unbind unsqueeze zip"""
        ),
        needed=_words("ALL_ATTENTION_FUNCTIONS apply_rotary_pos_emb_vision is_flash_attention_requested proj qkv"),
    ),
    "rotation": Known(
        parameters=_words("q k cos sin"),
        words=_words("dtype float rotate_half to unsqueeze"),
        needed=_words("rotate_half"),
    ),
    "norm": Known(
        parameters=_words("hidden_states"),
        words=_words("dtype float32 mean pow rsqrt to torch variance_epsilon weight"),
        needed=_words("rsqrt variance_epsilon weight"),
    ),
    "mlp": Known(
        parameters=None,
        words=_words("act act_fn down_proj fc1 fc2 gate_proj linear_fc1 linear_fc2 up_proj"),
    ),
    "merger": Known(
        parameters=_words("x"),
        words=_words("act_fn hidden_size linear_fc1 linear_fc2 ln_q mlp norm use_postshuffle_norm view"),
    ),
    "patch_embed": Known(
        parameters=_words("hidden_states"),
        words=_words("dtype embed_dim in_channels patch_size proj temporal_patch_size to view weight"),
        needed=_words("proj"),
    ),
}
"""The forwards that are computed without being called, in transformers 5.15 to 5.23, by their role in a tower."""


def is_upstream(function: Any) -> bool:
    """Whether a function's own code, and that of all it wraps, comes from transformers or torch, whatever its name."""
    while function is not None:
        code = getattr(function, "__code__", None)
        if code is None or not code.co_filename.startswith(_UPSTREAM):
            return False
        function = getattr(function, "__wrapped__", None)
    return True


def _words_of(code: CodeType) -> set[str]:
    inner = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return set(code.co_names).union(*map(_words_of, inner))


@lru_cache(maxsize=64)
def changes(function: Callable[..., Any], role: str) -> tuple[str, ...]:
    """How a function of transformers differs from what is known in its role; empty if it does not."""
    known, body, found = KNOWN[role], inspect.unwrap(function), []
    parameters = set(inspect.signature(body).parameters) - {"self"}
    if known.parameters is not None and parameters != known.parameters:
        found.append(f"{body.__qualname__} takes {sorted(parameters)}, known is {sorted(known.parameters)}")
    words = _words_of(body.__code__)
    if new := sorted(words - known.words):
        found.append(f"{body.__qualname__} uses {', '.join(new)}, which it did not")
    if gone := sorted(known.needed - words):
        found.append(f"{body.__qualname__} no longer uses {', '.join(gone)}")
    return tuple(found)


def tower_changes(tower: Any) -> Iterator[str]:
    """What changed in the code of a tower's own classes. Classes from elsewhere stand in their place by intention."""
    home = type(tower).forward.__module__
    blocks = list(getattr(tower, "blocks", ()))
    by_role: dict[str, list[Any]] = {
        "tower": [tower],
        "block": blocks,
        "attention": [getattr(block, "attn", None) for block in blocks],
        "norm": [getattr(block, name, None) for block in blocks for name in ("norm1", "norm2")],
        "mlp": [getattr(block, "mlp", None) for block in blocks],
        "merger": [getattr(tower, "merger", None), *getattr(tower, "deepstack_merger_list", ())],
        "patch_embed": [getattr(tower, "patch_embed", None)],
    }
    for role, modules in by_role.items():
        forwards = dict.fromkeys(type(module).forward for module in modules if isinstance(module, nn.Module))
        for forward in forwards:
            if forward.__module__ == home and is_upstream(forward):
                yield from changes(forward, role)
    rotation = rotation_of(tower)
    if rotation is not None and is_upstream(rotation):
        yield from changes(rotation, "rotation")


def rotation_of(tower: Any) -> Any:
    """The function that rotates queries and keys: a global of the tower's module, which anyone may replace."""
    return getattr(sys.modules.get(type(tower).forward.__module__), "apply_rotary_pos_emb_vision", None)


_WARNED: set[tuple[str, str]] = set()


def warn_of(tower: nn.Module) -> None:
    """Say once what changed in a tower's code: it stays as it is in stock, and `status` gives the same reason."""
    name = type(tower).__name__
    for change in tower_changes(tower):
        if (name, change) not in _WARNED:
            _WARNED.add((name, change))
            warnings.warn(
                f"transformers {transformers.__version__}: {change}. {name} stays stock until "
                "hf_vit_accel knows the new code; look for a newer hf_vit_accel.",
                stacklevel=2,
            )
