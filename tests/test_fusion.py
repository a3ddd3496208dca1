"""The fused tower: its wiring on CPU, with every kernel's reference in the kernel's place; and all of it on a GPU."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from tiny import GRIDS, TINY, assert_close, outputs_of, pixels_for, relative_error, run_tower, tower_of
from torch import nn

import hf_vit_accel
from hf_vit_accel import FallbackError, fusion
from hf_vit_accel.backends import backend_named
from hf_vit_accel.fusion import PARTS
from hf_vit_accel.ops import window_attention
from hf_vit_accel.ops.activation import pad_swiglu_reference, quick_gelu_reference, swiglu_reference
from hf_vit_accel.ops.linear_activation import linear_quick_gelu_reference, linear_swiglu_reference
from hf_vit_accel.ops.norm import add_norm_reference_
from hf_vit_accel.ops.positions import add_positions_reference_
from hf_vit_accel.ops.rope import rope_reference_
from hf_vit_accel.ops.window_attention import window_attention_reference
from hf_vit_accel.tower import state_of

APPLIES = {
    "qwen2_vl": {"patch_embed", "mergers", "norms", "rope", "mlp"},
    "qwen2_5_vl": {"patch_embed", "mergers", "norms", "rope", "mlp", "window_attention"},
    "qwen3_vl": {"patch_embed", "mergers", "positions", "norms", "rope", "mlp"},
    "qwen3_vl_moe": {"patch_embed", "mergers", "positions", "norms", "rope", "mlp"},
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
    monkeypatch.setattr(fusion, "why_not_descriptors", lambda device: None)
    put(fusion, "rope_", rope_reference_)
    put(fusion, "add_norm_", add_norm_reference_)
    put(fusion, "add_positions_", add_positions_reference_)
    put(fusion, "swiglu", swiglu_reference)
    put(fusion, "pad_swiglu", pad_swiglu_reference)
    put(fusion, "linear_swiglu", linear_swiglu_reference)
    put(fusion, "linear_quick_gelu", linear_quick_gelu_reference)
    put(fusion, "quick_gelu_", quick_gelu_reference)
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
    mergers = 1 + len(getattr(tower_of(model), "deepstack_merger_list", ()))
    expected = {"add_norm_": 2 * depth + mergers, "rope_": depth - windows}
    expected |= {
        "qwen2_vl": {"linear_quick_gelu": depth},
        "qwen2_5_vl": {"linear_swiglu": depth, "window_attention": windows},
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


@pytest.mark.parametrize("name", ["norm1", "mlp", "attn.qkv", "merger"])
@pytest.mark.parametrize("how", ["instance forward", "class forward", "module"])
def test_what_is_not_plain_runs_itself(
    references: list[str], model: Any, name: str, how: str, monkeypatch: Any
) -> None:
    """Patched first, changed afterwards: the next call must see it."""
    tower_ = tower_of(model)
    hf_vit_accel.patch(model)
    before = run_tower(tower_, GRIDS["mixed"])
    owner = tower_ if name == "merger" else tower_.blocks[1]
    module = owner.get_submodule(name)
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
        setattr(owner.get_submodule(parent), child, Scaled(module))
    found = run_tower(tower_, GRIDS["mixed"])
    hf_vit_accel.unpatch(model)
    assert_close(found, run_tower(tower_, GRIDS["mixed"]))
    assert max(relative_error(f, b) for f, b in zip(found, before, strict=True)) > 1e-3


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


# --- weights stay what they are --------------------------------------------------------------------------------------


def test_parameters_are_untouched(references: list[str], model: Any) -> None:
    """Address, strides, storage: whatever holds or walks the parameters (optimizers, checkpoints) sees stock's."""

    def seen() -> list[Any]:
        return [
            (name, id(p), p.data_ptr(), p.stride(), p.untyped_storage().nbytes(), p.untyped_storage().data_ptr())
            for name, p in model.named_parameters()
        ]

    before = seen()
    hf_vit_accel.patch(model)
    run_tower(tower_of(model), GRIDS["mixed"])
    assert seen() == before


