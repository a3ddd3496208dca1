"""What is taken from transformers: what its code computes is proven by running it, its functions are there or missed.

A newer transformers is played by its own source with a few words changed, compiled as if it stood in its files.
"""

from __future__ import annotations

import importlib
import inspect
import multiprocessing
import sys
import textwrap
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support.towers import ONE_TOWER
from tiny import FAMILIES, GRIDS, TINY, assert_close, pixels_for, relative_error, run_tower, tower_of

import hf_vit_accel
from hf_vit_accel import FallbackError, machine
from hf_vit_accel.families import family_of
from hf_vit_accel.tower import proof as upstream
from hf_vit_accel.tower.state import state_of

GRID = GRIDS["mixed"]
QWEN3 = ("qwen3_vl", "qwen3_vl_moe")


def compiled(source: str, home: Any, like: Any) -> Any:
    """A function as if transformers had it in the module `home`."""
    path = Path(transformers.__file__).parent / "models" / "newer.py"
    scope: dict[str, Any] = {}
    exec(compile(textwrap.dedent(source), str(path), "exec"), vars(home), scope)
    [function] = scope.values()
    function.__module__, function.__qualname__ = home.__name__, like.__qualname__
    return function


def edited(function: Any, edits: tuple[tuple[str, str], ...]) -> Any:
    """A function of transformers with words of its source changed."""
    plain = inspect.unwrap(function)
    source = textwrap.dedent(inspect.getsource(function)).replace("@auto_docstring\n", "")
    source = source.replace("super().__init__", "super(type(self), self).__init__")
    for old, new in edits:
        if old not in source:
            pytest.skip(f"this transformers does not say {old!r} in {plain.__qualname__}")
        source = source.replace(old, new)
    return compiled(source, sys.modules[plain.__module__], plain)


BLOCK = """
    def forward(self, hidden_states, cu_seqlens, position_embeddings=None{more}, **kwargs):
        def attn(x):
            return self.attn(x, cu_seqlens=cu_seqlens, position_embeddings=position_embeddings, **kwargs)
        h = hidden_states
        {body}
"""
STOCK = "h = h + attn(self.norm1(h)); return h + self.mlp(self.norm2(h))"


@dataclass(frozen=True)
class Change:
    """What a newer transformers might do.

    role: whose forward, or which function of the tower's module, is written anew. edits: (old, new) words of source,
    or the body of a block. families: that have it. outcome: "stock"; "fast", for what computes the same or is read from
    modules. more: arguments.
    """

    role: str
    edits: Any
    families: tuple[str, ...] = FAMILIES
    outcome: str = "stock"
    more: str = ""

    def make(self, tower: Any, monkeypatch: Any) -> None:
        """Put it into transformers."""
        name, _, method = self.role.partition(".")
        block, home = tower.blocks[0], sys.modules[type(tower).forward.__module__]
        owners = dict(tower=tower, block=block, attention=block.attn, mlp=block.mlp, norm=block.norm1)
        owners |= dict(merger=tower.merger, patch_embed=tower.patch_embed, rotary=tower.rotary_pos_emb)
        owner: Any = type(owners[name]) if name in owners else home
        name = method or ("forward" if name in owners else name)
        function = getattr(owner, name)
        if isinstance(self.edits, str):
            new = compiled(BLOCK.format(body=self.edits, more=self.more), home, function)
        else:
            new = edited(function, self.edits)
        monkeypatch.setattr(owner, name, new)


