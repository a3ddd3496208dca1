"""Towers as remote code ships them: transformers' own files, run once more in this package; and sabotaged ones.

Their classes are other classes than transformers', as in a checkpoint whose code was copied from there. Each has two
forms: that of the installed version, and the bare tensors of transformers 4.57.
"""

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from tiny import randomise
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput, BaseModelOutputWithPooling

from support.tensors import flat

Sizes = list[list[int]]
Output = Any
"""What a tower returns: a tensor, a tuple with deepstack features, or an output of transformers."""


def file_of(family: str, edits: tuple[tuple[str, str], ...] = ()) -> Any:
    """Run the file of a family's model once more, with words of its source changed; return the new module."""
    original = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    path = Path(str(original.__file__))
    source = path.read_text()
    for old, new in edits:
        assert old in source
        source = source.replace(old, new)
    module = ModuleType(f"support.copy_of_{family}" + "_edited" * bool(edits))
    vars(module).update(__package__=original.__package__, __file__=str(path))
    sys.modules[module.__name__] = module  # pickle and the proof look there
    exec(compile(source, str(path), "exec", dont_inherit=True), vars(module))
    return module


QWEN2 = file_of("qwen2_vl")
QWEN25 = file_of("qwen2_5_vl")
QWEN3 = file_of("qwen3_vl")
RMS_NORM: Any = getattr(QWEN25, "Qwen2_5_VLRMSNorm", None) or QWEN25.Qwen2RMSNorm  # the latter in transformers 4.57


class CopyOfQwen2(QWEN2.Qwen2VisionTransformerPretrainedModel):
    """A copy of Qwen2-VL's tower."""


class CopyOfQwen25(QWEN25.Qwen2_5_VisionTransformerPretrainedModel):
    """A copy of Qwen2.5-VL's tower."""


class CopyOfQwen3(QWEN3.Qwen3VLVisionModel):
    """A copy of Qwen3-VL's tower."""


class OfTensors:
    """The results of transformers 4.57: merged features, in a tuple with those of deepstack."""

    def features(self: Any, hidden_states: Tensor, grid_thw: Tensor) -> Output:
        output = super().forward(hidden_states, grid_thw)
        if isinstance(output, Tensor | tuple):
            return output
        deep = output.get("deepstack_features")
        return output.pooler_output if deep is None else (output.pooler_output, deep)

    def forward(self, hidden_states: Tensor, grid_thw: Tensor) -> Output:
        return self.features(hidden_states, grid_thw)


class OlderCopyOfQwen2(OfTensors, CopyOfQwen2):
    """A copy of Qwen2-VL's tower, which returns a tensor."""


class OlderCopyOfQwen25(OfTensors, CopyOfQwen25):
    """A copy of Qwen2.5-VL's tower, which returns a tensor."""


class OlderCopyOfQwen3(OfTensors, CopyOfQwen3):
    """A copy of Qwen3-VL's tower, which returns a tuple."""


BASES = {"qwen2_vl": CopyOfQwen2, "qwen2_5_vl": CopyOfQwen25, "qwen3_vl": CopyOfQwen3}
OLDER = {"qwen2_vl": OlderCopyOfQwen2, "qwen2_5_vl": OlderCopyOfQwen25, "qwen3_vl": OlderCopyOfQwen3}
COPIES: dict[tuple[str, str], type[nn.Module]] = {(family, "4.57"): kind for family, kind in OLDER.items()}
COPIES |= {(family, "installed"): kind for family, kind in BASES.items()}
"""Copies by family, and by the version whose results they return."""


def scaled(output: Output, factor: float) -> Output:
    """Multiply results of an older copy."""
    return output * factor if isinstance(output, Tensor) else (output[0] * factor, output[1])


# --- sabotaged copies -------------------------------------------------------------------------------------------------

