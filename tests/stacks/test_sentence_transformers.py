"""sentence-transformers on tiny captioners: pictures, texts and both embedded, hidden states, and training."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.base.modules import Transformer
from sentence_transformers.sentence_transformer import losses
from sentence_transformers.sentence_transformer.modules import Pooling
from support.stacks import (
    QUESTION,
    Checkpoint,
    Job,
    every_family,
    expect_same_and_fast,
    pictures,
    recipe,
    short_training,
)
from support.stacks import losses as logged

import hf_vit_accel

Dataset = pytest.importorskip("datasets").Dataset  # its trainer needs it, the package itself does not
FEW: list[Image.Image] = pictures(4)
INPUTS: dict[str, list[Any]] = {
    "pictures": FEW,
    "pictures and texts": [{"text": QUESTION, "image": picture} for picture in FEW],
    "some with a picture": ["a small red circle", FEW[0], {"text": QUESTION, "image": FEW[1]}],
}


def run(path: str, inputs: list[Any], *, patched: bool, make: Callable[[str], SentenceTransformer]) -> Any:
    """Run a side of the page's recipe; return the model and the embeddings."""
    names = {"SentenceTransformer": make, "name": path, "inputs": inputs}
    names = recipe("sentence_transformers").run(patched=patched, names=names)
    return names["model"], torch.as_tensor(names["embeddings"])


@every_family
@pytest.mark.parametrize("kind", INPUTS)
def test_encode(family: str, kind: str, checkpoint: Checkpoint) -> None:
    path = checkpoint(family)
    _, stock = run(path, INPUTS[kind], patched=False, make=SentenceTransformer)
    model, patched = run(path, INPUTS[kind], patched=True, make=SentenceTransformer)
    Job("sentence_transformers", f"encode, {kind}", "sentence_transformers").expect(family, stock, patched, model)


@every_family
@pytest.mark.parametrize("kind", INPUTS)
def test_encode_with_text(family: str, kind: str, checkpoint: Checkpoint) -> None:
    """What the comment of the recipe says."""
    path = checkpoint(family)
    _, stock = run(path, INPUTS[kind], patched=False, make=SentenceTransformer)
    model = hf_vit_accel.patch(SentenceTransformer(path), text=True)
    expect_same_and_fast(stock, torch.as_tensor(model.encode(INPUTS[kind])), model)
    assert "text: 1 call without padding" in str(hf_vit_accel.status(model))


@every_family
def test_hidden_states(family: str, checkpoint: Checkpoint) -> None:
    """A config may name the hidden state of a layer as its output."""

    def make(path: str) -> SentenceTransformer:
        usual = Transformer(path)
        config = {
            modality: entry | {"method": "forward", "method_output_name": ("hidden_states", -2)}
            for modality, entry in usual.modality_config.items()
        }
        transformer = Transformer(path, modality_config=config, module_output_name="token_embeddings")
        return SentenceTransformer(modules=[transformer, Pooling(transformer.get_embedding_dimension(), "mean")])

    _, stock = run(checkpoint(family), FEW, patched=False, make=make)
    model, patched = run(checkpoint(family), FEW, patched=True, make=make)
    job = Job("sentence_transformers", "encode, hidden states of a layer", "sentence_transformers")
    job.expect(family, stock, patched, model)


@every_family
def test_train(family: str, checkpoint: Checkpoint, tmp_path: Path) -> None:
    data = Dataset.from_list([{"anchor": "a small red circle", "positive": picture} for picture in pictures(8)])
    runs = []
    for patched in (False, True):
        model, _ = run(checkpoint(family), FEW, patched=patched, make=SentenceTransformer)
        settings = short_training(tmp_path, per_device_train_batch_size=4, max_steps=3, learning_rate=1e-4)
        args = SentenceTransformerTrainingArguments(**settings)
        loss = losses.MultipleNegativesRankingLoss(model)
        torch.manual_seed(0)
        trainer = SentenceTransformerTrainer(model=model, args=args, train_dataset=data, loss=loss)
        trainer.train()
        runs.append(logged(trainer.state.log_history))
    job = Job("sentence_transformers", "train, all weights", "sentence_transformers")
    job.expect(family, *runs, model, bound=1e-3)
