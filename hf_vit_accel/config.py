"""Settings that users pass as objects. Every object checks its values when it is made."""

from __future__ import annotations

import inspect
import json
import math
import os
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class FlexConfig:
    """Attention by FlexAttention with a `score_mod` of your own; for `hf_vit_accel.patch(attention=...)`.

    torch.compile builds the score_mod into the kernel, so it may use everything that torch.compile traces. It may
    index tensors that it captures.

    `q_idx` and `kv_idx` are rows of the packed sequence, in the order of the tower: blocks of 2 x 2 patches, in
    Qwen2.5-VL window by window. Let only their difference matter: the row at which a frame starts depends on the other
    images of a call. CUDA graphs also cut large calls between images.

    The score_mod also sees pairs of different frames or windows, and padding rows, before they are masked. So clamp
    the numbers that index a captured tensor.

    Captured tensors are constants. They may change in place, but gradients reach queries, keys and values only. Patch
    again if another tensor or number takes the place of a captured one: CUDA graphs replay the former. (Every number
    is a kernel of its own, and torch compiles 8 of them at most.)

    With a score_mod, all layers run FlexAttention, window layers too. No other backend applies it. So a call that
    FlexAttention cannot run raises an error, with or without `strict`.

    Args:
        score_mod: Called as `score_mod(score, batch, head, q_idx, kv_idx)` for every scaled score; returns the new
            score. All are scalar tensors, and `batch` is 0. None changes nothing.

    Raises:
        ValueError: If the score_mod cannot be called with five arguments or is not hashable.

    Examples:
        >>> def nearer(score, batch, head, q_idx, kv_idx):
        ...     return score - 0.01 * (q_idx - kv_idx).abs()
        >>> model = hf_vit_accel.patch(model, attention=hf_vit_accel.FlexConfig(score_mod=nearer))
    """

    score_mod: Callable[..., Tensor] | None = None

    def __post_init__(self) -> None:
        if self.score_mod is None:
            return
        expected = "expected score_mod to be a function of (score, batch, head, q_idx, kv_idx)"
        if not callable(self.score_mod):
            raise ValueError(f"{expected}, got {self.score_mod!r}")
        try:
            hash(self.score_mod)
            with suppress(ValueError):  # builtins may have no signature
                inspect.signature(self.score_mod).bind(*range(5))
        except TypeError as error:
            raise ValueError(f"{expected}, got {self.score_mod!r}: {error}") from error


@dataclass(frozen=True, kw_only=True)
class Fp8Config:
    """Attention in FP8 (e4m3) where that is faster; for `hf_vit_accel.patch(fp8=...)`.

    Not exact, for inference only. cuDNN runs it, on long segments.

    Args:
        amax_file: A file of absolute maxima written by `hf_vit_accel.calibrate`, which scale every call. Values beyond
            a maximum and its margin are cut off, and `status` reports it. None: every call scales each layer and head
            by the maxima of some of its own rows, with a margin. If that would cut off a value, all rows count.
        min_seqlen: FP8 runs if a row attends to at least so many rows on average. None for the measured threshold.
            Windows never use FP8.

    Raises:
        ValueError: If a value makes no sense.
    """

    amax_file: str | os.PathLike[str] | None = None
    min_seqlen: int | None = None

    def __post_init__(self) -> None:
        if self.amax_file is not None and not isinstance(self.amax_file, str | os.PathLike):
            raise ValueError(f"expected amax_file to be the path of a file or None, got {self.amax_file!r}")
        if self.min_seqlen is not None:
            _check_integer("min_seqlen", self.min_seqlen, least=0)


_FORMAT = "hf-vit-accel fp8 amax"
_VERSION = 1