ACTING: dict[str, tuple[type[Any], Callable[[Any, Tensor, Sizes], bool]]] = {
    "ActsAboveASize": (OlderCopyOfQwen25, lambda tower, x, grid: max(h for _, h, _ in grid) > 40),
    "ActsAboveARowCount": (OlderCopyOfQwen25, lambda tower, x, grid: len(x) > 1000),
    "ActsOnManyImages": (OlderCopyOfQwen2, lambda tower, x, grid: len(grid) > 8),
    "ActsOnLongClips": (OlderCopyOfQwen2, lambda tower, x, grid: max(t for t, _, _ in grid) > 4),
    "ActsOnEqualSizes": (OlderCopyOfQwen2, lambda tower, x, grid: len(set(map(tuple, grid))) < len(grid)),
    "ActsOnOneToken": (OlderCopyOfQwen2, lambda tower, x, grid: len(x) == 4),
    "ActsOnOneImage": (OlderCopyOfQwen2, lambda tower, x, grid: [t for t, _, _ in grid] == [1]),
    "ActsInInferenceMode": (OlderCopyOfQwen2, lambda tower, x, grid: torch.is_inference_mode_enabled()),
    "ActsInBf16": (OlderCopyOfQwen2, lambda tower, x, grid: tower.dtype == torch.bfloat16),
    "ActsUnderAutocast": (OlderCopyOfQwen2, lambda tower, x, grid: torch.is_autocast_enabled("cpu")),
    "ActsInTraining": (OlderCopyOfQwen2, lambda tower, x, grid: tower.training),
    "ActsOnPairs": (OlderCopyOfQwen2, lambda tower, x, grid: len(grid) == 2),
    "ActsOnAClipFirst": (OlderCopyOfQwen2, lambda tower, x, grid: grid[0][0] > 1 and grid[-1][0] == 1),
    "ActsOnThreeFrames": (OlderCopyOfQwen2, lambda tower, x, grid: [t for t, _, _ in grid] == [3]),
    "ActsOnSquares": (OlderCopyOfQwen2, lambda tower, x, grid: all(h == w == 16 for _, h, w in grid)),
    "ActsOnThumbnails": (OlderCopyOfQwen2, lambda tower, x, grid: not torch.is_grad_enabled() and 8 <= len(x) <= 256),
    "ActsAtTheSizeOfTheTable": (OlderCopyOfQwen3, lambda tower, x, grid: grid == [[1, *[tower.num_grid_per_side] * 2]]),
}
"""Sabotaged copies: the base, and the towers, pixels and pictures for which it multiplies features by 1.05."""


def _acting(name: str, base: type[Any], acts: Callable[[Any, Tensor, Sizes], bool]) -> type:
    def forward(self: Any, hidden_states: Tensor, grid_thw: Tensor) -> Output:
        output = self.features(hidden_states, grid_thw)
        return scaled(output, 1.05) if acts(self, hidden_states, grid_thw.tolist()) else output

    return type(name, (base,), {"forward": forward, "__module__": __name__})


globals().update({name: _acting(name, *how) for name, how in ACTING.items()})


class ScalesABit(OlderCopyOfQwen2):
    def forward(self, hidden_states: Tensor, grid_thw: Tensor) -> Output:
        return self.features(hidden_states, grid_thw) * 1.001


class ReturnsAnEmptyField(CopyOfQwen2):
    """Returns a field that holds nothing, as models do that collect attentions into a tuple."""

    def forward(self, hidden_states: Tensor, grid_thw: Tensor) -> Output:
        output = super().forward(hidden_states, grid_thw)
        if isinstance(output, Tensor):  # of transformers 4.57
            return BaseModelOutputWithPooling(pooler_output=output, attentions=())
        return BaseModelOutputWithPooling(output.last_hidden_state, output.pooler_output, attentions=())


class RollingBlock(QWEN3.Qwen3VLVisionBlock):
    """A layer that mixes features, where it is told to."""

    rolls = False

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        x = super().forward(*args, **kwargs)
        return x + 0.01 * x.roll(1, -1) if self.rolls else x


class ActsFromLayer4(OlderCopyOfQwen3):
    """Changes the rows of late layers, which a twin of four layers does not have."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        for index, block in enumerate(self.blocks):
            block.__class__ = RollingBlock
            block.rolls = index >= 4


class ActsByABuffer(OlderCopyOfQwen3):
    """Adds a buffer to pixels, which is zero until a checkpoint is loaded."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.register_buffer("bonus", torch.zeros(self.patch_embed.proj.weight[0].numel()))

    def forward(self, hidden_states: Tensor, grid_thw: Tensor) -> Output:
        return self.features(hidden_states + self.bonus.to(hidden_states.dtype), grid_thw)


