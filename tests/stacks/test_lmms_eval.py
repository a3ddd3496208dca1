"""lmms-eval on tiny captioners: its evaluator asks its wrappers about pictures, a task of this file."""

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from lmms_eval.api.task import ConfigurableTask
from lmms_eval.evaluator import simple_evaluate
from lmms_eval.models.simple.qwen2_5_vl import Qwen2_5_VL
from lmms_eval.models.simple.qwen3_vl import Qwen3_VL
from support.stacks import ANSWER, QUESTION, Checkpoint, Job, calls_of, pictures, recipe
from torch import nn

WRAPPERS = {"qwen2_5_vl": Qwen2_5_VL, "qwen3_vl": Qwen3_VL}


def captions(folder: Path) -> ConfigurableTask:
    """Return a task that asks about four pictures."""
    file = folder / "captions.parquet"
    Dataset.from_list([{"picture": picture, "caption": ANSWER} for picture in pictures(4)]).to_parquet(file)
    config = {
        "task": "captions",
        "dataset_path": "parquet",
        "dataset_kwargs": {"data_files": {"test": str(file)}, "cache_dir": str(folder)},
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_visual": lambda doc: [doc["picture"]],
        "doc_to_text": lambda doc: QUESTION,
        "doc_to_target": "caption",
        "generation_kwargs": {"max_new_tokens": 12, "temperature": 0, "until": ["###"]},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    }
    return ConfigurableTask(config=config)


def run(family: str, path: str, batch: int, folder: Path, *, patched: bool, fp32: bool) -> list[str]:
    """Run a side of the recipe with a task of ours; return the answers. The evaluator deletes `lm.model` at its end."""

    def make(pretrained: str) -> Any:
        lm = WRAPPERS[family](
            pretrained, device="cpu", device_map="cpu", batch_size=batch, max_pixels=50176, min_pixels=3136
        )
        if fp32:
            lm.model.float()
        return lm

    names = {"Qwen2_5_VL": make, "name": path, "simple_evaluate": simple_evaluate, "captions": captions(folder)}
    names = recipe("lmms_eval").run(patched=patched, names=names, **{'"mmmu_val"': "captions"})
    samples = names["results"]["samples"]["captions"]
    return [sample["filtered_resps"][0] for sample in samples]


@pytest.mark.parametrize("family", WRAPPERS)
@pytest.mark.parametrize("batch", [1, 2])
def test_simple_evaluate(
    family: str, batch: int, checkpoint: Checkpoint, tmp_path: Path, patched_models: list[nn.Module]
) -> None:
    """In fp32: in the wrappers' bf16 two words may have equal logits, and which is taken depends on the processor."""
    runs = []
    for patched in (False, True):
        answers = run(family, checkpoint(family), batch, tmp_path, patched=patched, fp32=True)
        runs.append(torch.tensor([float(ord(letter)) for letter in "\n".join(answers)]))
    job = Job("lmms_eval", f"simple_evaluate, batches of {batch}", "lmms_eval")
    job.expect(family, *runs, *patched_models)


@pytest.mark.parametrize("family", WRAPPERS)
def test_the_wrapper_s_own_dtype(
    family: str, checkpoint: Checkpoint, tmp_path: Path, patched_models: list[nn.Module]
) -> None:
    assert all(run(family, checkpoint(family), 1, tmp_path, patched=True, fp32=False))
    (model,) = patched_models
    assert next(model.parameters()).dtype == torch.bfloat16
    assert calls_of(model) == (4, 0, [])
