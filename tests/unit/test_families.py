"""Prove every tower class of every family in its smallest shape, and compare it with stock and its gradients."""

import copy
import functools
import importlib
import itertools
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from support import versions
from support.cpu_graphs import Recorder
from support.families import CLASSES, DIFFERENT, GRIDS, build, classes_like, inputs, run, shared_tower, trained
from support.graphs import patch
from support.interpreter import interpreted
from support.patching import assert_fast
from support.towers import alike
from tiny import assert_close, checkpoint_layers, largest_error, merged_of, randomise, relative_error
from torch.nn import Module, ModuleList
from torch.utils.flop_counter import FlopCounterMode

import hf_vit_accel
from hf_vit_accel.backends.base import Attend, Backend, Plan, Request
from hf_vit_accel.backends.sdpa import Sdpa
from hf_vit_accel.families import FAMILIES, Block, Parts, family_of
from hf_vit_accel.layout import Geometry, Segments
from hf_vit_accel.ops import TABLE, mlp
from hf_vit_accel.ops.training import mlp as trained_mlp
from hf_vit_accel.ops.training import nodes as nodes_module
from hf_vit_accel.ops.training.nodes import OpWithBackward, layer_node_of
from hf_vit_accel.ops.window_attention import WindowAttention
from hf_vit_accel.tower.proof import prove


def entry_of(name: str) -> Any:
    """Return the entry of `CLASSES` whose class name starts with a name."""
    return next(entry for entry in CLASSES if entry[2].startswith(name))


@pytest.fixture(params=CLASSES, ids=lambda entry: entry[2])
def tower(request: pytest.FixtureRequest) -> Any:
    return build(*request.param)


@pytest.fixture(params=classes_like(*DIFFERENT))
def typical(request: pytest.FixtureRequest) -> Any:
    """Build one tower for every set of parameters of a family, for tests that do not depend on the class."""
    family, *named = request.param
    for earlier in family.towers[: family.towers.index(tuple(named))]:
        if _shapes(family, *earlier) == _shapes(family, *named):
            pytest.skip(f"built as {earlier[1]}")
    return build(*request.param)


@functools.cache
def _shapes(*built: Any) -> dict[str, torch.Size]:
    return {name: parameter.shape for name, parameter in shared_tower(*built).named_parameters()}


@pytest.mark.parametrize("reentrant", alike(None, True, False))  # SUPPORT.md's table has frozen towers with checkpoints
def test_frozen_layers_cost_no_backward(typical: Any, reentrant: bool | None) -> None:
    """Train the merger alone, as a projector is trained: layers compute no gradient and save nothing."""
    family = family_of(typical)
    stock = copy.deepcopy(typical)
    merger = family.parts(typical).merger
    if merger is None:
        pytest.skip("no merger")
    hf_vit_accel.patch(typical, strict=True)
    _, pixels, grid = inputs(typical, GRIDS[1])
    costs = []
    for tower in (stock, typical):
        tower.requires_grad_(False)
        family.parts(tower).merger.requires_grad_(True)
        if reentrant is not None:
            checkpoint_layers(tower.train(), reentrant=reentrant)
        saved_sizes: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda x, sizes=saved_sizes: (sizes.append(x.nbytes), x)[1], lambda x: x
        ):
            merged = merged_of(tower(pixels.detach(), grid_thw=grid))
        with FlopCounterMode(display=False) as products:
            merged.square().sum().backward()
        costs.append((products.get_total_flops(), sum(saved_sizes)))
    (of_stock, kept_by_stock), (ours, kept_by_us) = costs
    assert ours <= of_stock and kept_by_us <= 1.1 * kept_by_stock


def test_adapters_on_every_linear(typical: Any, references: list[str]) -> None:
    """Put LoRA on all Linears of all layers, under every family's names: no PEFT module is called."""
    assert versions.lora(typical) == "fast"
    [status] = hf_vit_accel.status(typical).towers
    assert not any("Linear stands where" in why for why in status.unfused.values()), status.unfused


