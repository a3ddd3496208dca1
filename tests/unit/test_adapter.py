"""Compare our products with PEFT's LoRA modules, in every state that these modules can be in."""

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.families import build, trained
from support.tensors import flat
from support.towers import alike
from tiny import GRIDS, TINY, all_equal, largest_error, pixels_for, relative_error, tower_of

import hf_vit_accel
from hf_vit_accel.families import FAMILIES as FAMILIES_OF_TOWERS
from hf_vit_accel.ops import lora
from hf_vit_accel.tower.state import state_of

peft = pytest.importorskip("peft")

LINEARS = r".*blocks\.\d+\..*(qkv|q_proj|k_proj|v_proj|proj|fc1|fc2|linear_fc1|linear_fc2|gate_proj|up_proj|down_proj)"
FAMILIES = "qwen2_vl", "qwen2_5_vl", "qwen3_vl"
GRID = GRIDS["images"]
GRID_THW = torch.tensor(GRID)


def lora_on(
    family: str, *, rank: int = 3, dropout: float = 0.0, target: str = LINEARS, layers: int = 0, **kwargs: Any
) -> Any:
    """Build a model with random adapters on its tower. The first layers are kept: two, or those of deepstack."""
    model = TINY[family].build()
    del tower_of(model).blocks[layers or (3 if family == "qwen3_vl" else 2) :]
    settings = {"init_lora_weights": False, "lora_alpha": 2 * rank, "lora_dropout": dropout} | kwargs
    torch.manual_seed(0)
    return peft.get_peft_model(model, peft.LoraConfig(r=rank, target_modules=target, **settings))


def step(model: Any, *, grad: bool = True) -> dict[str, torch.Tensor]:
    """Return the outputs and every gradient by name, with the same random numbers in every call."""
    tower = tower_of(model)
    tower.zero_grad(set_to_none=True)
    torch.manual_seed(1)
    with torch.set_grad_enabled(grad):
        outputs = flat(tower(pixels_for(tower, GRID), grid_thw=torch.tensor(GRID)))
    if grad:
        torch.stack([output.square().mean() for output in outputs]).sum().backward()
    gradients = {name: parameter.grad for name, parameter in tower.named_parameters() if parameter.grad is not None}
    return gradients | {f"output {index}": output.detach() for index, output in enumerate(outputs)}


def fused(model: Any) -> frozenset[str]:
    return frozenset(hf_vit_accel.status(model).towers[0].fused)


def check(model: Any, other: Any, bound: float = 1e-4, **kwargs: Any) -> None:
    """Compare a patched model with its equal, which PEFT computes."""
    actual = step(model, **kwargs)
    expected = step(other, **kwargs)
    assert actual.keys() == expected.keys()
    assert max(relative_error(actual[name], expected[name]) for name in expected) < bound