@dataclass(frozen=True, kw_only=True, eq=False)
class Amax:
    """Absolute maxima of rotated q and k, and of v, of every layer and head, in the model's own units.

    Attributes:
        amax_L3H: fp32, on the host.
        margin: factor of amax before scales follow from it.
        model: the family of the model that was calibrated.
    """

    amax_L3H: Tensor
    margin: float
    model: str = ""

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write a JSON file and return its path."""
        layers = [dict(zip("qkv", layer, strict=True)) for layer in self.amax_L3H.tolist()]
        content = {
            "format": _FORMAT,
            "version": _VERSION,
            "model": self.model,
            "margin": self.margin,
            "layers": layers,
        }
        path = Path(path)
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        return path

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Amax:
        """Read a file of `save`; ValueError for one of another format."""
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
            if (content["format"], content["version"]) != (_FORMAT, _VERSION):
                raise ValueError(f"its format is not {_FORMAT!r}, version {_VERSION}")
            margin = float(content["margin"])
            layers = [[layer[part] for part in "qkv"] for layer in content["layers"]]
            amax_L3H = torch.tensor(layers, dtype=torch.float32, device="cpu")
            if amax_L3H.dim() != 3 or not amax_L3H.numel():
                raise ValueError("layers, or q, k and v, have different numbers of heads, or none")
            # NaN fails `>= 0`. A finite amax may overflow when it is multiplied by the margin.
            if not (margin >= 1 and (amax_L3H >= 0).all() and (amax_L3H * margin).isfinite().all()):
                raise ValueError("amax values must be finite and non-negative, the margin at least 1")
        except FileNotFoundError:
            raise FileNotFoundError(
                f"expected FP8 amax in {path}: there is no such file; hf_vit_accel.calibrate writes one"
            ) from None
        except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
            raise ValueError(
                f"expected FP8 amax in {path}: {type(error).__name__}: {error}; make the file by hf_vit_accel.calibrate"
            ) from error
        return cls(amax_L3H=amax_L3H, margin=margin, model=str(content.get("model", "")))


def _check_integer(name: str, value: object, *, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"expected {name} to be an integer of at least {least}, got {value!r}")


@dataclass(frozen=True, kw_only=True)
class GraphConfig:
    """Capture a tower in CUDA graphs; for `hf_vit_accel.patch(cuda_graphs=...)`.

    A merged token is four patches, also in towers that do not merge.

    Args:
        max_tokens: Merged tokens of the largest budget. (1280, Qwen's own example of `max_pixels`, are 5120 patches.)
            Larger images run eagerly, unless their exact shape comes often. From about 4,000 patches on the GPU is
            busy while the host launches kernels.
        budgets: Merged tokens of every budget, increasing. None for the ladder of budgets up to `max_tokens`.
        exact_after: A shape that came so often is captured as it is, without padding; 0 for never.
        max_graphs: The largest number of graphs. Above it, the least recently used graph is dropped.
        max_bytes: No graph is captured while all graphs hold as much device memory; those of the last call may exceed
            it. If the bound prevents many captures, all graphs are dropped.
        max_training_bytes: The same bound for graphs with gradients. They hold the activations for a backward pass:
            up to 4 GB at 3,136 patches, shared by all layouts. A layout of up to `max_tokens` that came `exact_after`
            times is captured, forward and backward. 0 runs steps with gradients eagerly.

    Raises:
        ValueError: If a value makes no sense.

    Examples:
        >>> graphs = hf_vit_accel.GraphConfig(max_tokens=2048, max_bytes=1 << 30)
        >>> model = hf_vit_accel.patch(model, cuda_graphs=graphs)
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
    """Encode equal images and videos once; for `hf_vit_accel.patch(reuse=...)`.

    Args:
        across_calls: Keep features on the device for later calls, too. They are valid as long as weights, dtypes and
            settings stay the same and no gradient is required. To check the weights, every call reads all of them once,
            at the speed of the memory. With FP8, kept features are those of their first call.
        gigabytes: Device memory (10**9 bytes) that features may take; the least recently used are dropped first. An
            image of 512 x 512 takes 14 MB in Qwen3-VL-8B, with its pixels.

    Raises:
        ValueError: If a value makes no sense.

    Examples:
        >>> model = hf_vit_accel.patch(model, reuse=hf_vit_accel.ReuseConfig(across_calls=True))
    """

    across_calls: bool = False
    gigabytes: float = 2.0

    def __post_init__(self) -> None:
        if not isinstance(self.across_calls, bool):
            raise ValueError(f"expected across_calls to be True or False, got {self.across_calls!r}")
        is_number = isinstance(self.gigabytes, int | float) and not isinstance(self.gigabytes, bool)
        if not is_number or not 0 < self.gigabytes < math.inf:
            raise ValueError(f"expected gigabytes to be a positive number, got {self.gigabytes!r}")


@dataclass(frozen=True, kw_only=True)
class Normalisation:
    """Computes pixel values from the bytes of pictures, as an image processor does: (x - mean) / std, in fp32.

    Args:
        mean: Of every channel, in bytes.
        std: Of every channel, in bytes.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __call__(self, bytes_TP: Tensor, dtype: torch.dtype) -> Tensor:
        """Return pixel values (T, P) of a dtype. Channels are the outermost dimension of P. Any dtype holds bytes."""
        chunks = [self._of_chunk(chunk_TP, dtype) for chunk_TP in bytes_TP.split(_ROWS_AT_ONCE)]
        return chunks[0] if len(chunks) == 1 else torch.cat(chunks)

    def _of_chunk(self, bytes_TP: Tensor, dtype: torch.dtype) -> Tensor:
        channels = bytes_TP.float().chunk(len(self.mean), dim=1)
        triples = zip(channels, self.mean, self.std, strict=True)
        return torch.cat([((channel - mean) / std).to(dtype) for channel, mean, std in triples], dim=1)


_ROWS_AT_ONCE = 16384
"""Patch rows whose bytes are normalised at once: the fp32 values between take some 150 MB."""


class Ranks:
    """A process group whose ranks share calls. Copies share it; a pickle comes back with the default group, or None."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)

    def __deepcopy__(self, memo: object) -> Ranks:
        return self

    def __reduce__(self) -> tuple[object, ...]:
        return _unpickled, (self.group is dist.group.WORLD,)


def _unpickled(default: bool) -> Ranks | None:
    if default and dist.is_available() and dist.is_initialized():
        return ranks_of(True)
    warnings.warn(
        "a process group cannot be pickled, so calls are no longer shared by ranks; patch again with data_parallel",
        stacklevel=2,
    )
    return None


def ranks_of(data_parallel: object) -> Ranks | None:
    """Return the ranks that `patch(data_parallel=...)` means; None for no other rank than this one."""
    if data_parallel is False:
        return None
    expected = "expected data_parallel to be False, True, a process group or a device mesh of one dimension"
    if not dist.is_available() or not dist.is_initialized():
        raise ValueError(
            f"{expected}, with torch.distributed initialised; call init_process_group first, under torchrun"
        )
    group: Any = dist.group.WORLD if data_parallel is True else data_parallel
    if hasattr(group, "get_group"):
        if group.ndim != 1:
            raise ValueError(f"{expected}, got a mesh of {group.ndim}; pass one of them, such as mesh['tp']")
        group = group.get_group()
    if not isinstance(group, dist.ProcessGroup):
        raise ValueError(f"{expected}, got {data_parallel!r}")
    ranks = Ranks(group)
    return ranks if ranks.size > 1 else None


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The options of `hf_vit_accel.patch`, checked.

    Args:
        graphs: How to capture CUDA graphs; "auto" where that pays, None for none.
        amax: The absolute maxima in the file of `fp8`; None without a file.
        every_rank: Whether every training forward of the model calls the tower exactly once.
        normalisation: Of pixel values, which are bytes; None where the processor normalises them.
        like: The family of every class of a tower that is a copy, by name.

    Raises:
        ValueError: If values make no sense, alone or together.
    """

    attention: str = "auto"
    score_mod: Callable[..., Tensor] | None = None
    fuse: bool = True
    graphs: GraphConfig | Literal["auto"] | None = "auto"
    fp8: Fp8Config | None = None
    amax: Amax | None = None
    max_rows: int | Literal["auto"] | None = "auto"
    ranks: Ranks | None = None
    reuse: ReuseConfig | None = None
    every_rank: bool = False
    text: bool = False
    strict: bool = False
    normalisation: Normalisation | None = None
    like: Mapping[str, str] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if self.max_rows not in ("auto", None):
            _check_integer("max_rows, unless 'auto' or None,", self.max_rows, least=1)
        for name in ("fuse", "every_rank", "text", "strict"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"expected {name} to be True or False, got {getattr(self, name)!r}")
        if self.score_mod is not None and self.fp8 is not None:
            raise ValueError("expected fp8=False beside a score_mod, which attention in FP8 does not apply")
        if self.ranks is not None and self.reuse is not None and self.reuse.across_calls:
            raise ValueError(
                "ReuseConfig(across_calls=True) does not work with data_parallel: ranks with different kept features "
                "would wait for one another. Use reuse=True"
            )