def test_weights_are_read_at_every_call(references: list[str], model: Any) -> None:
    """In place, by loading, by assignment, by pruning: nothing derived from a weight outlives the call."""
    twin = copy.deepcopy(model)
    hf_vit_accel.patch(model)

    def both(change: Any) -> None:
        for m in (model, twin):
            with torch.no_grad():
                change(tower_of(m))
        found, expected = (run_tower(tower_of(m), GRIDS["mixed"]) for m in (model, twin))
        assert_close(found, expected)

    both(lambda tower_: [parameter.mul_(1.1) for parameter in tower_.parameters()])
    fresh = {name: torch.randn_like(value) * 0.1 for name, value in tower_of(twin).state_dict().items()}
    both(lambda tower_: tower_.load_state_dict({name: value.clone() for name, value in fresh.items()}))
    both(lambda tower_: tower_.load_state_dict({name: value.clone() for name, value in fresh.items()}, assign=True))
    both(
        lambda tower_: setattr(
            tower_.blocks[0].norm1.weight, "data", torch.ones(1).expand(tower_.blocks[0].norm1.weight.shape)
        )
    )
    both(lambda tower_: tower_.double())
    if hasattr(tower_of(model).blocks[0].mlp, "gate_proj"):

        def prune(tower_: Any) -> None:
            mlp = tower_.blocks[0].mlp
            for linear in (mlp.gate_proj, mlp.up_proj):
                linear.weight.data, linear.bias.data = linear.weight.data[:101], linear.bias.data[:101]
            mlp.down_proj.weight.data = mlp.down_proj.weight.data[:, :101]

        both(prune)
    both(
        lambda tower_: [
            setattr(n, "eps" if hasattr(n, "eps") else "variance_epsilon", 3.0) for n in [tower_.blocks[0].norm2]
        ]
    )


def test_fused_optimizers_step_as_on_stock(references: list[str]) -> None:
    losses = []
    for patched in (False, True):
        model = TINY["qwen2_5_vl"].build()
        if patched:
            hf_vit_accel.patch(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        for _ in range(3):
            run_tower(tower_of(model), GRIDS["mixed"])
            pixels, grid = pixels_for(tower_of(model), GRIDS["image"]), torch.tensor(GRIDS["image"])
            loss = tower_of(model)(pixels, grid_thw=grid).pooler_output.square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.detach())
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-4, atol=0.0)


def test_checkpoints_of_others_are_complete(references: list[str], model: Any, tmp_path: Any) -> None:
    """accelerate and safetensors drop or refuse parameters that share storage or are strided."""
    from accelerate import Accelerator
    from safetensors.torch import load_file, save_file

    before = {name: value.clone() for name, value in model.state_dict().items()}
    hf_vit_accel.patch(model)
    run_tower(tower_of(model), GRIDS["mixed"])
    Accelerator(cpu=True).save_model(model, str(tmp_path))
    save_file({name: value.clone() for name, value in before.items()}, tmp_path / "stock.safetensors")
    save_file(tower_of(model).state_dict(), tmp_path / "tower.safetensors")
    saved = load_file(tmp_path / "model.safetensors")
    tower_names = [name for name in before if ".visual." in f".{name}"]
    assert len(tower_names) > 20 and all(torch.equal(saved[name], before[name]) for name in tower_names)


def test_without_descriptors_qwen2_vl_activates_in_place(
    references: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fusion, "why_not_descriptors", lambda device: "not this GPU")
    model = TINY["qwen2_vl"].build()
    expected = run_tower(tower_of(model), GRIDS["mixed"])
    hf_vit_accel.patch(model)
    assert_close(run_tower(tower_of(model), GRIDS["mixed"]), expected)
    assert "quick_gelu_" in references and "linear_quick_gelu" not in references


def test_without_descriptors_widths_are_padded_only_where_they_need_it(
    references: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fusion, "why_not_descriptors", lambda device: "not this GPU")
    for width, padded in ((212, True), (216, False)):
        tiny = copy.deepcopy(TINY["qwen2_5_vl"])
        tiny.vision["intermediate_size"] = width
        model = tiny.build()
        expected = run_tower(tower_of(model), GRIDS["mixed"])
        references.clear()
        hf_vit_accel.patch(model)
        assert_close(run_tower(tower_of(model), GRIDS["mixed"]), expected)
        assert ("pad_swiglu" in references) == padded and "swiglu" in references
        assert "linear_swiglu" not in references


