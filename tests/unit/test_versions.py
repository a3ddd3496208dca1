"""Test what differs between versions of transformers, on stand-ins for code of other versions."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support.towers import both_towers
from tiny import GRIDS, TINY, run_tower, tower_of
from torch import nn

import hf_vit_accel
from hf_vit_accel import versions
from hf_vit_accel.tower.state import state_of

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