CHANGES = {
    "half an MLP": Change("block", STOCK.replace("self.mlp", "0.5 * self.mlp")),
    "attention and MLP in parallel": Change("block", "return h + attn(self.norm1(h)) + self.mlp(self.norm2(h))"),
    "norms after": Change("block", "h = self.norm1(h + attn(h)); return self.norm2(h + self.mlp(h))"),
    "a sign of the rotation": Change("apply_rotary_pos_emb_vision", (("+ (rotate_half(q)", "- (rotate_half(q)"),)),
    "a clone": Change("block", STOCK.replace("h = h +", "residual = h.clone(); h = residual +"), outcome="fast"),
    "an optional argument": Change("block", STOCK, outcome="fast", more=", scale=None"),
    # More of them, in blocks,
    "the residual after the norm": Change("block", f"h = self.norm1(h); {STOCK.replace('self.norm1(h)', 'h')}"),
    "norms swapped": Change(
        "block", STOCK.replace("norm1", "norm0").replace("norm2", "norm1").replace("norm0", "norm2")
    ),
    "a residual without gradients": Change("block", STOCK.replace("return h +", "return h.detach() +")),
    "dropout in training": Change(
        "block",
        STOCK.replace("attn(self.norm1(h));", "nn.functional.dropout(attn(self.norm1(h)), 0.5, self.training);"),
    ),
    # attention,
    "scale": Change("attention", (("scaling=self.scaling", "scaling=self.scaling * 1.01"),)),
    "queries and keys swapped": Change(
        "attention", (("query_states, key_states, value_states = (", "key_states, query_states, value_states = ("),)
    ),
    "keys not rotated": Change("attention", (("query_states, key_states = apply", "query_states, _ = apply"),)),
    "no bias of the projection": Change(
        "attention", (("self.proj(attn_output)", "nn.functional.linear(attn_output, self.proj.weight)"),)
    ),
    "a clip attends as one": Change(
        "tower", (("seqlens(grid_thw, self.config,", "seqlens(grid_thw, self.config, True,"),)
    ),
    "a clip of three frames or more attends as one": Change(
        "tower", (("seqlens(grid_thw, self.config,", "seqlens(grid_thw, self.config, grid_thw[:, 0].max() > 2,"),)
    ),
    # MLP, norms, merger,
    "gate and up swapped": Change(
        "mlp", (("gate_proj", "other_proj"), ("up_proj", "gate_proj"), ("other_proj", "up_proj")), ("qwen2_5_vl",)
    ),
    "no bias of the MLP": Change(
        "mlp", (("self.linear_fc1(hidden_state)", "(self.linear_fc1(hidden_state) - self.linear_fc1.bias)"),), QWEN3
    ),
    "a GELU of another form": Change("mlp", (("self.act_fn(", "nn.functional.gelu("),), QWEN3),
    "an exact GELU for a quick one": Change("mlp", (("self.act(", "nn.functional.gelu("),), ("qwen2_vl",)),
    "epsilon": Change("norm", (("variance + self.variance_epsilon", "variance + 1e-5"),), ("qwen2_5_vl",)),
    "a norm without weight": Change("norm", (("self.weight * ", ""),), ("qwen2_5_vl",)),
    "a norm's weight around zero": Change("norm", (("self.weight * ", "(1 + self.weight) * "),), ("qwen2_5_vl",)),
    "the mean over rows": Change("norm", ((".mean(-1, keepdim", ".mean(0, keepdim"),), ("qwen2_5_vl",)),
    "patches merged in another order": Change(
        "merger",
        ((").view(-1, self.hidden_size)", ").view(-1, 4, self.hidden_size // 4).flip(1).flatten(1)"),),
        ("qwen2_vl", "qwen2_5_vl"),
    ),
    "another activation in the merger": Change("merger", (("self.act_fn(", "nn.functional.silu("),), QWEN3),
    # and around the layers.
    "pixels in another order": Change("patch_embed", (("self.proj(hidden_states", "self.proj(hidden_states.mT"),)),
    "height and width swapped": Change("get_vision_position_ids", (("[hpos_ids, wpos_ids]", "[wpos_ids, hpos_ids]"),)),
    "windows one larger": Change(
        "get_vision_window_index",
        (("spatial_merge_size // patch_size", "spatial_merge_size // patch_size + 1"),),
        ("qwen2_5_vl",),
    ),
    "windows in the other layers": Change("tower", (("in self.fullatt", "not in self.fullatt"),), ("qwen2_5_vl",)),
    "the order of windows kept": Change("tower", (("[reverse_indices, :]", "[:]"),), ("qwen2_5_vl",)),
    "another interpolation": Change("tower", (("=self.interpolation_align_corners", "=False"),), QWEN3),
    "positions subtracted": Change("tower", (("hidden_states + pos_embeds", "hidden_states - pos_embeds"),), QWEN3),
    "deepstack of the layer after": Change(
        "tower", (("if layer_num in", "if layer_num ^ 1 in"), (".index(layer_num)", ".index(layer_num ^ 1)")), QWEN3
    ),
    # What is read from modules, or computed by calling them, may change: nothing is to be caught.
    "epsilon of a module": Change(
        "block.__init__", (("eps=1e-6", "eps=1e-2"),), ("qwen2_vl", "qwen2_5_vl", *QWEN3), outcome="fast"
    ),
    "scale of a module": Change("attention.__init__", (("self.head_dim**-0.5", "0.2"),), outcome="fast"),
    "another rotation base": Change("rotary", (("self.inv_freq.to(", "self.inv_freq.square().to("),), outcome="fast"),
}


