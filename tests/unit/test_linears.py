"""Linears in FP8: what they serve, how near they are, that weights are live. By the kernels' references, on a CPU.

Kernels and the library's product are held to those references in tests/unit/test_kernels.py.
"""

from __future__ import annotations

import copy
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from standins import ONE_TOWER, SMALL, products_on_cpu
from standins import status_of as graphs_of
from support.graphs import patch
from tiny import FAMILIES, GRIDS, TINY, assert_close, pixels_for, relative_error, run_tower, tower_of
from torch import nn

import hf_vit_accel
from hf_vit_accel import BackendUnavailableError, FallbackError, Fp8Config, backends, machine
from hf_vit_accel.backends import Needs
from hf_vit_accel.config import LINEARS
from hf_vit_accel.ops import linears, scaled
from hf_vit_accel.tower.state import state_of

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "tiny_captioner"))

import parity

if not torch.cuda.is_available() and not products_on_cpu():
    pytest.skip("this torch has no product in FP8 on the CPU that scales rows", allow_module_level=True)

ALL = Fp8Config(attention=False, linears=True, min_rows=0)
GRID = GRIDS["mixed"]
KERNELS = ("product", "quantize_rows", "activate", "add_norm_e4m3_")


@pytest.fixture
def called(references: Any, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """References in the place of kernels and products, wherever tensors are; how often each was called."""
    counts: Counter[str] = Counter()

    def counted(name: str) -> Any:
        reference = getattr(scaled, f"{name.rstrip('_')}_reference{'_' * name.endswith('_')}", scaled.product)
        return lambda *args, **kwargs: counts.update([name]) or reference(*args, **kwargs)

    for name in KERNELS:
        monkeypatch.setattr(scaled, name, counted(name))
    monkeypatch.setattr(backends, "LINEARS_NEED", Needs(cuda=False))
    why = "gradients are required"
    monkeypatch.setattr(linears, "why_not", lambda device, dtype, *, grad: why if grad else None)
    return counts


def status_of(model: Any) -> Any:
    return hf_vit_accel.status(model).towers[0]


def cosine(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float(torch.cosine_similarity(found.double(), expected.double(), dim=-1).min())


def errors(found: list[torch.Tensor], expected: list[torch.Tensor]) -> list[float]:
    return [relative_error(f, e) for f, e in zip(found, expected, strict=True)]


@pytest.mark.parametrize("model", FAMILIES, indirect=True)
@pytest.mark.parametrize("parts", [*LINEARS, True, ("qkv", "proj")], ids=str)
def test_towers_are_near_and_say_so(called: Any, model: Any, parts: Any) -> None:
    """Each part alone differs from stock by e4m3's rounding, and by no more; outside of FP8 nothing does."""
    tower = tower_of(model)
    expected = run_tower(tower, GRID)
    parts = (parts,) if isinstance(parts, str) else parts
    hf_vit_accel.patch(model, fp8=Fp8Config(attention=False, linears=parts, min_rows=0), strict=True)
    found = run_tower(tower, GRID)
    assert 5e-3 < max(errors(found, expected)) < 0.12 and min(map(cosine, found, expected)) > 0.97
    status, blocks, mergers = status_of(model), len(tower.blocks), len(found) - 1
    wanted = set(LINEARS) if parts is True else set(parts)
    assert str(status.fp8).startswith(
        f"linears of {', '.join(part for part in LINEARS if part in wanted)}, with weights"
    )
    assert status.calls == 1 and not status.fallbacks and "not used" not in str(status.fp8)
    products = blocks * (("qkv" in wanted) + ("proj" in wanted) + 2 * ("mlp" in wanted)) + 2 * mergers * (
        "mergers" in wanted
    )
    assert called["product"] == products
    assert called["add_norm_e4m3_"] == blocks * (("qkv" in wanted) + ("mlp" in wanted))
    assert called["activate"] == blocks * ("mlp" in wanted) + mergers * ("mergers" in wanted)
    hf_vit_accel.unpatch(model)
    assert all(map(torch.equal, run_tower(tower, GRID), expected))


def test_those_of_attention_keep_the_direction_of_every_row(called: Any, model: Any) -> None:
    """With weights that make each layer's change as large as the rows, which is more than models' do."""
    tower = tower_of(model)
    expected = run_tower(tower, GRID)
    hf_vit_accel.patch(model, fp8=Fp8Config(attention=False, linears=("qkv", "proj"), min_rows=0), strict=True)
    found = run_tower(tower, GRID)
    assert called["product"] == 2 * len(tower.blocks)
    assert min(map(cosine, found, expected)) > 0.995 and max(errors(found, expected)) < 0.06, errors(found, expected)


def test_few_rows_stay_in_the_dtype(called: Any, model: Any) -> None:
    tower = tower_of(model)
    expected = run_tower(tower, GRID)
    rows = sum(t * h * w for t, h, w in GRID)
    for least, used in ((rows + 1, False), (rows, True)):
        hf_vit_accel.patch(model, fp8=Fp8Config(attention=False, linears=True, min_rows=least), strict=True)
        found = run_tower(tower, GRID)
        assert (max(errors(found, expected)) > 5e-3) == used == bool(called)
        told = f"not used by the last call: {rows} rows, they are used from {least} on"
        assert (told in str(status_of(model))) != used and not status_of(model).fallbacks
    hf_vit_accel.patch(model, fp8=Fp8Config(attention=False, linears=True), strict=True)
    called.clear()
    assert_close(run_tower(tower, GRID), expected)
    assert not called and rows < linears.MIN_ROWS


# --- live weights ---------------------------------------------------------------------------------------------------


def _linears(tower: Any) -> list[nn.Linear]:
    return [module for module in tower.modules() if type(module) is nn.Linear]


def _in_place(tower: Any) -> None:
    with torch.no_grad():
        for module in _linears(tower):
            module.weight.mul_(1.5)


def _data(tower: Any) -> None:
    for module in _linears(tower):
        module.weight.data += 0.1 * module.weight.data.flip(0)


def _slice(tower: Any) -> None:
    for module in _linears(tower):
        module.weight.data[1:, :1].zero_()


def _pointed(tower: Any) -> None:
    for module in _linears(tower):
        module.weight.data = module.weight.data * 0.7


def _loaded(tower: Any) -> None:
    tower.load_state_dict({name: value * 0.8 for name, value in tower.state_dict().items()})


def _assigned(tower: Any) -> None:
    tower.load_state_dict({name: value * 0.8 for name, value in tower.state_dict().items()}, assign=True)


def _replaced(tower: Any) -> None:
    for module in _linears(tower):
        module.weight = nn.Parameter(module.weight.detach() * 0.6)


def _numpy(tower: Any) -> None:
    for module in _linears(tower):
        module.weight.detach().numpy()[:] *= 1.2


def _stepped(kind: Any, **options: Any) -> Any:
    def step(tower: Any) -> None:
        parameters = [module.weight for module in _linears(tower)]
        for parameter in parameters:
            parameter.grad = torch.sign(parameter.detach())
        kind(parameters, lr=0.02, **options).step()
        for parameter in parameters:
            parameter.grad = None

    return step


def _vector(tower: Any) -> None:
    parameters = [module.weight for module in _linears(tower)]
    flat = nn.utils.parameters_to_vector(parameters).detach()
    nn.utils.vector_to_parameters(flat * 1.3, parameters)


def _there_and_back(tower: Any) -> None:
    tower.half().float()
    _in_place(tower)


CHANGES: dict[str, Any] = {
    "in place": _in_place,
    ".data": _data,
    "a slice of .data": _slice,
    "another .data": _pointed,
    "load_state_dict": _loaded,
    "load_state_dict, assigned": _assigned,
    "another parameter": _replaced,
    "numpy": _numpy,
    "SGD": _stepped(torch.optim.SGD),
    "AdamW, foreach": _stepped(torch.optim.AdamW, foreach=True),
    "AdamW, fused": _stepped(torch.optim.AdamW, fused=True),
    "vector_to_parameters": _vector,
    "to and back": _there_and_back,
}


ALIKE = {".data", "numpy", "load_state_dict", "SGD", "AdamW, foreach"}
"""Values that are written where they lie."""


@pytest.mark.parametrize(
    "change", [pytest.param(name, marks=[pytest.mark.matrix] * (name in ALIKE)) for name in CHANGES]
)
def test_weights_are_live(called: Any, on_cpu: Any, change: str) -> None:
    """Eagerly and replayed, a model that was changed computes what one that is patched afterwards does."""
    for graphs in (False, True):
        model = TINY["qwen2_5_vl"].build()  # MLPs whose weights are stacked, and padded
        tower, grid = tower_of(model), [(1, 10, 8)]
        patch(model, SMALL, fp8=ALL) if graphs else hf_vit_accel.patch(model, fp8=ALL)
        before = run_tower(tower, grid)
        CHANGES[change](tower)
        found = run_tower(tower, grid)
        assert (graphs_of(model).replays == 2) if graphs else (status_of(model).calls == 2)
        assert min(errors(found, before)) > 0.01
        twin = copy.deepcopy(hf_vit_accel.unpatch(model))
        hf_vit_accel.patch(twin, fp8=ALL)
        assert_close(found, run_tower(tower_of(twin), grid), 2e-3 if graphs else 1e-6)


def test_lora_is_merged_and_unmerged(called: Any) -> None:
    """By PEFT, which writes to `.data`; a LoRA that is not merged runs its own modules."""
    peft = pytest.importorskip("peft")
    model = TINY["qwen3_vl"].build()
    expected = run_tower(tower_of(model), GRID)
    config = peft.LoraConfig(target_modules=["qkv", "linear_fc1", "linear_fc2"], init_lora_weights=False, r=4)
    lora = peft.get_peft_model(model, config)
    hf_vit_accel.patch(lora, fp8=ALL)
    tower = tower_of(lora)
    adapted = run_tower(tower, GRID)
    assert min(errors(adapted, expected)) > 0.2
    assert any(
        "qkv cannot be in FP8: a peft.tuners.lora.layer.Linear stands where a plain Linear was" in why
        for why in status_of(lora).fallbacks
    )
    merged = lora.merge_and_unload()
    assert max(errors(run_tower(tower, GRID), adapted)) < 0.12
    assert not status_of(merged).unfused.keys() & {"norms", "mlp"} and "linears of qkv, proj, mlp" in str(
        status_of(merged)
    )
    for module in _linears(tower):  # as PEFT's own merge and unmerge
        delta = 0.3 * torch.randn_like(module.weight)
        once = run_tower(tower, GRID)
        module.weight.data += delta
        assert max(errors(run_tower(tower, GRID), once)) > 1e-4
        break


# --- what is not served ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", KERNELS)
def test_what_fails_goes_on_without(called: Any, model: Any, monkeypatch: Any, kernel: str) -> None:
    """The call is right, by the operations of the dtype, which are not given up; it is counted, and not tried again."""
    expected = run_tower(tower_of(model), GRID)
    tried = []

    def fail(*args: Any, **kwargs: Any) -> Any:
        tried.append(kernel)
        raise RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED")

    monkeypatch.setattr(scaled, kernel, fail)
    hf_vit_accel.patch(model, fp8=ALL)
    for _ in range(2):
        assert_close(run_tower(tower_of(model), GRID), expected)
    status = status_of(model)
    assert state_of(tower_of(model)).faults.keys() == {machine.LINEARS} and len(tried) == 1
    assert {"norms", "mlp"} <= set(status.fused) and status.calls == 2
    assert [count for why, count in status.fallbacks.items() if "NOT_SUPPORTED" in why] == [2]
    assert "linears are not: failed when it ran" in str(status.fp8)
    hf_vit_accel.patch(model, fp8=ALL, strict=True)
    with pytest.raises(FallbackError, match="fp8_linears failed when it ran"):
        run_tower(tower_of(model), GRID)


def test_gradients_are_those_of_the_dtype(called: Any, model: Any) -> None:
    tower = tower_of(model)
    pixels, grid = pixels_for(tower, GRID), torch.tensor(GRID)
    tower(pixels, grid_thw=grid).pooler_output.sum().backward()
    wanted = [parameter.grad for parameter in tower.parameters()]
    tower.zero_grad()
    hf_vit_accel.patch(model, fp8=ALL)
    tower(pixels, grid_thw=grid).pooler_output.sum().backward()
    assert not called and any("gradients are required" in why for why in status_of(model).fallbacks)
    assert_close([p.grad for p in tower.parameters() if p.grad is not None], [g for g in wanted if g is not None], 1e-4)
    hf_vit_accel.patch(model, fp8=ALL, strict=True)
    with pytest.raises(FallbackError, match="gradients"):
        tower(pixels, grid_thw=grid)


class Doubled(nn.Linear):
    """Not what a product computes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


@pytest.mark.parametrize("part", LINEARS)
def test_what_was_replaced_runs_itself(called: Any, part: str) -> None:
    """One layer's, or one merger's; the others stay in FP8."""
    model = TINY["qwen3_vl"].build()
    tower = tower_of(model)
    owner, name = {
        "qkv": (tower.blocks[1].attn, "qkv"),
        "proj": (tower.blocks[1].attn, "proj"),
        "mlp": (tower.blocks[1].mlp, "linear_fc2"),
        "mergers": (tower.merger, "linear_fc1"),
    }[part]
    old: Any = getattr(owner, name)
    new = Doubled(old.in_features, old.out_features)
    new.load_state_dict(old.state_dict())
    setattr(owner, name, new)
    expected = run_tower(tower, GRID)
    hf_vit_accel.patch(model, fp8=ALL)
    found = run_tower(tower, GRID)
    assert max(errors(found, expected)) < 0.12 and called["product"] > 10
    why = "it is not fused" if part == "mlp" else "a Doubled stands"
    assert any(f"{part} cannot be in FP8: {why}" in each for each in status_of(model).fallbacks)


def test_widths_that_products_do_not_take(called: Any) -> None:
    tiny = copy.deepcopy(TINY["qwen3_vl"])
    tiny.vision.update(hidden_size=136, num_heads=1, out_hidden_size=24)
    model = tiny.build()
    expected = run_tower(tower_of(model), GRID)
    hf_vit_accel.patch(model, fp8=ALL)
    assert_close(run_tower(tower_of(model), GRID), expected)
    for part, widths in (
        ("qkv", "136 to 408"),
        ("proj", "136 to 136"),
        ("mlp", "136 to 200"),
        ("mergers", "544 to 24"),
    ):
        assert any(
            why.startswith(f"{part} cannot be in FP8: the widths of a Linear, {widths}")
            for why in status_of(model).fallbacks
        )
    assert "linears of nothing" in str(status_of(model).fp8) and not called


def test_what_hangs_on_a_block_keeps_the_stock_way(called: Any, model: Any) -> None:
    tower_of(model).blocks[0].register_forward_hook(lambda *_: None)
    hf_vit_accel.patch(model, fp8=ALL)
    run_tower(tower_of(model), GRID)
    assert not called and "linears are not: the stock blocks run" in str(status_of(model))


def test_autocast_quantizes_the_weights_that_there_are(called: Any, model: Any) -> None:
    """Under autocast rows are bf16; fp32 weights need no cast before they are quantised."""
    tower = tower_of(model)
    expected = run_tower(tower, GRID)
    hf_vit_accel.patch(model, fp8=ALL, strict=True)
    with torch.autocast("cpu", torch.bfloat16):
        found = run_tower(tower, GRID)
    assert max(errors([x.float() for x in found], expected)) < 0.12 and called["product"]


def test_spare_rows_of_a_graph_reach_no_other(called: Any, on_cpu: Any, model: Any) -> None:
    """Buffers are poisoned before each use; a row's scale is its own."""
    tower, grid = tower_of(model), [(1, 6, 10)]
    hf_vit_accel.patch(model, fp8=ALL)
    eager = run_tower(tower, grid)
    patch(model, SMALL, fp8=ALL)
    assert max(errors(run_tower(tower, grid), eager)) < 0.03
    assert graphs_of(model).replays == 1 and graphs_of(model).padding > 1


# --- what is asked for ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (dict(attention=1), "attention to be True or False"),
        (dict(linears="qkv"), "linears to be True, False or names"),
        (dict(linears=("qkv", "fc1")), "linears to be True, False or names"),
        (dict(linears=3), "linears to be True, False or names"),
        (dict(min_rows=-1), "min_rows"),
        (dict(attention=False, linears=()), "got neither"),
    ],
)
def test_config_is_checked(arguments: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        Fp8Config(**arguments)
    assert Fp8Config(linears=iter(["qkv"])).parts == {"qkv"} and Fp8Config(linears=True).parts == set(LINEARS)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is there")
def test_it_is_refused_with_reasons_where_it_cannot_run() -> None:
    model = TINY["qwen3_vl"].build()
    with pytest.raises(BackendUnavailableError, match=r"linears in FP8 cannot run(.|\n)*no CUDA device"):
        hf_vit_accel.patch(model, fp8=ALL)
    assert state_of(tower_of(model)) is None


@pytest.mark.parametrize(
    ("at", "capability", "dtype", "grad", "why"),
    [
        ("cpu", (9, 0), torch.bfloat16, False, "need CUDA"),
        ("cuda", (8, 6), torch.bfloat16, False, "capability is 8.6"),
        ("cuda", (8, 9), torch.float16, False, "dtype is float16"),
        ("cuda", (9, 0), torch.bfloat16, True, "gradients"),
        ("cuda", (9, 0), torch.bfloat16, False, None),
        ("cuda", (10, 0), torch.bfloat16, False, None),
    ],
)
def test_where_it_can_run(monkeypatch: Any, at: str, capability: Any, dtype: Any, grad: bool, why: Any) -> None:
    monkeypatch.setattr(machine, "cuda_capability", lambda index: capability)
    found = linears.why_not(torch.device(at), dtype, grad=grad)
    assert (found is None) if why is None else (why in str(found))


@pytest.mark.parametrize("family", ONE_TOWER)
def test_trained_models_say_the_same(called: Any, family: str) -> None:
    """With all linears in FP8, in at least 99% of held-out scenes."""
    model, batches = parity.load(family, torch.float32), parity.held_out(family, 100, size=100)
    expected = parity.captions(model, family, batches)
    hf_vit_accel.patch(model, fp8=ALL, strict=True)
    found = parity.captions(model, family, batches)
    assert called["product"] and sum(map(str.__eq__, found, expected)) >= 99
