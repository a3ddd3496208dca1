"""One call of the tower in every forward, whatever the batch of a rank holds, for distributed training.

FSDP2 and ZeRO-3 gather the weights of the tower when it is called, and DDP waits for gradients of all parameters. So a
rank without pictures, or with images and videos, must call the tower as often as every other rank: once.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import transformers
from torch import Tensor, nn

from hf_vit_accel.families import Family, Model, Tower
from hf_vit_accel.model.positions import Arguments, Result
from hf_vit_accel.tower import fsdp
from hf_vit_accel.tower.forward import own_hooks

KINDS = {"image": ("pixel_values", "image_grid_thw"), "video": ("pixel_values_videos", "video_grid_thw")}
"""Kinds of pictures, with the arguments of a model's forward for their pixels and their grid."""


@dataclass(kw_only=True, eq=False)
class Features:
    """The features of one forward, encoded in one call of the tower.

    Attributes:
        outputs: By kind of picture: the pixels that the forward was given, and their part of the output.
        zero: The sum of a dummy's features with weight zero, to be added to the embeddings; None with real pictures.
        calls: Forwards that called the tower once.
        dummies: How many of them encoded a dummy.
    """

    outputs: dict[str, tuple[Tensor, Result]] = field(default_factory=dict)
    zero: Tensor | None = None
    calls: int = 0
    dummies: int = 0

    def take(self, kind: str, pixels: object) -> Result:
        """Return the output for these pixels, once; None if they are not part of this forward."""
        if kind not in self.outputs or self.outputs[kind][0] is not pixels:
            return None
        return self.outputs.pop(kind)[1]


def applies(tower: Tower, cache: transformers.Cache | None) -> bool:
    """Return whether a forward calls the tower exactly once.

    It does so with gradients enabled. Without them, it does so for weights that FSDP2 or ZeRO-3 gather, except where
    the cache holds tokens: then every rank decodes.
    """
    if torch.is_grad_enabled():
        return True
    if cache is not None and int(cache.get_seq_length()) > 0:
        return False
    is_sharded = any(isinstance(module, fsdp.wrapper()) for module in tower.modules())
    return is_sharded or any(hasattr(parameter, "ds_id") for parameter in tower.parameters())


def encode_once(
    features: Features,
    encode: Callable[..., Result],
    tower: Tower,
    family: Family,
    arguments: Arguments,
    options: Arguments,
) -> None:
    """Encode all images and videos of a forward, or a dummy, in one call of the tower.

    Args:
        features: Receives the result.
        encode: The model's `get_image_features`.
        tower: The tower.
        family: Its family.
        arguments: The named arguments of the forward.
        options: Its other keyword arguments, which reach the tower.

    Raises:
        ValueError: The caller supplies metadata of images or videos alone.
    """
    separate = [name for name in options if name.startswith(("image_", "video_"))]
    if separate:
        raise ValueError(f"every_rank encodes images and videos in one call, so {separate} cannot be used; drop them")
    features.outputs.clear()
    features.zero = None
    present = {kind: names for kind, names in KINDS.items() if arguments.get(names[0]) is not None}
    grids = {kind: _frames_apart(arguments[grid], family) for kind, (_, grid) in present.items()}
    pixels = [arguments[name] for name, _ in present.values()]
    if present:
        output = encode(torch.cat(pixels), torch.cat(list(grids.values())), return_dict=True, **options)
    else:
        output = encode(*_dummy(tower, arguments), return_dict=True, **options)
        tensors = [*output.pooler_output, *_flat(output.get("deepstack_features") or ())]
        # The weight comes before the sum, which could overflow in fp16.
        features.zero = torch.stack([(tensor * 0).sum() for tensor in tensors]).sum()
        features.dummies += 1
    features.calls += 1
    entry = 0
    for (kind, grid), tensor in zip(grids.items(), pixels, strict=True):
        features.outputs[kind] = tensor, _part(output, entry, entry + len(grid))
        entry += len(grid)


def _frames_apart(grid: Tensor, family: Family) -> Tensor:
    """Return a grid with one row a frame for families whose towers take images only, as their models do."""
    if family.videos:
        return grid
    sides = grid[:, 1:].repeat_interleave(grid[:, 0], dim=0)
    return torch.cat([torch.ones_like(sides[:, :1]), sides], dim=1)


def _dummy(tower: Tower, arguments: Arguments) -> tuple[Tensor, Tensor]:
    """Return the pixels and the grid of a black picture of one merged token."""
    ids = arguments.get("input_ids")
    device = (arguments["inputs_embeds"] if ids is None else ids).device
    config = tower.config
    merge = config.spatial_merge_size
    width = config.in_channels * config.temporal_patch_size * config.patch_size**2
    pixels = torch.zeros(merge * merge, width, dtype=tower.dtype, device=device)
    return pixels, torch.tensor([[1, merge, merge]], device=device)


def _flat(groups: Sequence[Tensor | Sequence[Tensor]]) -> list[Tensor]:
    """Return the tensors in a list of tensors and tuples of tensors: versions of transformers differ."""
    tensors: list[Tensor] = []
    for group in groups:
        tensors += [group] if isinstance(group, Tensor) else group
    return tensors


def _part(output: Result, first: int, end: int) -> Result:
    """Return the output for the pictures from `first` to `end`."""
    sizes = [len(tensor) for tensor in output.pooler_output]
    rows = slice(sum(sizes[:first]), sum(sizes[:end]))
    parts: Arguments = {"pooler_output": output.pooler_output[first:end]}
    if output.get("deepstack_features") is not None:
        groups = output.deepstack_features
        parts["deepstack_features"] = [
            group[rows] if isinstance(group, Tensor) else group[first:end] for group in groups
        ]
    return type(output)(**parts)


@dataclass(eq=False)
class AddDummy:
    """Forward pre-hook of the text model: add the dummy's zero to the embeddings, through which all losses go."""

    features: Features

    def __call__(self, text: nn.Module, args: tuple[object, ...], kwargs: Arguments) -> object:
        zero = self.features.zero
        embeddings = kwargs.get("inputs_embeds")
        if zero is None or embeddings is None:
            return None
        self.features.zero = None
        return args, {**kwargs, "inputs_embeds": embeddings + zero.to(embeddings.device, embeddings.dtype)}


def add_dummies(model: Model, features: Features) -> None:
    """Give the text model of a model the hook, unless it has it."""
    text = model.language_model
    hooks = [hook for hook in text._forward_pre_hooks.values() if isinstance(hook, AddDummy)]
    if len(hooks) != 1 or hooks[0].features is not features:  # the text model is new, or the model a copy
        drop_hooks(text, AddDummy)
        text.register_forward_pre_hook(AddDummy(features), with_kwargs=True)


def drop_hooks(module: nn.Module, kinds: type | tuple[type, ...]) -> None:
    """Take hooks of these classes off a module. Its shallow copies share its dictionaries, and keep theirs."""
    own_hooks(module)
    vars(module)["_forward_hooks"] = OrderedDict(module._forward_hooks)
    for hooks in (vars(module)["_forward_pre_hooks"], vars(module)["_forward_hooks"]):
        for key, hook in list(hooks.items()):
            if isinstance(hook, kinds):
                del hooks[key]
                module._forward_pre_hooks_with_kwargs.pop(key, None)
