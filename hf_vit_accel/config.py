"""Settings that users pass by object, checked when they are made."""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True)
class FlexConfig:
    """Attention by FlexAttention, with a change of your own to its scores; for `hf_vit_accel.patch(attention=...)`.

    score_mod: called as `score_mod(score, batch, head, q_idx, kv_idx)` for every score, already scaled; returns the
    score that takes its place. All are scalar tensors. It is compiled into the kernel, so it may use what torch.compile
    traces, and index tensors that it captures. `batch` is 0. `q_idx` and `kv_idx` are rows of the packed sequence, in
    the order of the tower: blocks of 2 x 2 patches, in Qwen2.5-VL window by window. Where a frame starts depends on
    what else is in the call, and CUDA graphs cut large calls between images, so let only their difference matter.

    Pairs of different frames or windows stay left out, but after their scores were changed like all others, rows of
    padding among them: clamp what you index a tensor with. Captured tensors are constants: they may change in place,
    but gradients reach queries, keys and values only. When another tensor or number takes the place of a captured one,
    patch again: CUDA graphs go on with the former. (Each number is a kernel of its own, of which torch compiles 8.)

    With a score_mod every layer goes through FlexAttention, windows included, and a call that it cannot serve raises
    an error, under `strict` or not: no other backend would apply it.

    Raises ValueError for a score_mod that cannot be called with five arguments or is not hashable.
    """

    score_mod: Callable[..., Any] | None = None

    def __post_init__(self) -> None:
        if self.score_mod is None:
            return
        wanted = "expected score_mod to be a function of (score, batch, head, q_idx, kv_idx)"
        if not callable(self.score_mod):
            raise ValueError(f"{wanted}, got {self.score_mod!r}")
        try:
            hash(self.score_mod)
            with suppress(ValueError):  # builtins may have no signature
                inspect.signature(self.score_mod).bind(*range(5))
        except TypeError as error:
            raise ValueError(f"{wanted}, got {self.score_mod!r}: {error}") from error


@dataclass(frozen=True, kw_only=True)
class Fp8Config:
    """Attention in FP8 (e4m3), by cuDNN, on long segments, where that is faster; for `hf_vit_accel.patch(fp8=...)`.

    Not exact, for inference only.

    amax_file: written by `hf_vit_accel.calibrate`; every call is scaled by the absolute maxima in it, numbers beyond
    them and their margin are cut off (`status` says so). None: each layer and head of a call is scaled by the absolute
    maxima of some of its rows, with room, or by those of all where that would cut something off.
    min_seqlen: rows that a row attends to, on average, from which FP8 is used; None for where it measured faster.
    Windows never use it.

    Raises ValueError for values that make no sense.
    """

    amax_file: str | os.PathLike[str] | None = None
    min_seqlen: int | None = None

    def __post_init__(self) -> None:
        if self.amax_file is not None and not isinstance(self.amax_file, str | os.PathLike):
            raise ValueError(f"expected amax_file to be the path of a file or None, got {self.amax_file!r}")
        if self.min_seqlen is not None:
            _check_integer("min_seqlen", self.min_seqlen, least=0)


def _check_integer(name: str, value: object, *, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"expected {name} to be an integer of at least {least}, got {value!r}")


@dataclass(frozen=True, kw_only=True)
class GraphConfig:
    """How a tower is captured in CUDA graphs; see `hf_vit_accel.patch`.

    A merged token is four patches, also in towers that merge none.
    max_tokens: merged tokens of the largest budget (1280, Qwen's own example of `max_pixels`, are 5120 patches). Larger
    images run eagerly unless their very shape comes again and again: from about 4,000 patches on the launches hide
    behind the work.
    budgets: merged tokens of every budget, instead of the ladder up to `max_tokens`.
    exact_after: a shape that came this often is captured as it is, without padding; 0 for never.
    max_graphs: the least recently used graph goes when there are more.
    max_bytes: no graph is captured while they hold more device memory, which the last one may have brought about. All
    go when that kept many calls from being captured.
    max_training_bytes: the same of graphs with gradients, which hold what a backward pass needs and a copy of all
    gradients: of 4096 patches 3 to 4 GB. A layout of up to `max_tokens` that came `exact_after` times is captured,
    forward and backward. 0: steps with gradients run eagerly.

    Raises ValueError for values that make no sense.
    """

    max_tokens: int = 1280
    budgets: tuple[int, ...] | None = None
    exact_after: int = 3
    max_graphs: int = 192
    max_bytes: int = 2 << 30
    max_training_bytes: int = 8 << 30

    def __post_init__(self) -> None:
        for name in ("max_tokens", "max_graphs", "max_bytes"):
            _check_integer(name, getattr(self, name), least=1)
        for name in ("exact_after", "max_training_bytes"):
            _check_integer(name, getattr(self, name), least=0)
        if self.budgets is None:
            return
        budgets = tuple(self.budgets) if isinstance(self.budgets, Iterable) else ()
        positive = all(isinstance(budget, int) and not isinstance(budget, bool) and budget > 0 for budget in budgets)
        if not budgets or not positive or list(budgets) != sorted(set(budgets)):
            raise ValueError(f"expected budgets as increasing positive integers (merged tokens), got {self.budgets!r}")
        object.__setattr__(self, "budgets", budgets)


@dataclass(frozen=True, kw_only=True)
class ReuseConfig:
    """What of equal images and videos is encoded once; for `hf_vit_accel.patch(reuse=...)`.

    across_calls: keep features on the device for later calls, too, as long as weights, dtypes and settings are the same
    and no gradient is required. At every call all weights are read once to tell, as fast as memory can be read, so what
    a call costs at least is that. With FP8, features that are kept are those of their first call.
    gigabytes: device memory (10**9 bytes) that features may take; the least recently used go first. An image of 512 x
    512 takes 11 MB in Qwen3-VL-8B.

    Raises ValueError for values that make no sense.
    """

    across_calls: bool = False
    gigabytes: float = 2.0

    def __post_init__(self) -> None:
        if not isinstance(self.across_calls, bool):
            raise ValueError(f"expected across_calls to be True or False, got {self.across_calls!r}")
        number = isinstance(self.gigabytes, int | float) and not isinstance(self.gigabytes, bool)
        if not number or not 0 < self.gigabytes < math.inf:
            raise ValueError(f"expected gigabytes to be a positive number, got {self.gigabytes!r}")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What `hf_vit_accel.patch` was asked for. Raises ValueError for what makes no sense.

    score_mod: what every layer's attention must apply. fuse: the parts that were named; None for all that can be.
    amax: what the file of `fp8` holds, if it names one. max_rows: patch rows of a pass. ranks: those that share calls.
    """

    attention: str = "auto"
    score_mod: Callable[..., Any] | None = None
    fuse: frozenset[str] | None = None
    graphs: GraphConfig | None = None
    fp8: Fp8Config | None = None
    amax: Any = None
    max_rows: int | Literal["auto"] | None = "auto"
    ranks: Any = None
    reuse: ReuseConfig | None = None
    strict: bool = False

    def __post_init__(self) -> None:
        if self.max_rows not in ("auto", None):
            _check_integer("max_rows, unless 'auto' or None,", self.max_rows, least=1)
        if self.ranks is not None and self.reuse is not None and self.reuse.across_calls:
            raise ValueError(
                "expected reuse=True beside data_parallel, got across_calls: ranks that remember different pictures "
                "would wait for one another"
            )
