"""Save a tiny model, and load it by any name of attention."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from tiny import GRIDS, TINY, run_tower, tower_of
from transformers import AutoModelForImageTextToText, PreTrainedModel

from support.towers import alike


@dataclass(frozen=True)
class Saved:
    """A stock model of one family, and the folder where it is saved."""

    path: Path
    model: PreTrainedModel

    def load(self, **options: object) -> PreTrainedModel:
        """Load the model with options of `from_pretrained`."""
        return AutoModelForImageTextToText.from_pretrained(self.path, **options)

    def outputs(self, grid: str = "mixed") -> list[torch.Tensor]:
        return run_tower(tower_of(self.model), GRIDS[grid])


@pytest.fixture(scope="module", params=alike("qwen2_5_vl", "qwen3_vl_moe", "qwen2_vl", "qwen3_vl"))
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """Save a tiny model of a family to a folder."""
    model = TINY[request.param].build()
    path = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(path)
    return Saved(path, model)
