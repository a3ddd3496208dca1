"""Compute the loss and the accuracy of a training step."""

from __future__ import annotations

import torch
from transformers import EvalPrediction
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.modeling_outputs import ModelOutput

from finetuning.data import IGNORED

__all__ = ["accuracy", "most_likely", "token_loss"]


def token_loss(
    outputs: ModelOutput, labels: torch.Tensor, num_items_in_batch: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the mean loss over all tokens of a step.

    The models' own loss is a mean over a batch, which gives tokens of short answers more weight.
    """
    logits = outputs.logits
    return ForCausalLMLoss(logits, labels, vocab_size=logits.shape[-1], num_items_in_batch=num_items_in_batch)


def most_likely(logits: torch.Tensor | tuple[torch.Tensor, ...], labels: torch.Tensor) -> torch.Tensor:
    """Return the most likely tokens: the logits of all examples would not fit into the memory."""
    best: torch.Tensor = (logits[0] if isinstance(logits, tuple) else logits).argmax(-1)
    return best


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    """Return the share of the tokens with a label that were predicted."""
    labels = prediction.label_ids[:, 1:]
    is_right = (prediction.predictions[:, :-1] == labels) & (labels != IGNORED)
    return {"accuracy": float(is_right.sum() / (labels != IGNORED).sum())}
