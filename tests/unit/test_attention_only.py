"""Towers whose attention alone is ours: their own forward, equal to stock, one plan a kind of layer, no warning."""

from __future__ import annotations

import copy
import importlib
import inspect
import pickle
import warnings
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from tiny import assert_close, randomise, relative_error

import hf_vit_accel
from hf_vit_accel import FallbackError, FlexConfig
from hf_vit_accel.config import Settings
from hf_vit_accel.engine.route import Routes
from hf_vit_accel.families import FAMILIES, Family
from hf_vit_accel.layout import Geometry
from hf_vit_accel.tower import loading as registration
from hf_vit_accel.tower.state import state_of

GRID = [(1, 4, 6), (2, 6, 4), (1, 2, 12), (2, 8, 8)]
_SIGLIP = dict(num_hidden_layers=4, hidden_size=32, num_attention_heads=2, intermediate_size=40, patch_size=2)


@dataclass(frozen=True)
class Tiny:
    """config: fields of the vision config. frames: of a patch. square: whether pixels come as (T, 3, side, side).

    clips: whether stock takes any; alike: only if all are as long (Kimi's, which fails to concatenate others).
    """

    config: dict[str, Any]
    frames: int = 1
    square: bool = False
    clips: bool = True
    alike: bool = False
    merge_sizes: bool = False


_MUSE = _SIGLIP | dict(pos_emb_height=4, pos_emb_width=4, max_position_embeddings=16)
_MUSE |= dict(layer_types=["window_attention", "full_attention"] * 2)
TINY = {
    "VideoLlama3VisionModel": Tiny(_SIGLIP, merge_sizes=True),
    "Kimi_K25VisionModel": Tiny(_SIGLIP | dict(pos_emb_height=6, pos_emb_width=6), square=True, alike=True),
    "GlmImageVisionModel": Tiny(
        dict(depth=4, hidden_size=32, num_heads=2, intermediate_size=40, patch_size=2, image_size=10), clips=False
    ),
    "MiniMaxM3VLVisionModel": Tiny(_SIGLIP, frames=2),
    "MuseGlimmerVisionModel": Tiny(_MUSE, frames=2),
    "MuseSparkVisionModel": Tiny(_MUSE, frames=2),
    "HunYuanVLVisionTransformer": Tiny(_SIGLIP | dict(max_image_size=12, out_hidden_size=16), clips=False),
    "Cosmos3EdgeVisionModel": Tiny(_SIGLIP | dict(num_patches=36)),
}
CLASSES = [(family, *tower) for family in FAMILIES if family.attention_only for tower in family.towers]


NO_SEGMENTS = "before transformers 5.23 the layers of MiniMax-M3 know no segments: its pictures attend to each other"


def build(module: str, name: str) -> Any:
    kind: Any = getattr(pytest.importorskip(module), name)
    config = kind.config_class()
    for field, value in TINY[name].config.items():
        setattr(config, field, copy.deepcopy(value))
    config._attn_implementation_internal = "sdpa"
    return randomise(kind(config).eval())


@pytest.fixture(params=CLASSES, ids=lambda each: each[2])
def tower(request: Any) -> Any:
    _, module, name = request.param
    tower = build(module, name)
    if (
        name.startswith("MiniMax")
        and "cu_seqlens" not in inspect.signature(tower.layers[0].self_attn.forward).parameters
    ):
        pytest.skip(NO_SEGMENTS)
    return tower


def inputs(tower: Any, seed: int = 0) -> dict[str, Any]:
    tiny = TINY[type(tower).__name__]
    grid = GRID if tiny.clips else [(1, h, w) for t, h, w in GRID for _ in range(t)]
    grid = [(2, h, w) for _, h, w in GRID] if tiny.alike else grid
    rows = sum(t * h * w for t, h, w in grid)
    shape = (rows, 3, 2, 2) if tiny.square else (rows, 3 * 4 * tiny.frames)
    pixels = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).requires_grad_()
    more = {"merge_sizes": torch.tensor([2, 1, 2, 2])} if tiny.merge_sizes else {}
    return {"pixel_values": pixels, "grid_thw": torch.tensor(grid), **more}


