"""Towers as remote code ships them: own classes, an own config, an own forward; and copies that are sabotaged.

Three families, each in the manner of four versions of transformers. The manners differ in how the rotation is called,
in what a forward returns and in how attention runs. No class inherits from a tower of transformers.

`T` packed patch rows, `E` width, `H` heads, `D` head dim, `M` merged tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from tiny import randomise
from torch import Tensor, nn
from torch.nn import functional
from transformers import PretrainedConfig, PreTrainedModel
from transformers.activations import ACT2FN
from transformers.modeling_outputs import BaseModelOutput, BaseModelOutputWithPooling
from transformers.utils import ModelOutput

from hf_vit_accel.tower import trials
from support.tensors import flat

Sizes = list[tuple[int, int, int]]
Output = Tensor | tuple[Tensor, list[Tensor]] | ModelOutput
MakeNorm = Callable[[int], nn.Module]


class CopiedConfig(PretrainedConfig):
    """The config of all copies, of a class that transformers does not have."""

    model_type = "copied_vision"

    def __init__(self, **kwargs: object) -> None:
        self.depth = kwargs.pop("depth", 6)
        self.hidden_size = kwargs.pop("hidden_size", 32)
        self.num_heads = 2
        self.intermediate_size = 44
        self.out_hidden_size = kwargs.pop("out_hidden_size", 24)
        self.patch_size = 2
        self.temporal_patch_size = 2
        self.in_channels = 3
        self.spatial_merge_size = 2
        self.window_size = 16
        self.fullatt_block_indexes = [2, 5]
        self.num_position_embeddings = 36
        self.deepstack_visual_indexes = [1, 3]
        self.boost = kwargs.pop("boost", 0)
        super().__init__(**kwargs)


@dataclass(frozen=True)
class Manner:
    """The manner of a version of transformers."""

    version: str
    rotary: str  # "length" for a table of angles, "positions" for angles, "tables" for cosines and sines
    returns_output: bool  # an output object; else a tensor, or a tuple with deepstack features


MANNERS = (
    Manner("4.57", "length", False),
    Manner("5.6", "length", True),
    Manner("5.14", "positions", True),
    Manner("5.24", "tables", True),
)


# --- parts ------------------------------------------------------------------------------------------------------------


class Patches(nn.Module):
    """Embed patches by a convolution."""

    def __init__(self, config: CopiedConfig, *, bias: bool) -> None:
        super().__init__()
        kernel = (config.temporal_patch_size, config.patch_size, config.patch_size)
        self.shape = (config.in_channels, *kernel)
        self.proj = nn.Conv3d(config.in_channels, config.hidden_size, kernel, stride=kernel, bias=bias)

    def forward(self, pixels: Tensor) -> Tensor:
        rows = self.proj(pixels.to(self.proj.weight.dtype).view(-1, *self.shape))
        return rows.flatten(1)


class RootNorm(nn.Module):
    """Divide rows by their root mean square."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.variance_epsilon = 1e-6

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        scale = wide.square().mean(-1, keepdim=True).add(self.variance_epsilon).rsqrt()
        return self.weight * (wide * scale).to(x.dtype)


