"""Choose the families and cases of a test: a few in every run, all of them in the matrix."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny import FAMILIES, TINY, Tiny, tower_of

from hf_vit_accel.families import family_of
from hf_vit_accel.tower import trials
from hf_vit_accel.tower.proof import prove


def alike(case: Any, *similar_cases: Any) -> list[Any]:
    """Return one case for every run, and the similar cases for the matrix alone, since they show no more."""
    cases = [case]
    for similar in similar_cases:
        values = similar if isinstance(similar, tuple) else (similar,)
        cases.append(pytest.param(*values, marks=pytest.mark.matrix))
    return cases


TOWERS = [
    pytest.param("qwen2_vl", marks=[pytest.mark.matrix] * (not torch.cuda.is_available())),
    *(name for name in FAMILIES if name != "qwen2_vl"),
]
"""Families for tests of how a call runs. On a CPU, Qwen2-VL's tower runs in the matrix alone.

That tower has no part that the others lack: no windows, no table of positions, no deepstack. `test_tower.py`,
`test_ops.py` and `test_families.py` compare its results, and so its activation, with stock in every run.
"""


NARROW = replace(TINY["qwen3_vl"], vision=TINY["qwen3_vl"].vision | dict(hidden_size=32, intermediate_size=32))
"""A quick model for tests of many calls, where no width matters."""

SHALLOW = replace(NARROW, vision=NARROW.vision | dict(depth=2, deepstack_visual_indexes=[0]))
"""A still quicker model: most tests of graphs make many calls, and which are replayed depends on no width or depth."""


def two_layers(family: str) -> Tiny:
    """Describe a model whose tower has two layers, of both kinds if the family has two; for tests of several ranks."""
    vision = TINY[family].vision | {"depth": 2}
    for name, layers in {"fullatt_block_indexes": [1], "deepstack_visual_indexes": [0]}.items():
        if name in vision:
            vision[name] = layers
    return replace(TINY[family], vision=vision)


ONE_TOWER = list(TOWERS) if torch.cuda.is_available() else alike("qwen2_5_vl", "qwen3_vl", "qwen2_vl")
"""Families for tests of what the library stores, counts or refuses between calls, which depends on no tower's parts.

`test_families.py` shows that calls are right in every tower: eager, replayed, in passes and with replaced modules.
"""
both_towers = pytest.mark.parametrize("model", TOWERS, indirect=True)
"""Build the fixture `model` of every family of `TOWERS`."""


@pytest.fixture(params=ONE_TOWER)
def model(request: Any) -> Any:
    """Build a tiny model of a family: of `ONE_TOWER`, or of the test's own parameters."""
    return TINY[request.param].build()


@pytest.fixture
def tower(model: Any) -> Any:
    return tower_of(model)


@pytest.fixture
def quick_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prove copies by few and small inputs, for tests of what comes before and after a proof."""
    names = ("small images", "one image", "two images")
    few = {name: trials.CONDITIONS[name] for name in names}
    monkeypatch.setattr(trials, "CONDITIONS", few | {"large images": few["small images"]})


def skip_without_metadata(tower: Any) -> None:
    """Skip a test where this transformers' tower takes no offsets from its caller."""
    if "cu_seqlens" not in prove(tower, family_of(tower)).taken:
        pytest.skip("this transformers takes no metadata")