def run(tower: Any, *, trained: bool = False) -> list[torch.Tensor]:
    """Outputs, and the gradients of pixels and parameters."""
    given = inputs(tower)
    with torch.set_grad_enabled(trained):
        outputs = [value for value in tower(**given).values() if isinstance(value, torch.Tensor)]
    if not trained:
        return outputs
    loss = sum((x * torch.linspace(-1, 1, x.numel()).view(x.shape)).sum() for x in outputs)
    leaves = [given["pixel_values"], *tower.parameters()]
    gradients = torch.autograd.grad(loss, leaves, allow_unused=True)
    return [*outputs, *(gradient for gradient in gradients if gradient is not None)]


@pytest.mark.parametrize("trained", [False, True], ids=["inference", "training"])
def test_it_equals_stock_with_one_plan_for_a_kind_of_layer(tower: Any, trained: bool, monkeypatch: Any) -> None:
    expected, plans = run(tower, trained=trained), []
    original = registration.plan_alone
    monkeypatch.setattr(registration, "plan_alone", lambda *args: plans.append(args) or original(*args))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hf_vit_accel.patch(tower, strict=True)
        for _ in range(2):
            found = run(tower, trained=trained)
    assert_close(found[:2], expected[:2])
    assert max(map(relative_error, found, expected)) < 1e-4
    [status] = hf_vit_accel.status(tower).towers
    assert (status.attention_only, status.calls, status.stock_calls, status.fallbacks) == (True, 2, 0, {})
    windows = "Muse" in type(tower).__name__
    assert status.backends == dict.fromkeys(["full", "window"] if windows else ["full"], "sdpa")
    assert len(plans) == 1 + windows, "layouts of calls before are taken again"
    assert "attention only" in str(status) and "fallback" not in str(status)


def test_segments_that_are_stated_wrong_are_seen(tower: Any) -> None:
    """The control of the test above: whole clips instead of frames, or frames instead of clips."""
    if not TINY[type(tower).__name__].clips:
        pytest.skip("stock takes no clips")
    expected = run(tower)
    state = state_of(hf_vit_accel.patch(tower))
    wrong = replace(state.family.geometry(tower), clips=not state.family.geometry(tower).clips)
    state.family = replace(state.family, geometry=lambda tower: wrong)
    assert max(map(relative_error, run(tower), expected)) > 1e-3


def test_offsets_are_not_read_from_the_device(tower: Any, monkeypatch: Any) -> None:
    hf_vit_accel.patch(tower)
    monkeypatch.setattr(registration, "_plan_offsets", lambda *_: pytest.fail("offsets were read"))
    run(tower)


def test_unpatched_it_is_stock_again(tower: Any) -> None:
    expected = run(tower)
    hf_vit_accel.patch(tower)
    hf_vit_accel.unpatch(tower)
    assert_close(run(tower), expected, 0.0)
    assert state_of(tower) is None and tower.config._attn_implementation == "sdpa"


def test_a_named_backend_serves_all_layers(tower: Any) -> None:
    expected = run(tower)
    hf_vit_accel.patch(tower, attention="flex", strict=True)
    assert_close(run(tower), expected)
    [status] = hf_vit_accel.status(tower).towers
    assert set(status.backends.values()) == {"flex"}


def test_a_score_mod_is_applied(tower: Any) -> None:
    expected = run(tower)
    hf_vit_accel.patch(tower, attention=FlexConfig(score_mod=lambda score, *_: score * 0.5))
    assert max(map(relative_error, run(tower), expected)) > 1e-3
    given = inputs(tower)
    given["grid_thw"] = torch.cat([given["grid_thw"], torch.zeros(1, 3, dtype=torch.int64)])  # as pads a batch
    with torch.no_grad(), pytest.raises(FallbackError, match=r"a score_mod was given .* no frames, or no size"):
        tower(**given)