def frequencies(head_dim: int) -> Tensor:
    """Return the frequencies of one axis."""
    exponents = torch.arange(0, head_dim // 2, 2, dtype=torch.float32) / (head_dim // 2)
    return 10000.0**-exponents


class LengthRotary(nn.Module):
    """Return the angles of positions 0 to a length, up to transformers 5.8."""

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        self.register_buffer("inv_freq", frequencies(head_dim), persistent=False)

    def forward(self, seqlen: int) -> Tensor:
        steps = torch.arange(seqlen, device=self.inv_freq.device, dtype=self.inv_freq.dtype)
        return steps[:, None] * self.inv_freq[None]


class PositionsRotary(LengthRotary):
    """Return the angles of positions (T, 2), up to transformers 5.17."""

    def forward(self, position_ids: Tensor) -> Tensor:  # type: ignore[override]
        return (position_ids[..., None] * self.inv_freq).flatten(1)


class TablesRotary(LengthRotary):
    """Return cosines and sines of positions (T, 2)."""

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        angles = (position_ids[..., None].float() * self.inv_freq.float()).flatten(1)
        angles = angles.repeat(1, 2)
        return angles.cos(), angles.sin()


ROTARIES = {"length": LengthRotary, "positions": PositionsRotary, "tables": TablesRotary}


def turn(x_THD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate halves of heads in fp32."""
    first, second = x_THD.float().chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    rotated = x_THD.float() * cos[:, None].float() + turned * sin[:, None].float()
    return rotated.to(x_THD.dtype)


class Heads(nn.Module):
    """Attend segment by segment, in a loop of its own."""

    def __init__(self, config: CopiedConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.head_dim = config.hidden_size // config.num_heads
        self.scaling = self.head_dim**-0.5
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.proj = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, x_TE: Tensor, lengths: list[int], tables: tuple[Tensor, Tensor]) -> Tensor:
        q, k, v = self.qkv(x_TE).view(len(x_TE), 3, self.num_heads, self.head_dim).unbind(1)
        q = turn(q, *tables)
        k = turn(k, *tables)
        results = []
        for parts in zip(*(x.split(lengths) for x in (q, k, v)), strict=True):
            q_HLD, k_HLD, v_HLD = (part.transpose(0, 1) for part in parts)
            attended = functional.scaled_dot_product_attention(
                q_HLD[None], k_HLD[None], v_HLD[None], scale=self.scaling
            )
            results.append(attended[0].transpose(0, 1).flatten(1))
        return self.proj(torch.cat(results))


class PlainMlp(nn.Module):
    """Two products; their names differ between families."""

    def __init__(self, config: CopiedConfig, names: tuple[str, str, str], activation: str) -> None:
        super().__init__()
        self.names = names
        setattr(self, names[0], nn.Linear(config.hidden_size, config.intermediate_size))
        setattr(self, names[1], ACT2FN[activation])
        setattr(self, names[2], nn.Linear(config.intermediate_size, config.hidden_size))

    def forward(self, x: Tensor) -> Tensor:
        for name in self.names:
            x = getattr(self, name)(x)
        return x


class GatedMlp(nn.Module):
    """A SwiGLU with biases."""

    def __init__(self, config: CopiedConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size)
        self.act_fn = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """A layer of any family."""

    def __init__(self, config: CopiedConfig, norm: MakeNorm, mlp: nn.Module) -> None:
        super().__init__()
        self.norm1 = norm(config.hidden_size)
        self.norm2 = norm(config.hidden_size)
        self.attn = Heads(config)
        self.mlp = mlp

    def forward(self, x: Tensor, lengths: list[int], tables: tuple[Tensor, Tensor]) -> Tensor:
        x = x + self.attn(self.norm1(x), lengths, tables)
        return x + self.mlp(self.norm2(x))


class SequentialMerger(nn.Module):
    """The merger of Qwen2-VL and Qwen2.5-VL."""

    def __init__(self, config: CopiedConfig, norm: MakeNorm) -> None:
        super().__init__()
        self.hidden_size = config.hidden_size * config.spatial_merge_size**2
        self.ln_q = norm(config.hidden_size)
        self.mlp = nn.Sequential(
            nn.Linear(self.hidden_size, self.hidden_size),
            nn.GELU(),
            nn.Linear(self.hidden_size, config.out_hidden_size),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(self.ln_q(x).view(-1, self.hidden_size))


class NormedMerger(nn.Module):
    """The merger of Qwen3-VL; deepstack's normalises merged tokens."""

    def __init__(self, config: CopiedConfig, *, merged_norm: bool) -> None:
        super().__init__()
        self.hidden_size = config.hidden_size * config.spatial_merge_size**2
        self.norm = layer_norm(self.hidden_size if merged_norm else config.hidden_size)
        self.linear_fc1 = nn.Linear(self.hidden_size, self.hidden_size)
        self.act_fn = nn.GELU()
        self.linear_fc2 = nn.Linear(self.hidden_size, config.out_hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.norm(x.view(-1, *self.norm.normalized_shape)).view(-1, self.hidden_size)
        return self.linear_fc2(self.act_fn(self.linear_fc1(rows)))


def layer_norm(width: int) -> nn.LayerNorm:
    return nn.LayerNorm(width, eps=1e-6)


# --- towers -----------------------------------------------------------------------------------------------------------


@dataclass
class DeepOutput(ModelOutput):
    """The output of a copy of Qwen3-VL."""

    last_hidden_state: Tensor | None = None
    pooler_output: Tensor | None = None
    deepstack_features: list[Tensor] | None = None


class CopiedTower(PreTrainedModel):
    """The parts of a forward that all copies share, in loops over pictures."""

    config_class = CopiedConfig
    manner = MANNERS[0]
    _supports_sdpa = True

    def __init__(self, config: CopiedConfig) -> None:
        super().__init__(config)
        self.spatial_merge_size = config.spatial_merge_size
        self.patch_size = config.patch_size
        self.rotary_pos_emb = ROTARIES[self.manner.rotary](config.hidden_size // config.num_heads)
        self.make_parts(config)

    def make_parts(self, config: CopiedConfig) -> None:
        raise NotImplementedError

    def after_layer(self, x: Tensor, index: int, grid: Sizes) -> Tensor:
        """Return the rows of a layer; sabotaged copies change them."""
        return x

    def in_blocks(self, values: Tensor, h: int, w: int) -> Tensor:
        """Put the values of a frame (h, w, ...) into the order of merge blocks."""
        m = self.spatial_merge_size
        return values.view(h // m, m, w // m, m, *values.shape[2:]).transpose(1, 2).flatten(0, 3)

    def positions(self, grid: Sizes, device: torch.device) -> Tensor:
        positions = []
        for t, h, w in grid:
            frame = torch.cartesian_prod(torch.arange(h, device=device), torch.arange(w, device=device)).view(h, w, 2)
            positions.append(self.in_blocks(frame, h, w).repeat(t, 1))
        return torch.cat(positions)

    def rotation(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        if self.manner.rotary == "tables":
            return self.rotary_pos_emb(x, positions)
        if self.manner.rotary == "positions":
            half = self.rotary_pos_emb(positions)
        else:
            half = self.rotary_pos_emb(int(positions.max()) + 1)[positions].flatten(1)
        angles = torch.cat((half, half), dim=-1)
        return angles.cos(), angles.sin()

    @staticmethod
    def frames(grid: Sizes) -> list[int]:
        return [h * w for t, h, w in grid for _ in range(t)]


class CopyOfQwen2(CopiedTower):
    """A copy of Qwen2-VL's tower."""

    def make_parts(self, config: CopiedConfig) -> None:
        self.patch_embed = Patches(config, bias=False)
        names = "fc1", "act", "fc2"
        layers = [Layer(config, layer_norm, PlainMlp(config, names, "quick_gelu")) for _ in range(config.depth)]
        self.blocks = nn.ModuleList(layers)
        self.merger = SequentialMerger(config, layer_norm)

    def forward(self, hidden_states: Tensor, grid_thw: Tensor, **kwargs: object) -> Output:
        grid = [tuple(sizes) for sizes in grid_thw.tolist()]
        x = self.patch_embed(hidden_states)
        tables = self.rotation(x, self.positions(grid, x.device))
        for index, block in enumerate(self.blocks):
            x = self.after_layer(block(x, self.frames(grid), tables), index, grid)
        features = self.merger(x)
        if self.manner.returns_output:
            return BaseModelOutputWithPooling(last_hidden_state=x, pooler_output=features)
        return features


class CopyOfQwen25(CopiedTower):
    """A copy of Qwen2.5-VL's tower."""

    def make_parts(self, config: CopiedConfig) -> None:
        self.window_size = config.window_size
        self.fullatt_block_indexes = config.fullatt_block_indexes
        self.patch_embed = Patches(config, bias=False)
        self.blocks = nn.ModuleList([Layer(config, RootNorm, GatedMlp(config)) for _ in range(config.depth)])
        self.merger = SequentialMerger(config, RootNorm)

    def windows(self, grid: Sizes) -> tuple[list[int], list[int]]:
        """Return the order of merged tokens, and the rows of every window."""
        m = self.spatial_merge_size
        side = self.window_size // m // self.patch_size
        order: list[int] = []
        lengths = []
        start = 0
        for t, h, w in grid:
            tokens_THW = torch.arange(t * h * w // m**2).view(t, h // m, w // m) + start
            start += tokens_THW.numel()
            for frame in tokens_THW:
                for strip in frame.split(side, dim=0):
                    for window in strip.split(side, dim=1):
                        order += window.flatten().tolist()
                        lengths.append(window.numel() * m**2)
        return order, lengths

    def forward(self, hidden_states: Tensor, grid_thw: Tensor, **kwargs: object) -> Output:
        grid = [tuple(sizes) for sizes in grid_thw.tolist()]
        order, windows = self.windows(grid)
        unit = self.spatial_merge_size**2
        x = self.patch_embed(hidden_states)
        cos, sin = self.rotation(x, self.positions(grid, x.device))
        x, cos, sin = (y.unflatten(0, (-1, unit))[order].flatten(0, 1) for y in (x, cos, sin))
        for index, block in enumerate(self.blocks):
            lengths = self.frames(grid) if index in self.fullatt_block_indexes else windows
            x = self.after_layer(block(x, lengths, (cos, sin)), index, grid)
        features = self.merger(x)[torch.tensor(order, device=x.device).argsort()]
        if self.manner.returns_output:
            return BaseModelOutputWithPooling(last_hidden_state=x, pooler_output=features)
        return features


class CopyOfQwen3(CopiedTower):
    """A copy of Qwen3-VL's tower."""

    def make_parts(self, config: CopiedConfig) -> None:
        self.patch_embed = Patches(config, bias=True)
        self.pos_embed = nn.Embedding(config.num_position_embeddings, config.hidden_size)
        self.num_grid_per_side = int(config.num_position_embeddings**0.5)
        names = "linear_fc1", "act_fn", "linear_fc2"
        layers = [Layer(config, layer_norm, PlainMlp(config, names, "gelu_pytorch_tanh")) for _ in range(config.depth)]
        self.blocks = nn.ModuleList(layers)
        self.merger = NormedMerger(config, merged_norm=False)
        self.deepstack_visual_indexes = config.deepstack_visual_indexes
        mergers = [NormedMerger(config, merged_norm=True) for _ in self.deepstack_visual_indexes]
        self.deepstack_merger_list = nn.ModuleList(mergers)

    def table(self, grid: Sizes) -> Tensor:
        """Interpolate the position table bilinearly for every picture."""
        side = self.num_grid_per_side
        results = []
        device = self.pos_embed.weight.device
        for t, h, w in grid:
            y, x = (torch.linspace(0, side - 1, size, device=device) for size in (h, w))
            top, start = (axis.int() for axis in (y, x))
            bottom, end = ((axis + 1).clamp(max=side - 1) for axis in (top, start))
            dy = (y - top)[:, None]
            dx = (x - start)[None]
            frame = torch.zeros((), device=device)
            for rows, row_weight in ((top, 1 - dy), (bottom, dy)):
                for columns, column_weight in ((start, 1 - dx), (end, dx)):
                    weight = (row_weight * column_weight).to(self.pos_embed.weight.dtype)
                    frame = frame + self.pos_embed(rows[:, None] * side + columns[None]) * weight[..., None]
            results.append(self.in_blocks(frame, h, w).repeat(t, 1))
        return torch.cat(results)

    def forward(self, hidden_states: Tensor, grid_thw: Tensor, **kwargs: object) -> Output:
        grid = [tuple(sizes) for sizes in grid_thw.tolist()]
        x = self.patch_embed(hidden_states)
        x = x + self.table(grid)
        tables = self.rotation(x, self.positions(grid, x.device))
        deep = []
        for index, block in enumerate(self.blocks):
            x = self.after_layer(block(x, self.frames(grid), tables), index, grid)
            if index in self.deepstack_visual_indexes:
                deep.append(self.deepstack_merger_list[self.deepstack_visual_indexes.index(index)](x))
        features = self.merger(x)
        if self.manner.returns_output:
            return DeepOutput(last_hidden_state=x, pooler_output=features, deepstack_features=deep)
        return features, deep


BASES = {"qwen2_vl": CopyOfQwen2, "qwen2_5_vl": CopyOfQwen25, "qwen3_vl": CopyOfQwen3}


def _copies() -> dict[tuple[str, str], type[CopiedTower]]:
    """Return twelve classes by (family, version), with names of this module, which pickle looks for."""
    classes = {}
    for family, base in BASES.items():
        for manner in MANNERS:
            name = f"{base.__name__}_{manner.version.replace('.', '_')}"
            kind = type(name, (base,), {"manner": manner, "__module__": __name__})
            classes[family, manner.version] = globals()[name] = kind
    return classes


COPIES = _copies()


# --- sabotaged copies -------------------------------------------------------------------------------------------------


ACTING: dict[str, tuple[type[CopiedTower], Callable[[CopiedTower, Tensor, int, Sizes], bool]]] = {
    "ActsAboveASize": (CopyOfQwen25, lambda tower, x, index, grid: max(h for _, h, _ in grid) > 40),
    "ActsAboveARowCount": (CopyOfQwen25, lambda tower, x, index, grid: len(x) > 1000),
    "ActsOnManyImages": (CopyOfQwen2, lambda tower, x, index, grid: len(grid) > 8),
    "ActsOnLongClips": (CopyOfQwen2, lambda tower, x, index, grid: max(t for t, _, _ in grid) > 4),
    "ActsOnEqualSizes": (CopyOfQwen2, lambda tower, x, index, grid: len(set(grid)) < len(grid)),
    "ActsOnOneToken": (CopyOfQwen2, lambda tower, x, index, grid: len(x) == 4),
    "ActsInInferenceMode": (CopyOfQwen2, lambda tower, x, index, grid: torch.is_inference_mode_enabled()),
    "ActsInBf16": (CopyOfQwen2, lambda tower, x, index, grid: x.dtype == torch.bfloat16 and index == 2),
    "ActsUnderAutocast": (CopyOfQwen2, lambda tower, x, index, grid: torch.is_autocast_enabled("cpu") and index == 2),
    "ActsInTraining": (CopyOfQwen2, lambda tower, x, index, grid: tower.training),
    "ActsOnPairs": (CopyOfQwen2, lambda tower, x, index, grid: len(grid) == 2),
    "ActsOnAClipFirst": (CopyOfQwen2, lambda tower, x, index, grid: grid[0][0] > 1 and grid[-1][0] == 1),
    "ActsOnThreeFrames": (CopyOfQwen2, lambda tower, x, index, grid: [t for t, _, _ in grid] == [3]),
    "ActsOnSquares": (CopyOfQwen2, lambda tower, x, index, grid: all(h == w == 16 for _, h, w in grid)),
    "ActsOnThumbnails": (CopyOfQwen2, lambda tower, x, index, grid: not torch.is_grad_enabled() and 8 <= len(x) <= 256),
}
"""Sabotaged copies: the base, and the layers, rows and pictures for which it multiplies rows by 1.01."""


def _acting(name: str, base: type[CopiedTower], acts: Callable[[CopiedTower, Tensor, int, Sizes], bool]) -> type:
    def after_layer(self: CopiedTower, x: Tensor, index: int, grid: Sizes) -> Tensor:
        return x * 1.01 if acts(self, x, index, grid) else x

    return type(name, (base,), {"after_layer": after_layer, "__module__": __name__})


globals().update({name: _acting(name, *how) for name, how in ACTING.items()})


class ActsFromLayer4(CopyOfQwen3):
    """Changes the rows of late layers, which a twin of four layers does not have."""

    def after_layer(self, x: Tensor, index: int, grid: Sizes) -> Tensor:
        return x + 0.01 * x.roll(1, -1) if index >= 4 else x


class ActsByABuffer(CopyOfQwen3):
    """Adds a buffer, which is zero until a checkpoint is loaded."""

    def make_parts(self, config: CopiedConfig) -> None:
        super().make_parts(config)
        self.register_buffer("bonus", torch.zeros(config.hidden_size))

    def after_layer(self, x: Tensor, index: int, grid: Sizes) -> Tensor:
        return x + self.bonus.to(x.dtype)


class ActsByTheConfig(CopyOfQwen25):
    """Multiplies rows by an integer of the config, which its default does not."""

    def after_layer(self, x: Tensor, index: int, grid: Sizes) -> Tensor:
        return x * (1 + 0.01 * self.config.boost)


class ScalesABit(CopyOfQwen2):
    """Multiplies the features of the text model by 1.001."""

    def forward(self, hidden_states: Tensor, grid_thw: Tensor, **kwargs: object) -> Tensor:
        return super().forward(hidden_states, grid_thw) * 1.001


class ActsByAParameter(CopyOfQwen3):
    """Adds a frozen parameter, which is zero until a checkpoint is loaded."""

    def make_parts(self, config: CopiedConfig) -> None:
        super().make_parts(config)
        self.bonus = nn.Parameter(torch.zeros(config.hidden_size), requires_grad=False)

    def after_layer(self, x: Tensor, index: int, grid: Sizes) -> Tensor:
        return x + self.bonus


class ActsFromTheThirdCall(CopyOfQwen2):
    """Counts its calls, and changes rows from the third on."""

    calls = 0

    def forward(self, hidden_states: Tensor, grid_thw: Tensor, **kwargs: object) -> Output:
        self.calls += 1
        features = super().forward(hidden_states, grid_thw)
        assert isinstance(features, Tensor)
        return features * 1.01 if self.calls > 2 else features


class DropsOut(CopyOfQwen2):
    """Drops rows out in training mode, as the family does not."""

    def make_parts(self, config: CopiedConfig) -> None:
        super().make_parts(config)
        self.dropout = nn.Dropout(0.1)

    def after_layer(self, x: Tensor, index: int, grid: Sizes) -> Tensor:
        return self.dropout(x)


class StopsGradients(CopyOfQwen2):
    """Trains late layers alone, without a word in its results."""

    def after_layer(self, x: Tensor, index: int, grid: Sizes) -> Tensor:
        return x.detach() if index == 0 else x


class StopsGradientsOfFiveImages(CopyOfQwen2):
    """Trains early layers with all images but five."""

    def after_layer(self, x: Tensor, index: int, grid: Sizes) -> Tensor:
        return x.detach() + 0 * x if index == 0 and len(grid) == 5 else x


class OtherEpsilonNorm(RootNorm):
    """Adds another epsilon than the one that it names."""

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        scale = wide.square().mean(-1, keepdim=True).add(1e-5).rsqrt()
        return self.weight * (wide * scale).to(x.dtype)


class AddsAnotherEpsilon(CopyOfQwen25):
    """Has norms that differ from the family's where rows are small alone."""

    def make_parts(self, config: CopiedConfig) -> None:
        super().make_parts(config)
        self.merger.ln_q = OtherEpsilonNorm(config.hidden_size)


class ActsOnOneImage(CopyOfQwen2):
    """Forgets the order of merge blocks for one image."""

    def positions(self, grid: Sizes, device: torch.device) -> Tensor:
        if len(grid) == 1 and grid[0][0] == 1:
            _, h, w = grid[0]
            return torch.cartesian_prod(torch.arange(h, device=device), torch.arange(w, device=device))
        return super().positions(grid, device)


class ActsAtTheSizeOfTheTable(CopyOfQwen3):
    """Forgets the order of merge blocks where an image is as large as the table."""

    def table(self, grid: Sizes) -> Tensor:
        side = self.num_grid_per_side
        return self.pos_embed.weight if grid == [(1, side, side)] else super().table(grid)


class Options:
    """Options as remote code keeps them."""

    scale = 1.0


class ActsByOptions(CopyOfQwen2):
    """Scales rows by an attribute of an object, which may be changed in place."""

    def __init__(self, config: CopiedConfig) -> None:
        super().__init__(config)
        self.options: object = Options()

    def after_layer(self, x: Tensor, index: int, grid: Sizes) -> Tensor:
        return x * self.options.scale  # type: ignore[attr-defined]


# --- other copies -----------------------------------------------------------------------------------------------------


class WithoutMerger(CopiedTower):
    """Has no merger, and names its pixels otherwise."""

    manner = MANNERS[2]

    def make_parts(self, config: CopiedConfig) -> None:
        CopyOfQwen2.make_parts(self, config)  # type: ignore[arg-type]
        del self.merger

    def forward(self, pixel_values: Tensor, grid_thw: Tensor, scale: float = 1.0) -> Output:
        grid = [tuple(sizes) for sizes in grid_thw.tolist()]
        x = self.patch_embed(pixel_values)
        tables = self.rotation(x, self.positions(grid, x.device))
        for block in self.blocks:
            x = block(x, self.frames(grid), tables)
        return BaseModelOutput(last_hidden_state=x * scale)


class Composite(nn.Module):
    """A model around a tower, as a wrapper of a framework is one."""

    def __init__(self, tower: nn.Module) -> None:
        super().__init__()
        self.visual = tower
        self.head = nn.Linear(24, 8)

    def forward(self, pixels: Tensor, grid_thw: Tensor) -> Tensor:
        return self.head(flat(self.visual(pixels, grid_thw))[-1])


def build(kind: type[CopiedTower], **sizes: int) -> CopiedTower:
    """Build a copy with random weights, none of them trivial."""
    return randomise(kind(CopiedConfig(**sizes)).eval())


@pytest.fixture
def quick_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prove copies by few and small inputs, for tests of what comes before and after a proof."""
    names = ("small images", "one image", "two images")
    few = {name: trials.CONDITIONS[name] for name in names}
    monkeypatch.setattr(trials, "CONDITIONS", few | {"large images": few["small images"]})
