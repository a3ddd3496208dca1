"""Build tiny models, and draw inputs for them: real architecture, random weights, no download.

These are complete models. Towers of every family are in `support/composites.py`. Head dims are the real ones (80, 80,
72, 72). Norms and biases are random, so that no term of the tower is trivial.
"""

import inspect
import io
import pickle
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import nn

IMAGE = 60
VIDEO = 61
START = 62
END = 63
VOCAB = 64

_TEXT = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=4096,
    bos_token_id=0,
    eos_token_id=1,
    pad_token_id=2,
    rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]},
)
if transformers.__version__.startswith("4."):  # other names of the same
    _TEXT |= dict(
        rope_theta=10000.0, rope_scaling={"type": "default", "rope_type": "default", "mrope_section": [2, 1, 1]}
    )
    del _TEXT["rope_parameters"]
_TOKENS = dict(image_token_id=IMAGE, video_token_id=VIDEO, vision_start_token_id=START, vision_end_token_id=END)
_QWEN3_VISION = dict(
    depth=4,
    hidden_size=144,
    num_heads=2,
    intermediate_size=200,
    patch_size=4,
    spatial_merge_size=2,
    temporal_patch_size=2,
    out_hidden_size=32,
    num_position_embeddings=36,
    deepstack_visual_indexes=[0, 2],
    hidden_act="gelu_pytorch_tanh",
)
_QWEN3_TEXT = dict(_TEXT, head_dim=8)
_MOE = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, decoder_sparse_step=1, mlp_only_layers=[])


class Template(pickle.Pickler):
    """An object to copy often: unpickled at a quarter of the time of `deepcopy`, with tensors of its own."""

    def __init__(self, original: Any) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        file = io.BytesIO()
        super().__init__(file)
        self.dump(original)
        self.data = file.getvalue()

    def persistent_id(self, value: object) -> str | None:
        """Leave tensors out of the pickle."""
        if not isinstance(value, torch.Tensor):
            return None
        self.tensors[str(id(value))] = value
        return str(id(value))

    def copy(self) -> Any:
        """Return a copy, in which modules share a tensor where they did."""
        reader = pickle.Unpickler(io.BytesIO(self.data))
        memo: dict[int, Any] = {}
        reader.persistent_load = lambda key: deepcopy(self.tensors[key], memo)
        return reader.load()


_BUILT: dict[tuple[str, int], Template] = {}


@dataclass(frozen=True)
class Tiny:
    """Describe a tiny model: its class and config in transformers, and the config's arguments."""

    model: str
    config: str
    vision: dict[str, Any]
    text: dict[str, Any]

    def build(self, seed: int = 0, *, fresh: bool = False, **kwargs: Any) -> Any:
        """Build the model in eval mode with random parameters, or copy an earlier one, which is faster.

        Args:
            seed: Seed of the parameters.
            fresh: Build in any case, for tests that change how transformers builds, or that build on the meta device.
        """
        if fresh or kwargs or torch.get_default_device().type != "cpu":
            return self._build(seed, **kwargs)
        key = repr(self), seed
        if key not in _BUILT:
            _BUILT[key] = Template(self._build(seed))
        torch.manual_seed(seed)  # as building it does
        return _BUILT[key].copy()

    def _build(self, seed: int, **kwargs: Any) -> Any:
        parts = {"vision_config": deepcopy(self.vision), "text_config": deepcopy(self.text)}  # configs write to theirs
        config = getattr(transformers, self.config)(**parts, **_TOKENS)
        torch.manual_seed(seed)
        model = getattr(transformers, self.model)._from_config(config, **kwargs).eval()
        return randomise(model, seed)


