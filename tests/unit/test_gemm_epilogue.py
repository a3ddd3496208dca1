"""When what follows a product goes into its epilogue: where QuACK can, is proven and is faster; else by a kernel.

Towers whose residual stream does: tests/unit/test_residual.py.

There is no GPU here: what its products compute stands in for them. On a GPU, tests/unit/test_backward.py compares them.
"""

from __future__ import annotations

import copy
import sys
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from tiny import GRIDS, TINY, outputs_of, pixels_for, relative_error, tower_of
from torch.utils.checkpoint import checkpoint

import hf_vit_accel
from hf_vit_accel import machine
from hf_vit_accel.ops import gemm_epilogue, mlp
from hf_vit_accel.ops.base import Context
from hf_vit_accel.ops.gemm_epilogue import KINDS, gemm_act_reference, gemm_add_reference, gemm_dact_reference
from hf_vit_accel.ops.training import gelu_backward, swiglu_backward
from hf_vit_accel.ops.training.gelu_backward import GeluMlp, gelu_mlp_reference
from hf_vit_accel.ops.training.swiglu_backward import SwigluMlp, swiglu_mlp_reference

CUDA, BF16 = torch.device("cuda", 0), torch.bfloat16
ACTIVATIONS = KINDS[:-1]


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A machine that has all; tried: what is found there, by kind, and what was tried."""
    found: dict[str, Any] = {"tried": [], "why": None}
    monkeypatch.setattr(machine, "cuda_capability", lambda index: (9, 0))
    monkeypatch.setattr(machine, "why_missing", lambda package: None)
    monkeypatch.setattr(gemm_epilogue, "_tried", lambda device, kind: found["tried"].append(kind) or found["why"])
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_what_stands_against_it(hopper: dict[str, Any], monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    assert gemm_epilogue.why_not(CUDA, BF16, kind) is None and hopper["tried"] == [kind]
    hopper["why"] = "wrong here"
    assert gemm_epilogue.why_not(CUDA, BF16, kind) == "wrong here"
    hopper["tried"].clear()
    assert "the tensors are on cpu" in gemm_epilogue.why_not(torch.device("cpu"), BF16, kind)
    assert "the dtype is float16" in gemm_epilogue.why_not(CUDA, torch.float16, kind)
    monkeypatch.setattr(machine, "why_missing", lambda package: f"no {package.distribution}")
    assert gemm_epilogue.why_not(CUDA, BF16, kind) == "no quack-kernels"
    monkeypatch.setattr(machine, "cuda_capability", lambda index: (10, 0))
    assert "compute capability is 10.0" in gemm_epilogue.why_not(CUDA, BF16, kind)
    assert not hopper["tried"], "nothing is compiled where something else stands against it"


def test_few_rows_compile_nothing(hopper: dict[str, Any]) -> None:
    least = gemm_epilogue.LEAST_ROWS
    rows = torch.empty(least, 8, dtype=BF16, device="meta")
    assert not gemm_epilogue.serves(rows, "swiglu") and not hopper["tried"]  # meta is no CUDA

    class OnCuda:
        device, dtype = CUDA, BF16

        def __init__(self, rows: int) -> None:
            self.shape = (rows, 8)

    assert not gemm_epilogue.serves(OnCuda(least - 1), "swiglu") and not hopper["tried"]  # type: ignore[arg-type]
    assert gemm_epilogue.serves(OnCuda(least), "swiglu") and hopper["tried"] == ["swiglu"]  # type: ignore[arg-type]


def off_by_little(function: Any, at: int) -> Any:
    """One of the results is 2% too large."""

    def run(*args: Any) -> Any:
        made = list(function(*args))
        made[at] = made[at] * 1.02
        return tuple(made)

    return run


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_it_is_tried_before_it_is_used(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Each of five results, and an error, tells."""
    tried = gemm_epilogue._try
    pieces = {"gemm_act": (gemm_act_reference, 2), "gemm_dact": (gemm_dact_reference, 3)}
    for name, (reference, _) in pieces.items():
        monkeypatch.setattr(gemm_epilogue, name, reference)
    assert tried(torch.device("cpu"), kind) is None
    for name, (reference, results) in pieces.items():
        for at in range(results):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(gemm_epilogue, name, off_by_little(reference, at))
                assert "QuACK's products are wrong here" in tried(torch.device("cpu"), kind), (name, at)

    def broken(*args: Any) -> Any:
        raise RuntimeError("no such\n tile")

    monkeypatch.setattr(gemm_epilogue, "gemm_dact", machine.guarded(machine.EPILOGUES, broken))
    assert tried(torch.device("cpu"), kind) == "QuACK's products failed when it ran: RuntimeError: no such tile"


