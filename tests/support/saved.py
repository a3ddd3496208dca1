"""Save a tiny model, and load it by any name of attention."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from tiny import GRIDS, run_tower, tower_of
from transformers import AutoModelForImageTextToText, PreTrainedModel


@dataclass(frozen=True)
class Saved:
    """A stock model of one family, and the folder where it is saved."""

    path: Path
    model: PreTrainedModel

    def load(self, **options: object) -> PreTrainedModel:
        """Load the model with options of `from_pretrained`."""
        return AutoModelForImageTextToText.from_pretrained(self.path, **options)

    def outputs(self, grid: str = "mixed") -> list[torch.Tensor]:
        """Return the outputs of the stock tower."""
        return run_tower(tower_of(self.model), GRIDS[grid])


def save(model: PreTrainedModel, path: Path) -> Saved:
    """Save a model to a folder."""
    model.save_pretrained(path)
    return Saved(path, model)
