"""Differences between versions of transformers; every section says versions, symptom, and when it may go. At the end
stand the names of other packages.

Differences are detected in the code of a tower, not by version numbers: classes move between versions one by one. The
proof compares the results in any case, and keeps a tower stock where they differ.

`T` packed patch rows, `D` head dim.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from types import ModuleType
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from hf_vit_accel.families.base import Part

NEWEST_TESTED = {"transformers": (5, 24), "torch": (2, 15)}
"""The newest versions that all tests ran with. pyproject.toml lists all (a test compares them)."""


def untested() -> list[str]:
    """Return a sentence for every installed package that is newer than the tests ran with."""
    lines = []
    for package, version in (("transformers", transformers.__version__), ("torch", torch.__version__)):
        newest = NEWEST_TESTED[package]
        if tuple(int(part) for part in version.split(".")[:2]) > newest:
            lines.append(f"{package} {version} is newer than the newest tested, {newest[0]}.{newest[1]}")
    return lines


# Metadata. From 5.15 on, towers pop all of it from their keyword arguments. From 5.9 to 5.14 they pop some: no lengths,
# and positions under other names. Up to 5.8 they pop nothing, and `cu_seqlens` raises a TypeError. May go with 5.14.

METADATA = ("position_ids", "cu_seqlens", "window_index", "cu_window_seqlens", "interp_indices", "interp_weights")
"""The arrays that towers pop from their keyword arguments, by their present names."""
_LENGTHS = ("max_seqlen", "max_window_seqlen")
_BILINEAR = {"interp_indices": "bilinear_indices", "interp_weights": "bilinear_weights"}
POPPED = (*METADATA, *_LENGTHS, *_BILINEAR.values())
"""The keyword arguments that some version pops."""
_POPPED_BEFORE_5_15 = {
    "get_vision_position_ids": ("position_ids",),
    "get_vision_cu_seqlens": ("cu_seqlens",),
    "get_vision_window_index": ("window_index", "cu_window_seqlens"),
    "get_vision_bilinear_indices_and_weights": ("interp_indices", "interp_weights"),
}


@lru_cache(maxsize=1)
def _vision_utils() -> ModuleType | None:
    """Return the module of transformers that computes metadata, imported late; None before there was one."""
    name = "transformers.vision_utils"
    return None if importlib.util.find_spec(name) is None else importlib.import_module(name)


def popped_by(names: Iterable[str]) -> frozenset[str]:
    """Return the metadata that a tower pops, by present names. It calls functions of the given names."""
    if hasattr(_vision_utils(), "get_vision_attention_seqlens"):
        return frozenset((*METADATA, *_LENGTHS))
    called = [_POPPED_BEFORE_5_15.get(name, ()) for name in names if hasattr(_vision_utils(), name)]
    return frozenset(argument for arguments in called for argument in arguments)


def keyword_arguments(metadata: Mapping[str, Any], popped: frozenset[str]) -> dict[str, object]:
    """Return the metadata that a tower pops, under the names and in the layout of this version."""
    kwargs = {name: value for name, value in metadata.items() if name in popped}
    if not hasattr(_vision_utils(), "get_vision_attention_seqlens"):
        for name, former_name in _BILINEAR.items():
            if name in kwargs:
                kwargs[former_name] = kwargs.pop(name).t()  # (4, T) instead of (T, 4)
    return kwargs


# Rotary modules. Up to 5.8 they take a length and return a table of the angles of that many positions, which the tower
# indexes. From 5.9 to 5.17 they take positions and return angles of one half: the tower computes cos and sin. From 5.18
# on they take rows and positions and return cos and sin. May go with 5.8, and with 5.17, but for copies of that code.


def rotaries_in(kinds: Iterable[type[nn.Module]]) -> list[type[nn.Module]]:
    """Return the rotary modules among classes."""
    return [kind for kind in kinds if "RotaryEmbedding" in kind.__name__]


def takes_length(rotaries: Iterable[type[nn.Module]]) -> bool:
    """Return whether a rotary module of these classes takes a length, not positions."""
    return any("len" in "".join(_arguments_of(kind)[:1]) for kind in rotaries)


def takes_rows(rotaries: Iterable[type[nn.Module]]) -> bool:
    """Return whether a rotary module of these classes takes rows and positions, and returns cos and sin."""
    return any(len(_arguments_of(kind)) > 1 for kind in rotaries)


def _arguments_of(rotary: type[nn.Module]) -> list[str]:
    return list(inspect.signature(rotary.forward).parameters)[1:]


def angles_by_length(rotary: Part, *, is_stock: bool) -> Callable[[Tensor], Tensor]:
    """Return a function of positions (T, 2) to angles (T, D / 2), by a rotary module that takes a length.

    The product of transformers' own module is computed for these positions only. Any other module is called, and the
    length that it needs is a host sync.
    """

    def compute(positions_T2: Tensor) -> Tensor:
        inv_freq = rotary.inv_freq
        return (positions_T2.unsqueeze(-1).to(inv_freq.dtype) * inv_freq).flatten(1)

    def call(positions_T2: Tensor) -> Tensor:
        table = rotary(int(positions_T2.max()) + 1)
        return table[positions_T2].flatten(1)

    return compute if is_stock else call


# Learned positions. Up to 5.8 towers add them in the dtype of their table. Under autocast that is fp32, and so is the
# residual stream. From 5.9 on they are rounded to the dtype of the rows. May go with 5.8.


def adds_unrounded(kinds: Iterable[type]) -> bool:
    """Return whether learned positions keep the dtype of their table, in a tower of modules of these classes."""
    return takes_length(rotaries_in(kinds))


# Attention by segments. In 4.57 only layers under the very name "flash_attention_2" hand over all segments at once.
# Under our names they call attention once a segment, without offsets. May go with 4.57.


def knows_segments(names: Iterable[str]) -> bool:
    """Return whether layers under our names hand over all segments at once, by the names and strings in their code."""
    return "flash_attention_2" not in names


# Hooks of transformers. From 5.0 on, those on blocks add hidden states to the collector of whichever forward runs, and
# stay on after one use.


def is_output_marker(hook: object) -> bool:
    """Return whether a hook is the one that makes outputs require gradients, for checkpointing."""
    return (
        getattr(hook, "__module__", None) == "transformers.modeling_utils"
        and getattr(hook, "__name__", None) == "make_inputs_require_grads"
    )


def is_inert(hook: object) -> bool:
    """Return whether a hook of transformers does nothing unless hidden states or attentions are requested."""
    return getattr(hook, "__module__", None) == "transformers.utils.output_capturing" or is_output_marker(hook)


@contextmanager
def without_capture() -> Iterator[None]:
    """Hide the collector of an outer model: in stock, the tower's own forward hides it from blocks."""
    collector = getattr(sys.modules.get("transformers.utils.output_capturing"), "_active_collector", None)
    token = collector and collector.set(None)
    try:
        yield
    finally:
        if collector is not None:
            collector.reset(token)


