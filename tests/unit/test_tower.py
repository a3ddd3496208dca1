"""Patched towers against stock ones: every family, kind of input, path through the boundary, and fault."""

from __future__ import annotations

import copy
import functools
import gc
import io
import pickle
import threading
import warnings
import weakref
from collections.abc import Iterable
from types import MethodType
from typing import Any

import pytest
import torch
from support.towers import ONE_TOWER
from tiny import (
    FAMILIES,
    GRIDS,
    TINY,
    assert_close,
    outputs_of,
    pixels_for,
    relative_error,
    run_tower,
    tower_of,
)
from torch import nn

import hf_vit_accel
from hf_vit_accel import FallbackError
from hf_vit_accel.backends import BACKENDS
from hf_vit_accel.backends import flashinfer_cudnn as cudnn_backend
from hf_vit_accel.tower import state as state_module
from hf_vit_accel.tower.state import state_of


@pytest.fixture(scope="module", params=list(TINY))
def shared(request) -> Any:
    """One model per family for tests that leave it as they found it."""
    return TINY[request.param].build()


@pytest.fixture(params=ONE_TOWER)
def model(request) -> Any:
    return TINY[request.param].build()


# --- equal to stock -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fuse", ["auto", False], ids=["fused", "unfused"])
@pytest.mark.parametrize("grid", GRIDS)
def test_patched_equals_stock(shared: Any, grid: str, fuse: Any) -> None:
    tower = tower_of(shared)
    expected = run_tower(tower, GRIDS[grid])
    with hf_vit_accel.patched(shared, fuse=fuse, strict=True):
        assert_close(run_tower(tower, GRIDS[grid]), expected)
        assert state_of(tower).calls == 1
    assert_close(run_tower(tower, GRIDS[grid]), expected, 0.0)


def test_layouts_of_equal_size_are_told_apart(shared: Any) -> None:
    """The trap of graphs and caches keyed by row counts: same rows, same longest segment, other segments."""
    tower = tower_of(shared)
    layouts = [[(1, 8, 4), (1, 4, 8)], [(1, 4, 8), (1, 8, 4)], [(2, 4, 8)], [(1, 4, 8)] * 2, [(1, 2, 16), (1, 8, 4)]]
    expected = [run_tower(tower, grid) for grid in layouts]
    with hf_vit_accel.patched(shared):
        for _ in range(2):
            for grid, outputs in zip(layouts, expected, strict=True):
                assert_close(run_tower(tower, grid), outputs)
        assert state_of(tower).routes.cache.misses == len(layouts)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_as_exact_as_stock(shared: Any, dtype: torch.dtype) -> None:
    check_error_bound(shared, dtype, "cpu", ["sdpa"], [[(1, 8, 8), (2, 4, 4), (1, 4, 10)]])


def check_error_bound(
    model: Any, dtype: torch.dtype, device: str, attentions: list[str], grids: Iterable[Any] = tuple(GRIDS.values())
) -> None:
    """Error against fp32 stock at most max(1.1 x stock's own, one unit in the last place), 5 seeds."""
    reference = tower_of(copy.deepcopy(model)).to(device)
    tower = tower_of(copy.deepcopy(model)).to(device)
    for parameter in tower.parameters():
        parameter.data = parameter.data.to(dtype)
    for parameter, low in zip(reference.parameters(), tower.parameters(), strict=True):
        parameter.data = low.data.float()

    def run(of: Any, grid: Any, seed: int) -> list[torch.Tensor]:
        weight = of.patch_embed.proj.weight
        pixels = pixels_for(of, grid, seed).to(dtype).to(device, weight.dtype)
        with torch.no_grad():
            return outputs_of(of(pixels, grid_thw=torch.tensor(grid, device=device)))

    def errors(found: list[torch.Tensor], expected: list[torch.Tensor]) -> list[float]:
        return [relative_error(f, e) for f, e in zip(found, expected, strict=True)]

    for grid in grids:
        exact = [run(reference, grid, seed) for seed in range(5)]
        stock = [errors(run(tower, grid, seed), exact[seed]) for seed in range(5)]
        for attention in attentions:
            with hf_vit_accel.patched(tower, attention=attention, strict=True):
                ours = [errors(run(tower, grid, seed), exact[seed]) for seed in range(5)]
            for of_ours, of_stock in zip(zip(*ours, strict=True), zip(*stock, strict=True), strict=True):
                bound = max(1.1 * sum(of_stock) / 5, torch.finfo(dtype).eps)
                assert sum(of_ours) / 5 <= bound, (attention, grid, of_ours, of_stock)