TINY = {
    "qwen2_vl": Tiny(
        "Qwen2VLForConditionalGeneration",
        "Qwen2VLConfig",
        dict(
            depth=4,
            embed_dim=160,
            hidden_size=32,
            num_heads=2,
            mlp_ratio=2,
            patch_size=4,
            spatial_merge_size=2,
            temporal_patch_size=2,
            hidden_act="quick_gelu",
        ),
        _TEXT,
    ),
    "qwen2_5_vl": Tiny(
        "Qwen2_5_VLForConditionalGeneration",
        "Qwen2_5_VLConfig",
        dict(
            depth=4,
            hidden_size=160,
            num_heads=2,
            intermediate_size=212,
            out_hidden_size=32,
            patch_size=4,
            spatial_merge_size=2,
            temporal_patch_size=2,
            window_size=32,
            fullatt_block_indexes=[1, 3],
            hidden_act="silu",
        ),
        _TEXT,
    ),
    "qwen3_vl": Tiny("Qwen3VLForConditionalGeneration", "Qwen3VLConfig", _QWEN3_VISION, _QWEN3_TEXT),
    "qwen3_vl_moe": Tiny("Qwen3VLMoeForConditionalGeneration", "Qwen3VLMoeConfig", _QWEN3_VISION, _QWEN3_TEXT | _MOE),
}
FAMILIES = tuple(name for name in TINY if name != "qwen3_vl_moe")
"""One model of each family, for tests of how a tower runs. `qwen3_vl_moe` has the tower of `qwen3_vl` under another
name, so that only tests of exactness, gradients and complete models use all of TINY."""


def randomise(model: nn.Module, seed: int = 0) -> Any:
    """Draw every parameter: matrices at fan-in scale, norm weights around one, biases small."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() > 1:
                fan_in = parameter[0].numel() if "experts" not in name else parameter.shape[-1]
                parameter.copy_(noise / fan_in**0.5)
            else:
                parameter.copy_(noise * 0.1 + (1.0 if name.endswith("weight") else 0.0))
    return model


GRIDS: dict[str, list[tuple[int, int, int]]] = {
    "image": [(1, 12, 8)],
    "one window": [(1, 8, 8)],
    "smallest": [(1, 2, 2)],
    "images": [(1, 4, 6), (1, 14, 10), (1, 2, 26), (1, 8, 8), (1, 2, 2)],
    "video": [(4, 6, 10)],
    "mixed": [(1, 10, 2), (3, 4, 2), (1, 2, 18), (2, 4, 10)],
}


def tower_of(model: nn.Module) -> Any:
    from hf_vit_accel.families import find_towers

    return next(tower for _, tower, _ in find_towers(model))


def checkpoint_layers(model: Any, *, reentrant: bool) -> None:
    """Turn on checkpointing of layers, whose name changed in transformers 5.23."""
    word = "activation" if hasattr(model, "activation_checkpointing_enable") else "gradient"
    getattr(model, f"{word}_checkpointing_enable")(**{f"{word}_checkpointing_kwargs": {"use_reentrant": reentrant}})


def pixels_for(tower: Any, grid: list[tuple[int, int, int]], seed: int = 0, **kwargs: Any) -> torch.Tensor:
    """Draw flattened patches (T, P) for a grid."""
    width = tower.config.in_channels * tower.config.temporal_patch_size * tower.config.patch_size**2
    rows = sum(t * h * w for t, h, w in grid)
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)).to(**kwargs)


def outputs_of(output: Any) -> list[torch.Tensor]:
    """Return every tensor of a tower's output, in order."""
    if isinstance(output, torch.Tensor):  # transformers 4.57 returns no output class
        return [output]
    if type(output) is tuple:
        return [output[0], *output[1]]
    return [output.last_hidden_state, output.pooler_output, *(output.get("deepstack_features") or [])]


def merged_of(output: object) -> torch.Tensor:
    if isinstance(output, torch.Tensor | tuple):
        return outputs_of(output)[0]
    return output.pooler_output


def doubled(output: object) -> object:
    """Return a tower's output with its first tensor doubled, in its own form."""
    if isinstance(output, torch.Tensor):
        return output * 2
    if type(output) is tuple:
        return (output[0] * 2, *output[1:])
    output.last_hidden_state = output.last_hidden_state * 2
    return output