# Caches. Up to 5.23 the cache is named `past_key_values`, from 5.24 on `cache`. Under the other name it is not found.
# May go with 5.23.


def cache_name() -> str:
    """Return the name of the cache among the arguments and the outputs of models."""
    outputs = importlib.import_module("transformers.modeling_outputs")  # slow
    return "cache" if hasattr(outputs.CausalLMOutputWithPast, "cache") else "past_key_values"


# Other packages. The only names of theirs in the code: nothing but a name tells their classes and functions from a
# user's, which may do something else at every call. May go where such code says of itself what it leaves unchanged.

ADAPTERS = "peft"
"""The package whose modules around layers call them, and hold no state that a call changes."""
LORA_LINEAR = ("peft.tuners.lora.layer", "Linear")
"""Module and name of the class whose forward is proven to compute a Linear with LoRA."""
FORWARD_WRAPPERS = {
    "torch.amp.autocast_mode.autocast_decorator.<locals>.decorate_autocast": "func",
    "accelerate.utils.operations.convert_outputs_to_fp32.<locals>.forward": "model_forward",
    "accelerate.utils.operations.ConvertOutputsToFp32.__call__": "model_forward",
    "trl.trainer.utils.add_fused_lm_head.<locals>._fused_forward": "original_forward",  # GRPO
}
"""Functions around a model's forward that do no more for `generate` than call it, and their variable that holds it.

A trial call would not tell them from a user's wrapper: one that counts would see it, and the next call may differ.
"""


def is_adapter(module: nn.Module) -> bool:
    """Return whether the class of a module is of `ADAPTERS`."""
    return type(module).__module__.startswith(f"{ADAPTERS}.")