def test_all_parts_are_fused_and_equal_stock(references: list[str], tower: Any) -> None:
    """Run the kernels' references, with gradients and without."""
    family = family_of(tower)
    parts = family.parts(tower)
    assert (family.windows, family.deepstack) == (parts.full_layers is not None, bool(parts.deepstack))
    applicable = {operation.name for operation in TABLE if operation.subjects(parts)}
    expected = run(tower, GRIDS[1])
    outputs, gradients = trained(tower, GRIDS[1])
    hf_vit_accel.patch(tower, strict=True)
    assert_close(run(tower, GRIDS[1]), expected)
    [status] = hf_vit_accel.status(tower).towers
    assert set(status.fused) == applicable
    actual, ours = trained(tower, GRIDS[1])
    assert_close(actual, outputs)
    assert largest_error(ours, gradients) < 1e-4
    assert_fast(tower, 2)
    shaped = "heads" in applicable
    assert references.count("shape_heads_") == len(parts.blocks) * shaped
    assert references.count("shape_heads") == len(parts.blocks) * shaped


def test_nothing_fused_equals_stock(typical: Any) -> None:
    """Run every part by its module, with gradients and under checkpointing of layers."""
    expected, gradients = trained(typical, GRIDS[1])
    hf_vit_accel.patch(typical, fuse=False)
    actual, ours = trained(typical, GRIDS[1])
    [status] = hf_vit_accel.status(typical).towers
    assert status.fused == () and largest_error(ours, gradients) < 1e-4
    assert_close(actual, expected)
    hf_vit_accel.unpatch(typical)
    assert versions.checkpointing(typical) in ("fast", "transformers does not checkpoint it")


def test_replays_equal_stock(references: list[str], on_cpu: type[Recorder], typical: Any) -> None:
    """Replay fused graphs of several images, and of cut calls, with buffers poisoned before every use."""
    grids = [*GRIDS, [(1, 2, 4)], [(1, 8, 12)] * 8]
    expected = [run(typical, grid) for grid in grids]
    graphs = patch(typical)
    for grid, outputs in zip(grids, expected, strict=True):
        assert_close(run(typical, grid), outputs)
    assert graphs.status().replays > len(grids) and graphs.status().padding > 1
    assert not graphs.status().eager
    assert_fast(typical, len(grids))


def test_rounding_is_that_of_stock(references: list[str], typical: Any) -> None:
    """Compare the error of the fused tower in bf16 with stock's, against the tower in fp32."""
    if "experts" in str(typical):
        pytest.skip("rounding chooses other experts")
    exact = [x.double() for x in run(typical, GRIDS[1])]
    typical.to(torch.bfloat16)
    stock = run(typical, GRIDS[1])
    hf_vit_accel.patch(typical, strict=True)
    actual = run(typical, GRIDS[1])
    assert [(x.dtype, x.shape) for x in actual] == [(x.dtype, x.shape) for x in stock]
    for ours, theirs, true in zip(actual, stock, exact, strict=True):
        assert relative_error(ours, true) <= 1.1 * relative_error(theirs, true)


