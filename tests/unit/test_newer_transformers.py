"""Test towers of a newer transformers: what computes something else stays stock, the rest is fast.

A newer transformers is transformers' own source with a few words changed, compiled as if it were in its files.
"""

import inspect
import re
import sys
import textwrap
import tomllib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
import transformers
from support.towers import both_towers
from tiny import FAMILIES, GRIDS, TINY, assert_close, relative_error, run_tower, tower_of
from torch import nn

import hf_vit_accel
from hf_vit_accel import FallbackError, versions
from hf_vit_accel.tower.state import state_of

GRID = GRIDS["mixed"]
QWEN3 = ("qwen3_vl", "qwen3_vl_moe")


Function = Callable[..., object]
Edits = tuple[tuple[str, str], ...]
"""Pairs of words in a source: the present ones, and those that replace them."""


pytestmark = pytest.mark.usefixtures("nothing_said")


def compiled(source: str, home: ModuleType, original: Function) -> Function:
    """Compile a function as if it stood in the place of another in a module of transformers."""
    path = Path(transformers.__file__).parent / "models" / "newer.py"
    scope: dict[str, Function] = {}
    exec(compile(textwrap.dedent(source), str(path), "exec"), vars(home), scope)
    [function] = scope.values()
    function.__module__ = home.__name__
    function.__qualname__ = original.__qualname__
    return function


def edited(function: Function, edits: Edits) -> Function:
    """Return a function of transformers with words of its source changed; skip the test if it lacks them."""
    plain = inspect.unwrap(function)
    source = textwrap.dedent(inspect.getsource(function)).replace("@auto_docstring\n", "")
    source = source.replace("super().__init__", "super(type(self), self).__init__")
    for old, new in edits:
        if old not in source:
            pytest.skip(f"this transformers has no {old!r} in {plain.__qualname__}")
        source = source.replace(old, new)
    return compiled(source, sys.modules[plain.__module__], plain)


BLOCK = """
    def forward(self, hidden_states, cu_seqlens, position_embeddings=None{arguments}, **kwargs):
        def attn(x):
            return self.attn(x, cu_seqlens=cu_seqlens, position_embeddings=position_embeddings, **kwargs)
        h = hidden_states
        {body}
"""
STOCK = "h = h + attn(self.norm1(h)); return h + self.mlp(self.norm2(h))"


