"""Parameters of several dtypes, of classes of their own, beside adapters, and on the meta device."""

import copy
import re
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from support.patching import AUTO, check_calls, check_stock, patch_by, run, status_of
from support.tensors import flat
from support.towers import ONE_TOWER, alike
from tiny import GRIDS, TINY, assert_close, left_padded, pixels_for, relative_error, tower_of
from torch import nn

import hf_vit_accel

# --- dtypes and classes of parameters -------------------------------------------------------------------------------


UPCAST = {
    "norms": r"blocks\.\d+\.norm[12]",  # as LLaMA-Factory's `upcast_layernorm`
    "merger": r"merger",  # as people train a merger
    "patch embedding": r"patch_embed",
    "all but one layer": r"(?!blocks$|blocks\.1\b).+",
}


def check_step(tower: nn.Module, step: Callable[[nn.Module], list[torch.Tensor]], factor: float) -> None:
    """Expect dtypes of stock, errors of at most its own times a factor and a rounding, and the same bits unpatched."""
    exact = step(copy.deepcopy(tower).float())
    expected = step(tower)
    hf_vit_accel.patch(tower)
    results = step(tower)
    check_calls(tower, 1, 0)
    for one, other, reference in zip(results, expected, exact, strict=True):
        assert one.dtype == other.dtype
        assert relative_error(one.float(), reference) <= factor * relative_error(other.float(), reference) + 2**-8
    hf_vit_accel.unpatch(tower)
    for result, value in zip(step(tower), expected, strict=True):
        assert torch.equal(result, value)


@pytest.mark.parametrize("upcast", ["norms", *alike("all but one layer", "merger", "patch embedding")])
@pytest.mark.parametrize("trained", alike(True, False), ids=["trained", "inference"])
def test_parts_in_fp32_beside_bf16_are_fast_under_autocast(model: nn.Module, upcast: str, trained: bool) -> None:
    tower = tower_of(model).bfloat16()
    grid = GRIDS["mixed"]
    for name, module in tower.named_modules():
        if re.fullmatch(UPCAST[upcast], name):
            module.float()
    assert len({parameter.dtype for parameter in tower.parameters()}) == 2

    def step(tower: nn.Module) -> list[torch.Tensor]:
        tower.zero_grad(set_to_none=True)
        dtype = tower.patch_embed.proj.weight.dtype
        is_exact = len({parameter.dtype for parameter in tower.parameters()}) == 1
        pixels = pixels_for(tower, grid).to(dtype).requires_grad_(trained)
        with torch.autocast("cpu", torch.bfloat16, enabled=not is_exact), torch.set_grad_enabled(trained):
            outputs = flat(tower(pixels, grid_thw=torch.tensor(grid)))
        if not trained:
            return outputs
        sum(output.float().square().mean() for output in outputs).backward()
        gradients = [parameter.grad for parameter in (pixels, *tower.parameters())]
        return [*(output.detach() for output in outputs), *gradients]

    check_step(tower, step, 1.2)


def test_parts_in_fp32_beside_bf16_stay_stock_without_autocast(model: nn.Module) -> None:
    tower = tower_of(model).bfloat16()
    grid = GRIDS["image"]
    tower.patch_embed.float()
    tower.blocks[0].norm1.float()
    if hasattr(tower.blocks[0].norm1, "variance_epsilon"):  # returns fp32, which no bf16 Linear takes
        hf_vit_accel.patch(model)
        with pytest.raises(RuntimeError, match="dtype"):
            run(tower, grid)
        return
    with torch.autocast("cpu", torch.bfloat16):
        expected = run(tower, grid)
    hf_vit_accel.patch(model)
    tower.patch_embed.bfloat16()
    assert_close(run(tower, grid), expected, 2e-2)
    check_calls(model, 0, 1, "several dtypes (torch.bfloat16, torch.float32) without autocast")
    hf_vit_accel.patch(model.float())
    run(tower, grid)
    check_calls(model, 1, 0)


LINEARS = r".*blocks\.\d+\..*(qkv|proj|fc1|fc2|linear_fc1|linear_fc2|gate_proj|up_proj|down_proj)"
TUNERS: dict[str, Callable[[ModuleType], object]] = {
    "LoRA": lambda peft: peft.LoraConfig(r=4, target_modules=LINEARS, init_lora_weights=False),
    "DoRA": lambda peft: peft.LoraConfig(r=4, target_modules=LINEARS, init_lora_weights=False, use_dora=True),
    "LoHa": lambda peft: peft.LoHaConfig(r=4, target_modules=LINEARS, init_weights=False),
    "IA3": lambda peft: peft.IA3Config(target_modules=LINEARS, feedforward_modules=[], init_ia3_weights=False),
}


