"""M-RoPE positions of a batch, computed on the host: the integers of transformers' `get_rope_index`.

`B` samples of `S` tokens, `T` tokens that are no padding, `N` images or videos.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, TypeAlias, TypeGuard

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hf_vit_accel.families import Config
from hf_vit_accel.layout import send

Array = NDArray[np.int64]

Arguments: TypeAlias = dict[str, Any]
"""The arguments of a model's method by name: tensors, caches and flags."""
Result: TypeAlias = Any
"""A result of a model's method: tensors, or an output class of transformers."""


@dataclass(frozen=True, kw_only=True)
class Rule:
    """How a family numbers the frames of a video; the proof finds the rule of a class.

    Args:
        frames: Whether each frame is a run of tokens of its own, between timestamps.
        seconds: How frames are spaced by `second_per_grid_ts`: exactly, by whole seconds, or not at all.
        merges_frames: Whether the model merges frames (`temporal_merge_size`).
    """

    frames: bool = False
    seconds: Literal["exact", "whole"] | None = None
    merges_frames: bool = False


RULES = (Rule(), Rule(frames=True), Rule(seconds="exact"), Rule(seconds="whole"), Rule(merges_frames=True))


class HostCopies:
    """Copies of a call's small tensors on the host, as int64. Valid while the tensors are the same and unmodified.

    Inference tensors do not count their modifications. Their copies are valid only until their forward ends.
    """

    def __init__(self) -> None:
        self._copies: list[tuple[weakref.ref[Tensor], int | None, Array]] = []
        self.in_forward = False

    @staticmethod
    def is_on_host(tensor: Tensor) -> bool:
        """Return whether the host reads a tensor without a transfer."""
        return tensor.device.type == "cpu"

    def find(self, tensor: Tensor) -> Array | None:
        """Return the copy of a tensor; None if there is none, or if the tensor changed."""
        if self.is_on_host(tensor):
            return _words(tensor).view(tensor.shape).numpy()
        for reference, version, copy in self._copies:
            if reference() is tensor:
                is_valid = self.in_forward if tensor.is_inference() else tensor._version == version
                return copy if is_valid else None
        return None

    def read(self, tensors: Sequence[Tensor]) -> list[Array]:
        """Return the copies of tensors, in their order. One transfer fetches all that are missing."""
        copies = [self.find(tensor) for tensor in tensors]
        missing = [tensor for tensor, copy in zip(tensors, copies, strict=True) if copy is None]
        if missing:
            device = missing[0].device
            host = torch.cat([_words(tensor).to(device) for tensor in missing]).cpu()
            parts = host.split([tensor.numel() for tensor in missing])
            fetched = iter([part.view(tensor.shape).numpy() for part, tensor in zip(parts, missing, strict=True)])
            copies = [next(fetched) if copy is None else copy for copy in copies]
        arrays = [copy for copy in copies if copy is not None]
        pairs = zip(tensors, arrays, strict=True)
        self._copies = [(weakref.ref(tensor), _version(tensor), array) for tensor, array in pairs]
        return arrays


