"""The fused tower: its wiring on CPU, with every kernel's reference in the kernel's place; and all of it on a GPU."""

from __future__ import annotations

import copy
import pickle
import threading
from typing import Any

import pytest
import torch
from tiny import GRIDS, TINY, assert_close, outputs_of, pixels_for, relative_error, run_tower, tower_of
from torch import nn

import hf_vit_accel
from hf_vit_accel import FallbackError, fusion
from hf_vit_accel.backends import backend_named
from hf_vit_accel.fusion import PARTS, AlignedSwiglu
from hf_vit_accel.kernels import window_attention
from hf_vit_accel.kernels.activation import quick_gelu_reference_, swiglu_reference
from hf_vit_accel.kernels.norm import add_norm_reference_
from hf_vit_accel.kernels.positions import add_positions_reference_
from hf_vit_accel.kernels.rope import rope_reference_
from hf_vit_accel.kernels.window_attention import window_attention_reference
from hf_vit_accel.tower import state_of

APPLIES = {
    "qwen2_vl": {"patch_embed", "norms", "rope", "mlp"},
    "qwen2_5_vl": {"patch_embed", "norms", "rope", "mlp", "window_attention"},
    "qwen3_vl": {"patch_embed", "positions", "norms", "rope", "mlp"},
    "qwen3_vl_moe": {"patch_embed", "positions", "norms", "rope", "mlp"},
}


