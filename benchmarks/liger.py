"""Time Liger's kernels beside ours, and both together: a LoRA step and the first token about one 1024² picture.

    python benchmarks/liger.py --json build/liger.json      needs a CUDA device with 60 GB and liger-kernel

Towers have their full size. Language models have eight layers instead of 28 and 36: the tower's share of a call is
larger, and two models fit. Weights and pictures are random. Adapters are on all Linears of tower and language model.
Liger is applied to a loaded model, as `use_liger_kernel` of TRL, LLaMA-Factory and ms-swift does. The four contenders
take turns in one process. `result` is the loss of a step, or the largest logit of the first token.
"""

from __future__ import annotations

import copy
import json
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from liger_kernel.transformers import monkey_patch
from measuring import DEVICE, STEPS_UNTIL_STEADY, Row, document_of, in_turn, write_json
from peft import LoraConfig, get_peft_model
from torch import nn
from whole_call import TEXT, build, inputs_for

import hf_vit_accel
from hf_vit_accel.tools.bench.timing import milliseconds

CONTENDERS = {"stock": (False, False), "Liger": (True, False), "ours": (False, True), "both": (True, True)}
"""Whether Liger is applied, and whether the model is patched."""
LINEARS = r".*\.(qkv|proj|linear_fc1|linear_fc2|q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)"
ADAPTED = rf"(model\.language_model|model\.visual\.blocks){LINEARS}"
Inputs = dict[str, torch.Tensor]


class Pair:
    """A model and its copy with Liger's kernels. Liger also replaces names in transformers' file, for all models."""

    def __init__(self, name: str, layers: int) -> None:
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
    """Time all contenders in turns; each is warmed up anew in every round, since setting it up drops its graphs."""
    times: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    rows: dict[str, Row] = {}
    for index in range(rounds):
        for name in in_turn(CONTENDERS, index):
            model = pair.set_up(name)
            result = run(model, inputs)
            for _ in range(STEPS_UNTIL_STEADY):
                run(model, inputs)
            call = partial(run, model, inputs)
            times[name] += [milliseconds(call, cuda=DEVICE.type == "cuda") for _ in range(calls)]
            rows[name] = {"result": result}
            if CONTENDERS[name][1]:
                status = hf_vit_accel.status(model).towers[0]
                graphs = status.training if run is step else status.graphs
                rows[name] |= {"fast": status.calls, "stock": status.stock_calls, "unfused": dict(status.unfused)}
                rows[name] |= {"why": list(status.against_fast), "graphs": None if graphs is None else graphs.last}
    for name, row in rows.items():
        row |= {"ms": statistics.median(times[name]), "low": min(times[name]), "high": max(times[name])}
    return {"contenders": {name: rows[name] for name in CONTENDERS}}


def main(
    models: Annotated[str, typer.Option(help="Comma-separated.")] = "qwen2.5-vl-7b,qwen3-vl-8b",
    layers: Annotated[int, typer.Option(help="Layers of the language model.")] = 8,
    side: Annotated[int, typer.Option(help="Patches along one side of the picture.")] = 64,
    rounds: int = 4,
    calls: int = 6,
    rank: int = 16,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write one JSON object to this file.")] = None,
) -> None:
    """Time both jobs for every model, and print and write the rows."""
    rows: list[Row] = []
    document = document_of(rows, layers=layers)
    for name in models.split(","):
        pair = Pair(name, layers)
        inputs = inputs_for(pair.models[False], [(1, side, side)])
        for job, run in (("tower", tower_alone), ("first token", first_token), ("LoRA step", step)):
            if run is step:
                pair.add_adapters(rank)
            rows.append({"model": name, "job": job, "side": side} | measure(pair, run, inputs, rounds, calls))
            print(json.dumps(rows[-1]), flush=True)
            write_json(json_path, document)
        pair.set_up("stock")
        del pair
        if DEVICE.type == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    typer.run(main)