def _version(tensor: Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version


def _words(tensor: Tensor) -> Tensor:
    """Return the elements as int64, and floats as the bits of their float64."""
    flat = tensor.detach().reshape(-1)
    return flat.double().view(torch.int64) if flat.is_floating_point() else flat.long()


@dataclass(frozen=True, kw_only=True, eq=False)
class Tokens:
    """The inputs of `get_rope_index` on the host.

    Args:
        kinds_BS: 0 for text, 1 for images, 2 for videos.
        kept_BS: Whether a token is no padding.
        images_N3: Frames, height and width of every image in patches; None without images.
        videos_N3: The same of every video.
        seconds: `second_per_grid_ts`, a tensor on the CPU or a list; None if it is missing.
    """

    kinds_BS: Array
    kept_BS: NDArray[np.bool_]
    images_N3: Array | None
    videos_N3: Array | None
    seconds: Sequence[float] | Tensor | None = None


def rope_index(rule: Rule, vision_config: Config, tokens: Tokens, like: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return position ids (3, B, S) and rope deltas (B, 1), sent to the device of the input ids in one copy.

    Args:
        rule: How the family numbers frames.
        vision_config: Holds the merge sizes and `tokens_per_second`.
        tokens: The inputs on the host.
        like: The input ids (B, S), int64, whose device the positions get.

    Returns:
        None for inputs for which transformers raises, or whose runs of tokens do not fit their grids.
    """
    lengths_B = tokens.kept_BS.sum(1)
    if not lengths_B.size or not lengths_B.all():
        return None
    starts_B = lengths_B.cumsum() - lengths_B
    positions_3T = _positions(rule, vision_config, tokens, starts_B)
    if positions_3T is None:
        return None
    size = 3 * tokens.kept_BS.size
    packed = np.zeros(size + len(lengths_B), np.int64)
    packed[:size].reshape(3, -1)[:, tokens.kept_BS.reshape(-1)] = positions_3T
    packed[size:] = np.maximum.reduceat(positions_3T.max(0), starts_B) + 1 - lengths_B
    sent = send(packed.view(np.uint8), like.device).view(torch.int64)
    return sent[:size].view(3, *like.shape), sent[size:].view(-1, 1).clone()


def _positions(rule: Rule, vision_config: Config, tokens: Tokens, starts_B: Array) -> Array | None:
    """Return the positions (3, T) of all tokens that are no padding, sample after sample."""
    kinds_T = tokens.kinds_BS[tokens.kept_BS]
    begins_T = np.ones(len(kinds_T), bool)
    begins_T[1:] = kinds_T[1:] != kinds_T[:-1]
    begins_T[starts_B] = True
    bounds = [*np.flatnonzero(begins_T).tolist(), len(kinds_T)]
    merge = vision_config.spatial_merge_size
    grids = {1: _rows(tokens.images_N3), 2: _rows(tokens.videos_N3, frames=rule.frames)}
    times = _times(rule, vision_config, tokens)
    sample_starts = set(starts_B.tolist())
    numbers = np.arange(len(kinds_T))
    positions_3T = np.empty((3, len(kinds_T)), np.int64)
    position = 0
    for start, end in pairwise(bounds):
        position = 0 if start in sample_starts else position
        kind = int(kinds_T[start])
        if kind == 0:
            positions_3T[:, start:end] = numbers[: end - start] + position
            position += end - start
            continue
        t, h, w = next(grids.get(kind, iter(())), (0, 0, 0))
        if kind == 2 and rule.merges_frames:
            t //= vision_config.temporal_merge_size
        h //= merge
        w //= merge
        interval = next(times, None) if kind == 2 else 1
        if t * h * w != end - start or interval is None:
            return None
        block_3THW = positions_3T[:, start:end].reshape(3, t, h, w)  # a view
        block_3THW[0] = _spaced(t, interval)[:, None, None] + position
        block_3THW[1] = numbers[:h, None] + position
        block_3THW[2] = numbers[:w] + position
        position += max(h, w)
    return positions_3T


def _rows(grid_N3: Array | None, *, frames: bool = False) -> Iterator[list[int]]:
    if grid_N3 is None:
        return iter(())
    if frames:
        grid_N3 = np.repeat(grid_N3, grid_N3[:, 0], axis=0)
        grid_N3[:, 0] = 1
    return iter(grid_N3.tolist())


def _times(rule: Rule, vision_config: Config, tokens: Tokens) -> Iterator[float | Tensor]:
    """Yield the interval between the frames of every video."""
    seconds = [1] * tokens.kinds_BS.size if rule.seconds is None or tokens.seconds is None else tokens.seconds
    scale = 1 if rule.seconds is None else vision_config.tokens_per_second
    for second in seconds:
        yield scale * (int(second) if rule.seconds == "whole" else second)


def _spaced(count: int, interval: float | Tensor) -> Array:
    """Return the first multiples of an interval, rounded as transformers rounds them."""
    if isinstance(interval, int):
        return np.arange(count) * interval
    with torch.device("cpu"):
        return (torch.arange(count) * interval).long().numpy()


def placeholder_masks(
    config: Config, video_token: str, ids: Tensor, ids_BS: Array, embeddings: Tensor, features: Sequence[Tensor | None]
) -> tuple[Tensor, Tensor] | None:
    """Return which tokens stand for images and for videos, (B, S, 1) each, without waiting for the device.

    Args:
        config: Of the model.
        video_token: The name of the config's field that marks videos: some families mark them as images.
        ids: The input ids (B, S).
        ids_BS: The same on the host.
        embeddings: Of the tokens (B, S, E).
        features: Those of images and of videos (M, E); None for features that are not checked.

    Returns:
        None if the number of placeholders is another than the number of features.
    """
    tokens = (config.image_token_id, getattr(config, video_token))
    for token, tensor in zip(tokens, features, strict=True):
        if tensor is not None and int((ids_BS == token).sum()) * embeddings.shape[-1] != tensor.numel():
            return None
    image_mask, video_mask = [(ids == token).unsqueeze(-1).to(embeddings.device) for token in tokens]
    return image_mask, video_mask


def positions_of(copies: HostCopies, rule: Rule, config: Config, arguments: Arguments) -> tuple[Tensor, Tensor] | None:
    """Return what `get_rope_index` returns for its arguments; None for calls that transformers must serve.

    Args:
        copies: Tensors that are on the host already.
        rule: How the family numbers frames.
        config: Of the model.
        arguments: By name. Those that no rule reads are ignored, as transformers ignores them.
    """
    tensors = {name: arguments[name] for name in ROPE_INPUTS if arguments.get(name) is not None}
    seconds = tensors.get("second_per_grid_ts")
    if rule.seconds is None or isinstance(seconds, list | tuple):
        tensors.pop("second_per_grid_ts", None)
    ids = tensors.get("input_ids")
    shapes = {tuple(tensors[name].shape) for name in ROPE_INPUTS[:3] if isinstance(tensors.get(name), Tensor)}
    if ids is None or ids.dtype != torch.long or len(shapes) != 1 or len(next(iter(shapes))) != 2:
        return None
    if "mm_token_type_ids" not in tensors:
        return None
    if not all(is_plain(tensor, name) for name, tensor in tensors.items()):
        return None
    arrays = dict(zip(tensors, copies.read(list(tensors.values())), strict=True))
    if "second_per_grid_ts" in tensors and isinstance(seconds, Tensor):
        bits = torch.from_numpy(arrays["second_per_grid_ts"])
        seconds = (bits.view(torch.float64) if seconds.is_floating_point() else bits).to(seconds.dtype)
    mask = arrays.get("attention_mask")
    tokens = Tokens(
        kinds_BS=arrays["mm_token_type_ids"],
        kept_BS=np.ones(ids.shape, bool) if mask is None else mask != 0,
        images_N3=arrays.get("image_grid_thw"),
        videos_N3=arrays.get("video_grid_thw"),
        seconds=seconds,
    )
    return rope_index(rule, config.vision_config, tokens, ids)


ROPE_INPUTS = (
    "input_ids",
    "mm_token_type_ids",
    "attention_mask",
    "image_grid_thw",
    "video_grid_thw",
    "second_per_grid_ts",
)
"""Arguments that positions are computed of; the first three have one shape."""


def is_plain(tensor: object, name: str) -> TypeGuard[Tensor]:
    """Return whether an argument is a tensor of a kind that we read: of torch's own class, and of whole numbers."""
    if type(tensor) is not Tensor or tensor.layout != torch.strided or tensor.is_complex():
        return False
    if name.endswith("grid_thw"):
        return tensor.dim() == 2 and tensor.shape[1] == 3 and not tensor.is_floating_point()
    return name == "second_per_grid_ts" or not tensor.is_floating_point()