# --- undo, redo, copies ---------------------------------------------------------------------------------------------


def snapshot(model: Any) -> Any:
    tower = tower_of(model)
    hooks = [(name, list(m._forward_hooks), list(m._forward_pre_hooks)) for name, m in model.named_modules()]
    names = [m.config._attn_implementation for m in model.modules() if hasattr(m, "config")]
    parameters = [(name, p.data_ptr(), p.shape, p.stride()) for name, p in model.named_parameters()]
    return sorted(vars(tower)), vars(tower).get("forward"), hooks, names, parameters, list(model.state_dict())


@pytest.mark.parametrize("had_forward", [False, True], ids=["", "own forward"])
def test_unpatch_leaves_everything_as_before(model: Any, had_forward: bool) -> None:
    tower = tower_of(model)
    if had_forward:
        class_forward = type(tower).forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            output = class_forward(tower, *args, **kwargs)
            output.last_hidden_state = output.last_hidden_state * 2
            return output

        tower.forward = forward
    before, expected = snapshot(model), run_tower(tower, GRIDS["mixed"])
    assert hf_vit_accel.patch(model) is model
    assert_close(run_tower(tower, GRIDS["mixed"]), expected)
    assert state_of(tower).calls == (0 if had_forward else 1)
    assert hf_vit_accel.unpatch(model) is model
    assert snapshot(model) == before
    assert_close(run_tower(tower, GRIDS["mixed"]), expected, 0.0)
    assert hf_vit_accel.unpatch(model) is model and snapshot(model) == before


def test_patching_twice_equals_once(model: Any) -> None:
    tower = tower_of(model)
    before = snapshot(model)
    hf_vit_accel.patch(model, attention="sdpa")
    once = snapshot(model)[0]
    hf_vit_accel.patch(model, attention="auto", fuse=False)
    assert snapshot(model)[0] == once
    assert state_of(tower).settings.attention == "auto" and not state_of(tower).settings.fuse
    assert state_of(tower).former_forward is None
    hf_vit_accel.unpatch(model)
    assert snapshot(model) == before


def test_patched_restores_what_was(model: Any) -> None:
    tower = tower_of(model)
    before = snapshot(model)
    with hf_vit_accel.patched(model, attention="sdpa") as same:
        assert same is model
        with hf_vit_accel.patched(model, fuse={"rope"}):
            assert state_of(tower).settings.fuse == {"rope"}
        assert state_of(tower).settings.attention == "sdpa" and state_of(tower).settings.fuse is None
    assert snapshot(model) == before
    with pytest.raises(RuntimeError, match="mine"), hf_vit_accel.patched(model):
        raise RuntimeError("mine")
    assert snapshot(model) == before


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
def test_copies_are_patched_on_their_own(model: Any, how: str) -> None:
    tower = tower_of(model)
    expected = run_tower(tower, GRIDS["mixed"])
    hf_vit_accel.patch(model, fuse={"rope"})
    run_tower(tower, GRIDS["mixed"])
    if how == "deepcopy":
        twin = copy.deepcopy(model)
    elif how == "pickle":
        twin = pickle.loads(pickle.dumps(model))
    else:
        buffer = io.BytesIO()
        torch.save(model, buffer)
        buffer.seek(0)
        twin = torch.load(buffer, weights_only=False)
    other = tower_of(twin)
    assert state_of(other) is not state_of(tower) and state_of(other).settings == state_of(tower).settings
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.5)
    assert_close(run_tower(tower, GRIDS["mixed"]), expected)
    scaled = run_tower(other, GRIDS["mixed"])
    assert state_of(other).calls == 1 and relative_error(scaled[0], expected[0]) > 0.01
    hf_vit_accel.unpatch(twin)
    assert_close(run_tower(other, GRIDS["mixed"]), scaled)
    assert state_of(tower) is not None


