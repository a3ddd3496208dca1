"""The forward of a prompt in groups of rows of similar length: rows of a group share little padding.

Every group is a forward of transformers on the inputs of its rows, without the columns that all of them pad. Its keys
and values go to their rows of the call's cache.
`B` rows of a batch, `G` rows of a group, `T` columns of a prompt, `V` vocabulary.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer
from transformers.modeling_outputs import CausalLMOutputWithPast

from hf_vit_accel.decoding.layers import check_equal
from hf_vit_accel.decoding.packed import CACHE, Arguments, PackedPrompt
from hf_vit_accel.decoding.room import Room, Size, make_room, on_device
from hf_vit_accel.decoding.steps import spare_bytes
from hf_vit_accel.decoding.text_models import Model

RoomFor: TypeAlias = Callable[[Arguments, Sequence[Any], Sequence[int] | None], Room]
"""Inputs, layers of a group's cache, lengths of rows that may share an axis -> room for the keys of all rows."""
GROUP_TOKENS = 16384
"""The most tokens of a group with its padding. Products are at their full rate with a quarter of it."""
TOKENS_OF_A_FORWARD = 2500
"""The launches of one more forward take the host as long as so many tokens take the device (8B, H200: 60 ms)."""
_FEATURES = "mm_encoder_outputs"
"""Features that `generate` of newer transformers computes before the prompt's forward, by modality."""
_PER_COLUMN = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")
"""Inputs of shape (B, T)."""


@dataclass(frozen=True)
class Modality:
    """The names of the inputs of pictures, or of videos.

    Attributes:
        token: The config's name of the token that stands for a merged patch.
        grid: The grid of every picture.
        pixels: Their patches, one after the other.
        others: What else has one value a picture.
    """

    token: str
    grid: str
    pixels: str
    others: tuple[str, ...] = ()


_MODALITIES = {
    "image": Modality("image_token_id", "image_grid_thw", "pixel_values"),
    "video": Modality("video_token_id", "video_grid_thw", "pixel_values_videos", ("second_per_grid_ts",)),
}
_PER_PICTURE = {name for names in _MODALITIES.values() for name in (names.grid, names.pixels, *names.others)}


def check_features(model: Model, features: Mapping[str, Any]) -> None:
    """Raise ValueError for features that no call of this model takes. Another dtype or device is no error."""
    is_named = isinstance(features, Mapping) and features.keys() <= _MODALITIES.keys()
    if not is_named or any(getattr(output, "pooler_output", None) is None for output in features.values()):
        given = {name: type(x).__name__ for name, x in features.items()} if isinstance(features, Mapping) else features
        raise ValueError(
            f'expected features as {{"image": output}}, {{"video": output}} or both, got {given}: pass what '
            "model.get_image_features(..., return_dict=True) returned, or get_video_features."
        )
    width = model.config.get_text_config().hidden_size
    indexes = getattr(getattr(model.config, "vision_config", None), "deepstack_visual_indexes", None) or ()
    for modality, output in features.items():
        of_layers = output.get("deepstack_features")
        layers = of_layers or ()
        widths: set[int] = set()
        for of_layer in (output.pooler_output, *layers):
            tensors = [of_layer] if isinstance(of_layer, Tensor) else of_layer
            widths.update(tensor.shape[-1] for tensor in tensors)
        # A tower with fewer blocks never reaches some of its deepstack layers.
        if widths - {width} or len(layers) > len(indexes) or (of_layers is None and indexes):
            raise ValueError(
                f"expected features of width {width} and of {len(indexes)} deepstack layers for {modality}s, got "
                f"{sorted(widths)} and {len(layers)}: encode them with the model that decodes."
            )