@pytest.mark.parametrize("name", ["patch_embed", "deepstack_merger_list.0"])
def test_what_modules_keep_or_hand_on_is_not_written_to(references: list[str], name: str) -> None:
    """The residual stream is updated in place; a module that keeps its output or returns its input must not see it."""

    class Keeping(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner, self.kept = inner, None

        @property
        def proj(self) -> nn.Module:
            return self.inner.proj

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.kept is None:
                self.kept = self.inner(x) if name == "patch_embed" else x
            return self.kept

    model = TINY["qwen3_vl"].build()
    tower_ = tower_of(model)
    parent, _, child = name.rpartition(".")
    setattr(tower_.get_submodule(parent), child, Keeping(tower_.get_submodule(name)))
    expected = [run_tower(tower_, GRIDS["mixed"]) for _ in range(2)]
    tower_.get_submodule(name).kept = None
    hf_vit_accel.patch(model)
    for outputs in expected:
        assert_close(run_tower(tower_, GRIDS["mixed"]), outputs)


@pytest.mark.parametrize(
    "name", ["blocks.3.norm2", "blocks.0.norm2", "blocks.2.norm1", "merger", "deepstack_merger_list.0"]
)
def test_what_modules_are_given_is_not_written_to(references: list[str], model: Any, name: str) -> None:
    """A module that keeps its input, and returns something else, must find it as it was."""

    class Keeping(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner, self.kept = inner, []

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.kept.append((x, x.clone()))
            return self.inner(x)

    tower_ = tower_of(model)
    parent, _, child = name.rpartition(".")
    if not any(known == name for known, _ in tower_.named_modules()):
        pytest.skip("the family has no such module")
    setattr(tower_.get_submodule(parent), child, Keeping(tower_.get_submodule(name)))
    hf_vit_accel.patch(model)
    outputs = run_tower(tower_, GRIDS["mixed"])
    (kept, as_given), *_ = tower_.get_submodule(name).kept
    assert torch.equal(kept, as_given) and hf_vit_accel.status(model).towers[0].calls == 1
    outputs[0].zero_()
    assert torch.equal(kept, as_given)


def test_embeddings_of_any_strides(references: list[str], monkeypatch: Any) -> None:
    class Transposed(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner, self.proj = inner, inner.proj

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x).t().contiguous().t()

    def contiguous_only(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        assert x.is_contiguous()
        return add_norm_reference_(x, *args, **kwargs)

    monkeypatch.setattr(fusion, "add_norm_", contiguous_only)
    model = TINY["qwen2_vl"].build()
    expected = run_tower(tower_of(model), GRIDS["mixed"])
    tower_of(model).patch_embed = Transposed(tower_of(model).patch_embed)
    hf_vit_accel.patch(model)
    assert_close(run_tower(tower_of(model), GRIDS["mixed"]), expected)


@pytest.mark.parametrize("target", ["blocks.1", "blocks.1.attn", "blocks.1.norm1", "blocks.1.mlp"])
@pytest.mark.parametrize("how", ["class", "no_grad", "wraps"])
def test_changed_classes_and_decorated_forwards(
    references: Any, model: Any, target: str, how: str, monkeypatch: Any
) -> None:
    tower_ = tower_of(model)
    hf_vit_accel.patch(model)
    before = run_tower(tower_, GRIDS["mixed"])
    module = tower_.get_submodule(target)
    kind, stock = type(module), type(module).forward

    def doubled(self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        return stock(self, *args, **kwargs) * 2

    if how == "class":
        module.__class__ = type(kind.__name__, (kind,), {"forward": doubled})
    elif how == "no_grad":
        monkeypatch.setattr(kind, "forward", torch.no_grad()(doubled))
    else:
        monkeypatch.setattr(kind, "forward", torch.no_grad()(functools.wraps(stock)(doubled)))
    found = run_tower(tower_, GRIDS["mixed"])
    hf_vit_accel.unpatch(model)
    assert_close(found, run_tower(tower_, GRIDS["mixed"]))
    assert relative_error(found[0], before[0]) > 1e-3


def test_layers_that_scale_or_drop_differently_go_the_stock_way(references: list[str], model: Any) -> None:
    tower_ = tower_of(model)
    hf_vit_accel.patch(model)
    run_tower(tower_, GRIDS["mixed"])
    tower_.blocks[1].attn.scaling = 1.0
    found = run_tower(tower_, GRIDS["mixed"])
    assert "layers scale attention differently" in state_of(tower_).fallbacks
    tower_.blocks[2].attn.attention_dropout = 0.5
    tower_.blocks[2].attn.train()
    run_tower(tower_, GRIDS["mixed"])
    assert "attention weights are dropped out" in state_of(tower_).fallbacks
    tower_.blocks[2].attn.eval()
    hf_vit_accel.unpatch(model)
    assert_close(found, run_tower(tower_, GRIDS["mixed"]))


def test_a_held_forward_does_not_recurse(model: Any) -> None:
    tower_ = tower_of(model)
    expected = run_tower(tower_, GRIDS["image"])
    hf_vit_accel.patch(model)
    held = tower_.forward
    tower_.forward = lambda *args, **kwargs: held(*args, **kwargs)
    assert_close(run_tower(tower_, GRIDS["image"]), expected)
    hf_vit_accel.unpatch(model)
    hf_vit_accel.patch(model)
    assert_close(run_tower(tower_, GRIDS["image"]), expected)


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
        tiny.vision.update(
            WIDE[name], depth=depth, **({"fullatt_block_indexes": [1, 3]} if name == "qwen2_5_vl" else {})
        )
        tower_ = tower_of(tiny.build()).to("cuda", torch.bfloat16)
        hf_vit_accel.patch(tower_, attention="flashinfer_cudnn", strict=True)
        grid = [(1, 32, 32)] * 8
        run_tower(tower_, grid)
        with profile(activities=[ProfilerActivity.CUDA]) as profiled:
            run_tower(tower_, grid)
            torch.cuda.synchronize()
        kernels = [e.name for e in profiled.events() if e.device_type == torch.autograd.DeviceType.CUDA]
        counts.append(len([kernel for kernel in kernels if "Memcpy" not in kernel and "Memset" not in kernel]))
    assert 2 * 7 <= counts[1] - counts[0] <= 2 * 9, counts  # of them one that cuDNN launches before its own