def cells() -> Iterator[Any]:
    """Every change in one family, in turn; in its others in the matrix."""
    for number, (name, change) in enumerate(CHANGES.items()):
        for at, family in enumerate(change.families):
            left_out = at != number % len(change.families)
            yield pytest.param(name, family, marks=[pytest.mark.matrix] * left_out)


@pytest.mark.parametrize(("name", "family"), list(cells()))
def test_what_changed_upstream_is_stock_and_what_did_not_is_fast(name: str, family: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(upstream, "_WARNED", set())
    change, tower = CHANGES[name], tower_of(TINY[family].build())
    before = run_tower(tower, GRID)
    change.make(tower, monkeypatch)
    tower = tower_of(TINY[family].build(fresh=True))
    expected = run_tower(tower, GRID)
    differs = max(map(relative_error, expected, before))
    elsewhere = name in ("a residual without gradients", "dropout in training")
    assert differs > 1e-6 or change.outcome == "fast" or elsewhere, "the change matters"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        hf_vit_accel.patch(tower)
        found = run_tower(tower, GRID)
        hf_vit_accel.patch(tower)
    [status] = hf_vit_accel.status(tower).towers
    run_tower(tower, GRID)
    if change.outcome == "fast":
        assert not caught and not status.against_fast, status
        assert_close(found, expected)
        assert state_of(tower).calls == 1
        hf_vit_accel.patch(tower, strict=True)
        return
    [warning] = caught
    assert "stays stock" in str(warning.message) and transformers.__version__ in str(warning.message)
    assert_close(found, expected, 0.0)
    assert (state_of(tower).calls, state_of(tower).stock_calls) == (0, 1)
    assert status.against_fast and status.against_fast[0] in str(warning.message)
    assert status.against_fast[0] in state_of(tower).fallbacks
    with pytest.raises(FallbackError, match="cannot be served"):
        hf_vit_accel.patch(tower, strict=True)
    hf_vit_accel.unpatch(tower)
    assert_close(run_tower(tower, GRID), expected, 0.0)


@pytest.mark.parametrize(
    ("field", "values"), [("self.attn.config.factor", (1, 2)), ("max(self.attn.config.factors)", ([1], [1, 2]))]
)
def test_a_proof_is_of_every_field_of_the_config(field: str, values: Any, monkeypatch: Any) -> None:
    """Integers and lists too: a tower is not served by the proof of another, which computes something else."""
    monkeypatch.setattr(upstream, "_WARNED", set())
    towers = [tower_of(TINY["qwen2_vl"].build()) for _ in values]
    Change("block", STOCK.replace("self.mlp", f"{field} * self.mlp")).make(towers[0], monkeypatch)
    name = field.rstrip(")").rpartition(".")[2]
    for tower, value in zip(towers, values, strict=True):
        setattr(tower.config, name, value)
    expected = [run_tower(tower, GRID) for tower in towers]
    assert relative_error(expected[1][0], expected[0][0]) > 0.01, "the change matters"
    assert_close(run_tower(hf_vit_accel.patch(towers[0], strict=True), GRID), expected[0])
    with pytest.warns(UserWarning, match="stays stock"):
        hf_vit_accel.patch(towers[1])
    assert_close(run_tower(towers[1], GRID), expected[1], 0.0)


@pytest.mark.parametrize("family", FAMILIES)
def test_code_that_changes_after_patching_is_proven_anew(family: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(upstream, "_WARNED", set())
    tower = tower_of(TINY[family].build())
    hf_vit_accel.patch(tower)
    before = run_tower(tower, GRID)
    with monkeypatch.context() as newer:
        CHANGES["norms after"].make(tower, newer)
        with pytest.warns(UserWarning, match="stays stock"):
            found = run_tower(tower, GRID)
        hf_vit_accel.unpatch(tower)
        assert_close(found, run_tower(tower, GRID), 0.0)
        hf_vit_accel.patch(tower)
    assert_close(run_tower(tower, GRID), before)
    assert state_of(tower).calls == 1, "fast again, with the code that was there"


# --- the proof ------------------------------------------------------------------------------------------------------


@pytest.fixture(params=ONE_TOWER)
def tower(request: Any, monkeypatch: Any) -> Any:
    """A tower of which nothing was proven yet."""
    monkeypatch.setattr(upstream, "_PROOFS", {})
    return tower_of(TINY[request.param].build())


def prove(tower: Any) -> upstream.Proof:
    family = family_of(tower)
    assert family is not None
    proof = upstream.prove(tower, family)
    assert (proof.fast, proof.injected) == (None, None)
    return proof


@pytest.mark.parametrize("where", ["instance", "later", "class made of it", "class"])
def test_a_method_that_the_proof_did_not_run_is_seen(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tower of a user's own class, or with a method of its own; of transformers' class, before another is patched."""
    tower = tower_of(TINY["qwen2_5_vl"].build())
    kind: Any = type(tower)
    name, before = "permute_input_for_window_attn", run_tower(tower, GRID)

    def other(self: Any, x: Any, *rest: Any, **named: Any) -> Any:
        return kind_s(self, 1.5 * x, *rest, **named)

    if not hasattr(kind, name):
        pytest.skip("this transformers has no such method")
    kind_s = getattr(kind, name)
    if where == "later":
        hf_vit_accel.patch(tower)
        run_tower(tower, GRID)
        hf_vit_accel.unpatch(tower)
    if where == "class made of it":
        tower.__class__ = type("Own", (kind,), {name: other})
    elif where == "class":
        run_tower(hf_vit_accel.patch(tower_of(TINY["qwen2_5_vl"].build())), GRID)
        monkeypatch.setattr(kind, name, other)
    else:
        setattr(tower, name, other.__get__(tower))
    expected = run_tower(tower, GRID)
    assert relative_error(expected[0], before[0]) > 0.1, "the change matters"
    hf_vit_accel.patch(tower)
    assert_close(run_tower(tower, GRID), expected)
    status = hf_vit_accel.status(tower).towers[0]
    assert (status.calls, status.stock_calls) == (0, 1)


def test_a_proof_is_made_once_per_class_and_short(tower: Any) -> None:
    twin, cuda = tower_of(TINY["qwen2_vl"].build()), torch.cuda.is_initialized()
    prove(twin if type(twin) is not type(tower) else tower_of(TINY["qwen3_vl"].build()))  # torch's own first time
    state, start = torch.random.get_rng_state(), time.process_time()
    first = prove(tower)
    assert time.process_time() - start <= 0.3, "150 ms, and as much for a busy machine"
    assert torch.equal(torch.random.get_rng_state(), state) and torch.cuda.is_initialized() == cuda
    start = time.process_time()
    assert prove(tower) is first and time.process_time() - start < 0.01


AROUND: dict[str, Callable[[], Any]] = {
    "meta": lambda: torch.device("meta"),
    "inference mode": torch.inference_mode,
    "no gradients": torch.no_grad,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "saved tensors": lambda: torch.autograd.graph.saved_tensors_hooks(lambda x: 1 / 0, lambda x: x),
}


@pytest.mark.parametrize("around", AROUND)
def test_a_proof_holds_whatever_is_around_it(tower: Any, around: str) -> None:
    with AROUND[around]():
        prove(tower)
    expected = run_tower(tower, GRID)
    with hf_vit_accel.patched(tower, strict=True):
        assert_close(run_tower(tower, GRID), expected)


def test_a_proof_holds_with_another_default_dtype(tower: Any) -> None:
    torch.set_default_dtype(torch.bfloat16)
    try:
        prove(tower)
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_proof_from_several_threads_at_once(tower: Any) -> None:
    found: list[Any] = []
    threads = [threading.Thread(target=lambda: found.append(prove(tower))) for _ in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert len(found) == 4


def _in_a_child(tower: Any, queue: Any) -> None:
    queue.put(prove(tower).fast or "proven")


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_proof_in_a_forked_child(tower: Any) -> None:
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=_in_a_child, args=(tower, queue))
    child.start()
    assert queue.get(timeout=60) == "proven"
    child.join()


def test_the_plugin_for_upstreams_suites_leaves_the_towers_of_a_proof_alone(
    tower: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Patching one would ask for that very proof, and never end."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "upstream"))
    plugin = importlib.import_module("patched")
    seen = machine.run_isolated(lambda: (plugin._call(tower, *_inputs(tower)), state_of(tower))[1])
    assert seen is None
    plugin._call(tower, *_inputs(tower))
    assert state_of(tower) is plugin.STATES.pop()


def _inputs(tower: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return pixels_for(tower, GRIDS["image"]), torch.tensor(GRIDS["image"])