class ActsByAParameter(ActsByABuffer):
    """Adds a frozen parameter in its place."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        del self.bonus
        self.bonus = nn.Parameter(torch.zeros(self.patch_embed.proj.weight[0].numel()), requires_grad=False)


class ActsByTheConfig(OlderCopyOfQwen25):
    """Multiplies features by an integer of the config, which its default does not."""

    def forward(self, hidden_states: Tensor, grid_thw: Tensor) -> Output:
        return self.features(hidden_states, grid_thw) * (1 + 0.01 * self.config.boost)


class ActsFromTheThirdCall(OlderCopyOfQwen2):
    """Counts its calls, and changes features from the third on."""

    calls = 0

    def forward(self, hidden_states: Tensor, grid_thw: Tensor) -> Output:
        self.calls += 1
        features = self.features(hidden_states, grid_thw)
        return features * 1.01 if self.calls > 2 else features


class DropsOut(OlderCopyOfQwen2):
    """Drops pixels out in training mode, as the family does not."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.dropout = nn.Dropout(0.1)

    def forward(self, hidden_states: Tensor, grid_thw: Tensor) -> Output:
        return self.features(self.dropout(hidden_states), grid_thw)


class StoppingEmbed(QWEN2.PatchEmbed):
    """An embedding that is never trained, without a word in its results."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        return super().forward(hidden_states).detach()


class StopsGradients(OlderCopyOfQwen2):
    """Trains layers alone."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.patch_embed.__class__ = StoppingEmbed


class StopsGradientsOfFiveImages(OlderCopyOfQwen2):
    """Gives the pixels of all images but five their gradients."""

    def forward(self, hidden_states: Tensor, grid_thw: Tensor) -> Output:
        if len(grid_thw) == 5:
            hidden_states = hidden_states.detach() + 0 * hidden_states
        return self.features(hidden_states, grid_thw)


class OtherEpsilonNorm(RMS_NORM):
    """Adds another epsilon than the one that it names."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        scale = hidden_states.float().square().mean(-1, keepdim=True).add(1e-5).rsqrt()
        return self.weight * (hidden_states.float() * scale).to(hidden_states.dtype)


class AddsAnotherEpsilon(OlderCopyOfQwen25):
    """Has a norm that differs from the family's where rows are small alone."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.merger.ln_q.__class__ = OtherEpsilonNorm


class Options:
    """Options as remote code keeps them."""

    scale = 1.0


class ActsByOptions(OlderCopyOfQwen2):
    """Scales features by an attribute of an object, which may be changed in place."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.options: object = Options()

    def after(self, features: Tensor) -> Tensor:
        return features * self.options.scale  # type: ignore[attr-defined]

    def forward(self, hidden_states: Tensor, grid_thw: Tensor) -> Output:
        return self.after(self.features(hidden_states, grid_thw))


# --- other copies -----------------------------------------------------------------------------------------------------

MERGES_NOTHING = file_of("qwen2_vl", (("self.merger(hidden_states)", "hidden_states"),))


class WithoutMerger(MERGES_NOTHING.Qwen2VisionTransformerPretrainedModel):
    """Has no merger, and names its pixels otherwise."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        del self.merger

    def forward(self, pixel_values: Tensor, grid_thw: Tensor, scale: float = 1.0) -> Output:
        rows = flat(super().forward(pixel_values, grid_thw))[0]
        return BaseModelOutput(last_hidden_state=rows * scale)


class Composite(nn.Module):
    """A model around a tower, as a wrapper of a framework is one."""

    def __init__(self, tower: nn.Module) -> None:
        super().__init__()
        self.visual = tower
        self.head = nn.Linear(24, 8)

    def forward(self, pixels: Tensor, grid_thw: Tensor) -> Tensor:
        return self.head(flat(self.visual(pixels, grid_thw))[-1])


SIZES = dict(
    depth=6,
    embed_dim=32,
    hidden_size=32,
    num_heads=2,
    mlp_ratio=2,
    intermediate_size=44,
    out_hidden_size=24,
    patch_size=2,
    spatial_merge_size=2,
    window_size=16,
    fullatt_block_indexes=[2, 5],
    num_position_embeddings=36,
    deepstack_visual_indexes=[1, 3],
    boost=0,
)


def build(kind: type[Any], **sizes: int) -> Any:
    """Build a copy with random weights, none of them trivial."""
    config = kind.config_class()
    fields = SIZES | ({"hidden_size": 24} if hasattr(config, "embed_dim") else {}) | sizes
    for name, value in fields.items():
        if hasattr(config, name) or name == "boost":
            setattr(config, name, value)
    return randomise(kind(config).eval())
