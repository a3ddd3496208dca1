"""Towers whose attention alone is ours. Their own forward equals stock, with one plan per kind of layer, no warning."""

import copy
import inspect
import warnings
from types import MethodType
from unittest.mock import Mock

import pytest
import torch
from support.attention_only import CLASSES, build, grid_name, inputs, takes_segments
from support.families import classes_like
from support.plans import assert_frozen, assert_same
from tiny import assert_close, largest_error
from torch import nn

import hf_vit_accel
from hf_vit_accel import FallbackError, FlexConfig
from hf_vit_accel.backends import Request
from hf_vit_accel.backends.base import Plan
from hf_vit_accel.config import Settings
from hf_vit_accel.engine import route as route_module
from hf_vit_accel.engine.route import Spec, make_route
from hf_vit_accel.families import family_of
from hf_vit_accel.layout import Geometry
from hf_vit_accel.tower import attention
from hf_vit_accel.tower.forward import decide
from hf_vit_accel.tower.state import state_of
from hf_vit_accel.tower.stock_way import StockPlan, Way


@pytest.fixture(params=CLASSES, ids=lambda family_module_class: family_module_class[2])
def tower(request: pytest.FixtureRequest) -> nn.Module:
    _, module, name = request.param
    return build(module, name)


DIFFERENT = "VideoLlama3", "MuseGlimmer", "MiniCPMV4_6", "Inkling2"
"""Segments alone, windows, a merger inside, and a class token in each frame."""
different_towers = pytest.mark.parametrize("tower", classes_like(*DIFFERENT, classes=CLASSES), indirect=True)


def run(tower: nn.Module, *, trained: bool = False, **changed: object) -> list[torch.Tensor]:
    """Return the outputs and, if trained, the gradients of pixels and parameters."""
    arguments = inputs(tower) | changed
    with torch.set_grad_enabled(trained):
        outputs = [value for value in tower(**arguments).values() if isinstance(value, torch.Tensor)]
    if not trained:
        return outputs
    loss = sum((x * torch.linspace(-1, 1, x.numel(), device=x.device).view(x.shape)).sum() for x in outputs)
    leaves = [arguments["pixel_values"], *tower.parameters()]
    gradients = torch.autograd.grad(loss, leaves, allow_unused=True)
    return [*outputs, *(gradient for gradient in gradients if gradient is not None)]