@pytest.mark.parametrize("model", FAMILIES, indirect=True)
def test_weights_stay_live(model: Any) -> None:
    tower, twin = tower_of(model), copy.deepcopy(model)
    hf_vit_accel.patch(model)
    run_tower(tower, GRIDS["image"])

    def check() -> None:
        assert_close(run_tower(tower, GRIDS["image"]), run_tower(tower_of(twin), GRIDS["image"]))

    for m in (model, twin):
        with torch.no_grad():
            tower_of(m).patch_embed.proj.weight.mul_(-1.25)
    check()
    fresh = {name: torch.randn_like(value) * 0.1 for name, value in model.state_dict().items()}
    for assign in (False, True):
        for m in (model, twin):
            m.load_state_dict({name: value.clone() for name, value in fresh.items()}, assign=assign)
        check()
    for m in (model, twin):
        m.double()
    check()
    assert state_of(tower).calls == 5


def test_save_and_state_dict_see_stock(model: Any, tmp_path: Any) -> None:
    names = {name: (value.shape, value.data_ptr()) for name, value in model.state_dict().items()}
    expected = run_tower(tower_of(model), GRIDS["images"])
    hf_vit_accel.patch(model)
    assert {name: (value.shape, value.data_ptr()) for name, value in model.state_dict().items()} == names
    model.save_pretrained(tmp_path)
    assert "flash_vit" not in (tmp_path / "config.json").read_text()
    reloaded = type(model).from_pretrained(tmp_path)
    assert state_of(tower_of(reloaded)) is None
    assert_close(run_tower(tower_of(reloaded), GRIDS["images"]), expected)


# --- what the fast path does not do ---------------------------------------------------------------------------------


def fallbacks(model: Any) -> str:
    return " | ".join(state_of(tower_of(model)).fallbacks)


@pytest.mark.parametrize("model", FAMILIES, indirect=True)
def test_gradients_are_served_fast_and_are_equal(model: Any) -> None:
    tower, twin = tower_of(model), tower_of(copy.deepcopy(model))
    hf_vit_accel.patch(model)
    grid, gradients = GRIDS["mixed"], []
    for of in (tower, twin):
        pixels = pixels_for(of, grid).requires_grad_()
        of(pixels, grid_thw=torch.tensor(grid)).pooler_output.square().sum().backward()
        gradients.append([pixels.grad, *(p.grad for p in of.parameters() if p.grad is not None)])
    assert len(gradients[0]) == len(gradients[1]) > 20
    for found, expected in zip(*gradients, strict=True):
        assert relative_error(found, expected) < 1e-5
    assert (state_of(tower).calls, state_of(tower).stock_calls) == (1, 0)


def test_frozen_tower_keeps_the_fast_path_with_grad_enabled(model: Any) -> None:
    tower = tower_of(model).requires_grad_(False)
    hf_vit_accel.patch(model, strict=True)
    out = tower(pixels_for(tower, GRIDS["image"]), grid_thw=torch.tensor(GRIDS["image"]))
    assert not out.pooler_output.requires_grad and state_of(tower).calls == 1


@pytest.mark.parametrize("what", ["output_hidden_states", "output_attentions"])
@pytest.mark.parametrize("where", ["kwargs", "config"])
def test_requested_outputs_are_stock(model: Any, what: str, where: str) -> None:
    tower, grid = tower_of(model), GRIDS["mixed"]
    kwargs = {what: True} if where == "kwargs" else {}
    if where == "config":
        setattr(tower.config, f"_{what}" if what == "output_attentions" else what, True)  # its setter wants eager
    pixels = pixels_for(tower, grid)
    with torch.no_grad():
        expected = tower(pixels, grid_thw=torch.tensor(grid), **kwargs)
        hf_vit_accel.patch(model)
        found = tower(pixels, grid_thw=torch.tensor(grid), **kwargs)
    name = what.removeprefix("output_")
    assert_close(list(found[name]), list(expected[name]))
    assert len(found[name]) >= 4 and what in fallbacks(model)
    if where == "config":
        setattr(tower.config, f"_{what}" if what == "output_attentions" else what, False)
    run_tower(tower, grid)
    assert state_of(tower).calls == 1, "capturing hooks stay installed and must not keep the fast path off"