def run_tower(tower: Any, grid: list[tuple[int, int, int]], seed: int = 0, **kwargs: Any) -> list[torch.Tensor]:
    """Run one forward without gradients on random pixels; return every output tensor."""
    weight = tower.patch_embed.proj.weight
    pixels = pixels_for(tower, grid, seed, device=weight.device, dtype=weight.dtype)
    with torch.no_grad():
        return outputs_of(tower(pixels, grid_thw=torch.tensor(grid, device=weight.device), **kwargs))


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Return |actual - expected| / |expected| in float64 (L2); infinity for other shapes or non-finite values."""
    if actual.shape != expected.shape or not torch.isfinite(actual).all():
        return float("inf")
    actual = actual.detach().double().cpu()
    expected = expected.detach().double().cpu()
    return float((actual - expected).norm() / expected.norm())


def largest_error(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """Return the largest relative error of any tensor; both lists have the same length."""
    return max(relative_error(tensor, exact) for tensor, exact in zip(actual, expected, strict=True))


def all_equal(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    """Return whether two lists of tensors have the same length and are equal bit for bit."""
    return len(actual) == len(expected) and all(torch.equal(x, y) for x, y in zip(actual, expected, strict=True))


def assert_close(actual: list[torch.Tensor], expected: list[torch.Tensor], bound: float = 1e-5) -> None:
    """Expect the same number of tensors, dtypes and shapes, and relative errors below the bound."""
    assert [(x.shape, x.dtype) for x in actual] == [(x.shape, x.dtype) for x in expected]
    errors = [relative_error(tensor, exact) for tensor, exact in zip(actual, expected, strict=True)]
    assert max(errors) <= bound, errors


def chat_inputs(model: Any, grid: list[tuple[int, int, int]], seed: int = 0) -> dict[str, torch.Tensor]:
    """Build one prompt with every image of a grid (t = 1) and every video (t > 1), ready for `generate`."""
    tower = tower_of(model)
    generator = torch.Generator().manual_seed(seed)
    ids = []
    kinds = []

    def say(tokens: list[int], kind: int = 0) -> None:
        ids.extend(tokens)
        kinds.extend([kind] * len(tokens))

    def words(count: int) -> list[int]:
        return torch.randint(3, 50, (count,), generator=generator).tolist()

    for t, h, w in grid:
        say(words(2))
        video = t > 1
        # Qwen3-VL writes a video as frames, each between its own start and end.
        pieces = t if video and "Qwen3" in type(model).__name__ else 1
        for _ in range(pieces):
            say([START])
            say([VIDEO if video else IMAGE] * (t * h * w // 4 // pieces), 2 if video else 1)
            say([END])
    say(words(3))
    inputs: dict[str, Any] = {
        "input_ids": torch.tensor([ids]),
        "attention_mask": torch.ones(1, len(ids), dtype=torch.long),
        "mm_token_type_ids": torch.tensor([kinds]),
    }
    images = [g for g in grid if g[0] == 1]
    videos = [g for g in grid if g[0] > 1]
    if images:
        inputs |= {"pixel_values": pixels_for(tower, images, seed), "image_grid_thw": torch.tensor(images)}
    if videos:
        inputs |= {"pixel_values_videos": pixels_for(tower, videos, seed + 1), "video_grid_thw": torch.tensor(videos)}
    return _taken(model, inputs)


def _taken(model: nn.Module, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Leave the types of tokens out where an older transformers finds them by the tokens."""
    names = inspect.signature(type(model.base_model).forward).parameters
    return {name: value for name, value in inputs.items() if name != "mm_token_type_ids" or name in names}


def padded_text(lengths: Sequence[int], seed: int = 0) -> dict[str, torch.Tensor]:
    """Draw rows of text, padded on the left to the longest."""
    longest = max(lengths)
    ids = torch.randint(3, 50, (len(lengths), longest), generator=torch.Generator().manual_seed(seed))
    mask = torch.arange(longest) >= longest - torch.tensor(lengths)[:, None]
    return {"input_ids": ids.where(mask, 2), "attention_mask": mask.long()}


def left_padded(model: Any, longer: tuple[int, int, int] = (1, 8, 8)) -> dict[str, torch.Tensor]:
    """Build two prompts with one image each, the shorter one padded on the left. `longer` is the other's image."""
    one = chat_inputs(model, [(1, 4, 6)], 0)
    two = chat_inputs(model, [longer], 1)
    pad = two["input_ids"].shape[1] - one["input_ids"].shape[1]
    assert pad > 0
    batch = {}
    for name, value in {"input_ids": 2, "attention_mask": 0, "mm_token_type_ids": 0}.items():
        if name not in one:
            continue
        batch[name] = torch.cat([nn.functional.pad(one[name], (pad, 0), value=value), two[name]])
    return batch | {name: torch.cat([one[name], two[name]]) for name in ("pixel_values", "image_grid_thw")}