def test_it_equals_stock_with_one_plan_per_kind_of_layer(tower: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    assert tuple(inspect.signature(tower.forward).parameters)[:2] == family_of(tower).arguments
    expected = run(tower, trained=True)
    plans = []
    original = route_module.plan_alone

    def counted(*args: object) -> Plan:
        plans.append(args)
        return original(*args)

    monkeypatch.setattr(route_module, "plan_alone", counted)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hf_vit_accel.patch(tower, strict=True)
        for _ in range(2):
            outputs = run(tower, trained=True)
    assert_close(outputs[:2], expected[:2])
    assert largest_error(outputs, expected) < 1e-4
    [status] = hf_vit_accel.status(tower).towers
    assert (status.attention_only, status.calls, status.stock_calls, status.fallbacks) == (True, 2, 0, {})
    geometry = family_of(tower).geometry(tower)
    windows = geometry.window is not None
    assert status.backends == dict.fromkeys(["full", "window"] if windows else ["full"], "sdpa")
    assert len(plans) == 1 + windows + geometry.quarters, "a layout of an earlier call is planned once"
    assert "attention only" in str(status) and "fallback" not in str(status)
    inferred = run(tower)
    assert_close(inferred, expected[: len(inferred)])


@different_towers
def test_another_layout_of_the_same_size_has_its_own_plan(tower: nn.Module) -> None:
    stock = copy.deepcopy(tower)
    hf_vit_accel.patch(tower, strict=True)
    name = grid_name(tower)
    sizes = inputs(tower)[name]
    layouts = [sizes, sizes.flip(0), sizes]
    if sizes.shape[1] == 2:  # as many windows in every image, and in all
        layouts.append(sizes.flip(1))
    outputs = [run(tower, **{name: layout}) for layout in layouts]
    assert largest_error(outputs[1], outputs[0]) > 1e-3
    for layout, output in zip(layouts, outputs, strict=True):
        assert_close(output, run(stock, **{name: layout}))


WITH_WINDOWS = [entry for entry in CLASSES if "Muse" in entry[2]]


@pytest.mark.parametrize("tower", classes_like("MuseGlimmer", classes=WITH_WINDOWS), indirect=True)
def test_windows_of_another_size_are_those_of_stock(tower: nn.Module) -> None:
    """Stock reads the size of its windows at every call: of the tower, and in older versions of the config."""
    stock = copy.deepcopy(tower)
    hf_vit_accel.patch(tower, strict=True)
    former = run(stock)
    assert_close(run(tower), former)
    for changed in (tower, stock):
        if hasattr(changed, "window_size"):
            changed.window_size = 2 * changed.patch_size
        else:
            changed.config.pos_emb_height = 2
    expected = run(stock)
    assert largest_error(expected, former) > 1e-3
    assert_close(run(tower), expected)
    for changed in (tower, stock):
        changed.config.pos_emb_height = 3
    assert_close(run(tower), run(stock))


@pytest.mark.gpu
@pytest.mark.parametrize("trained", [False, True], ids=["inference", "training"])
def test_gpu_it_is_as_exact_as_stock(tower: nn.Module, trained: bool) -> None:
    """In bf16, with the backend that `auto` chooses; the errors are those beside fp32."""
    exact = run(tower.to("cuda"), trained=trained)
    stock = copy.deepcopy(tower).to(torch.bfloat16)
    ours = hf_vit_accel.patch(copy.deepcopy(stock), strict=True)
    error_of_stock = largest_error(run(stock, trained=trained), exact)
    assert largest_error(run(ours, trained=trained), exact) < 1.5 * error_of_stock + 1e-3
    [status] = hf_vit_accel.status(ours).towers
    assert (status.calls, status.stock_calls) == (1, 0) and "sdpa" not in status.backends.values()


def test_odd_sizes_stay_stock() -> None:
    """MiniCPM-V takes them where the caller leaves its merger out."""
    tower = build("transformers.models.minicpmv4_6.modeling_minicpmv4_6", "MiniCPMV4_6VisionModel")
    changed = dict(pixel_values=torch.randn(1, 3, 2, 2 * 18), target_sizes=torch.tensor([[3, 4], [2, 3]]))
    expected = run(tower, **changed, use_vit_merger=False)
    hf_vit_accel.patch(tower)
    assert_close(run(tower, **changed, use_vit_merger=False), expected, 0.0)
    [status] = hf_vit_accel.status(tower).towers
    assert status.stock_calls == 1 and "an odd height or width" in str(status)
    hf_vit_accel.patch(tower, strict=True)
    with pytest.raises(FallbackError, match="an odd height or width"):
        run(tower, **changed, use_vit_merger=False)


@different_towers
def test_a_score_mod_is_applied(tower: nn.Module) -> None:
    expected = run(tower)
    hf_vit_accel.patch(tower, attention=FlexConfig(score_mod=lambda score, *_: score * 0.5))
    assert largest_error(run(tower), expected) > 1e-3
    name = grid_name(tower)
    sizes = inputs(tower)[name]
    padded = torch.cat([sizes, torch.zeros_like(sizes[:1])])
    with pytest.raises(FallbackError, match=r"a score_mod was given .* no frames, or no size"):
        run(tower, **{name: padded})


def test_a_score_mod_where_weights_are_offloaded() -> None:
    """All computes on one device then. On several, copies of our offsets would not know the score_mod."""
    accelerate = pytest.importorskip("accelerate")
    tower = build("transformers.models.video_llama_3.modeling_video_llama_3", "VideoLlama3VisionModel")
    hf_vit_accel.patch(tower, attention=FlexConfig(score_mod=lambda score, *_: score * 0.5))
    expected = run(tower)
    layers = next(module for module in tower.modules() if isinstance(module, nn.ModuleList))
    accelerate.cpu_offload(layers[1], execution_device="cpu")
    assert {parameter.device.type for parameter in tower.parameters()} == {"cpu", "meta"}
    assert_close(run(tower), expected)
    layers[0].unread = nn.Parameter(torch.empty(1, device="meta"))
    with pytest.raises(FallbackError, match="the tower lies on several devices"):
        run(tower)


@pytest.mark.parametrize(
    "options", [{}, {"strict": True}, {"attention": FlexConfig(score_mod=lambda score, *_: score)}]
)
def test_layers_that_take_no_segments_count_as_stock(
    options: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """MiniMax-M3 has such layers before transformers 5.23, where its other tests are skipped."""
    module = "transformers.models.minimax_m3_vl.modeling_minimax_m3_vl"
    tower = build(module, "MiniMaxM3VLVisionModel", without_segments=True)
    for layer in tower.layers:
        if takes_segments(layer):
            monkeypatch.setattr(layer.self_attn, "forward", lambda hidden_states, **_: (hidden_states * 0.5, None))
    expected = run(tower)
    hf_vit_accel.patch(tower, **options)
    if options:
        with pytest.raises(FallbackError, match=r"no layer attended by segments, .* \(transformers 5\."):
            run(tower)
        return
    assert_close(run(tower), expected, 0.0)
    [status] = hf_vit_accel.status(tower).towers
    [(why, count)] = status.fallbacks.items()
    assert (status.calls, status.stock_calls, status.backends, count) == (0, 1, {}, 1) and why in str(status)


@pytest.mark.parametrize("where", ["class", "instance"])
@different_towers
def test_a_forward_of_the_users_stays_stock(tower: nn.Module, where: str) -> None:
    """It takes what the user calls it with, and knows nothing of our segments."""
    kind = type(tower)
    arguments = inputs(tower)

    def forward(self: nn.Module, pixel_values: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
        outputs = kind.forward(self, **arguments | {"pixel_values": pixel_values * 0.5, grid_name(tower): grid})
        return next(value for value in outputs.values() if isinstance(value, torch.Tensor))

    if where == "class":
        tower.__class__ = type(kind.__name__, (kind,), {"forward": forward})
    else:
        tower.forward = MethodType(forward, tower)
    called_with = arguments["pixel_values"], arguments[grid_name(tower)]
    with torch.no_grad():
        expected = tower(*called_with)
        hf_vit_accel.patch(tower)
        assert torch.equal(tower(*called_with), expected)
    [status] = hf_vit_accel.status(tower).towers
    [why] = status.fallbacks
    assert (status.calls, status.stock_calls) == (0, 1)
    assert ("is not transformers' own" if where == "class" else "does not call the class's") in why


def test_options_beyond_attention_are_reported() -> None:
    tower = build("transformers.models.lfm3_vl.modeling_lfm3_vl", "Lfm3VlVisionModel")
    hf_vit_accel.patch(tower, cuda_graphs=True)
    run(tower)
    [status] = hf_vit_accel.status(tower).towers
    assert set(status.unfused) == {"cuda_graphs"} and status.calls == 1
    hf_vit_accel.unpatch(tower)
    with pytest.raises(FallbackError, match="cuda_graphs: this family is served attention only"):
        hf_vit_accel.patch(tower, cuda_graphs=True, strict=True)


def test_its_plan_is_frozen_and_decided_twice_the_same() -> None:
    tower = build("transformers.models.video_llama_3.modeling_video_llama_3", "VideoLlama3VisionModel")
    hf_vit_accel.patch(tower)
    call = tower, state_of(tower), (), inputs(tower)
    plan = decide(*call)
    assert isinstance(plan, StockPlan) and plan.way is Way.ATTENTION
    assert_frozen(plan)
    assert_same(plan, decide(*call))
    assert hf_vit_accel.status(tower).towers[0].layouts == (1, 0, 1)
    for hits in (1, 2):
        run(tower)
        assert hf_vit_accel.status(tower).towers[0].layouts == (1, hits, 1)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("lengths", [(16, 32), (32, 16)], ids=["those of the route", "others"])
def test_offsets_that_a_tower_computes_are_read_once_for_all_layers(
    lengths: tuple[int, int], mode: type[torch.no_grad | torch.inference_mode], monkeypatch: pytest.MonkeyPatch
) -> None:
    request = Request(device=torch.device("cpu"), dtype=torch.float32, heads=0, head_dim=0, scale=0.0)
    spec = Spec(geometry=Geometry(merge=2), request=request, ops=None, settings=Settings())
    route = make_route(((1, 4, 4), (1, 4, 8)), spec).bound
    q, k, v = torch.randn(3, 1, 2, 48, 8).unbind()
    segments = zip(*(x.split(lengths, dim=2) for x in (q, k, v)), strict=True)
    expected = torch.cat([nn.functional.scaled_dot_product_attention(*qkv) for qkv in segments], dim=2)
    equal = Mock(wraps=torch.equal)
    read = Mock(wraps=attention._plans_from_device)
    monkeypatch.setattr(torch, "equal", equal)
    monkeypatch.setattr(attention, "_plans_from_device", read)
    with mode():
        offsets = torch.tensor([0, lengths[0], 48], dtype=torch.int32)
        for _ in range(3):
            outputs, _ = attention.vision_attention(
                nn.Module(), q, k, v, cu_seq_lens_q=offsets, is_causal=False, vision_route=route
            )
            assert_close([outputs], [expected.transpose(1, 2)])
    assert (equal.call_count, read.call_count) == (1, lengths == (32, 16))