@pytest.fixture
def called(references: list[str], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the PEFT modules that were called, recorded by the first function of their forward."""
    names: list[str] = []
    kind = peft.tuners.lora.layer.Linear
    before = kind._check_forward_args

    def check(self: Any, *args: Any, **kwargs: Any) -> None:
        names.append(type(self).__name__)
        before(self, *args, **kwargs)

    assert lora._is_proven(kind.forward)
    monkeypatch.setattr(kind, "_check_forward_args", check)
    return names


def pair(family: str, **kwargs: Any) -> tuple[Any, Any]:
    model = lora_on(family, **kwargs)
    other = copy.deepcopy(model)
    hf_vit_accel.patch(model)
    return model, other


def test_adapters_on_single_linears(called: list[str]) -> None:
    """Put an adapter on one Linear of one layer, beside plain Linears."""
    for target in (r".*blocks\.1\.mlp\.up_proj", r".*blocks\.1\.mlp\.down_proj", r".*blocks\.0\.attn\.proj"):
        check(*pair("qwen2_5_vl", target=target))
        called.clear()


def test_separate_projections_of_which_one_has_no_bias(called: list[str]) -> None:
    """Queries, keys and values are one product, whose bias has zeros for the values."""
    family = next(family for family in FAMILIES_OF_TOWERS if family.name == "paddleocr_vl")
    tower = build(family, *family.towers[0])
    for block in family.parts(tower).blocks:
        block.qkv[2].bias = None
    names = ["q_proj", "k_proj", "v_proj"]
    peft.inject_adapter_in_model(peft.LoraConfig(r=3, target_modules=names, init_lora_weights=False), tower)
    expected, gradients = trained(tower, GRID)
    hf_vit_accel.patch(tower)
    called.clear()
    outputs, ours = trained(tower, GRID)
    assert largest_error(outputs, expected) < 1e-5 and not called and state_of(tower).fast_calls == 1
    for actual, stock in zip(ours, gradients, strict=True):
        assert (actual is None) == (stock is None) and (stock is None or relative_error(actual, stock) < 1e-4)


def test_base_weights_are_trained_as_well(called: list[str]) -> None:
    """Train the biases of adapted Linears (`bias="lora_only"`), or all base weights."""
    check(*pair("qwen2_5_vl", bias="lora_only"))
    model, other = pair("qwen2_5_vl")
    for lora_model in (model, other):
        tower_of(lora_model).requires_grad_(True)
    check(model, other)


def _again(model: Any) -> None:
    torch.manual_seed(2)
    config = peft.LoraConfig(r=5, lora_alpha=3, target_modules=LINEARS, init_lora_weights=False)
    model.add_adapter("second", config)
    model.base_model.set_adapter(["default", "second"])


CHANGES: dict[str, Callable[[Any], Any]] = {
    "two adapters": _again,
    "deleted": lambda model: (_again(model), model.set_adapter("second"), model.delete_adapter("default")),
}
"""`test_toggles.py` switches adapters, and merges them; the matrix unloads them."""


@pytest.mark.parametrize("change", CHANGES)
def test_changes_between_calls_take_effect(change: str, called: list[str]) -> None:
    model, other = pair("qwen2_5_vl")
    before = step(model, grad=False)
    for lora_model in (model, other):
        torch.manual_seed(3)
        CHANGES[change](lora_model)
    check(model, other, grad=False)
    after = step(model, grad=False)
    assert max(relative_error(after[name], before[name]) for name in before) > 1e-3
    check(model, other)


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen3_vl"])
def test_dropout_equals_peft(family: str, called: list[str]) -> None:
    """Drop the same numbers as PEFT, in training only. (Padded rows draw more numbers.)"""
    model, other = pair(family, dropout=0.4)
    for lora_model in (model, other):
        lora_model.train()
    check(model, other)
    trained = step(model)
    for lora_model in (model, other):
        lora_model.eval()
    check(model, other)
    assert relative_error(step(model)["output 0"], trained["output 0"]) > 1e-2
    called.clear()
    step(model)
    assert not called


@pytest.mark.parametrize("trains_first", [True, False])
def test_dropout_in_passes_acts_as_in_the_forward(trains_first: bool) -> None:
    """Change the model's mode before the backward: our masks stay those of the forward, and stock draws others."""
    model = lora_on("qwen2_5_vl", dropout=0.5)
    hf_vit_accel.patch(model, max_rows=50, strict=True)
    tower = tower_of(model)
    gradients = []
    for changes_mode in (False, True):
        model.zero_grad()
        model.train(trains_first)
        torch.manual_seed(1)
        outputs = flat(tower(pixels_for(tower, GRID), grid_thw=GRID_THW))
        model.train(trains_first != changes_mode)
        torch.stack([output.square().mean() for output in outputs]).sum().backward()
        assert all(module.training == model.training for module in tower.modules())
        gradients.append([p.grad.clone() for p in tower.parameters() if p.grad is not None])
    assert gradients[0] and all_equal(*gradients) and hf_vit_accel.status(model).towers[0].passes


@pytest.mark.parametrize(
    ("kwargs", "reason"),
    [
        ({"use_dora": True}, "it is a variant of LoRA, such as DoRA"),
        ({"lora_bias": True}, "an adapter is no Linear without bias"),
        ({"use_rslora": True}, None),
    ],
    ids=["DoRA", "bias", "rsLoRA"],
)
def test_other_kinds_of_lora_run_their_modules(kwargs: dict[str, Any], reason: str | None, called: list[str]) -> None:
    """Call PEFT's modules for other kinds of LoRA, except rsLoRA, which differs in its scaling only."""
    model, other = pair("qwen3_vl", **kwargs)
    check(model, other)
    called.clear()
    step(model)
    assert bool(called) == (reason is not None)
    why = hf_vit_accel.status(model).towers[0].unfused.get("mlp")
    linear = "a peft.tuners.lora.layer.Linear stands where a plain Linear was"
    assert why == (reason and f"{linear}: {reason}")


def test_another_forward_is_called(called: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the forward of the class, as Unsloth does: it runs in every call."""
    kind = peft.tuners.lora.layer.Linear
    gain = [1.0]
    before = kind.forward

    @functools.wraps(before)
    def scaled(self: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return before(self, x, *args, **kwargs) * gain[0]

    model, other = pair("qwen3_vl")
    check(model, other)
    assert "mlp" in fused(model)
    monkeypatch.setattr(kind, "forward", scaled)
    for gain[0] in (1.0, 2.0):  # the same as PEFT's, when it is looked at first
        check(model, other)
    assert "mlp" not in fused(model)
    monkeypatch.setattr(kind, "forward", before)
    check(model, other)
    assert "mlp" in fused(model)


@pytest.mark.parametrize("trained", [False, True])
def test_scalings_that_are_tensors(trained: bool, called: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Read tensor scalings (PEFT's hot swapping) without waiting for the device; leave trained ones to PEFT."""
    model = lora_on("qwen2_5_vl")
    other = None
    for module in tower_of(model).modules():
        if hasattr(module, "lora_A"):
            module.scaling["default"] = torch.tensor(1.5, requires_grad=trained)
    other = copy.deepcopy(model)
    hf_vit_accel.patch(model)
    check(model, other)
    called.clear()
    monkeypatch.setattr(torch.Tensor, "__bool__", lambda self: 1 / 0)
    tower = tower_of(model)
    with torch.no_grad():
        tower(pixels_for(tower, GRID), grid_thw=GRID_THW)
    assert bool(called) == trained


@pytest.mark.gpu
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_gpu_towers_are_as_exact_as_peft(family: str, autocast: bool) -> None:
    """Compare errors against fp32 with PEFT's, of outputs and of all gradients together."""
    model = TINY[family].build().cuda()
    torch.manual_seed(0)
    config = peft.LoraConfig(r=8, lora_alpha=16, target_modules=LINEARS, init_lora_weights=False)
    adapted = peft.get_peft_model(model, config)
    exact = copy.deepcopy(adapted)
    for name, parameter in adapted.named_parameters():
        if not autocast or "lora_" not in name:
            parameter.data = parameter.data.bfloat16()
    with torch.no_grad():  # what the other one holds, exactly
        for one, other in zip(exact.parameters(), adapted.parameters(), strict=True):
            one.copy_(other)

    def gradients(model: Any, enabled: bool) -> list[torch.Tensor]:
        tower = tower_of(model)
        tower.zero_grad(set_to_none=True)
        pixels = pixels_for(tower, GRID).cuda()
        with torch.autocast("cuda", torch.bfloat16, enabled=enabled):
            outputs = flat(tower(pixels, grid_thw=torch.tensor(GRID, device="cuda")))
        torch.stack([output.float().square().mean() for output in outputs]).sum().backward()
        trained = [parameter.grad for parameter in tower.parameters() if parameter.grad is not None]
        assert len(trained) >= 2 * 4 * len(tower.blocks)
        return [*outputs, torch.cat([gradient.double().flatten() for gradient in trained])]

    expected = gradients(exact, False)
    stock = gradients(adapted, autocast)
    hf_vit_accel.patch(adapted, strict=True)
    actual = gradients(adapted, autocast)
    for one, other, reference in zip(actual, stock, expected, strict=True):
        assert relative_error(one, reference) <= 1.1 * relative_error(other, reference) + 2**-9


@pytest.mark.parametrize("module_name", alike("merger", "norm1", "merger.mlp", "mlp"))
def test_modules_to_save_are_trained(module_name: str, called: list[str]) -> None:
    """Train a PEFT copy of a module (`modules_to_save`) beside the adapters of other modules."""
    model, other = pair("qwen2_5_vl", target=r".*blocks\.\d+\.attn\.qkv", modules_to_save=[module_name])
    check(model, other)
    assert any("modules_to_save" in name for name in step(model))
