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
from types import CodeType, FunctionType
from typing import Any

import torch
import transformers
from torch import nn
from transformers import modeling_utils

__all__ = [
    "HELPERS",
    "KNOWN",
    "Known",
    "changes",
    "forward_of",
    "helpers_of",
    "is_upstream",
    "makes_angles",
    "own_attention",
    "tower_changes",
    "warn_of",
]

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

HELPERS: dict[str, Known] = {
    "apply_rotary_pos_emb_vision": Known(
        parameters=_words("q k cos sin"),
        words=_words("cat dtype float rotate_half shape to torch unsqueeze"),
        needed=_words("rotate_half"),
    ),
    "rotate_half": Known(parameters=_words("x"), words=_words("cat shape torch")),
    "get_vision_position_ids": Known(
        parameters=None,
        words=_words(
            """append arange cat device expand flatten int isinstance len meshgrid pop repeat repeat_interleave reshape
            stack tensor tolist torch transpose zip"""
        ),
    ),
    "get_vision_attention_seqlens": Known(
        parameters=None,
        words=_words(
            """F cumsum dtype get_max_seqlen get_vision_cu_seqlens int32 is_flash_attention_requested is_tracing item
            jit max pad pop repeat_interleave torch"""
        ),
    ),
    "get_vision_window_index": Known(
        parameters=None,
        words=_words(
            """F append arange cat cumsum device extend int int32 pad permute pop reshape sum tensor tolist torch
            unique_consecutive"""
        ),
    ),
    "get_vision_interpolation_indices_and_weights": Known(
        parameters=None,
        words=_words(
            """F ValueError _interpolation_axis_taps_weights abs arange clamp cumsum device float32 floor long pad pop
            repeat_interleave reshape shape sum to torch where"""
        ),
    ),
    "permute_input_for_window_attn": Known(parameters=None, words=_words("reshape spatial_merge_unit")),
}
"""The functions and methods that compute for a tower beside its modules, and whose results we compute ourselves."""


def is_upstream(function: Any) -> bool:
    """Whether a function's own code, and that of all it wraps, comes from transformers or torch, whatever its name."""
    while True:
        code = getattr(function, "__code__", None)
        if code is None or not code.co_filename.startswith(_UPSTREAM):
            return False
        function = getattr(function, "__wrapped__", None)
        if function is None:
            return True


def own_attention(tower: Any, name: str | None) -> str | None:
    """Why a tower's attention of that name may compute anything: it is a function of the user's. None if it is not.

    Those of transformers and, by a name with a slash, from the Hub compute attention; so do ours.
    """
    if name == "eager":  # which is not registered, but a function beside the tower
        function: Any = getattr(sys.modules.get(type(tower).forward.__module__), "eager_attention_forward", None)
    else:
        function = modeling_utils.ALL_ATTENTION_FUNCTIONS.get(name)
    known = function is None or "/" in str(name) or str(function.__module__).startswith("hf_vit_accel.")
    if known or is_upstream(function):
        return None
    return f"the attention {name!r} is a function of your own; patch(attention=...) with a backend's name replaces it"


def forward_of(kind: type[nn.Module]) -> Any:
    """The forward of a class; None where only instances have one (modules of torch.jit)."""
    return getattr(kind, "forward", None)


def _words_of(code: CodeType) -> set[str]:
    inner = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return set(code.co_names).union(*map(_words_of, inner))


def _called(function: Any, words: frozenset[str] | set[str]) -> Iterator[Any]:
    for word in words:
        inner = inspect.unwrap(function.__globals__.get(word, len))
        if isinstance(inner, FunctionType) and inner.__module__ == function.__module__:
            yield inner


@lru_cache(maxsize=256)
def changes(function: Callable[..., Any], role: str) -> tuple[str, ...]:
    """How a function of transformers differs from what is known in its role; empty if it does not."""
    known, body, found = {**KNOWN, **HELPERS}[role], inspect.unwrap(function), []
    parameters = set(inspect.signature(body).parameters) - {"self"}
    if known.parameters is not None and parameters != known.parameters:
        found.append(f"{body.__qualname__} takes {sorted(parameters)}, known is {sorted(known.parameters)}")
    words = _words_of(body.__code__)
    if role in HELPERS:  # and those of what it calls in its own module
        words = words.union(*(_words_of(inner.__code__) for inner in _called(body, words)))
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
        forwards = dict.fromkeys(forward_of(type(module)) for module in modules if isinstance(module, nn.Module))
        for forward in forwards:
            if is_upstream(forward) and forward.__module__ == home:
                yield from changes(forward, role)
    for name, function in helpers_of(tower).items():
        if is_upstream(function):
            yield from changes(function, name)


def helpers_of(tower: Any) -> dict[str, Any]:
    """The `HELPERS` that a tower has: methods of its own or of its class, or globals of its module.

    Anyone may replace them.
    """
    kind, own = type(tower), vars(tower)
    home = sys.modules.get(kind.forward.__module__)
    found = {name: own.get(name) or getattr(kind, name, None) or getattr(home, name, None) for name in HELPERS}
    return {name: function for name, function in found.items() if function is not None}


def makes_angles(tower: Any) -> bool:
    """Whether a tower itself makes cos and sin of angles that its `rotary_pos_emb` returns (transformers before 5.17).

    (Told by the tower's code, for whatever stands in the module's place may hide what it takes.)
    """
    code = getattr(inspect.unwrap(type(tower).forward), "__code__", None)
    return code is not None and "cos" in code.co_names


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