@pytest.fixture
def references(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every kernel replaced by its reference, and taken for runnable; the names of those that were called."""
    called: list[str] = []

    def put(owner: Any, name: str, reference: Any) -> None:
        def counted(*args: Any, **kwargs: Any) -> Any:
            called.append(name)
            return reference(*args, **kwargs)

        monkeypatch.setattr(owner, name, counted)

    def gelu(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return nn.functional.gelu(nn.functional.linear(x, weight, bias), approximate="tanh")

    monkeypatch.setattr(fusion, "why_not_triton", lambda device, dtype: None)
    put(fusion, "rope_", rope_reference_)
    put(fusion, "add_norm_", add_norm_reference_)
    put(fusion, "add_positions_", add_positions_reference_)
    put(fusion, "swiglu", swiglu_reference)
    put(fusion, "quick_gelu_", quick_gelu_reference_)
    put(fusion, "linear_gelu_tanh", gelu)
    put(window_attention, "window_attention", window_attention_reference)
    return called


@pytest.fixture(params=list(TINY))
def model(request: Any) -> Any:
    return TINY[request.param].build()


def family_of(model: Any) -> str:
    return next(name for name, tiny in TINY.items() if tiny.model == type(model).__name__)


@pytest.mark.parametrize("part", ["all", *PARTS])
def test_each_part_equals_stock(references: list[str], model: Any, part: str) -> None:
    expected = {grid: run_tower(tower_of(model), GRIDS[grid]) for grid in GRIDS}
    hf_vit_accel.patch(model, fuse="auto" if part == "all" else {part}, strict=part == "all")
    for grid, outputs in expected.items():
        assert_close(run_tower(tower_of(model), GRIDS[grid]), outputs)
    wanted = APPLIES[family_of(model)] & (set(PARTS) if part == "all" else {part})
    assert set(hf_vit_accel.status(model).towers[0].fused) == wanted
    assert state_of(tower_of(model)).calls == len(GRIDS)


def test_fused_parts_are_what_runs(references: list[str], model: Any) -> None:
    hf_vit_accel.patch(model)
    run_tower(tower_of(model), GRIDS["mixed"])
    depth = len(tower_of(model).blocks)
    name = family_of(model)
    windows = depth - 2 if name == "qwen2_5_vl" else 0
    expected = {"add_norm_": 2 * depth, "rope_": depth - windows}
    expected |= {
        "qwen2_vl": {"quick_gelu_": depth},
        "qwen2_5_vl": {"swiglu": depth, "window_attention": windows},
    }.get(name, {"linear_gelu_tanh": depth, "add_positions_": 1})
    assert {kernel: references.count(kernel) for kernel in set(references)} == expected


def test_windows_too_long_for_the_kernel_are_planned(references: list[str]) -> None:
    tiny = copy.deepcopy(TINY["qwen2_5_vl"])
    tiny.vision["window_size"] = 64  # 8 x 8 merged tokens, 256 rows
    model = tiny.build()
    expected = run_tower(tower_of(model), [(1, 24, 20)])
    hf_vit_accel.patch(model)
    assert_close(run_tower(tower_of(model), [(1, 24, 20)]), expected)
    assert "window_attention" not in references
    assert set(hf_vit_accel.status(model).towers[0].backends) == {"full", "window"}


@pytest.mark.parametrize("name", ["norm1", "mlp", "attn.qkv"])
@pytest.mark.parametrize("how", ["instance forward", "class forward", "module"])
def test_what_is_not_plain_runs_itself(
    references: list[str], model: Any, name: str, how: str, monkeypatch: Any
) -> None:
    """Patched first, changed afterwards: the next call must see it."""
    tower_ = tower_of(model)
    hf_vit_accel.patch(model)
    before = run_tower(tower_, GRIDS["mixed"])
    module = tower_.blocks[1].get_submodule(name)
    if how == "instance forward":
        stock = module.forward
        module.forward = lambda x: stock(x) * 1.5
    elif how == "class forward":
        kind, stock = type(module), type(module).forward
        monkeypatch.setattr(kind, "forward", lambda self, x: stock(self, x) * 1.5)
    else:

        class Scaled(nn.Module):
            def __init__(self, inner: nn.Module) -> None:
                super().__init__()
                self.inner = inner

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.inner(x) * 1.5

        parent, _, child = name.rpartition(".")
        setattr(tower_.blocks[1].get_submodule(parent), child, Scaled(module))
    found = run_tower(tower_, GRIDS["mixed"])
    hf_vit_accel.unpatch(model)
    assert_close(found, run_tower(tower_, GRIDS["mixed"]))
    assert relative_error(found[0], before[0]) > 1e-3


def test_strict_wants_named_parts_fused(references: list[str], model: Any) -> None:
    model_tower = tower_of(model)
    applies = APPLIES[family_of(model)]
    hf_vit_accel.patch(model, fuse=applies, strict=True)
    model_tower.blocks[0].norm1 = nn.Identity()
    with pytest.raises(FallbackError, match=r"norms is not fused: .*Identity"):
        hf_vit_accel.patch(model, fuse=applies, strict=True)
    hf_vit_accel.patch(model, fuse=applies)
    assert "Identity" in hf_vit_accel.status(model).towers[0].unfused["norms"]


@pytest.mark.parametrize("bad", ["everything", {"rope", "nope"}, {"nope"}])
def test_unknown_parts_are_listed(model: Any, bad: Any) -> None:
    with pytest.raises(ValueError, match=r"names out of .*'mlp', 'norms'"):
        hf_vit_accel.patch(model, fuse=bad)
    assert state_of(tower_of(model)) is None


# --- the padded MLP -------------------------------------------------------------------------------------------------


def swiglu_model() -> Any:
    return TINY["qwen2_5_vl"].build()


def same(model: Any, twin: Any) -> None:
    assert_close(run_tower(tower_of(model), GRIDS["mixed"]), run_tower(tower_of(twin), GRIDS["mixed"]))


def derived(model: Any) -> tuple[AlignedSwiglu, ...]:
    return state_of(tower_of(model))._fusion[3].aligned


def test_padded_parameters_keep_names_shapes_values(references: list[str], tmp_path: Any) -> None:
    model = swiglu_model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    identity = {name: id(parameter) for name, parameter in model.named_parameters()}
    hf_vit_accel.patch(model)
    run_tower(tower_of(model), GRIDS["image"])
    (first, *_) = derived(model)
    assert first.width == 212 and first.padded == 216
    assert tower_of(model).blocks[0].mlp.down_proj.weight.stride() == (216, 1)
    after = model.state_dict()
    assert list(after) == list(before) and all(torch.equal(after[name], before[name]) for name in before)
    assert {name: id(parameter) for name, parameter in model.named_parameters()} == identity
    model.save_pretrained(tmp_path / "saved")
    reloaded = type(model).from_pretrained(tmp_path / "saved")
    assert all(torch.equal(value, before[name]) for name, value in reloaded.state_dict().items())
    torch.save(model.state_dict(), tmp_path / "state.pt")
    assert all(torch.equal(v, before[n]) for n, v in torch.load(tmp_path / "state.pt").items())
    hf_vit_accel.unpatch(model)
    for name, parameter in model.named_parameters():
        assert parameter.is_contiguous() and torch.equal(parameter, before[name])
        assert parameter.untyped_storage().nbytes() == parameter.numel() * parameter.element_size()


def test_padded_parameters_are_live(references: list[str]) -> None:
    model = swiglu_model()
    twin = copy.deepcopy(model)
    hf_vit_accel.patch(model)
    same(model, twin)
    address = derived(model)[0].addresses

    def both(change: Any) -> None:
        for m in (model, twin):
            with torch.no_grad():
                change(tower_of(m).blocks[0].mlp)
        same(model, twin)

    both(lambda mlp: mlp.gate_proj.weight.mul_(2))
    both(lambda mlp: mlp.down_proj.weight.add_(0.01))
    both(lambda mlp: mlp.up_proj.bias.sub_(0.1))
    assert derived(model)[0].addresses == address, "in place: nothing is laid out again"
    fresh = {name: torch.randn_like(value) * 0.1 for name, value in twin.state_dict().items()}
    for assign in (False, True):
        for m in (model, twin):
            m.load_state_dict({name: value.clone() for name, value in fresh.items()}, assign=assign)
        same(model, twin)
    assert derived(model)[0].addresses != address
    both(lambda mlp: setattr(mlp.up_proj.weight, "data", mlp.up_proj.weight.data.clone() * 3))
    for m in (model, twin):
        m.double()
    same(model, twin)
    hf_vit_accel.unpatch(model)
    same(model, twin)


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copies_lay_out_their_own(references: list[str], how: str) -> None:
    model = swiglu_model()
    hf_vit_accel.patch(model)
    expected = run_tower(tower_of(model), GRIDS["mixed"])
    twin = copy.deepcopy(model) if how == "deepcopy" else pickle.loads(pickle.dumps(model))
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    assert_close(run_tower(tower_of(model), GRIDS["mixed"]), expected)
    run_tower(tower_of(twin), GRIDS["image"])
    hf_vit_accel.unpatch(twin)
    assert_close(run_tower(tower_of(model), GRIDS["mixed"]), expected)


def test_parameters_stay_trainable_after_inference_mode(references: list[str]) -> None:
    model = swiglu_model()
    hf_vit_accel.patch(model)
    grid = GRIDS["image"]
    with torch.inference_mode():
        tower_of(model)(pixels_for(tower_of(model), grid), grid_thw=torch.tensor(grid))
    assert derived(model)[0].addresses and not any(parameter.is_inference() for parameter in model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    outputs_of(tower_of(model)(pixels_for(tower_of(model), grid), grid_thw=torch.tensor(grid)))[0].sum().backward()
    optimizer.step()
    twin = copy.deepcopy(model)
    hf_vit_accel.unpatch(twin)
    same(model, twin)


def test_aligned_widths_are_not_padded(references: list[str]) -> None:
    linears = nn.Linear(16, 24), nn.Linear(16, 24), nn.Linear(24, 16)
    mlp = AlignedSwiglu(*linears)
    mlp.derive()
    assert mlp.padded == 24 and linears[2].weight.is_contiguous()
    x = torch.randn(5, 16)
    expected = linears[2](nn.functional.silu(linears[0](x)) * linears[1](x))
    torch.testing.assert_close(mlp(x), expected)


def test_threads_that_lay_out_at_once_agree(references: list[str]) -> None:
    model = swiglu_model()
    expected = run_tower(tower_of(model), GRIDS["mixed"])
    hf_vit_accel.patch(model)
    failures: list[Exception] = []

    def work() -> None:
        try:
            for _ in range(3):
                assert_close(run_tower(tower_of(model), GRIDS["mixed"]), expected)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert not failures
    hf_vit_accel.unpatch(model)
    assert_close(run_tower(tower_of(model), GRIDS["mixed"]), expected, 0.0)


def test_patching_again_does_not_stack_paddings(references: list[str]) -> None:
    model = swiglu_model()
    twin = copy.deepcopy(model)
    for fuse in ("auto", {"mlp"}, False, "auto"):
        hf_vit_accel.patch(model, fuse=fuse)
        same(model, twin)
        if not fuse:
            assert all(parameter.is_contiguous() for parameter in model.parameters())


# --- on a GPU -------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_gpu_everything_that_applies_is_fused(model: Any, dtype: torch.dtype) -> None:
    tower_ = tower_of(model.to("cuda", dtype))
    hf_vit_accel.patch(model, fuse=APPLIES[family_of(model)], strict=True)
    run_tower(tower_, GRIDS["mixed"])
    status = hf_vit_accel.status(model).towers[0]
    assert set(status.fused) == APPLIES[family_of(model)] and status.calls == 1
    model.float()
    with pytest.raises(FallbackError, match="is not fused: the dtype is float32"):
        run_tower(tower_, GRIDS["mixed"])
    hf_vit_accel.patch(model)
    run_tower(tower_, GRIDS["mixed"])
    assert hf_vit_accel.status(model).towers[0].fused == ("patch_embed",)


@pytest.mark.gpu
@pytest.mark.parametrize("part", ["all", *PARTS])
def test_gpu_each_part_is_as_exact_as_stock(model: Any, part: str) -> None:
    tower_ = tower_of(model.cuda())
    for parameter in tower_.parameters():
        parameter.data = parameter.data.bfloat16()
    exact = copy.deepcopy(tower_).float()
    for grid in GRIDS.values():
        errors = []
        for of in (tower_, None):
            if of is None:
                hf_vit_accel.patch(tower_, fuse="auto" if part == "all" else {part})
            total = 0.0
            for seed in range(5):
                pixels = pixels_for(tower_, grid, seed).bfloat16().cuda()
                with torch.no_grad():
                    found = outputs_of(tower_(pixels, grid_thw=torch.tensor(grid, device="cuda")))
                    expected = outputs_of(exact(pixels.float(), grid_thw=torch.tensor(grid, device="cuda")))
                total += max(relative_error(f, e) for f, e in zip(found, expected, strict=True)) / 5
            errors.append(total)
        hf_vit_accel.unpatch(tower_)
        assert errors[1] <= max(1.1 * errors[0], torch.finfo(torch.bfloat16).eps), (grid, errors)


@pytest.mark.gpu
def test_gpu_weights_stay_live(model: Any) -> None:
    model = model.to("cuda", torch.bfloat16)
    twin = copy.deepcopy(model)
    hf_vit_accel.patch(model)
    for _ in range(2):
        found, expected = (run_tower(tower_of(m), GRIDS["mixed"]) for m in (model, twin))
        assert_close(found, expected, 3e-2)
        for m in (model, twin):
            with torch.no_grad():
                for parameter in tower_of(m).parameters():
                    parameter.mul_(1.25)
    fresh = {name: torch.randn_like(value) * 0.1 for name, value in twin.state_dict().items()}
    for m in (model, twin):
        m.load_state_dict(fresh)
    found, expected = (run_tower(tower_of(m), GRIDS["mixed"]) for m in (model, twin))
    assert_close(found, expected, 3e-2)
    assert state_of(tower_of(model)).calls == 3


WIDE = {
    "qwen2_vl": dict(embed_dim=1280, num_heads=16, mlp_ratio=4, hidden_size=512),
    "qwen2_5_vl": dict(hidden_size=1280, num_heads=16, intermediate_size=3420, out_hidden_size=512),
    "qwen3_vl": dict(hidden_size=1152, num_heads=16, intermediate_size=4304, deepstack_visual_indexes=[0]),
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", WIDE)
def test_gpu_at_most_nine_kernels_per_layer(name: str) -> None:
    """At the real widths: narrow products are split, and their parts summed by kernels more."""
    from torch.profiler import ProfilerActivity, profile

    if reasons := backend_named("flashinfer_cudnn").reasons_against_machine():
        pytest.skip("; ".join(reasons))  # other backends launch helper kernels of their own
    counts = []
    for depth in (2, 4):
        tiny = copy.deepcopy(TINY[name])
        tiny.vision.update(WIDE[name], depth=depth, **({"fullatt_block_indexes": [1]} if name == "qwen2_5_vl" else {}))
        tower_ = tower_of(tiny.build()).to("cuda", torch.bfloat16)
        hf_vit_accel.patch(tower_, attention="flashinfer_cudnn", strict=True)
        grid = [(1, 32, 32)] * 8
        run_tower(tower_, grid)
        with profile(activities=[ProfilerActivity.CUDA]) as profiled:
            run_tower(tower_, grid)
            torch.cuda.synchronize()
        kernels = [e.name for e in profiled.events() if e.device_type == torch.autograd.DeviceType.CUDA]
        counts.append(len([kernel for kernel in kernels if "Memcpy" not in kernel and "Memset" not in kernel]))
    # cuDNN launches a small kernel before its own, and Qwen2-VL's activation is no epilogue that cuBLAS has.
    assert 2 * 7 <= counts[1] - counts[0] <= 2 * (10 if name == "qwen2_vl" else 9), counts