class Doubled(nn.Module):
    """Stands for what LoRA and quantisation put in a module's place. It hands on no attributes."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        assert "vision_plans" not in kwargs, "keyword arguments of ours are for transformers' own blocks"
        return self.inner(x, **kwargs) * 2


class WithParts(Doubled):
    """One that does."""

    @property
    def weight(self) -> torch.Tensor:
        return self.inner.weight

    @property
    def proj(self) -> nn.Module:
        return self.inner.proj


REPLACED = ("blocks.0.attn.qkv", "blocks.1.mlp", "merger", "blocks.2.norm1", "blocks.3", "patch_embed")


@pytest.mark.parametrize(
    ("name", "kind"),
    [*((name, Doubled) for name in REPLACED), ("patch_embed", WithParts), ("patch_embed.proj", WithParts)],
)
@pytest.mark.parametrize("model", FAMILIES, indirect=True)
def test_replaced_modules_are_used(model: Any, name: str, kind: Any) -> None:
    """Before patching; after it: `test_ops`."""
    tower, grid = tower_of(model), torch.tensor(GRIDS["images"])
    pixels, (parent, _, child) = pixels_for(tower, GRIDS["images"]), name.rpartition(".")

    def run() -> list[torch.Tensor]:
        with torch.no_grad():
            return outputs_of(tower(pixels, grid_thw=grid))

    before = run()
    setattr(tower.get_submodule(parent), child, kind(tower.get_submodule(name)))
    hf_vit_accel.patch(model)
    found = run()
    assert "patch_embed" not in name or "patch_embed" not in hf_vit_accel.status(model).towers[0].fused
    hf_vit_accel.unpatch(model)
    expected = run()
    assert_close(found, expected)
    assert max(map(relative_error, expected, before)) > 1e-3


def test_upcast_queries_are_attended_in_the_dtype_of_the_weights(model: Any) -> None:
    """PEFT and quantisation leave some layers in fp32 beside bf16 weights: fp32 q, k, v come back as fp32."""
    tower = tower_of(model).bfloat16()
    for block in tower.blocks:
        inner = block.attn.qkv.float()
        block.attn.qkv = nn.Sequential(Cast(torch.float32), inner)
        block.attn.proj = nn.Sequential(Cast(torch.bfloat16), block.attn.proj)
    expected = run_tower(tower, GRIDS["image"])
    hf_vit_accel.patch(model)
    assert_close(run_tower(tower, GRIDS["image"]), expected, 3e-2)
    assert "several dtypes" in fallbacks(model)


class Cast(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.to(self.dtype)


def test_strict_raises_instead_of_falling_back(model: Any) -> None:
    tower, grid = tower_of(model), torch.tensor(GRIDS["image"])
    hf_vit_accel.patch(model, strict=True)
    pixels = pixels_for(tower, GRIDS["image"])
    tower(pixels, grid_thw=grid)
    with torch.no_grad():
        tower(pixels, grid_thw=grid)
        with pytest.raises(FallbackError, match="output_hidden_states"):
            tower(pixels, grid_thw=grid, output_hidden_states=True)
        tower.blocks[0].register_forward_hook(lambda *_: None)
        with pytest.raises(FallbackError, match=r"hooks on blocks\.0"):
            tower(pixels, grid_thw=grid)
    with pytest.raises(FallbackError, match=r"hooks on blocks\.0"):
        hf_vit_accel.patch(model, strict=True)


@pytest.mark.parametrize("shared", ONE_TOWER, indirect=True)
def test_two_threads_get_their_own_answers(shared: Any) -> None:
    tower = tower_of(shared)
    grids = [GRIDS[name] for name in ("smallest", "video", "mixed")]
    expected = {(i, seed): run_tower(tower, grid, seed) for i, grid in enumerate(grids) for seed in range(2)}
    failures: list[Any] = []

    def work(seed: int) -> None:
        for _ in range(5):
            for i, grid in enumerate(grids):
                try:
                    assert_close(run_tower(tower, grid, seed), expected[i, seed])
                except Exception as error:
                    failures.append(error)

    with hf_vit_accel.patched(shared):
        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(2)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
    assert not failures


def test_neither_inputs_nor_earlier_outputs_are_changed(shared: Any) -> None:
    tower, grid = tower_of(shared), torch.tensor(GRIDS["images"])
    pixels = pixels_for(tower, GRIDS["images"])
    with hf_vit_accel.patched(shared), torch.no_grad():
        held = [pixels, grid, *outputs_of(tower(pixels, grid_thw=grid))]
        kept = [x.clone() for x in held]
        run_tower(tower, GRIDS["images"], 1)
    assert all(torch.equal(x, y) for x, y in zip(held, kept, strict=True))


def test_the_cache_of_layouts_is_bounded() -> None:
    shared = TINY["qwen2_5_vl"].build()
    tower = tower_of(shared)
    with hf_vit_accel.patched(shared):
        for width in range(1, 100):
            run_tower(tower, [(1, 2, 2 * width)])
        prepared = state_of(tower).routes.cache
        assert len(prepared) <= prepared.entries and prepared.total_cost <= prepared.cost
        hf_vit_accel.patch(shared)
        assert len(prepared) == 0


HOW = ["wrapped", "replaced", "on the instance"]


@pytest.mark.parametrize(
    ("model", "target", "how"),
    [
        (family, target, HOW[(row + column) % 3])
        for row, target in enumerate(["tower", "block", "attention"])
        for column, family in enumerate(FAMILIES)
    ],
    indirect=["model"],
)
def test_forwards_replaced_after_patching(model: Any, target: str, how: str, monkeypatch: Any) -> None:
    """Wrapped by functools.wraps, too, which copies the module's name and hides from signatures."""
    tower = tower_of(model)
    hf_vit_accel.patch(model)
    before = run_tower(tower, GRIDS["mixed"])
    module = {"tower": tower, "block": tower.blocks[1], "attention": tower.blocks[1].attn}[target]
    kind, instance = type(module), vars(module).get("forward")
    stock = kind.forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = stock(self, *args, **kwargs)
        if target == "tower":
            output.last_hidden_state = output.last_hidden_state * 2
            return output
        return output * 2

    if how == "on the instance":
        module.forward = MethodType(forward, module)
    else:
        monkeypatch.setattr(kind, "forward", functools.wraps(stock)(forward) if how == "wrapped" else forward)
    found = run_tower(tower, GRIDS["mixed"])
    assert state_of(tower).stock_calls == 1 or instance is not None
    assert "forward of" in fallbacks(model) or instance is not None
    hf_vit_accel.unpatch(model)
    assert_close(found, run_tower(tower, GRIDS["mixed"]))
    assert relative_error(found[0], before[0]) > 0.1


