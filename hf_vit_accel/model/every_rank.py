"""One call of the tower in every forward, whatever the batch of a rank holds, for distributed training.

FSDP2 and ZeRO-3 gather the weights of the tower when it is called, and DDP waits for gradients of all parameters. So a
rank without pictures, or with images and videos, must call the tower as often as every other rank: once.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import transformers
from torch import Tensor, nn

from hf_vit_accel import machine
from hf_vit_accel.families import Family, Model, Tower, find_towers
from hf_vit_accel.families.interface import FIELDS, Form
from hf_vit_accel.model.host import Arguments, Result
from hf_vit_accel.tower import fsdp
from hf_vit_accel.tower.state import state_of

FEATURES = "_hf_vit_accel_features"
"""The attribute of a text model with the `Features` of the model around it."""
KINDS = {"image": ("pixel_values", "image_grid_thw"), "video": ("pixel_values_videos", "video_grid_thw")}
"""Kinds of pictures, with the arguments of a model's forward for their pixels and their grid."""


@dataclass(kw_only=True, eq=False)
class Features:
    """The features of the latest forward, encoded in one call of the tower, and counts of all forwards.

    Attributes:
        outputs: The pixels that the latest forward was given, and their part of the output.
        zero: The sum of its dummy's features with weight zero; None with real pictures.
        tower_calls: Calls of the tower until the end of the latest forward.
    """

    outputs: list[tuple[Tensor, Result]] = field(default_factory=list)
    zero: Tensor | None = None
    calls: int = 0
    dummies: int = 0
    tower_calls: int = 0

    def __reduce__(self) -> tuple[object, ...]:  # copies keep nothing: a graph cannot be copied
        return type(self), ()

    def clear(self) -> None:
        self.outputs = []
        self.zero = None

    def find(self, pixels: object) -> Result:
        """Return the output for these pixels; None if this forward has not encoded them."""
        return next((output for source, output in self.outputs if source is pixels), None)


def tower_in(model: nn.Module) -> tuple[str, Tower, Family] | None:
    """Return name, tower and family of the child of a model that is a tower, or wraps one; None without one."""
    for name, child in model.named_children():
        for _, tower, family in find_towers(child):
            return name, tower, family
    return None


def calls_of(tower: Tower) -> int:
    state = state_of(tower)
    return 0 if state is None else state.fast_calls + state.stock_calls


def must_call_once(tower: Tower, cache: transformers.Cache | None) -> bool:
    """Return whether a forward must call the tower exactly once, as those of all other ranks do.

    It must with gradients enabled. Without them, it must if FSDP2 or ZeRO-3 gather the weights, unless the cache holds
    tokens: then every rank decodes, and none calls the tower.
    """
    if torch.is_grad_enabled():
        return True
    if cache is not None and int(cache.get_seq_length()) > 0:
        return False
    is_sharded = any(isinstance(module, fsdp.wrapper()) for module in tower.modules())
    return is_sharded or any(hasattr(parameter, "ds_id") for parameter in tower.parameters())


def encode_once(features: Features, model: Model, arguments: Arguments, options: Arguments) -> None:
    """Encode all images and videos of a forward, or a dummy, in one call of the tower."""
    separate = [name for name in options if name.startswith(("image_", "video_"))]
    if separate:
        raise ValueError(f"every_rank encodes images and videos in one call, so {separate} cannot be used; drop them")
    in_model = tower_in(model)
    assert in_model is not None
    _, tower, family = in_model
    features.clear()
    features.calls += 1
    if arguments.get("input_ids") is None and calls_of(tower) > features.tower_calls:
        return  # the caller has encoded the pictures, as transformers' ColQwen2 does
    present = [names for names in KINDS.values() if arguments.get(names[0]) is not None]
    pictures = [(arguments[pixels], arguments[grid]) for pixels, grid in present]
    if pictures:
        features.outputs = encode_together(model, family, pictures, options)
        return
    features.dummies += 1
    output = type(model).get_image_features(model, *_dummy(tower, arguments), return_dict=True, **options)
    # The weight comes before the sum, which could overflow in fp16.
    features.zero = torch.stack([(tensor * 0).sum() for tensor in _tensors_of(output)]).sum()


