"""The gate: how little a steady call asks, and that it sees every change that stands against serving it fast."""

from __future__ import annotations

import copy
import importlib
import sys
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.calls import PACKAGE, entered
from support.towers import ONE_TOWER
from tiny import (
    FAMILIES,
    GRIDS,
    TINY,
    assert_close,
    outputs_of,
    pixels_for,
    randomise,
    relative_error,
    run_tower,
    tower_of,
)
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

import hf_vit_accel
from hf_vit_accel.backends import BACKENDS
from hf_vit_accel.engine import inputs
from hf_vit_accel.ops import TABLE
from hf_vit_accel.tower.state import state_of

GRID = GRIDS["mixed"]
MEDIUM = [(1, 10, 6), (3, 4, 2), (1, 2, 10)]
FEW = [(1, 10, 6), (2, 4, 4)]
OWN_FILES = {
    Path(sys.modules[getattr(each, "__module__", "")].__file__ or "").as_posix().removeprefix(PACKAGE)
    for each in (*map(type, BACKENDS), *(operation.fused for operation in TABLE))
}
"""Those of the operations and backends that compute, one each."""


@pytest.fixture(params=ONE_TOWER)
def tower(request: Any) -> Any:
    return tower_of(TINY[request.param].build())


def counts(tower: Any) -> tuple[int, int]:
    """Calls that went fast, and the stock way."""
    [status] = hf_vit_accel.status(tower).towers
    return status.calls, status.stock_calls


# --- how little is asked --------------------------------------------------------------------------------------------


def entries(act: Callable[[], Any]) -> list[tuple[str, list[str]]]:
    """Return every entry of a file from another file of ours: the file, and the files that are on the stack then."""
    found: list[tuple[str, list[str]]] = []
    stack: list[str] = []

    def trace(frame: Any, event: str, _: Any) -> None:
        code = frame.f_code
        if not code.co_filename.startswith(PACKAGE):
            return
        file = code.co_filename.removeprefix(PACKAGE)
        if event == "call":
            if stack and stack[-1] != file:
                found.append((file, list(stack)))
            stack.append(file)
        elif event == "return":
            stack.pop()

    sys.setprofile(trace)
    try:
        act()
    finally:
        sys.setprofile(None)
    return found


def is_of_operations(file: str) -> bool:
    """Return whether a file belongs to operations and attention, which a call enters again and again."""
    return file.startswith(("/ops/", "/backends/"))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_steady_call_enters_few_functions_of_few_files(tower: Any, mode: Any) -> None:
    pixels, grid = pixels_for(tower, GRID), torch.tensor(GRID)
    hf_vit_accel.patch(tower)
    with mode():
        for _ in range(2):
            tower(pixels, grid_thw=grid)
        found = entered(lambda: tower(pixels, grid_thw=grid))
        calls_between_files = entries(lambda: tower(pixels, grid_thw=grid))
    wrapper = ("/machine.py", "call")  # marks the failures of an operation
    steady = [key for key in found if not is_of_operations(key[0]) and key[:2] != wrapper]
    listing = "\n".join(str(key) for key in sorted(steady))
    assert len(steady) <= 25, listing
    assert len({file for file, _, _ in steady}) <= 9, listing
    called_back = {file for file, stack in calls_between_files if file in stack and not is_of_operations(file)}
    assert not called_back, "nothing calls back into a file that waits for it"