def test_a_subclass_with_a_forward_of_its_own_goes_the_stock_way() -> None:
    for tiny in TINY.values():
        model = tiny.build()
        tower = tower_of(model)
        kind = type(tower)

        class Sub(kind):  # type: ignore[misc,valid-type]
            def forward(self, *args: Any, **kwargs: Any) -> Any:
                output = super().forward(*args, **kwargs)
                output.last_hidden_state = output.last_hidden_state * 2
                return output

        tower.__class__ = Sub
        expected = run_tower(tower, GRIDS["image"])
        hf_vit_accel.patch(tower)
        assert_close(run_tower(tower, GRIDS["image"]), expected)
        with pytest.raises(FallbackError, match="forward of Sub"):
            hf_vit_accel.patch(tower, strict=True)


def test_under_another_default_device(shared: Any) -> None:
    tower = tower_of(shared)
    expected = run_tower(tower, GRIDS["mixed"])
    pixels, grid = pixels_for(tower, GRIDS["mixed"]), torch.tensor(GRIDS["mixed"])
    with hf_vit_accel.patched(shared), torch.device("meta"), torch.no_grad():
        assert_close(outputs_of(tower(pixels, grid_thw=grid)), expected)


def test_a_deleted_model_is_freed_at_once() -> None:
    model = TINY["qwen2_5_vl"].build()
    hf_vit_accel.patch(model)
    run_tower(tower_of(model), GRIDS["image"])
    gone = [weakref.ref(tower_of(model)), weakref.ref(tower_of(model).merger)]
    gc.collect()
    gc.disable()
    try:
        del model
        assert [reference() for reference in gone] == [None, None]
    finally:
        gc.enable()


