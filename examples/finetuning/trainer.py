"""Go on from a checkpoint with the weights that it holds."""

from __future__ import annotations

from pathlib import Path

from torch import nn
from transformers import Trainer

__all__ = ["ResumedTrainer", "holds_model"]


def holds_model(checkpoint: str) -> bool:
    """Return whether a checkpoint of the trainer holds a whole model, as opposed to adapters or a process's part."""
    return any(Path(checkpoint).glob("model*.safetensors"))


class ResumedTrainer(Trainer):
    """A trainer whose model was loaded from its checkpoint by `from_pretrained`, where that holds a whole model.

    Checkpoints name weights as those on the Hub do. Trainer looks for the names of the model's modules, and keeps a
    weight that it does not find. With Qwen2-VL and Qwen2.5-VL it finds none, so training would begin anew.
    """

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        if not holds_model(resume_from_checkpoint):
            super()._load_from_checkpoint(resume_from_checkpoint, model)