def one_node_a_layer(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let `sdpa` attend by the kernel for windows in calls with gradients; return a list that grows with every node."""
    nodes: list[int] = []
    stock_plan = Sdpa.plan
    stock_attend_layers = Sdpa.attend_layers

    def plan(backend: Sdpa, segments: Segments, request: Request) -> Plan:
        return (Backend.plan if request.grad else stock_plan)(backend, segments, request)

    def attend_layers(backend: Sdpa, plan: Plan, layers: int, rotate: Attend) -> list[Attend]:
        if not plan.request.grad:
            return stock_attend_layers(backend, plan, layers, rotate)
        settings = plan.tensors["cu_seqlens_S1"], plan.request.scale
        return [OpWithBackward(function=WindowAttention, settings=settings)] * layers

    def counted_layer_node_of(layer: object, attend: object) -> Callable[..., object] | None:
        node = layer_node_of(layer, attend)
        if node is not None:
            nodes.append(len(nodes))
        return node

    monkeypatch.setattr(Sdpa, "plan", plan)
    monkeypatch.setattr(Sdpa, "attend_layers", attend_layers)
    monkeypatch.setattr(nodes_module, "layer_node_of", counted_layer_node_of)
    return nodes


@interpreted
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("Glm5Next", ""),  # a limit; three products and groups of heads, which kernels know from test_backward.py:
        *(pytest.param(name, "", marks=pytest.mark.matrix) for name in ("Qwen2_5Omni", "Exaone4_5", "GlmOcr")),
        *(pytest.param(name, "", marks=pytest.mark.matrix) for name in ("Glm4vVision", "PaddleOCR")),
        ("Glm4vVision", "autocast"),  # the residual stream in fp32; in fp16 in GLM-OCR's
        *(pytest.param(name, "autocast", marks=pytest.mark.matrix) for name in ("GlmOcr", "Dots3", "PaddleOCR")),
        ("Qwen2_5_Vision", "adapters"),
        pytest.param("Qwen2Vision", "adapters", marks=pytest.mark.matrix),
    ],
)
def test_kernels_interpreted(name: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the kernels in fp16, a layer as one node: outputs and gradients are as near to fp32 as stock's.

    Frozen parameters have no gradient, and the others keep theirs.
    """
    autocast = kind == "autocast"
    amp = torch.autocast("cpu", torch.float16, enabled=autocast)
    tower = build(*entry_of(name))
    hf_vit_accel.unpatch(hf_vit_accel.patch(tower))  # the proof comes before the kernels take torch's place
    monkeypatch.setattr(mlp, "why_not_descriptors", lambda device: None)
    nodes = one_node_a_layer(monkeypatch)
    grid = [(1, 2, 4), (1, 2, 2)]
    layers = next(module for module in tower.modules() if isinstance(module, ModuleList))
    del layers[1:]  # the interpreter is slow
    parts = family_of(tower).parts(tower)
    assert [block.module for block in parts.blocks] == [*layers]
    limit = getattr(parts.blocks[0].mlp, "swiglu_limit", None)
    if limit:
        with torch.no_grad():  # else nothing is cut off
            for block in parts.blocks:
                block.mlp.up_proj.weight.mul_(limit)
    if kind == "adapters":  # on all Linears of the layer but one
        peft = pytest.importorskip("peft")
        linears = r".*blocks\..*(qkv|fc1|fc2|gate_proj|up_proj|down_proj)"
        config = peft.LoraConfig(r=3, lora_alpha=6, target_modules=linears, init_lora_weights=False)
        torch.manual_seed(0)
        peft.inject_adapter_in_model(config, tower)
        tower.requires_grad_(True)
    exact, exact_gradients = trained(tower, grid)
    tower.to(torch.float32 if autocast else torch.float16)
    with amp:
        stock, stock_gradients = trained(tower, grid)
    hf_vit_accel.patch(tower, strict=True)
    with amp:
        actual = run(tower, grid)
        outputs, gradients = trained(tower, grid)
    assert_fast(tower, 2)
    assert [x.dtype for x in actual] == [x.dtype for x in outputs] == [x.dtype for x in stock]
    # Norms of heads are a node of their own, and so are experts.
    assert len(nodes) == sum(not mlp.is_mixture_of_experts(b.mlp) and not b.shapes_heads for b in parts.blocks)

    def joined(tensors: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat([tensor.flatten().double() for tensor in tensors])

    def error(tensors: list[torch.Tensor], true: list[torch.Tensor]) -> float:
        return relative_error(joined(tensors), joined(true))

    assert error(actual, exact) <= max(1.1 * error(stock, exact), torch.finfo(torch.float16).eps * 1.5)
    assert error(gradients, exact_gradients) <= 1.1 * error(stock_gradients, exact_gradients)
    if name not in ("Glm5Next", "Exaone4_5") and kind != "adapters":
        return
    for index, parameter in enumerate(tower.parameters()):
        parameter.requires_grad_(index % 3 == 1)
    for index, (parameter, again) in enumerate(zip(tower.parameters(), trained(tower, grid)[1][1:], strict=True)):
        assert parameter.requires_grad == (again is not None)
        assert again is None or relative_error(again, gradients[1 + index]) < 1e-3


CAST = "Qwen2_5_Vision", "Qwen3VLVision", "Glm4vVision", "GlmOcr"
"""Towers whose streams and parts differ in what autocast makes of them; the others in the matrix."""


def towers_like(*names: str) -> pytest.MarkDecorator:
    """Run a test of the fixture `typical` with these towers; the matrix has the others."""
    return pytest.mark.parametrize("typical", classes_like(*names), indirect=True)


@towers_like(*CAST)
@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.matrix)], ids=str)
def test_under_autocast_a_tower_is_as_stock(references: list[str], typical: Any, dtype: torch.dtype) -> None:
    """Compare dtypes, and errors averaged over seeds, since the error of one seed depends on luck.

    A limit of SwiGLUs stops the gradients of gates and ups beyond it. Rounding moves a few of them across, for stock
    as for us, and each outweighs all other errors. So many rows average that, and few without limits show the rest.
    """
    if "experts" in str(typical):
        pytest.skip("rounding chooses other experts")
    limited = [module for module in typical.modules() if getattr(module, "swiglu_limit", None)]
    if limited:
        compare_under_autocast(typical, dtype, GRIDS[1] * 16, seeds=10)
    for module in limited:
        module.swiglu_limit = 100.0  # nothing is cut off
    compare_under_autocast(typical, dtype, GRIDS[1], seeds=20 if limited else 5)


