"""Leave out the files of frameworks that are not installed, and share tiny checkpoints."""

import importlib.util
import os
from pathlib import Path

import pytest
from support.stacks import REQUIREMENTS, Checkpoint, save_captioner
from torch import nn

import hf_vit_accel

os.environ["DO_NOT_TRACK"] = "1"  # axolotl sends what it does from its import on

collect_ignore = [f"test_{name}.py" for name in REQUIREMENTS if importlib.util.find_spec(name) is None]
"""`make test` does without the frameworks. A program has the name of the module that it imports."""


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """Return the path of a tiny captioner in fp32 with its processor."""
    paths: dict[str, str] = {}

    def path_of(family: str) -> str:
        if family not in paths:
            paths[family] = save_captioner(family, tmp_path_factory.mktemp(family))
        return paths[family]

    return path_of


@pytest.fixture
def patched_models(monkeypatch: pytest.MonkeyPatch) -> list[nn.Module]:
    """Collect the models that a recipe patches inside a framework, which returns none of them."""
    models: list[nn.Module] = []
    patch = hf_vit_accel.patch

    def remember(model: nn.Module, **options: object) -> nn.Module:
        models.append(model)
        return patch(model, **options)

    monkeypatch.setattr(hf_vit_accel, "patch", remember)
    return models


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work where frameworks may write."""
    monkeypatch.chdir(tmp_path)