def _output_of(output: Any, pictures: Sequence[int]) -> Any:
    """Return an output with the features of some pictures, in the form that they have."""
    fields: Arguments = {"pooler_output": [output.pooler_output[index] for index in pictures]}
    if output.get("deepstack_features") is not None:
        fields["deepstack_features"] = layers = []
        for layer in output.deepstack_features:
            is_joined = isinstance(layer, Tensor)
            of_pictures = layer.split([len(picture) for picture in output.pooler_output]) if is_joined else layer
            cut = [of_pictures[index] for index in pictures]
            layers.append(torch.cat(cut) if is_joined and cut else cut)
    return type(output)(**fields)


def plan_groups(lengths: Sequence[int], most: int) -> list[list[int]]:
    """Divide the rows of a batch into groups that take the least time together.

    Args:
        lengths: The tokens of every row.
        most: The tokens of a group, padding included; a longer row is a group of its own.

    Returns:
        The rows of every group. Rows of one group follow each other when all are sorted by length.
    """
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    costs = [0]  # of the first rows, grouped best
    begins = [0]
    for end in range(1, len(order) + 1):
        longest = lengths[order[end - 1]]
        first = max(0, end - max(1, most // longest))
        cost, begin = min((costs[begin] + (end - begin) * longest, begin) for begin in range(first, end))
        costs.append(cost + TOKENS_OF_A_FORWARD)
        begins.append(begin)
    groups: list[list[int]] = []
    end = len(order)
    while end:
        groups.append(order[begins[end] : end])
        end = begins[end]
    return groups


def in_two(rows: list[int]) -> list[list[int]]:
    """Divide a group in two."""
    return [rows[: len(rows) // 2], rows[len(rows) // 2 :]]


def bytes_left(device: torch.device) -> int:
    """Return the bytes that a group may take. On a CPU there is no bound."""
    return spare_bytes(device) if device.type == "cuda" else sys.maxsize


def bytes_of_slot(model: Model) -> int:
    """Return the bytes of the keys and values of a token."""
    config = model.config.get_text_config()
    of_token: int = 2 * config.num_hidden_layers * config.num_key_value_heads * _head_dim(config)
    return of_token * model.dtype.itemsize


def bytes_of_group(model: Model, rows: int, columns: int) -> int:
    """Estimate the bytes of a group's forward, without its keys and values.

    A token has up to 16 hidden states at once: some 7 in a layer, the others are features of pictures. Its heads and
    the MLP's inner states are there three times, the logits of a row twice. Forwards of 2 to 16 thousand tokens took
    0.41 to 0.84 of the estimate (H200, Qwen2.5-VL-7B and Qwen3-VL-8B, pictures and text alone).
    """
    config = model.config.get_text_config()
    heads = config.num_attention_heads + config.num_key_value_heads
    of_experts = (getattr(config, "num_experts_per_tok", None) or 0) * getattr(config, "moe_intermediate_size", 0)
    inner = max(getattr(config, "intermediate_size", 0), of_experts)
    of_token = 16 * config.hidden_size + 3 * (heads * _head_dim(config) + inner)
    numbers: int = rows * (columns * of_token + 2 * config.vocab_size)
    return numbers * model.dtype.itemsize


def _head_dim(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


class GroupedPrompt:
    """The inputs of a prompt, as transformers prepared them, to be cut by rows.

    Args:
        encoded: What the model's methods returned for all images, or videos, by modality. Packed groups take their rows
            from it, and encode no pixels.

    Attributes:
        groups: The rows of every group; none for a prompt that cannot be cut.
        columns: Of the whole prompt.
        lengths_B: The columns of every row from its first token on.
    """

    def __init__(self, model: Model, inputs: Arguments, encoded: Mapping[str, Any] | None = None) -> None:
        self._model = model
        self._inputs = inputs
        self._encoded = encoded or {}
        self._merge: int = getattr(getattr(model.config, "vision_config", None), "spatial_merge_size", 0)
        self._pictures: dict[str, list[range]] = {}  # of every row, by modality
        self._patches: dict[str, list[int]] = {}  # of every picture
        self.lengths_B: list[int] = []
        self.columns = 0
        self.groups: list[list[int]] = []
        ids_BT = inputs.get("input_ids")
        if isinstance(ids_BT, Tensor) and ids_BT.numel() and self._can_be_cut(ids_BT):
            self.columns = ids_BT.shape[1]
            self.lengths_B = self._lengths(ids_BT)
            self.groups = plan_groups(self.lengths_B, GROUP_TOKENS)

    def _can_be_cut(self, ids_BT: Tensor) -> bool:
        """Return whether every input is known, and so are the pictures of every row."""
        inputs = self._inputs
        positions = inputs.get("position_ids")
        known = {CACHE, _FEATURES, "position_ids", *_PER_COLUMN, *_PER_PICTURE}
        if not all(name in known or isinstance(value, bool | int | None) for name, value in inputs.items()):
            return False
        if not isinstance(positions, Tensor) or positions.shape[-2:] != ids_BT.shape:
            return False
        if any(inputs[name].shape != ids_BT.shape for name in _PER_COLUMN if inputs.get(name) is not None):
            return False
        if {type(layer) for layer in inputs[CACHE].layers} != {DynamicLayer}:
            return False
        return all(self._find_pictures(modality, ids_BT) for modality in _MODALITIES)

    def _find_pictures(self, modality: str, ids_BT: Tensor) -> bool:
        """Find which pictures every row has; False if its tokens are not those of complete pictures."""
        names = _MODALITIES[modality]
        features = self._features_of(modality)
        grid_N3 = self._inputs.get(names.grid)
        pixels = self._inputs.get(names.pixels)
        if features is not None:
            # Some models return one tensor of all pictures, of which an index is no picture.
            per_picture = [features.pooler_output, *(features.get("deepstack_features") or ())]
            if any(not isinstance(of_pictures, list | tuple) for of_pictures in per_picture):
                return False
            tokens = [len(of_picture) for of_picture in features.pooler_output]
            if any([len(of_picture) for of_picture in of_pictures] != tokens for of_pictures in per_picture):
                return False
        elif grid_N3 is not None and pixels is not None:
            self._patches[modality] = [frames * height * width for frames, height, width in grid_N3.tolist()]
            if not self._merge or len(pixels) != sum(self._patches[modality]):
                return False
            tokens = self._tokens(modality)
        else:
            return all(self._inputs.get(name) is None for name in (names.grid, names.pixels, *names.others))
        token = getattr(self._model.config, names.token, None)
        if token is None:
            return False
        pictures_of_row = []
        end = 0
        for missing in (ids_BT == token).sum(1).tolist():
            begin = end
            while missing > 0 and end < len(tokens):
                missing -= tokens[end]
                end += 1
            if missing:
                return False
            pictures_of_row.append(range(begin, end))
        self._pictures[modality] = pictures_of_row
        return end == len(tokens)

    def _tokens(self, modality: str) -> list[int]:
        """Return the tokens of every picture."""
        return [patches // self._merge**2 for patches in self._patches[modality]]

    def _features_of(self, modality: str) -> Any:
        return (self._inputs.get(_FEATURES) or {}).get(modality)

    def _lengths(self, ids_BT: Tensor) -> list[int]:
        """Return the columns of every row from its first token on, or from its first picture."""
        mask_BT = self._inputs.get("attention_mask")
        if mask_BT is None:
            return [self.columns] * len(ids_BT)
        is_kept_BT = mask_BT != 0
        for modality in self._pictures:  # also pictures that the mask hides
            is_kept_BT |= ids_BT == getattr(self._model.config, _MODALITIES[modality].token)
        return [self.columns - first for first in is_kept_BT.int().argmax(1).tolist()]

    def may_be_packed(self) -> bool:
        """Return whether the last column is of tokens in all rows."""
        mask_BT = self._inputs.get("attention_mask")
        return mask_BT is None or bool((mask_BT[:, -1] != 0).all())

    def names(self) -> frozenset[str]:
        """Return the names of the inputs that are given, and the modalities of features."""
        inputs = self._inputs | (self._inputs.get(_FEATURES) or {}) | {_FEATURES: None}
        return frozenset(name for name, value in inputs.items() if value is not None)

    def run(
        self, room_for: RoomFor, packed: PackedPrompt | None = None, places: Sequence[int] | None = None
    ) -> CausalLMOutputWithPast:
        """Run every group, one after the other; return what a forward of all rows would: the last column's logits.

        A group that the free memory does not hold is halved, and so is one for which memory runs out all the same.

        Args:
            room_for: Called once, by the first group or before it.
            packed: Runs the groups instead of transformers' text model.
            places: Of the rows in the room, where it has others, too.
        """
        cache = self._inputs[CACHE]
        room: Room | None = None
        empty: Any = None
        if packed is None:
            empty = copy.deepcopy(cache)
        else:
            room = room_for(self._inputs, packed.layers, self.lengths_B)
        logits_B1V: Tensor | None = None
        groups = list(self.groups)
        while groups:
            rows = groups.pop()
            columns = max(self.lengths_B[row] for row in rows)
            if len(rows) > 1 and bytes_of_group(self._model, len(rows), columns) > bytes_left(self._model.device):
                groups += in_two(rows)
                continue
            of_group: Any = None
            logits_G1V: Tensor | None = None
            try:
                if packed is None:
                    of_group = copy.deepcopy(empty)
                    logits_G1V = self._model(**self.inputs_of(rows, of_group, columns), return_dict=True).logits[:, -1:]
                else:
                    assert room is not None
                    places_G = rows if places is None else [places[row] for row in rows]
                    encoded = self.encoded_of(rows)
                    logits_G1V = packed.logits(self.inputs_of(rows, None, columns), places_G, room, encoded)
            except torch.OutOfMemoryError:
                if len(rows) == 1:
                    raise
            if logits_G1V is None:  # by now nothing holds the tensors of the forward
                groups += in_two(rows)
                continue
            rows_G = on_device(rows, logits_G1V.device)
            if logits_B1V is None:
                logits_B1V = logits_G1V.new_zeros(len(self.lengths_B), 1, logits_G1V.shape[-1])
            logits_B1V.index_copy_(0, rows_G, logits_G1V)
            if packed is None:
                if room is None:
                    room = room_for(self._inputs, of_group.layers, None)
                    room.give_to(cache, self.columns)
                self._collect(cache, of_group, rows_G)
        if packed is not None:
            assert room is not None
            room.give_to(cache, self.columns)
        return CausalLMOutputWithPast(logits=logits_B1V, **{CACHE: cache})

    def prove(self, packed: PackedPrompt) -> None:
        """Run the longest two rows both ways; ArithmeticError where results differ by more than rounding."""
        rows = self.groups[-1][-2:]
        columns = max(self.lengths_B[row] for row in rows)
        mask_BT = self._inputs.get("attention_mask")
        cache = copy.deepcopy(self._inputs[CACHE])
        expected = self._model(**self.inputs_of(rows, cache, columns), return_dict=True).logits[:, -1:]
        room = make_room(packed.layers, Size(len(rows), packed.columns, packed.columns))
        logits = packed.logits(self.inputs_of(rows, None, columns), range(len(rows)), room, self.encoded_of(rows))
        check_equal(logits, expected, "a packed prompt differs")
        for layer, of_stock in zip(room.layers, cache.layers, strict=True):
            for ours, theirs in ((layer.keys, of_stock.keys), (layer.values, of_stock.values)):
                for index, row in enumerate(rows):
                    is_token_C = slice(None) if mask_BT is None else mask_BT[row, -columns:] != 0
                    ours_KTD = ours[index, :, -columns:][:, is_token_C]
                    check_equal(ours_KTD, theirs[index][:, is_token_C], "a packed prompt differs")

    def inputs_of(self, rows: Sequence[int], cache: Any, columns: int) -> Arguments:
        """Return the inputs of some rows: their last columns."""
        inputs = self._inputs | {CACHE: cache}
        rows_G = on_device(rows, inputs["input_ids"].device)
        for name in ("position_ids", *_PER_COLUMN):
            if inputs.get(name) is not None:
                rows_of_group = inputs[name].index_select(-2, rows_G.to(inputs[name].device))
                inputs[name] = rows_of_group[..., -columns:].contiguous()
        if inputs.get(_FEATURES) is not None:
            inputs[_FEATURES] = {}
        for modality in self._pictures:
            self._cut_pictures(inputs, modality, self._pictures_of(modality, rows))
        return inputs

    def _pictures_of(self, modality: str, rows: Sequence[int]) -> list[int]:
        return [index for row in rows for index in self._pictures[modality][row]]

    def why_encoded_again(self) -> list[str]:
        """Report which of the given features packed groups do not take."""
        reasons = []
        for modality, output in self._encoded.items():
            if self._features_of(modality) is not None:
                reasons.append(f"generate encodes {modality}s itself, and takes mm_encoder_outputs")
            elif modality not in self._patches:
                reasons.append(f"features of {modality}s, of which the call has none")
            elif not self._fits(modality, output):
                count = len(output.pooler_output)
                reasons.append(f"features of {count} {modality}s do not fit the call's {len(self._patches[modality])}")
        return reasons

    def _fits(self, modality: str, output: Any) -> bool:
        is_per_picture = isinstance(output.pooler_output, list | tuple)
        return is_per_picture and [len(picture) for picture in output.pooler_output] == self._tokens(modality)

    def encoded_of(self, rows: Sequence[int]) -> dict[str, Any]:
        """Return the features of some rows that are encoded already, by modality, unless they are of another call."""
        encoded = {}
        for modality in self._encoded.keys() & self._patches.keys():
            output = self._encoded[modality]
            if self._fits(modality, output):
                encoded[modality] = _output_of(output, self._pictures_of(modality, rows))
        return encoded

    def _cut_pictures(self, inputs: Arguments, modality: str, pictures: Sequence[int]) -> None:
        """Replace features or pixels by those of some pictures; by None if there are none: a tower takes no less."""
        names = _MODALITIES[modality]
        features = self._features_of(modality)
        if features is not None and pictures:
            inputs[_FEATURES][modality] = _output_of(features, pictures)
        if inputs.get(names.pixels) is not None:
            inputs[names.pixels] = self._pixels_of(modality, pictures)
        for name in (names.grid, *names.others):
            if isinstance(inputs.get(name), Tensor):
                inputs[name] = inputs[name][on_device(pictures, inputs[name].device)] if pictures else None
            elif inputs.get(name) is not None:
                inputs[name] = [inputs[name][index] for index in pictures] or None

    def _pixels_of(self, modality: str, pictures: Sequence[int]) -> Tensor | None:
        """Return the pixels of some pictures: a view where they follow each other; None of no picture."""
        if not pictures:
            return None
        pixels: Tensor = self._inputs[_MODALITIES[modality].pixels]
        patches = self._patches[modality]
        first, last = pictures[0], pictures[-1]
        if list(pictures) == list(range(first, last + 1)):
            return pixels[sum(patches[:first]) : sum(patches[: last + 1])]
        of_pictures = pixels.split(patches)
        return torch.cat([of_pictures[index] for index in pictures])

    def _collect(self, cache: Any, group_cache: Any, rows_G: Tensor) -> None:
        """Move keys and values of a group to its rows of the call's cache, at the right end of their columns."""
        for layer, of_group in zip(cache.layers, group_cache.layers, strict=True):
            columns = of_group.keys.shape[2]
            for name in ("keys", "values"):
                states = getattr(of_group, name)
                getattr(layer, name)[:, :, -columns:].index_copy_(0, rows_G.to(states.device), states)
                setattr(of_group, name, None)