def test_the_residual_stream_is_tried_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    """To memory of its own, and in place."""

    def off(in_place: bool, *arguments: torch.Tensor) -> torch.Tensor:
        made = gemm_add_reference(*arguments)
        return made.mul_(1.02) if (len(arguments) == 5) == in_place else made

    monkeypatch.setattr(gemm_epilogue, "gemm_add", gemm_add_reference)
    assert gemm_epilogue._try(torch.device("cpu"), "residual") is None
    for in_place in (False, True):
        monkeypatch.setattr(gemm_epilogue, "gemm_add", partial(off, in_place))
        assert "QuACK's products are wrong here" in gemm_epilogue._try(torch.device("cpu"), "residual")

    def forgets(h: Any, weight: Any, bias: Any, x: torch.Tensor, out: Any = None) -> torch.Tensor:
        return gemm_add_reference(h, weight, bias if out is None else None, x, out)

    monkeypatch.setattr(gemm_epilogue, "gemm_add", forgets)
    assert "QuACK's products are wrong here" in gemm_epilogue._try(torch.device("cpu"), "residual")


class Spoiled:
    """QuACK's product, wrong or refused for results of some width."""

    _plan_cache: ClassVar[dict[Any, Any]] = {}
    _call_cache: ClassVar[dict[Any, Any]] = {}

    def __init__(self, run: Any) -> None:
        self.run, self.tiles = run, set[int]()

    def __call__(self, h: Any, w: Any, c: Any, *, out: Any, config: Any, tuned: bool, bias: Any) -> Any:
        self.tiles.add(config)
        return {"D": out["D"].copy_(self.run(config, h.double() @ w.double() + bias.double() + c.double()))}


def test_every_tile_that_towers_take_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is a kernel of its own; widths of 1152, 1280 and 1024 are those of the models."""
    monkeypatch.setitem(sys.modules, "quack.gemm_config", SimpleNamespace(GemmConfig=SimpleNamespace))
    config = gemm_epilogue._config.__wrapped__
    monkeypatch.setattr(gemm_epilogue, "_config", lambda kind, width: config(kind, width).tile_n)
    tiles = {config("residual", width).tile_n for width in (1024, 1152, 1280)}
    for spoiled in (None, *tiles):
        product = Spoiled(lambda at, made, spoiled=spoiled: made * (1.02 if at == spoiled else 1))
        monkeypatch.setattr(gemm_epilogue, "_addition", lambda product=product: product)
        why = gemm_epilogue._try(torch.device("cpu"), "residual")
        assert (why is None) if spoiled is None else ("QuACK's products are wrong here" in str(why)), spoiled
        assert spoiled is not None or product.tiles == tiles


def test_what_quack_asserts_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its assertions are about our arguments, and may change with its version; another's reaches the user."""
    monkeypatch.setattr(gemm_epilogue, "_config", lambda kind, width: width)
    theirs = "quack.gemm_sm90", "triton.backends.nvidia.driver", "flash_attn_interface", "tvm_ffi.core"
    of_modules = {**dict.fromkeys(theirs, True), "hf_vit_accel.ops.linear": False, "quackery": False}
    for module, is_fault in of_modules.items():
        of: dict[str, Any] = {"__name__": module}
        exec("def run(at, made):\n    assert at == 0, 'a tile of 0'", of)
        product = Spoiled(of["run"])
        monkeypatch.setattr(gemm_epilogue, "_addition", lambda product=product: product)
        if is_fault:
            why = gemm_epilogue._try(torch.device("cpu"), "residual")
            assert why == "QuACK's products failed when it ran: AssertionError: a tile of 0"
        else:
            with pytest.raises(AssertionError, match="a tile of 0"):
                gemm_epilogue._try(torch.device("cpu"), "residual")


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("in_place", [True, False])
def test_how_quack_is_given_a_product_that_adds(monkeypatch: pytest.MonkeyPatch, biased: bool, in_place: bool) -> None:
    """Contiguous rows of 16 bytes, whatever comes; its caches of row counts are bounded."""

    class Product:
        _plan_cache, _call_cache = dict.fromkeys(range(257)), dict.fromkeys(range(256))

        def __call__(self, h: Any, w: Any, c: Any, *, out: Any, config: Any, tuned: bool, bias: Any) -> Any:
            assert h.is_contiguous() and w.t().is_contiguous() and config == ("residual", 24) and not tuned
            assert all(x.data_ptr() % 16 == 0 for x in (h, w, c, bias))
            return {"D": out["D"].copy_(h @ w + bias + c)}

    product = Product()
    monkeypatch.setattr(gemm_epilogue, "_addition", lambda: product)
    monkeypatch.setattr(gemm_epilogue, "_config", lambda kind, width: (kind, width))
    h, weight = torch.randn(16, 5).t(), torch.randn(24, 18)[:, 1:17]
    bias, x = torch.randn(25)[1:] if biased else None, torch.randn(5, 24)
    before = x.clone()
    expected = gemm_add_reference(h, weight, bias, x)
    if in_place:
        assert gemm_epilogue.add_product_(h, weight, bias, x) is None
        torch.testing.assert_close(x, expected)
    else:
        torch.testing.assert_close(gemm_epilogue.gemm_add(h, weight, bias, x), expected)
        assert torch.equal(x, before)
    assert not product._plan_cache and len(product._call_cache) == 256