@pytest.mark.parametrize("grad", [False, True])
def test_the_benchmark_of_checks_asks_what_a_call_asks(tower: Any, grad: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples" / "benchmark"))
    checks = importlib.import_module("checks")
    pixels, grid = pixels_for(tower, GRID), torch.tensor(GRID)
    hf_vit_accel.patch(tower.requires_grad_(False))
    assert 0 < checks.measure(tower, grad=grad, calls=20)["least"] < 1e6
    with torch.set_grad_enabled(grad):
        asked = [entered(lambda: tower(pixels, grid_thw=grid)), entered(lambda: checks.checked(tower, pixels, grid))]
    of_a_call, of_checks = (
        {key for key in each if key[0] in ("/tower/checks.py", "/tower/snapshot.py", "/engine/inputs.py")}
        for each in asked
    )
    others = {"autocast_dtype", "marks_outputs", "request"}  # what is done with a call that is served
    assert {key for key in of_a_call if key[1] not in others} == of_checks


def test_what_is_asked_does_not_grow_with_the_tower() -> None:
    """Calls of functions of ours, beside those that are a layer's operations."""
    found = []
    for depth in (4, 8):
        tiny = TINY["qwen2_vl"]
        tower = tower_of(type(tiny)(tiny.model, tiny.config, tiny.vision | {"depth": depth}, tiny.text).build())
        hf_vit_accel.patch(tower)
        run_tower(tower, GRID)
        calls = entered(lambda: run_tower(tower, GRID))  # noqa: B023
        layers = "/ops/", "/backends/", "/engine/encoder.py", "/machine.py"
        found.append({key: count for key, count in calls.items() if not key[0].startswith(layers)})
    assert found[0] == found[1]


# --- what is seen ---------------------------------------------------------------------------------------------------


def _epsilon(tower: Any) -> None:
    for block in tower.blocks:
        setattr(block.norm1, "variance_epsilon" if hasattr(block.norm1, "variance_epsilon") else "eps", 0.5)


def _epsilon_of_the_merger(tower: Any) -> None:
    norm = getattr(tower.merger, "ln_q", None) or tower.merger.norm
    setattr(norm, "variance_epsilon" if hasattr(norm, "variance_epsilon") else "eps", 0.5)


def _heads(tower: Any) -> None:
    for block in tower.blocks:
        block.attn.num_heads, block.attn.head_dim = 1, 2 * block.attn.head_dim
    frequencies = tower.rotary_pos_emb.inv_freq
    tower.rotary_pos_emb.inv_freq = torch.cat([frequencies, frequencies / 2])


def _heads_of_a_layer(tower: Any) -> None:
    attention, dim = tower.blocks[1].attn, tower.blocks[1].attn.head_dim
    attention.qkv, attention.proj = nn.Linear(attention.qkv.in_features, 3 * dim), nn.Linear(dim, 2 * dim)
    attention.num_heads = 1


def _each(name: str, value: Any) -> Callable[[Any], None]:
    def change(tower: Any) -> None:
        for block in tower.blocks:
            setattr(block.attn, name, value)

    return change


def _deepstack(tower: Any) -> None:
    tower.deepstack_visual_indexes[1] = 3  # in place, in the list that the config holds


ATTRIBUTES: dict[str, tuple[Callable[[Any], None], tuple[str, ...]]] = {
    "epsilon": (_epsilon, ()),
    "epsilon of the merger": (_epsilon_of_the_merger, ()),
    "heads": (_heads, ()),
    "scale": (_each("scaling", 0.7), ()),
    "window size": (lambda tower: setattr(tower, "window_size", 16), ("window_size",)),
    "layers that attend per frame": (lambda tower: setattr(tower, "fullatt_block_indexes", [0]), ("window_size",)),
    "the same, in place": (lambda tower: tower.fullatt_block_indexes.append(0), ("window_size",)),
    "deepstack": (_deepstack, ("deepstack_visual_indexes",)),
    "interpolation": (lambda tower: setattr(tower, "interpolation_align_corners", False), ("pos_embed",)),
    "the activation's class": (lambda tower: setattr(activation_of(tower), "__class__", nn.Tanh), ()),
    "a buffer": (lambda tower: tower.rotary_pos_emb.inv_freq.mul_(2), ()),
    "heads of a layer": (_heads_of_a_layer, ()),
    "scale of a layer": (lambda tower: setattr(tower.blocks[2].attn, "scaling", 0.7), ()),
}
"""What is changed on a tower after it was patched, and what a tower has that knows it."""
SLOW = ("interpolation", "heads of a layer", "scale of a layer")


def activation_of(tower: Any) -> Any:
    mlp = tower.blocks[0].mlp
    return mlp.act if hasattr(mlp, "act") else mlp.act_fn


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_attributes_that_change_are_seen_by_the_next_call(tower: Any, name: str) -> None:
    change, needs = ATTRIBUTES[name]
    if not all(hasattr(tower, need) for need in needs):
        pytest.skip("this family has none")
    hf_vit_accel.patch(tower)
    before = run_tower(tower, GRID)
    change(tower)
    found = run_tower(tower, GRID)
    assert counts(tower) == ((1, 1) if name in SLOW else (2, 0)), str(hf_vit_accel.status(tower))
    hf_vit_accel.unpatch(tower)
    expected = run_tower(tower, GRID)
    assert_close(found, expected)
    assert max(map(relative_error, expected, before)) > 1e-3, "the change matters"


def _parameter(tower: Any) -> None:
    tower.blocks[1].attn.proj.weight = nn.Parameter(tower.blocks[1].attn.proj.weight.detach() * 2)


def _in_place(tower: Any) -> None:
    tower.blocks[1].attn.proj.weight.data.mul_(2)


def _other_mlp(tower: Any) -> None:
    width = tower.blocks[0].attn.qkv.in_features
    tower.blocks[1].mlp = nn.Sequential(randomise(nn.Linear(width, width)))


def _other_order(tower: Any) -> None:
    layers = tower.blocks._modules
    layers["0"] = layers.pop("0")  # the first becomes the last


def _block_removed(tower: Any) -> None:
    tower.blocks = tower.blocks[:3]
    if hasattr(tower, "deepstack_merger_list"):
        tower.deepstack_visual_indexes = [0, 1]


def _hooks_in_a_new_dict(tower: Any) -> None:
    tower.blocks[1]._forward_hooks = OrderedDict()  # as people clear them
    tower.blocks[1].register_forward_hook(lambda module, args, output: output * 2)


def _hooks_put_back(tower: Any) -> None:
    """As by who had set them aside: nothing is registered."""
    tower.blocks[1]._forward_hooks = OrderedDict({0: lambda module, args, output: output * 2})


def _causal_modules(tower: Any) -> None:
    """Stock tells the attention function that it is not causal, whatever the module says."""
    tower.blocks[1].register_forward_hook(lambda module, args, output: output * 2)
    for block in tower.blocks:
        block.attn.is_causal = True


def _class_of_a_block(tower: Any) -> None:
    kind = type(tower.blocks[1])
    tower.blocks[1].__class__ = type("Mine", (kind,), {"forward": lambda self, x, **k: kind.forward(self, x, **k) * 2})


MODULES: dict[str, tuple[Callable[[Any], None], str | None]] = {
    "a parameter": (_parameter, None),
    "a parameter's values": (_in_place, None),
    "a module": (_other_mlp, None),
    "fewer layers": (_block_removed, None),
    "layers in another order": (_other_order, None),
    "a hook on causal modules": (_causal_modules, "hooks on blocks.1"),
    "hooks in a new dict": (_hooks_in_a_new_dict, "hooks on blocks.1"),
    "hooks that were set aside": (_hooks_put_back, "hooks on blocks.1"),
    "a class": (_class_of_a_block, "layer 1 has a Mine"),
}
"""What is put in the place of another, and why the calls after it go the stock way, if they do."""


@pytest.mark.parametrize("name", MODULES)
def test_what_takes_the_place_of_another_is_seen_by_the_next_call(tower: Any, name: str) -> None:
    change, reason = MODULES[name]
    hf_vit_accel.patch(tower)
    before = run_tower(tower, GRID)
    torch.manual_seed(0)
    change(tower)
    found = run_tower(tower, GRID)
    [status] = hf_vit_accel.status(tower).towers
    assert counts(tower) == ((2, 0) if reason is None else (1, 1)), str(status)
    assert [reason in why for why in status.against_fast] == ([] if reason is None else [True]), str(status)
    hf_vit_accel.unpatch(tower)
    expected = run_tower(tower, GRID)
    assert_close(found, expected)
    assert max(map(relative_error, expected, before)) > 1e-3, "the change matters"


def test_what_is_made_of_a_former_reading_serves_no_later_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module is replaced, and another thread sees it, while a call is under way that has read the tower before."""
    tower = tower_of(TINY["qwen3_vl"].build())
    hf_vit_accel.patch(tower)
    read = inputs.read

    def meanwhile(*args: Any, **kwargs: Any) -> Any:
        monkeypatch.setattr(inputs, "read", read)
        tower.blocks[1].attn.proj = randomise(copy.deepcopy(tower.blocks[1].attn.proj))
        state_of(tower).snapshot(tower)
        return read(*args, **kwargs)

    monkeypatch.setattr(inputs, "read", meanwhile)
    before, found = run_tower(tower, GRID), run_tower(tower, GRID)
    hf_vit_accel.unpatch(tower)
    assert_close(found, run_tower(tower, GRID))
    assert max(map(relative_error, found, before)) > 1e-3, "the change matters"


HOOKS: dict[str, Callable[[nn.Module, list[str]], Any]] = {
    "forward": lambda module, seen: module.register_forward_hook(lambda *_: seen.append("forward")),
    "forward pre": lambda module, seen: module.register_forward_pre_hook(lambda *_: seen.append("forward pre")),
    "full backward": lambda module, seen: module.register_full_backward_hook(lambda *_: seen.append("full backward")),
    "backward pre": lambda module, seen: module.register_full_backward_pre_hook(lambda *_: seen.append("backward pre")),
    "global": lambda _, seen: register_module_forward_hook(lambda *_: seen.append("global")),
}


HOOKED = "patch_embed.proj", "blocks.1", "blocks.2.attn", "blocks.0.attn.qkv", "merger"


@pytest.mark.parametrize(("at", "name"), list(enumerate(HOOKED)))
@pytest.mark.parametrize("kind", HOOKS)
def test_hooks_run_while_they_are_there(kind: str, at: int, name: str) -> None:
    """Those of the backward pass matter to calls that record gradients. (Families take turns.)"""
    tower = tower_of(TINY[FAMILIES[(at + list(HOOKS).index(kind)) % len(FAMILIES)]].build())
    grid, seen = torch.tensor(FEW), []
    expected = run_tower(tower, FEW)
    hf_vit_accel.patch(tower)
    handle = HOOKS[kind](tower.get_submodule(name), seen)
    try:
        assert_close(run_tower(tower, FEW), expected)
        assert counts(tower) == ((1, 0) if "backward" in kind else (0, 1))
        assert bool(seen) == ("backward" not in kind)
        pixels = pixels_for(tower, FEW).requires_grad_()
        torch.stack([x.square().mean() for x in outputs_of(tower(pixels, grid_thw=grid))]).sum().backward()
        assert set(seen) == {kind} and state_of(tower).stock_calls == 1 + ("backward" not in kind)
        reason = "global module hooks" if kind == "global" else f"hooks on {name}"
        assert state_of(tower).fallbacks == {reason: state_of(tower).stock_calls}
    finally:
        handle.remove()
    stock = state_of(tower).stock_calls
    assert_close(run_tower(tower, FEW), expected)
    assert state_of(tower).stock_calls == stock


def test_a_hook_on_the_tower_itself_keeps_it_fast(tower: Any) -> None:
    seen: list[str] = []
    hf_vit_accel.patch(tower, strict=True)
    tower.register_forward_hook(lambda *_: seen.append("tower"))
    run_tower(tower, GRID)
    assert seen == ["tower"] and counts(tower) == (1, 0)


@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: [x]])
def test_features_that_a_hook_keeps_on_the_tower(tower: Any, wrap: Any) -> None:
    """Patched before and after the first; and read anew."""
    expected = run_tower(tower, GRID)
    tower.register_forward_hook(lambda module, _, out: setattr(module, "features", wrap(out.pooler_output.detach())))
    run_tower(tower, GRID)
    hf_vit_accel.patch(tower)
    for _ in range(3):
        assert_close(run_tower(tower, GRID), expected)
    tower.blocks[0].mlp = copy.deepcopy(tower.blocks[0].mlp)
    assert_close(run_tower(tower, GRID), expected)
    assert_close(run_tower(tower, GRID), expected)
    assert counts(tower) == (5, 0) and hf_vit_accel.status(tower).towers


def test_outputs_are_returned_as_the_config_says(tower: Any) -> None:
    tower.config.return_dict = False
    pixels, grid = pixels_for(tower, GRID), torch.tensor(GRID)
    with torch.no_grad():
        expected = tower(pixels, grid), tower(pixels, grid, return_dict=True), tower(pixels, grid, return_dict=False)
        hf_vit_accel.patch(tower, strict=True)
        found = (
            tower(pixels, grid),
            tower(pixels, grid_thw=grid, return_dict=True),
            tower(pixels, grid, return_dict=False),
        )
    assert list(map(type, found)) == list(map(type, expected)) and isinstance(found[0], tuple)
    for ours, theirs in zip(found, expected, strict=True):
        tuples = [x if isinstance(x, tuple) else x.to_tuple() for x in (ours, theirs)]
        assert list(map(type, tuples[0])) == list(map(type, tuples[1]))
        assert_close(*([*x[:2], *(x[2] if len(x) > 2 else ())] for x in tuples))


# --- autocast -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "fuse"),
    [*((dtype, "auto") for dtype in (torch.bfloat16, torch.float16, torch.float32)), (torch.bfloat16, False)],
    ids=str,
)
def test_autocast_is_served_fast(tower: Any, dtype: torch.dtype, fuse: Any) -> None:
    """Dtypes as stock's under autocast; errors against fp32 at most stock's own."""
    tower = tower.to(dtype)
    exact = type(tower)(tower.config).eval()
    exact.load_state_dict({name: value.float() for name, value in tower.state_dict().items()})
    autocast = dtype if dtype == torch.float16 else torch.bfloat16  # stock's LayerNorm takes fp16 weights in no other

    def outputs(seed: int) -> list[torch.Tensor]:
        with torch.no_grad(), torch.autocast("cpu", dtype=autocast):
            return outputs_of(tower(pixels_for(tower, MEDIUM, seed), grid_thw=torch.tensor(MEDIUM)))

    expected, stock = (
        [run(seed) for seed in range(5)] for run in (lambda seed: run_tower(exact, MEDIUM, seed), outputs)
    )
    hf_vit_accel.patch(tower, fuse=fuse, strict=True)
    ours = [outputs(seed) for seed in range(5)]
    assert counts(tower) == (5, 0)
    assert [(x.dtype, x.shape) for x in ours[0]] == [(x.dtype, x.shape) for x in stock[0]]

    def errors(runs: list[list[torch.Tensor]]) -> list[tuple[float, ...]]:
        """By output, of every seed."""
        return list(zip(*(map(relative_error, *pair) for pair in zip(runs, expected, strict=True)), strict=True))

    for found, of_stock in zip(errors(ours), errors(stock), strict=True):
        assert sum(found) <= max(1.1 * sum(of_stock), 5 * torch.finfo(autocast).eps), (found, of_stock)


def test_autocast_leaves_fp64_alone(tower: Any) -> None:
    tower, given = tower.double().requires_grad_(), pixels_for(tower, GRID).double()

    def found() -> list[torch.Tensor]:
        tower.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            outputs = outputs_of(tower(given, grid_thw=torch.tensor(GRID)))
        sum((output * output.cos()).sum() for output in outputs).backward()
        return [*outputs, *(weight.grad for weight in tower.parameters())]

    expected = found()
    hf_vit_accel.patch(tower, strict=True)
    for ours, of_stock in zip(found(), expected, strict=True):
        assert ours.dtype == of_stock.dtype == torch.float64
        assert relative_error(ours, of_stock) < 1e-6  # RMSNorm works in fp32
    assert counts(tower) == (1, 0)


def test_autocast_on_and_off_share_nothing(tower: Any) -> None:
    expected = run_tower(tower, GRID)
    hf_vit_accel.patch(tower, strict=True)
    for _ in range(2):
        assert_close(run_tower(tower, GRID), expected)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            run_tower(tower, GRID)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=False):
            assert_close(run_tower(tower, GRID), expected)


def test_strict_is_true_or_false(tower: Any) -> None:
    for strict in ("no", 1, None):
        with pytest.raises(ValueError, match="expected strict to be True or False"):
            hf_vit_accel.patch(tower, strict=strict)
    assert state_of(tower) is None