def compare_under_autocast(tower: Any, dtype: torch.dtype, grid: Any, *, seeds: int) -> None:
    ratios = []
    for seed in range(seeds):
        hf_vit_accel.unpatch(randomise(tower, seed))
        exact = pooled(*trained(tower, grid))
        with torch.autocast("cpu", dtype=dtype):
            stock = pooled(*trained(tower, grid))
            hf_vit_accel.patch(tower)
            alone = run(tower, grid)
            actual = pooled(*trained(tower, grid))
        assert [(x.dtype, x.shape) for x in actual] == [(x.dtype, x.shape) for x in stock]
        assert [x.dtype for x in alone] == [x.dtype for x in stock[:-1]]
        errors = zip([*actual, *alone], [*stock, *stock[:-1]], [*exact, *exact[:-1]], strict=True)
        ratios.append([relative_error(ours, true) / relative_error(theirs, true) for ours, theirs, true in errors])
    assert max(sum(of_seeds) / len(of_seeds) for of_seeds in zip(*ratios, strict=True)) <= 1.1
    [status] = hf_vit_accel.status(tower).towers
    assert (status.calls, status.fallbacks) == (2, {})


def pooled(outputs: list[torch.Tensor], gradients: list[Any]) -> list[torch.Tensor]:
    return [*outputs, torch.cat([gradient.flatten() for gradient in gradients])]


@towers_like("Qwen2_5_Vision", "Qwen3VLVision", "Glm5Next")
def test_whatever_module_is_replaced_runs_itself(references: list[str], typical: Any) -> None:
    """Replace every module of layer 1 and around the layers after patching: the next call runs it."""
    plain = copy.deepcopy(typical)
    hf_vit_accel.patch(typical)
    before = run(typical, GRIDS[1])
    names = [name for name, module in typical.named_modules() if name and "forward" in dir(type(module))]
    for name in names:
        module = typical.get_submodule(name)
        other = plain.get_submodule(name)
        numbered = re.search(r"\.(\d+)\.", f"{name}.")
        if name == "embeddings.position_embedding" and "Glm4v" in type(typical).__name__:
            continue  # stock reads its weight and never calls it
        if (numbered and numbered[1] != "1") or type(module).forward in (ModuleList.forward, Module.forward):
            continue

        def scaled_forward(module: Any, *args: Any, **kwargs: Any) -> Any:
            result = type(module).forward(module, *args, **kwargs)
            if isinstance(result, torch.Tensor):
                return result * 1.5
            return (result[0] * 1.5, *result[1:]) if isinstance(result, tuple) else result

        module.forward = functools.partial(scaled_forward, module)
        other.forward = functools.partial(scaled_forward, other)
        assert largest_error(run(typical, GRIDS[1]), run(plain, GRIDS[1])) < 1e-5, name
        del module.forward, other.forward
    assert_close(run(typical, GRIDS[1]), before)


# --- negative controls: what a family states wrong is caught by the proof ---------------------------------------------


def _each_block(change: Any) -> Any:
    return lambda parts: replace(parts, blocks=tuple(change(block) for block in parts.blocks))


def _swapped(block: Any) -> Any:
    """Swap queries and values, where each has its own product."""
    return replace(block, qkv=block.qkv[::-1])


WRONG = {
    "layers reversed": lambda parts: replace(parts, blocks=parts.blocks[::-1]),
    "norms swapped": _each_block(lambda block: replace(block, norm1=block.norm2, norm2=block.norm1)),
    "no norms of heads": _each_block(lambda block: replace(block, head_norms=())),
    "norms of heads swapped": _each_block(lambda block: replace(block, head_norms=block.head_norms[::-1])),
    "q, k and v in another order": _each_block(_swapped),
    "no norm of the embedding": lambda parts: replace(parts, embed_norm=None),
    "another final norm": lambda parts: replace(parts, final_norm=parts.blocks[0].norm1),
    "full layers": lambda parts: replace(parts, full_layers=None),
    "no positions": lambda parts: replace(parts, table=None),
    "no downsampling": lambda parts: replace(parts, downsample=None),
    "no merger": lambda parts: replace(parts, merger=None, final_norm=parts.final_norm or parts.blocks[0].norm1),
}
GEOMETRY = {
    "another interpolation": lambda g: replace(g, taps=6 - g.taps if g.table else g.taps),
    "other corners": lambda g: replace(g, align_corners=g.align_corners != bool(g.table)),
    "another order of rows": lambda g: replace(g, merge=3 - g.merge),
    "larger windows": lambda g: replace(g, window=g.window and g.window + 1),
}