@dataclass(frozen=True)
class Change:
    """A change that a newer transformers might make: in a part's forward, or "part.method".

    Towers stay fast (`is_fast`) if they compute the same, or if we read or call the changed part.
    """

    role: str
    edits: Edits | str
    families: tuple[str, ...] = FAMILIES
    is_fast: bool = False
    arguments: str = ""

    def make(self, tower: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
        role, _, method = self.role.partition(".")
        home = sys.modules[type(tower).forward.__module__]
        block = tower.blocks[0]
        parts = {
            "tower": tower,
            "block": block,
            "attention": block.attn,
            "mlp": block.mlp,
            "norm": block.norm1,
            "rotary": tower.rotary_pos_emb,
        }
        owner = type(parts[role])
        name = method or "forward"
        function = getattr(owner, name)
        if isinstance(self.edits, str):
            changed = compiled(BLOCK.format(body=self.edits, arguments=self.arguments), home, function)
        else:
            changed = edited(function, self.edits)
        monkeypatch.setattr(owner, name, changed)


CHANGES = {
    # Blocks.
    "half an MLP": Change("block", STOCK.replace("self.mlp", "0.5 * self.mlp")),
    "a clone": Change("block", STOCK.replace("h = h +", "residual = h.clone(); h = residual +"), is_fast=True),
    "an optional argument": Change("block", STOCK, is_fast=True, arguments=", scale=None"),
    "a residual without gradients": Change("block", STOCK.replace("return h +", "return h.detach() +")),
    "dropout in training": Change(
        "block",
        STOCK.replace("attn(self.norm1(h));", "nn.functional.dropout(attn(self.norm1(h)), 0.5, self.training);"),
    ),
    "a factor for one image": Change(
        "block", f"h = h * (1 + 0.1 * (len(cu_seqlens) == 2)); {STOCK}", ("qwen2_vl", *QWEN3)
    ),
    # Attention.
    "scale": Change("attention", (("scaling=self.scaling", "scaling=self.scaling * 1.01"),)),
    "a clip attends as one": Change(
        "tower", (("seqlens(grid_thw, self.config,", "seqlens(grid_thw, self.config, True,"),)
    ),
    "a clip of three frames or more attends as one": Change(
        "tower", (("seqlens(grid_thw, self.config,", "seqlens(grid_thw, self.config, grid_thw[:, 0].max() > 2,"),)
    ),
    # MLP, norms, merger.
    "a GELU of another form": Change("mlp", (("self.act_fn(", "nn.functional.gelu("),), QWEN3),
    "epsilon": Change("norm", (("variance + self.variance_epsilon", "variance + 1e-5"),), ("qwen2_5_vl",)),
    # Around the layers.
    "the order of windows kept": Change("tower", (("[reverse_indices, :]", "[:]"),), ("qwen2_5_vl",)),
    # We read or call these modules, so a change reaches us.
    "epsilon of a module": Change(
        "block.__init__", (("eps=1e-6", "eps=1e-2"),), ("qwen2_vl", "qwen2_5_vl", *QWEN3), is_fast=True
    ),
    "scale of a module": Change("attention.__init__", (("self.head_dim**-0.5", "0.2"),), is_fast=True),
    "another rotation base": Change("rotary", (("self.inv_freq.to(", "self.inv_freq.square().to("),), is_fast=True),
}


CHANGES_WITHOUT_EFFECT = ("a residual without gradients", "dropout in training", "a factor for one image")
"""Changes without an effect on inference of several images."""


def cells() -> Iterator[object]:
    """Return every change with one of its families, in turn. Its other families are tested in the matrix."""
    for number, (name, change) in enumerate(CHANGES.items()):
        for index, family in enumerate(change.families):
            is_in_turn = index == number % len(change.families)
            yield pytest.param(name, family, marks=[pytest.mark.matrix] * (not is_in_turn))


@pytest.mark.parametrize(("name", "family"), list(cells()))
def test_a_change_that_matters_keeps_towers_stock(name: str, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    change = CHANGES[name]
    tower = tower_of(TINY[family].build())
    before = run_tower(tower, GRID)
    change.make(tower, monkeypatch)
    tower = tower_of(TINY[family].build(fresh=True))
    expected = run_tower(tower, GRID)
    if not change.is_fast and name not in CHANGES_WITHOUT_EFFECT:
        assert max(relative_error(one, other) for one, other in zip(expected, before, strict=True)) > 1e-6
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        hf_vit_accel.patch(tower)
        outputs = run_tower(tower, GRID)
        hf_vit_accel.patch(tower)
    messages = [str(warning.message) for warning in caught]
    [status] = hf_vit_accel.status(tower).towers
    run_tower(tower, GRID)
    if change.is_fast:
        assert not messages and not status.against_fast, status
        assert_close(outputs, expected)
        assert state_of(tower).fast_calls == 1
        hf_vit_accel.patch(tower, strict=True)
        return
    # Before transformers 5.15 the tower computed the weights of the interpolation in another order than we do.
    assert_close(outputs, expected, 0.0 if hasattr(tower, "interpolation_mode") or family not in QWEN3 else 1e-6)
    [message] = messages
    assert "stays stock" in message and transformers.__version__ in message and status.against_fast[0] in message
    assert (state_of(tower).fast_calls, state_of(tower).stock_calls) == (0, 1)
    assert status.against_fast[0] in state_of(tower).fallbacks
    with pytest.raises(FallbackError, match="cannot be served"):
        hf_vit_accel.patch(tower, strict=True)
    hf_vit_accel.unpatch(tower)
    assert_close(run_tower(tower, GRID), expected, 0.0)


@pytest.mark.parametrize(
    ("field", "values"), [("self.attn.config.factor", (1, 2)), ("max(self.attn.config.factors)", ([1], [1, 2]))]
)
def test_a_proof_holds_for_equal_configs_only(
    field: str, values: tuple[object, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cover integers and lists, by which two towers of a class may compute different things."""
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


# --- versions ---------------------------------------------------------------------------------------------------------

ROOT = Path(__file__).resolve().parents[2]
TESTED = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hf-vit-accel"]["tested"]


def numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])


def test_the_newest_tested_versions_are_those_of_the_project() -> None:
    assert versions.NEWEST_TESTED["transformers"] == max(
        numbers(version) for version in TESTED["transformers"] + TESTED["towers"]
    )
    assert versions.NEWEST_TESTED["torch"] == max(numbers(version) for version in TESTED["torch"])


def test_one_file_names_versions_of_transformers() -> None:
    package = Path(hf_vit_accel.__file__).parent
    named = re.compile(r"(transformers|before|since|until|from|up to|in) (4\.57|5\.\d)", re.IGNORECASE)
    files = {path.name for path in package.rglob("*.py") if named.search(path.read_text())}
    assert files == {"versions.py"}


@pytest.mark.parametrize(("version", "is_newer"), [("5.24.9", False), ("5.25.0.dev0", True), ("6.0.0", True)])
def test_a_newer_version_is_reported_without_a_warning(
    version: str, is_newer: bool, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    monkeypatch.setattr(versions, "transformers", SimpleNamespace(__version__=version))
    tower = tower_of(TINY["qwen2_vl"].build())
    hf_vit_accel.patch(tower)
    run_tower(tower, GRIDS["image"])
    status = hf_vit_accel.status(tower)
    assert any(f"transformers {version} is newer" in line for line in status.untested) == is_newer
    assert (f"transformers {version}" in str(status)) == is_newer
    assert state_of(tower).fast_calls == 1 and not [str(warning.message) for warning in recwarn]


@pytest.mark.usefixtures("nothing_proven")
@both_towers
def test_another_dtype_under_autocast_alone_keeps_such_calls_stock(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tower whose last rows stay fp32 under autocast: proofs in one dtype cannot see it."""
    tower = tower_of(model)
    output_of = type(tower.merger).forward

    def forward(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        merged = output_of(self, x)
        return merged.float() if torch.is_autocast_enabled("cpu") else merged

    monkeypatch.setattr(type(tower.merger), "forward", forward)
    monkeypatch.setattr("hf_vit_accel.ops.base.machine.is_upstream", lambda function: True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = run_tower(tower, GRIDS["image"])
        hf_vit_accel.patch(tower)
        actual = run_tower(tower, GRIDS["image"])
    assert [x.dtype for x in actual] == [x.dtype for x in expected]
    assert state_of(tower).stock_calls == 1 and any("under autocast" in why for why in state_of(tower).fallbacks)
    run_tower(tower, GRIDS["image"])
    assert state_of(tower).fast_calls == 1
