"""lmms-eval's wrappers of tiny captioners: answers to pictures, as its evaluator asks for them."""

from typing import Any

import pytest
import torch
from lmms_eval.api.instance import Instance
from lmms_eval.models.simple.qwen2_5_vl import Qwen2_5_VL
from lmms_eval.models.simple.qwen3_vl import Qwen3_VL
from support.stacks import QUESTION, Checkpoint, Job, pictures, recipe

WRAPPERS = {"qwen2_5_vl": Qwen2_5_VL, "qwen3_vl": Qwen3_VL}


def answers(lm: Any) -> list[str]:
    """Ask for captions, as the evaluator does."""
    drawn = pictures(4)
    lm.task_dict["captions"] = {"test": [{"image": picture} for picture in drawn]}
    settings = {"max_new_tokens": 12, "temperature": 0, "until": ["###"]}
    requests = [
        Instance(
            request_type="generate_until",
            arguments=(QUESTION, settings, lambda doc: [doc["image"]], index, "captions", "test"),
            idx=0,
            metadata={"task": "captions", "doc_id": index, "repeats": 1},
        )
        for index in range(len(drawn))
    ]
    return lm.generate_until(requests)


@pytest.mark.parametrize("family", WRAPPERS)
@pytest.mark.parametrize("batch", [1, 2])
def test_generate_until(family: str, batch: int, checkpoint: Checkpoint) -> None:
    runs = []
    for patched in (False, True):
        names = {
            "Qwen2_5_VL": lambda pretrained: WRAPPERS[family](
                pretrained, device="cpu", device_map="cpu", batch_size=batch, max_pixels=50176, min_pixels=3136
            ),
            "name": checkpoint(family),
            "simple_evaluate": lambda model, tasks: answers(model),
        }
        names = recipe("lmms_eval").run(patched=patched, names=names)
        letters = [float(ord(letter)) for letter in "\n".join(names["results"])]
        runs.append(torch.tensor(letters))
    job = Job("lmms_eval", f"generate_until, batches of {batch}", "lmms_eval")
    job.expect(family, *runs, names["lm"].model)