def same(one: Any, other: Any) -> bool:
    """Return whether two sets of parts, blocks or geometries are equal."""
    if isinstance(one, Parts | Block | Geometry):
        return all(same(value, getattr(other, name)) for name, value in vars(one).items())
    if isinstance(one, tuple) and len(one) == len(other):
        return all(same(item, other_item) for item, other_item in zip(one, other, strict=True))
    return one is other or (not isinstance(one, torch.nn.Module) and one == other)


def towers_that_state(name: str, change: Any) -> Iterator[Any]:
    """Yield the entries of `CLASSES` in which a change makes a difference."""
    for entry in CLASSES:
        with suppress(pytest.skip.Exception):  # this transformers lacks the class
            tower = shared_tower(*entry)
            stated = getattr(family_of(tower), name)(tower)
            if not same(stated, change(stated)):
                yield entry


@pytest.mark.usefixtures("nothing_proven")
@pytest.mark.parametrize("what", [*WRONG, *GEOMETRY])
def test_a_family_that_states_something_wrong_is_caught(what: str, pytestconfig: pytest.Config) -> None:
    """Prove a family with one false statement: the proof fails. (With true statements every tower is fast.)

    One tower that states something of the kind shows it; in the matrix all of them.
    """
    name, change = ("parts", WRONG[what]) if what in WRONG else ("geometry", GEOMETRY[what])
    most = None if pytestconfig.getoption("--matrix") else 1
    entries = list(itertools.islice(towers_that_state(name, change), most))
    if not entries and Version(transformers.__version__) < Version("5.15"):
        pytest.skip("no tower of this transformers states it")
    assert entries
    for entry in entries:
        tower = build(*entry)
        family = family_of(tower)
        assert family is not None
        stated = getattr(family, name)
        wrong = replace(family, **{name: lambda tower, stated=stated: change(stated(tower))})
        assert prove(tower, wrong).why_not_fast is not None, entry


@pytest.mark.usefixtures("nothing_proven")
def test_an_operation_that_ignores_the_limit_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    family, *tower = entry_of("Glm5NextVisionModel")
    function = trained_mlp.activated_reference
    monkeypatch.setattr(trained_mlp, "activated_reference", lambda z, kind, limit: function(z, kind))
    assert "something else" in (prove(build(family, *tower), family).why_not_fast or "")


def test_every_module_of_a_family_is_importable_by_its_name() -> None:
    for family in FAMILIES:
        names: dict[str, list[str]] = {}  # a class may have had another name
        for module, name in family.towers:
            names.setdefault(module, []).append(name)
        for module, names_in_module in names.items():
            try:
                home = importlib.import_module(module)
            except ImportError:
                continue
            assert any(hasattr(home, name) for name in names_in_module)


def test_a_last_layer_norm_keeps_the_dtype_that_autocast_gives_it(
    references: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Expect fp32 from the last norm, as autocast on CUDA computes it for any weights."""
    tower = build(*entry_of("PaddleOCR")).bfloat16()
    plain = torch.nn.functional.layer_norm

    def as_on_cuda(x: torch.Tensor, shape: Any, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
        wide = torch.float32 if torch.is_autocast_enabled("cpu") else x.dtype
        return plain(x.to(wide), shape, weight.to(wide), bias.to(wide), eps)

    monkeypatch.setattr(torch.nn.functional, "layer_norm", as_on_cuda)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = run(tower, GRIDS[1])
        hf_vit_accel.patch(tower)
        actual = run(tower, GRIDS[1])
    assert [x.dtype for x in actual] == [x.dtype for x in expected] == [torch.float32]
    assert_fast(tower, 1)
    assert run(tower, GRIDS[1])[0].dtype == torch.bfloat16


def test_warmup_takes_videos_of_any_family(typical: Any) -> None:
    """Warm up with videos, frame by frame where the model passes single frames to its tower."""
    hf_vit_accel.patch(typical)
    (status,) = hf_vit_accel.warmup(typical, [[(3, 4, 4), (1, 4, 8)]], progress=False).towers
    assert (status.calls, status.stock_calls) == (1, 0)