@pytest.mark.parametrize(
    ("tuner", "autocast"),
    [*alike(("LoRA", False), ("LoRA", True), ("LoHa", False), ("IA3", True)), ("DoRA", True)],
)
def test_adapters_in_fp32_beside_weights_in_bf16(tuner: str, autocast: bool) -> None:
    """PEFT gives a bf16 model fp32 adapters, which cast their inputs and outputs."""
    peft = pytest.importorskip("peft")
    model = TINY["qwen2_5_vl"].build().bfloat16()
    torch.manual_seed(0)
    tower = tower_of(peft.get_peft_model(model, TUNERS[tuner](peft)))
    grid = GRIDS["image"]
    adapters = [parameter for parameter in tower.parameters() if parameter.requires_grad]
    assert adapters and {parameter.dtype for parameter in adapters} == {torch.float32}

    def step(tower: nn.Module) -> list[torch.Tensor]:
        tower.zero_grad(set_to_none=True)
        weight = next(tower.parameters())
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast and weight.dtype != torch.float32):
            outputs = flat(tower(pixels_for(tower, grid).to(weight.dtype), grid_thw=torch.tensor(grid)))
        assert len({output.dtype for output in outputs}) == 1 and outputs[0].dtype == weight.dtype
        torch.stack([output.float().square().mean() for output in outputs]).sum().backward()
        trained = [parameter.grad for parameter in tower.parameters() if parameter.requires_grad]
        return [*(output.detach().float() for output in outputs), *trained]

    check_step(tower, step, 1.5)


def test_a_trained_module_of_another_dtype(model: nn.Module) -> None:
    """PEFT names copies for `modules_to_save` like adapters, but casts nothing around them."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=r".*blocks\.\d+\.attn\.proj", modules_to_save=["norm1"])
    tower = tower_of(peft.get_peft_model(model.bfloat16(), config))
    grid = GRIDS["image"]
    for name, parameter in tower.named_parameters():
        if "modules_to_save" in name:
            parameter.data = parameter.data.float()
    with torch.autocast("cpu", torch.bfloat16):
        expected = run(tower, grid)
        hf_vit_accel.patch(model)
        assert_close(run(tower, grid), expected, 1e-2)
    check_calls(model, 1, 0)


# --- meta -----------------------------------------------------------------------------------------------------------


def fill(model: nn.Module, stock: nn.Module) -> None:
    """Move a model from the meta device to the CPU; copy the weights and unsaved buffers of another."""
    model.to_empty(device="cpu")
    model.load_state_dict(stock.state_dict())
    for name, buffer in stock.named_buffers():
        model.get_buffer(name).copy_(buffer)


@pytest.fixture(params=[*ONE_TOWER, pytest.param("qwen3_vl_moe", marks=pytest.mark.matrix)])
def stock(request: pytest.FixtureRequest) -> nn.Module:
    return TINY[request.param].build()


@pytest.mark.parametrize(("way", "is_called_on_meta"), [("built by name", True), ("patch", False), ("name", True)])
def test_from_the_meta_device(stock: nn.Module, way: str, is_called_on_meta: bool) -> None:
    tower = tower_of(stock)
    grid = GRIDS["mixed"]
    inputs = left_padded(stock)
    arguments = dict(max_new_tokens=4, do_sample=False)
    expected = run(tower, grid)
    tokens = stock.generate(**inputs, **arguments)
    kwargs = {"attn_implementation": AUTO} if way == "built by name" else {}
    with torch.device("meta"):
        model = type(stock)._from_config(copy.deepcopy(stock.config), **kwargs).eval()
    if not kwargs:
        patch_by(way, model)
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    assert status_of(model).patched and "patched" in str(hf_vit_accel.status(model))
    if is_called_on_meta:
        with torch.no_grad():
            pixels = pixels_for(tower, grid, device="meta")
            shapes = flat(tower_of(model)(pixels, grid_thw=torch.tensor(grid)))
        assert [x.shape for x in shapes] == [x.shape for x in expected] and {x.device.type for x in shapes} == {"meta"}
    fill(model, stock)
    assert_close(run(tower_of(model), grid), expected)
    check_calls(model, 1 + is_called_on_meta, 0)
    assert torch.equal(model.generate(**inputs, **arguments), tokens)
    check_stock(model, grid, expected)