def test_patched_inside_patched_keeps_the_outer_statistics(shared: Any) -> None:
    with hf_vit_accel.patched(shared):
        run_tower(tower_of(shared), GRIDS["image"])
        state = state_of(tower_of(shared))
        with hf_vit_accel.patched(shared, fuse=False):
            run_tower(tower_of(shared), GRIDS["image"])
        assert state_of(tower_of(shared)) is state and state.calls == 1


# --- bad input ------------------------------------------------------------------------------------------------------

BAD = {
    "rows disagree": (lambda p, g: (p[:-4], g), "expected 96 rows of pixel values"),
    "no frames": (lambda p, g: (p, torch.tensor([[0, 12, 8]])), "at least one image"),
    "no rows": (lambda p, g: (p, torch.tensor([[1, 0, 8]])), "positive sizes"),
    "negative": (lambda p, g: (p, torch.tensor([[1, -12, -8]])), "positive sizes"),
    "merge does not divide": (lambda p, g: (p, torch.tensor([[1, 32, 3]])), "multiples of the merge size 2"),
    "empty batch": (lambda p, g: (p[:0], g[:0]), "at least one image"),
    "grid rank": (lambda p, g: (p, g[0]), r"shape \(images and videos, 3\)"),
    "grid columns": (lambda p, g: (p, g[:, :2]), r"shape \(images and videos, 3\)"),
    "grid dtype": (lambda p, g: (p, g.float()), "integer grid_thw"),
    "grid is a list": (lambda p, g: (p, g.tolist()), r"got list"),
    "pixel dtype": (lambda p, g: (p.to(torch.complex64), g), "tensor of real numbers of shape"),
    "pixel width": (lambda p, g: (p[:, :-1], g), "values per patch"),
    "devices": (lambda p, g: (p.to("meta"), g), "on the tower's device cpu"),
    "grid device": (lambda p, g: (p, g.to("meta")), "grid_thw on the CPU or with the pixel values"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_a_value_error_and_the_next_call_is_right(shared: Any, case: str) -> None:
    tower, grid = tower_of(shared), GRIDS["image"]
    expected = run_tower(tower, grid)
    spoil, message = BAD[case]
    with hf_vit_accel.patched(shared):
        with pytest.raises(ValueError, match=message), torch.no_grad():
            tower(*spoil(pixels_for(tower, grid), torch.tensor(grid)))
        assert_close(run_tower(tower, grid), expected)


@pytest.mark.parametrize("fuse", ["auto", False], ids=["fused", "unfused"])
@pytest.mark.parametrize("case", ["padding rows", "integers", "bytes", "a batch"])
def test_odd_input_that_stock_takes_is_taken(shared: Any, case: str, fuse: Any) -> None:
    """Pixels in another shape than the processor's are stock's own business."""
    tower, grid = tower_of(shared), torch.tensor(GRIDS["images"])
    pixels = pixels_for(tower, GRIDS["images"])
    if case == "padding rows":
        grid = torch.cat([grid.new_zeros(1, 3), grid, grid.new_tensor([[0, 6, 4]])])
    else:
        other = {"integers": (pixels * 10).int(), "bytes": (pixels.abs() * 10).byte(), "a batch": pixels[None]}
        pixels = other[case]
    with torch.no_grad():
        expected = outputs_of(tower(pixels, grid))
        with hf_vit_accel.patched(shared, fuse=fuse):
            assert_close(outputs_of(tower(pixels, grid)), expected)
            assert state_of(tower).calls == (case != "a batch")


# --- on a GPU -------------------------------------------------------------------------------------------------------


def usable(names: list[str]) -> list[str]:
    return [backend.name for backend in BACKENDS if backend.name in names and not backend.reasons_against_machine()]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_gpu_towers_are_as_exact_as_stock(shared: Any, dtype: torch.dtype) -> None:
    check_error_bound(shared, dtype, "cuda", ["auto", *usable([backend.name for backend in BACKENDS])])


@pytest.mark.gpu
def test_gpu_fp32_equals_stock(shared: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # stock's convolution would use it
    twin = copy.deepcopy(shared).cuda()
    for grid in GRIDS.values():
        expected = run_tower(tower_of(twin), grid)
        with hf_vit_accel.patched(twin, strict=True):
            assert_close(run_tower(tower_of(twin), grid), expected)


def syncs_of(run: Any) -> list[str]:
    """Where a run made the host wait for the device."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            run()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return [f"{w.filename}:{w.lineno}: {w.message}" for w in caught if "synchronizing" in str(w.message)]


@pytest.mark.gpu
@pytest.mark.parametrize("attention", [backend.name for backend in BACKENDS])
def test_gpu_one_host_sync_per_forward(shared: Any, attention: str) -> None:
    if attention not in usable([attention]):
        pytest.skip(f"{attention} is not usable here")
    tower = tower_of(copy.deepcopy(shared)).to("cuda", torch.bfloat16)
    syncs_of(lambda: torch.ones(1, device="cuda").tolist())  # a process's first sync is reported twice
    for name, grid in GRIDS.items():
        pixels = pixels_for(tower, grid, device="cuda", dtype=torch.bfloat16)
        on_gpu, on_cpu = torch.tensor(grid, device="cuda"), torch.tensor(grid)
        hf_vit_accel.patch(tower, attention=attention, strict=True)
        with torch.no_grad():
            tower(pixels, grid_thw=on_gpu)
            hf_vit_accel.patch(tower, attention=attention, strict=True)  # a cold cache of layouts
            assert len(syncs := syncs_of(lambda: tower(pixels, grid_thw=on_gpu))) == 1, (name, syncs)  # noqa: B023
            assert len(syncs := syncs_of(lambda: tower(pixels, grid_thw=on_gpu))) == 1, (name, syncs)  # noqa: B023
            assert len(syncs := syncs_of(lambda: tower(pixels, grid_thw=on_cpu))) == 0, (name, syncs)  # noqa: B023
            hf_vit_accel.patch(tower, attention=attention)
            tower(pixels, grid_thw=on_gpu, output_hidden_states=True)
            syncs = syncs_of(lambda: tower(pixels, grid_thw=on_gpu, output_hidden_states=True))  # noqa: B023
            assert len(syncs) == 1, (name, syncs)
        hf_vit_accel.unpatch(tower)


@pytest.mark.gpu
def test_gpu_plans_are_built_once(shared: Any) -> None:
    if not usable(["flashinfer_cudnn"]):
        pytest.skip("flashinfer_cudnn is not usable here")
    tower = tower_of(copy.deepcopy(shared)).to("cuda", torch.bfloat16)
    hf_vit_accel.patch(tower, attention="flashinfer_cudnn", strict=True)
    run_tower(tower, GRIDS["mixed"])
    before = cudnn_backend.GRAPHS.misses
    for seed in range(3):
        run_tower(tower, GRIDS["mixed"], seed)
    assert cudnn_backend.GRAPHS.misses == before
    assert state_of(tower).calls == 4


@pytest.mark.gpu
@pytest.mark.parametrize("attention", ["auto", "flashinfer_cudnn", "torch_varlen"])
@pytest.mark.parametrize("model", FAMILIES, indirect=True)
def test_gpu_gradients_equal_stock(model: Any, attention: str) -> None:
    if attention != "auto" and not usable([attention]):
        pytest.skip(f"{attention} is not usable here")
    tower = tower_of(model.cuda())
    for parameter in tower.parameters():
        parameter.data = parameter.data.bfloat16()
    twin, exact = copy.deepcopy(tower), copy.deepcopy(tower).float()
    hf_vit_accel.patch(tower, attention=attention)
    grid, gradients = GRIDS["mixed"], []
    for of in (tower, twin, exact):
        weight = of.patch_embed.proj.weight
        pixels = pixels_for(of, grid).bfloat16().to("cuda", weight.dtype)
        of(pixels, grid_thw=torch.tensor(grid, device="cuda")).pooler_output.float().square().mean().backward()
        gradients.append(torch.cat([p.grad.float().flatten() for p in of.parameters() if p.grad is not None]))
    found, stock, expected = gradients
    assert relative_error(found, expected) <= max(1.2 * relative_error(stock, expected), 2**-7)
    assert (state_of(tower).calls, state_of(tower).stock_calls) == (1, 0)


@pytest.mark.gpu
def test_gpu_two_streams_get_right_answers(shared: Any) -> None:
    tower = tower_of(copy.deepcopy(shared)).to("cuda", torch.bfloat16)
    grids = list(GRIDS.values())
    expected = [run_tower(tower, grid) for grid in grids]
    hf_vit_accel.patch(tower, strict=True)
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    found: list[Any] = []
    torch.cuda.synchronize()
    for _ in range(5):
        for index, grid in enumerate(grids):
            for stream in streams:
                with torch.cuda.stream(stream):
                    found.append((index, run_tower(tower, grid)))
    torch.cuda.synchronize()
    for index, outputs in found:
        assert_close(outputs, expected[index], 3e-2)


@pytest.mark.gpu
def test_gpu_mixed_devices_are_a_value_error(shared: Any) -> None:
    tower = tower_of(copy.deepcopy(shared)).cuda()
    hf_vit_accel.patch(tower)
    with pytest.raises(ValueError, match="on the tower's device cuda:0, got them on cpu"):
        tower(pixels_for(tower, GRIDS["image"]), grid_thw=torch.tensor(GRIDS["image"]))


@pytest.mark.gpu
def test_gpu_memory_is_stock(shared: Any) -> None:
    tower = tower_of(copy.deepcopy(shared)).to("cuda", torch.bfloat16)
    run_tower(tower, GRIDS["mixed"])  # cuBLAS keeps a workspace from its first use
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    hf_vit_accel.patch(tower, attention="torch_varlen")
    assert torch.cuda.memory_allocated() == before
    run_tower(tower, GRIDS["mixed"])
    hf_vit_accel.unpatch(tower)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= before * 1.05


@pytest.mark.gpu
@pytest.mark.parametrize("warm", [True, False])
def test_gpu_a_capture_of_your_own_is_an_error_that_names_ours(model: Any, warm: bool) -> None:
    tower, grid = tower_of(model.to("cuda", torch.bfloat16)), torch.tensor(GRIDS["images"])
    pixels = pixels_for(tower, GRIDS["images"], device="cuda", dtype=torch.bfloat16)
    expected = run_tower(tower, GRIDS["images"])
    hf_vit_accel.patch(model)
    if warm:
        run_tower(tower, GRIDS["images"])
    capture = torch.cuda.graph(torch.cuda.CUDAGraph())
    with torch.no_grad(), pytest.raises(RuntimeError, match="cuda_graphs=True"), capture:
        tower(pixels, grid_thw=grid)
    assert_close(run_tower(tower, GRIDS["images"]), expected, 3e-2)


def test_status_says_a_reason_once() -> None:
    model = TINY["qwen3_vl"].build().to(torch.float32)
    hf_vit_accel.patch(model, attention="auto")
    pair = nn.ModuleDict({"a": model, "b": TINY["qwen2_5_vl"].build().to(torch.float32)})
    first, second = map(str, hf_vit_accel.status(pair).towers)
    assert first in str(hf_vit_accel.status(pair)) and "\n" not in second  # which is stock
    hf_vit_accel.patch(pair)
    texts = [str(tower) for tower in hf_vit_accel.status(pair).towers]
    for text in texts:
        reasons = [line for line in text.split("\n") if line.startswith("  not ")]
        whys = [line.split(": ", 1)[1] for line in reasons]
        assert len(whys) == len(set(whys)) > 2, reasons
        assert any(", " in line.split(": ")[0] for line in reasons), "all that one holds for"
    assert "not fused  window_attention: the tower has no windows" in texts[0]
    assert "not fused  positions: the tower has no position table" in texts[1]
    assert str(hf_vit_accel.status(pair)) == "\n".join(texts)


def test_the_name_that_models_are_loaded_with_is_explained() -> None:
    with pytest.raises(ValueError, match="what models are loaded with, here it is 'auto'"):
        hf_vit_accel.patch(TINY["qwen3_vl"].build(), attention="flash_vit_auto")


def test_status_tells_of_the_weights_as_they_are(references: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not of a call before they were cast."""
    only = lambda device, dtype: None if dtype == torch.bfloat16 else "not for this dtype"  # noqa: E731
    monkeypatch.setattr(state_module, "why_not_triton", only)
    tower = tower_of(TINY["qwen2_vl"].build())
    hf_vit_accel.patch(tower)
    run_tower(tower, [(1, 4, 4)])
    assert "mlp" not in hf_vit_accel.status(tower).towers[0].fused
    tower.bfloat16()
    assert "mlp" in hf_vit_accel.status(tower).towers[0].fused