def test_tiles_fit_the_width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "quack.gemm_config", SimpleNamespace(GemmConfig=SimpleNamespace))
    monkeypatch.setattr(gemm_epilogue, "_config", gemm_epilogue._config.__wrapped__)
    asked = [("residual", 1152), ("residual", 1280), ("residual", 1024), ("gelu_tanh", 4608), ("swiglu", 6840)]
    asked += [("gelu_tanh_gradient", 4304), ("swiglu_gradient", 3424)]
    assert [gemm_epilogue._config(*each).tile_n for each in asked] == [192, 160, 160, 160, 160, 160, 128]


def test_a_trial_is_no_part_of_what_is_checkpointed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first rows that it might serve come within a layer, which runs again."""
    monkeypatch.setattr(gemm_epilogue, "gemm_act", gemm_act_reference)
    monkeypatch.setattr(gemm_epilogue, "gemm_dact", gemm_dact_reference)
    machine.reset()
    weight = torch.randn(4, 4, requires_grad=True)

    def layer(x: torch.Tensor) -> torch.Tensor:
        y = x @ weight
        assert gemm_epilogue._tried(torch.device("cpu"), "gelu_tanh") is None
        return y.exp().sum()

    x = torch.randn(2, 4)
    with torch.autocast("cpu", torch.bfloat16), torch.autograd.graph.save_on_cpu():
        checkpoint(layer, x, use_reentrant=False).backward()
    assert weight.grad is not None
    machine.reset()


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_references_are_autograds(kind: str) -> None:
    """Also where there is no bias; gate and up take turns in a SwiGLU."""
    rows, width, inner = 7, 6, 5
    z = inner * (1 + (kind == "swiglu"))
    x, weight, bias, down, dy = (
        torch.randn(shape, dtype=torch.float64)
        for shape in ((rows, width), (z, width), (z,), (width, inner), (rows, width))
    )
    for given in (bias, None):
        made, h = gemm_act_reference(x, weight, given, kind)
        assert torch.equal(made, torch.nn.functional.linear(x, weight, given)) and h.shape == (rows, inner)
        dz, again, total = gemm_dact_reference(dy, down, made, kind)
        leaf = made.clone().requires_grad_()
        (gemm_epilogue.activate(leaf, kind) @ down.t()).backward(dy)
        torch.testing.assert_close(dz, leaf.grad)
        torch.testing.assert_close(total, leaf.grad.sum(0))
        assert torch.equal(again, h)
    if kind == "swiglu":
        torch.testing.assert_close(h[:, 1], torch.nn.functional.silu(made[:, 2]) * made[:, 3])


FAMILIES = {"qwen3_vl": "gelu_tanh", "qwen2_vl": "quick_gelu", "qwen2_5_vl": "swiglu"}


@pytest.fixture
def called(references: Any, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """QuACK serves all rows, by what stands in for it; its calls. MLPs without it are their references."""
    found: list[str] = []

    def counted(name: str, function: Any) -> Any:
        return lambda *args: found.append(f"{name} {args[3]}") or function(*args)

    def either(function: Any, reference: Any) -> Any:
        # Before the norm: epilogue.
        return SimpleNamespace(apply=lambda *args: (function.apply if args[-2] else reference)(*args))

    monkeypatch.setattr(mlp, "GeluMlp", either(GeluMlp, gelu_mlp_reference))
    monkeypatch.setattr(mlp, "SwigluMlp", either(SwigluMlp, swiglu_mlp_reference))
    for module in (gelu_backward, swiglu_backward):
        monkeypatch.setattr(module, "serves", lambda x_TE, kind: True)
        monkeypatch.setattr(module, "gemm_act", counted("act", gemm_act_reference))
        monkeypatch.setattr(module, "gemm_dact", counted("dact", gemm_dact_reference))
    return found


def gradients(model: Any) -> dict[str, torch.Tensor]:
    tower = tower_of(model)
    tower.zero_grad(set_to_none=True)
    made = outputs_of(tower(pixels_for(tower, GRIDS["mixed"]), grid_thw=torch.tensor(GRIDS["mixed"])))
    outputs = [output for output in made if output.requires_grad]
    torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])
    return {name: p.grad for name, p in tower.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_tower_is_trained_by_them_and_without_them_once_they_fail(
    family: str, called: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = TINY[family].build()
    tower = tower_of(model).requires_grad_(True)
    stock, layers, kind = gradients(model), len(tower.blocks), FAMILIES[family]
    hf_vit_accel.patch(model)
    once = [f"act {kind}"] * layers + [f"dact {kind}"] * layers

    def compare(expected: list[str]) -> None:
        called.clear()
        found = gradients(model)
        wanted = {name for name, p in tower.named_parameters() if p.requires_grad}
        assert found.keys() == wanted and called == expected
        assert max(relative_error(found[name], stock[name]) for name in wanted) < 1e-4

    compare(once)
    if (
        kind == "swiglu"
    ):  # a GELU's whose second weight is frozen is its kernel's: nobody needs what it would make again
        tower.requires_grad_(False)
        tower.blocks[0].norm1.weight.requires_grad_(True)  # what is frozen is on the way of its gradient
        compare(once)
        tower.requires_grad_(False)
        tower.blocks[-1].norm2.weight.requires_grad_(True)
        compare([f"act {kind}", f"dact {kind}"])
    tower.requires_grad_(True)

    def broken(*args: Any) -> Any:
        raise RuntimeError("no such tile")

    for module in (gelu_backward, swiglu_backward):
        monkeypatch.setattr(module, "gemm_act", machine.guarded(machine.EPILOGUES, broken))
    compare([])
    assert "not fused  gemm_epilogues: failed when it ran: RuntimeError: no such tile" in str(
        hf_vit_accel.status(model)
    )


@pytest.mark.parametrize(("name", "value"), [("intermediate_size", 36), ("hidden_act", "gelu")])
def test_what_they_cannot_compute_is_left_to_kernels(called: list[str], name: str, value: Any) -> None:
    """A width that is no multiple of 8; another activation leaves the whole MLP to its modules."""
    tower = type(tower_of(TINY["qwen3_vl"].build()))
    config = copy.deepcopy(tower_of(TINY["qwen3_vl"].build()).config)
    setattr(config, name, value)
    model = tower(config)
    stock = gradients(model)
    hf_vit_accel.patch(model)
    found = gradients(model)
    assert found.keys() == stock.keys() and not called
    assert max(relative_error(found[each], stock[each]) for each in stock) < 1e-4


def test_a_clamped_swiglu_is_left_to_its_kernel(called: list[str]) -> None:
    linears = [torch.nn.Linear(8, 16), torch.nn.Linear(8, 16), torch.nn.Linear(16, 8)]
    context = Context(device=torch.device("cpu"), dtype=torch.float32, grad=True)
    settings = [mlp._differentiable(linears[:2], linears[2], "silu", limit, context).settings for limit in (None, 7.0)]
    assert settings == [(None, True), (7.0, False)]
    failed = Context(device=torch.device("cpu"), dtype=torch.float32, grad=True, no_epilogues="failed")
    assert mlp._differentiable(linears[:2], linears[2], "silu", None, failed).settings == (None, False)
