"""Time Liger's kernels beside ours, and both together: a LoRA step and the first token about one 1024² picture.

    python benchmarks/liger.py --json build/liger.json      needs a CUDA device with 60 GB and liger-kernel

Towers have their full size. Language models have eight layers instead of 28 and 36: the tower's share of a call is
larger, and two models fit. Weights and pictures are random. Adapters are on all Linears of tower and language model.
Liger is applied to a loaded model, as `use_liger_kernel` of TRL, LLaMA-Factory and ms-swift does. The four contenders
take turns in one process. `result` is the loss of a step, or the largest logit of the first token. `--side` are the
patches along one side of the picture, `--layers` those of the language model.
"""

from __future__ import annotations

import copy
import json
import statistics
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from measuring import DEVICE, Row, measure_models, time_set_ups
from peft import LoraConfig, get_peft_model
from torch import nn
from whole_call import TEXT, build, inputs_for

import hf_vit_accel

CONTENDERS = {"stock": (False, False), "Liger": (True, False), "ours": (False, True), "both": (True, True)}
"""Whether Liger is applied, and whether the model is patched."""
LINEARS = r".*\.(qkv|proj|linear_fc1|linear_fc2|q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)"
ADAPTED = rf"(model\.language_model|model\.visual\.blocks){LINEARS}"
Inputs = dict[str, torch.Tensor]


class Pair:
    """A model and its copy with Liger's kernels. Liger also replaces names in transformers' file, for all models."""

    def __init__(self, name: str, layers: int) -> None:
        from liger_kernel.transformers import monkey_patch  # here, so that --help does without it

        prefix, text = TEXT[name]
        TEXT[name] = prefix, text | {"num_hidden_layers": layers}
        stock = build(name, device=DEVICE)
        liger = copy.deepcopy(stock)
        self.namespace = vars(sys.modules[type(stock).__module__])
        former = dict(self.namespace)
        getattr(monkey_patch, f"apply_liger_kernel_to_{stock.config.model_type}")(model=liger)
        replaced = {key for key, value in self.namespace.items() if former.get(key) is not value}
        self.names = {True: {key: self.namespace[key] for key in replaced}}
        self.names[False] = {key: former[key] for key in replaced & former.keys()}
        self.models: dict[bool, nn.Module] = {False: stock, True: liger}

    def set_up(self, contender: str) -> nn.Module:
        """Return the model of a contender, patched or not, with its names in transformers' file."""
        has_liger, is_patched = CONTENDERS[contender]
        self.namespace.update(self.names[has_liger])
        model = self.models[has_liger]
        hf_vit_accel.unpatch(model)
        return hf_vit_accel.patch(model) if is_patched else model

    def add_adapters(self, rank: int) -> None:
        """Add LoRA to both models, with the same random matrices."""
        for has_liger, model in self.models.items():
            torch.manual_seed(0)
            config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=ADAPTED, init_lora_weights=False)
            self.models[has_liger] = get_peft_model(model.requires_grad_(False), config).train()


def first_token(model: Any, inputs: Inputs) -> float:
    """Make one token; return its largest logit."""
    output = model.generate(
        **inputs, max_new_tokens=1, do_sample=False, return_dict_in_generate=True, output_logits=True
    )
    return float(output.logits[0].max())


def tower_alone(model: Any, inputs: Inputs) -> float:
    """Call the tower; return its largest feature."""
    with torch.no_grad():
        output = model.model.visual(inputs["pixel_values"].to(model.dtype), grid_thw=inputs["image_grid_thw"])
    return float(output.pooler_output.max())


def step(model: nn.Module, inputs: Inputs) -> float:
    """Run forward and backward of one LoRA step; return its loss."""
    model.zero_grad(set_to_none=True)
    with torch.autocast(DEVICE.type, torch.bfloat16):
        loss = model(**inputs, labels=inputs["input_ids"]).loss
    loss.backward()
    return float(loss.detach())


def measure(pair: Pair, run: Callable[[nn.Module, Inputs], float], inputs: Inputs, rounds: int, calls: int) -> Row:
    """Time all contenders in turns; return their times, results and, where patched, what ran."""
    rows: dict[str, Row] = {name: {} for name in CONTENDERS}

    def set_up(name: str) -> Callable[[], float]:
        model = pair.set_up(name)
        rows[name]["result"] = run(model, inputs)
        return partial(run, model, inputs)

    def note(name: str) -> None:
        has_liger, is_patched = CONTENDERS[name]
        if is_patched:
            status = hf_vit_accel.status(pair.models[has_liger]).towers[0]
            rows[name] |= {"fast": status.calls, "stock": status.stock_calls, "why": list(status.against_fast)}

    times = time_set_ups(CONTENDERS, set_up, rounds, calls, after=note)
    for name, row in rows.items():
        row |= {"ms": statistics.median(times[name]), "low": min(times[name]), "high": max(times[name])}
    return {"contenders": rows}


def measure_model(model: str, layers: int, side: int, rounds: int, calls: int, rank: int) -> list[Row]:
    """Return the rows of all jobs."""
    pair = Pair(model, layers)
    inputs = inputs_for(pair.models[False], [(1, side, side)])
    rows = []
    for job, run in (("tower", tower_alone), ("first token", first_token), ("LoRA step", step)):
        if run is step:
            pair.add_adapters(rank)
        rows.append({"model": model, "job": job, "side": side} | measure(pair, run, inputs, rounds, calls))
        print(json.dumps(rows[-1]), flush=True)
    pair.set_up("stock")  # the names in transformers' file, for the next model
    return rows


if __name__ == "__main__":
    defaults = {"layers": 8, "side": 64, "rounds": 4, "calls": 6, "rank": 16}
    measure_models(__doc__, "qwen2.5-vl-7b,qwen3-vl-8b", measure_model, options=defaults)