def encode_together(
    model: Model, family: Family, pictures: list[tuple[Tensor, Tensor]], options: Arguments
) -> list[tuple[Tensor, Result]]:
    """Encode pixels and grids of images and of videos in one call; return the pixels with their outputs."""
    grids = [_frames_apart(grid, family) for _, grid in pictures]
    all_pixels = torch.cat([pixels for pixels, _ in pictures])
    output = type(model).get_image_features(model, all_pixels, torch.cat(grids), return_dict=True, **options)
    outputs = []
    first = 0
    for (pixels, _), grid in zip(pictures, grids, strict=True):
        outputs.append((pixels, _part(output, first, first + len(grid))))
        first += len(grid)
    return outputs


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


def _tensors_of(output: Result) -> list[Tensor]:
    """Return the features of an output; versions of transformers differ in the form of those of deepstack."""
    tensors: list[Tensor] = []
    for group in (output.pooler_output, *(output.get("deepstack_features") or ())):
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


def add_dummy(text: nn.Module, args: tuple[object, ...], kwargs: Arguments) -> object:
    """Add the dummy's zero to the embeddings, through which all losses go; a forward pre-hook of the text model.

    Further on, backward passes of ranks with and without pictures would gather weights in another order.
    """
    features: Features | None = vars(text).get(FEATURES)
    embeddings = kwargs.get("inputs_embeds")
    if features is None or features.zero is None or embeddings is None:
        return None
    zero = features.zero.to(embeddings.device, embeddings.dtype)
    features.zero = None
    return args, {**kwargs, "inputs_embeds": embeddings + zero}


class _Tower(nn.Module):
    """A stand-in for the tower in a trial: merged tokens are sums of patches, deepstack features multiples."""

    dtype = torch.float32

    def __init__(self, tower: Tower, family: Family) -> None:
        super().__init__()
        self.config = tower.config
        self.spatial_merge_size = tower.config.spatial_merge_size
        output_class = family.output_class(tower)
        self._form = Form(tuple if family.deepstack else Tensor)
        if output_class is not None:
            self._form = Form(output_class, FIELDS if family.deepstack else FIELDS[:2])

    def forward(self, pixels: Tensor, grid_thw: Tensor, **options: object) -> Result:
        merged = pixels.reshape(-1, self.spatial_merge_size**2, pixels.shape[1]).sum(1)
        return self._form.build([pixels, merged, merged * 2, merged * 3])


def try_out(trial: Callable[[Model, Family, int], None], model: Model) -> str | None:
    """Run a trial of a model with a stand-in for its tower; return why it failed, or None."""
    in_model = tower_in(model)
    if in_model is None:
        return "the model holds no supported tower"
    name, tower, family = in_model
    twin = copy.copy(model)
    stand_in = _Tower(tower, family)
    vars(twin)["_modules"] = model._modules | {name: stand_in}
    for method in ("get_image_features", "get_video_features"):
        vars(twin).pop(method, None)

    def run() -> None:
        with torch.device("cpu"), torch.no_grad():
            trial(twin, family, stand_in.spatial_merge_size)

    try:
        machine.run_isolated(run)
    except Exception as error:  # of transformers' method, or of a comparison
        return machine.one_line(error)
    return None


def try_one_call(model: Model, family: Family, merge: int) -> None:
    """Compare the features of images and videos after one call with those after transformers' calls."""
    grids = [
        torch.tensor([[1, merge, 2 * merge], [1, merge, merge]]),
        torch.tensor([[2, merge, merge], [1, merge, 3 * merge]]),
    ]
    generator = torch.Generator("cpu").manual_seed(0)  # the global one is the user's
    pictures = [(torch.rand(int(grid.prod(1).sum()), 4, generator=generator), grid) for grid in grids]
    outputs = encode_together(model, family, pictures, {})
    methods = type(model).get_image_features, type(model).get_video_features
    for method, picture, (_, output) in zip(methods, pictures, outputs, strict=True):
        expected = method(model, *picture, return_dict=True)
        is_equal = output.keys() >= {name for name in expected if name.endswith(("pooler_output", "features"))}
        if not is_equal or not torch.equal(torch.cat(_tensors_of(output)), torch.cat(_tensors_of(expected))):
            raise ValueError(f"{type(model).__name__} encodes images and videos differently")


def try_host_grids(model: Model, family: Family, merge: int) -> None:
    """Run the methods for features on the meta device with a grid on the CPU: mixing the two is an error."""
    grid = torch.tensor([[1, merge, 2 * merge], [3, merge, merge]])
    pixels = torch.empty(5 * merge * merge, 4, device="meta")
    for method in (type(model).get_image_features, type(model).get_video_features):
        method(model, pixels, grid)
