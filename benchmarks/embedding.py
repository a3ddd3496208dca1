"""Time forwards that embed pictures: without gradients, without a cache, and with the hidden states of the text model.

python benchmarks/embedding.py [--json FILE] [--models qwen2.5-vl-7b,qwen3-vl-8b]     needs a GPU with 60 GB free

Complete models with random weights in real shapes, in bf16: stock, stock with FlashAttention-3 in the tower,
`patch(model)` and `patch(model, text=True)`, in turns. Before, hidden states of two rows are compared with fp32, beside
stock's own error. Each way is warmed up anew.
"""

from collections.abc import Callable
from copy import deepcopy
from functools import partial

import torch
from baselines import reasons_against_attention, set_attention
from measuring import DEVICE, ERROR_BAR, Row, measure_models, spread, time_set_ups
from torch import Tensor, nn
from transformers import PreTrainedModel
from whole_call import FLASH, TEXT, build, inputs_for

from hf_vit_accel import patch, status, unpatch
from hf_vit_accel.tools.bench import largest_error

Inputs = dict[str, Tensor]
BATCHES = {
    "32 x 34x46": [(1, 34, 46)] * 32,
    "32 of four sizes": [(1, 34, 46), (1, 46, 34), (1, 24, 32), (1, 12, 16)] * 8,
}
"""Name -> the grid of the picture in every row. Rows of small pictures are padded on the left."""
WAYS = {"stock": None, FLASH: None, "patch(model)": {}, "text=True": {"text": True}}
"""Name -> the options of `patch`; None for no patch. FlashAttention-3 attends in stock's tower."""
CALLS = 5
"""Timed calls of each way in a round."""


def batch_of(model: PreTrainedModel, grids: list[tuple[int, int, int]]) -> Inputs:
    """Draw a row for every picture, padded on the left to the longest."""
    rows = [inputs_for(model, [grid]) for grid in grids]
    longest = max(row["input_ids"].shape[1] for row in rows)
    for row in rows:
        missing = longest - row["input_ids"].shape[1]
        for name in ("input_ids", "attention_mask", "mm_token_type_ids"):
            row[name] = nn.functional.pad(row[name], (missing, 0))
    return {name: torch.cat([row[name] for row in rows]) for name in rows[0]}


def embed(model: PreTrainedModel, inputs: Inputs) -> Tensor:
    """Return the last hidden states, as a retrieval model takes them from the model without its head."""
    with torch.inference_mode():
        hidden: Tensor = model.model(**inputs, use_cache=False).last_hidden_state
    return hidden


def ways_of(model: PreTrainedModel) -> list[str]:
    """Return the ways that run here: FlashAttention-3 may be missing."""
    return [way for way in WAYS if way != FLASH or not reasons_against_attention(FLASH, model.model.visual)]


def set_up(model: PreTrainedModel, inputs: Inputs, way: str) -> Callable[[], Tensor]:
    """Prepare the model for one way, and return its call."""
    unpatch(model)
    set_attention(model.model.visual, FLASH if way == FLASH else "sdpa")
    options = WAYS[way]
    if options is not None:
        patch(model, **options)
    return partial(embed, model, inputs)


def verify(model: PreTrainedModel) -> dict[str, float]:
    """Return the errors of two padded rows in every way; AssertionError if ours are less exact than stock's."""
    inputs = batch_of(model, [(1, 34, 46), (1, 12, 16)])
    is_token = inputs["attention_mask"] != 0
    exact_model = deepcopy(model).float()
    exact = embed(exact_model, inputs | {"pixel_values": inputs["pixel_values"].float()})[is_token]
    del exact_model
    errors = {}
    for way in ways_of(model):
        call = set_up(model, inputs, way)
        errors[way] = largest_error([call()[is_token]], [exact])
    assert max(errors.values()) <= ERROR_BAR * errors["stock"], errors
    return errors


def time_model(name: str, rounds: int) -> list[Row]:
    """Verify and time one model with all batches."""
    model = build(name, device=DEVICE).requires_grad_(False)
    errors = verify(model)
    print(name, "errors:", errors, flush=True)
    rows = []
    for size, grids in BATCHES.items():
        inputs = batch_of(model, grids)

        def report(way: str) -> None:
            if way == "text=True":
                print(status(model).text, flush=True)

        times = time_set_ups(ways_of(model), partial(set_up, model, inputs), rounds, CALLS, after=report)
        for way, of_way in times.items():
            row = {"model": name, "size": size, "patches": len(inputs["pixel_values"])}
            rows.append(row | {"contender": way, "error": errors[way]} | spread(of_way))
            print(rows[-1], flush=True)
    return rows


if __name__ == "__main__":
    measure_models(__doc__, ",".join(TEXT), time_model)