@pytest.mark.parametrize("asked", [{}, {"strict": True}, {"attention": FlexConfig(score_mod=lambda score, *_: score)}])
def test_layers_that_ask_for_no_segments_are_told_as_stock(asked: dict[str, Any], monkeypatch: Any) -> None:
    """As those of MiniMax-M3 before transformers 5.23: the other tests here are skipped there, not this one."""
    module = "transformers.models.minimax_m3_vl.modeling_minimax_m3_vl"
    tower = build(module, "MiniMaxM3VLVisionModel")
    for layer in tower.layers:
        if "cu_seqlens" in inspect.signature(layer.self_attn.forward).parameters:
            monkeypatch.setattr(layer.self_attn, "forward", lambda hidden_states, **_: (hidden_states * 0.5, None))
    expected = run(tower)
    hf_vit_accel.patch(tower, **asked)
    if asked:
        with pytest.raises(FallbackError, match=r"no layer attended by segments, .* \(transformers 5\."):
            run(tower)
        return
    assert_close(run(tower), expected, 0.0)
    [status] = hf_vit_accel.status(tower).towers
    [(why, count)] = status.fallbacks.items()
    assert (status.calls, status.stock_calls, status.backends, count) == (0, 1, {}, 1) and why in str(status)


def test_what_is_beyond_attention_is_told(tower: Any) -> None:
    hf_vit_accel.patch(tower, cuda_graphs=True, fuse={"norms"})
    run(tower)
    [status] = hf_vit_accel.status(tower).towers
    assert set(status.unfused) == {"cuda_graphs", "norms"} and status.calls == 1
    hf_vit_accel.unpatch(tower)
    with pytest.raises(FallbackError, match="cuda_graphs: this family is served attention only"):
        hf_vit_accel.patch(tower, cuda_graphs=True, strict=True)


def test_segments_of_the_callers_own_are_kept(tower: Any) -> None:
    """As stock takes them; told in status."""
    hf_vit_accel.patch(tower)
    grid = inputs(tower)["grid_thw"]
    clips = type(tower).__name__.startswith(("Kimi", "MiniMax"))
    lengths = grid.prod(1) if clips else (grid[:, 1] * grid[:, 2]).repeat_interleave(grid[:, 0])
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
    expected = run(tower)
    found = [x for x in tower(**inputs(tower), cu_seqlens=offsets).values() if isinstance(x, torch.Tensor)]
    assert_close(found, expected)
    [status] = hf_vit_accel.status(tower).towers
    assert status.stock_calls == 1 and "the caller supplies sequence metadata" in status.fallbacks
    hf_vit_accel.patch(tower, attention=FlexConfig(score_mod=lambda score, *_: score * 0.5))
    with pytest.raises(FallbackError, match=r"a score_mod was given .* the caller supplies sequence metadata"):
        tower(**inputs(tower), cu_seqlens=offsets)


def test_copies_and_pickles_stay_patched(tower: Any) -> None:
    hf_vit_accel.patch(tower)
    expected = run(tower)
    for other in (copy.deepcopy(tower), pickle.loads(pickle.dumps(tower))):
        assert_close(run(other), expected)
        assert state_of(other).calls == 1


def test_every_class_is_tested() -> None:
    assert {name for _, _, name in CLASSES} == TINY.keys()
    for _, module, name in CLASSES:
        try:
            assert hasattr(importlib.import_module(module), name)
        except ImportError:
            continue


def test_a_family_names_what_its_forward_takes(tower: Any) -> None:
    family: Family = next(family for family in FAMILIES if family.tower_class(tower))
    assert tuple(inspect.signature(tower.forward).parameters)[:2] == family.arguments


def test_offsets_are_made_anew_for_another_geometry() -> None:
    """A clip is one segment, or a segment a frame: of equal rows and grids."""
    routes, rest = Routes(), (Settings(), {}, {})
    frames, clips = Geometry(merge=1), Geometry(merge=1, clips=True)
    found = [routes.offsets(((2, 4, 6),), torch.device("cpu"), each, *rest) for each in (frames, clips, frames)]
    assert [each["cu_seqlens"].tolist() for each in found] == [[0, 24, 48], [0, 48], [0, 24, 48]]
    assert found[0] is found[2]
