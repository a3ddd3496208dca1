"""colpali-engine's models on tiny checkpoints: pages and queries embedded, and LoRA by its own trainer."""

import shutil
from pathlib import Path
from typing import Any

import colpali_engine.models
import pytest
import torch
from colpali_engine.data import ColPaliEngineDataset
from colpali_engine.loss import BiEncoderLoss, ColbertLoss
from colpali_engine.trainer import contrastive_trainer
from colpali_engine.trainer.colmodel_training import ColModelTraining, ColModelTrainingConfig
from datasets import Dataset
from peft import LoraConfig
from support.stacks import Checkpoint, Job, Names, expect_same_and_fast, losses, pictures, recipe, short_training
from tiny import randomise
from torch import nn
from transformers import AutoConfig, AutoModelForImageTextToText, TrainingArguments

import hf_vit_accel

MODELS = {
    "ColQwen2": "qwen2_vl",
    "BiQwen2": "qwen2_vl",
    "ColQwen2_5": "qwen2_5_vl",
    "BiQwen2_5": "qwen2_5_vl",
    "ColQwen3": "qwen3_vl",
    "BiQwen3": "qwen3_vl",
    "ColQwen3_5": "qwen3_5",
    "BiQwen3_5": "qwen3_5",
}
every_model = pytest.mark.parametrize("name", MODELS)
ON_CPU = {"torch.bfloat16": "torch.float32", "cuda:0": "cpu"}


@pytest.fixture(scope="session")
def checkpoint(checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """Save a tiny Qwen3.5 with the processor of Qwen3-VL, too."""
    folder = tmp_path_factory.mktemp("qwen3_5")
    shutil.copytree(checkpoint("qwen3_vl"), folder, dirs_exist_ok=True)
    like = AutoConfig.from_pretrained(folder)
    vision = like.vision_config.to_dict() | {"model_type": "qwen3_5_vision"}
    text = {
        "vocab_size": like.text_config.vocab_size,
        "hidden_size": like.text_config.hidden_size,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "pad_token_id": like.text_config.pad_token_id,
    }
    tokens = {name: getattr(like, name) for name in vars(like) if name.endswith("_token_id") and "vision" in name}
    tokens |= {"image_token_id": like.image_token_id, "video_token_id": like.video_token_id}
    config = AutoConfig.for_model("qwen3_5", vision_config=vision, text_config=text, **tokens)
    torch.manual_seed(0)
    randomise(AutoModelForImageTextToText.from_config(config)).save_pretrained(folder)
    return lambda family: str(folder) if family == "qwen3_5" else checkpoint(family)


def load(name: str, path: str, *, patched: bool) -> nn.Module:
    """Load a model by the recipe of the page."""
    torch.manual_seed(0)  # the projection is new
    names: Names = {name: getattr(colpali_engine.models, name), "torch": torch, "name": path}
    replaced = dict(ON_CPU)
    if name in ("BiQwen2", "BiQwen2_5"):  # 0.3.18 reads a default that transformers 5.24 dropped, and fails in stock
        replaced["(name,"] = "(name, key_mapping={},"
    model = recipe("colpali").run(patched=patched, names=names, ColQwen2_5=name, **replaced)["model"]
    if hasattr(model, "custom_text_proj"):  # with a bias of zero, stock divides zero by zero at padding
        nn.init.normal_(model.custom_text_proj.bias, std=0.1, generator=torch.Generator().manual_seed(0))
    return model


def processor_of(name: str, path: str) -> Any:
    kinds = (f"{name}Processor", f"{name}_Processor")
    kind = next(getattr(colpali_engine.models, kind) for kind in kinds if hasattr(colpali_engine.models, kind))
    return kind.from_pretrained(path)


@every_model
def test_embed(name: str, checkpoint: Checkpoint) -> None:
    path = checkpoint(MODELS[name])
    processor = processor_of(name, path)
    pages = processor.process_images(pictures(4))
    write = getattr(processor, "process_queries", None) or processor.process_texts
    queries = write(["describe this picture", "a small red circle"])
    runs = []
    for patched in (False, True):
        model = load(name, path, patched=patched)
        with torch.no_grad():
            embeddings = model(**pages), model(**queries)
        scores = processor.score(list(torch.unbind(embeddings[1])), list(torch.unbind(embeddings[0])))
        runs.append(torch.cat([*(part.flatten() for part in embeddings), scores.flatten()]))
    Job("colpali_engine", "ColQwen and BiQwen, embed", "colpali").expect(name, *runs, model)


@every_model
def test_embed_with_text(name: str, checkpoint: Checkpoint) -> None:
    """What the comment of the recipe says. Layers of linear attention, as Qwen3.5 has them, stay stock's."""
    path = checkpoint(MODELS[name])
    pages = processor_of(name, path).process_images(pictures(4))
    stock = load(name, path, patched=False)
    model = load(name, path, patched=True)
    hf_vit_accel.patch(model, text=True)
    with torch.no_grad():
        expect_same_and_fast(stock(**pages), model(**pages), model)
    is_served = MODELS[name] != "qwen3_5"
    assert f"text: {int(is_served)} call{'s' * (not is_served)} without padding" in str(hf_vit_accel.status(model))


@pytest.mark.parametrize("name", [name for name in MODELS if name.startswith("Col")])
def test_train(name: str, checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = checkpoint(MODELS[name])
    rows = [{"query": f"picture {index}", "image": picture} for index, picture in enumerate(pictures(8))]
    text = r"(.*(language_model).*(down|gate|up|k|q|v|o)_proj.*$|.*(custom_text_proj).*$)"  # as its scripts
    trainers = []
    train = contrastive_trainer.ContrastiveTrainer.train
    monkeypatch.setattr(
        contrastive_trainer.ContrastiveTrainer, "train", lambda self, **options: trainers.append(self) or train(self)
    )
    for patched in (False, True):
        options = dict(per_device_train_batch_size=2, max_steps=3, remove_unused_columns=False)
        args = TrainingArguments(**short_training(tmp_path, **options))
        config = ColModelTrainingConfig(
            model=load(name, path, patched=patched),
            processor=processor_of(name, path),
            tr_args=args,
            output_dir=str(tmp_path),
            train_dataset=ColPaliEngineDataset(Dataset.from_list(rows), pos_target_column_name="image"),
            eval_dataset=None,
            run_eval=False,
            loss_func=ColbertLoss() if name.startswith("Col") else BiEncoderLoss(),
            peft_config=LoraConfig(r=4, target_modules=text),
        )
        torch.manual_seed(0)
        ColModelTraining(config).train()
    logs = [losses(trainer.state.log_history) for trainer in trainers]
    Job("colpali_engine", "ColQwen, train with LoRA", "colpali").expect(name, *logs, trainers[-1].model, bound=2e-3)
