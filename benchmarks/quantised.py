"""Time towers all of whose Linears bitsandbytes has quantised, in 4 and in 8 bit: stock beside patched.

    pip install bitsandbytes peft
    python benchmarks/quantised.py --json build/quantised.json

A forward runs in bf16 without gradients. A step is QLoRA's: floats upcast as `peft.prepare_model_for_kbit_training`
does, LoRA on all Linears, forward and backward under bf16 autocast. Both contenders hold the same weights, and are
compared before anything is timed: `error` is against the same tower with every product in fp32, of outputs and
gradients.
"""

import argparse
import statistics
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path

import bitsandbytes as bnb
import peft
import torch
from lora import Contender, Steps
from measuring import Row, device_name, in_turn, largest_error, write_json
from torch import nn

from hf_vit_accel import machine, patch, status
from hf_vit_accel.layout import rows_of
from hf_vit_accel.tools.bench.timing import milliseconds
from hf_vit_accel.tools.bench.towers import build_tower, parse_size

INPUTS = "one 448²", "one 1024²", "16 x 512²"
ERROR_BAR = 1.1
"""Times stock's own error; or a unit of bf16 in the last place."""


def quantised(linear: nn.Linear, bits: int) -> nn.Module:
    """Return a Linear of bitsandbytes with the same weight, as `from_pretrained` makes it."""
    sizes = linear.in_features, linear.out_features, linear.bias is not None
    weight = linear.weight.detach()
    if bits == 4:
        module = bnb.nn.Linear4bit(*sizes, compute_dtype=torch.bfloat16, quant_type="nf4", device="meta")
        module.weight = bnb.nn.Params4bit(weight.cpu(), requires_grad=False, quant_type="nf4")
    else:
        module = bnb.nn.Linear8bitLt(*sizes, has_fp16_weights=False, threshold=6.0, device="meta")
        module.weight = bnb.nn.Int8Params(weight.cpu(), requires_grad=False, has_fp16_weights=False)
    module.bias = linear.bias
    return module.to(weight.device)


def build(model: str, bits: int, device: torch.device) -> nn.Module:
    """Build a tower with random weights whose Linears are quantised."""
    torch.manual_seed(0)
    tower = build_tower(model, device, torch.bfloat16).requires_grad_(False).eval()
    for module in list(tower.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear:
                setattr(module, name, quantised(child, bits))
    tower.set_attn_implementation("sdpa")
    return tower


def upcast(tower: nn.Module) -> nn.Module:
    """Cast all floats of a tower to fp32 that are not packed."""
    for parameter in tower.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.float()
    return tower


def with_adapters(tower: nn.Module, bits: int) -> nn.Module:
    """Make QLoRA of a quantised tower; only the adapters require gradients."""
    setattr(upcast(tower), f"is_loaded_in_{bits}bit", True)  # by which PEFT chooses its classes
    linears = [name for name, module in tower.named_modules() if isinstance(module, nn.Linear)]
    config = peft.LoraConfig(r=16, lora_alpha=32, target_modules=linears, init_lora_weights=False)
    peft.inject_adapter_in_model(config, tower)
    for name, parameter in tower.named_parameters():
        if "lora_" in name:
            parameter.data = 0.1 * parameter.data.float()
            parameter.requires_grad_()
    return tower.train()


def exact_copy(tower: nn.Module) -> nn.Module:
    """Return a copy that computes in fp32 what it can: bitsandbytes casts rows to fp16 in 8 bit."""
    tower = upcast(deepcopy(tower))
    for module in tower.modules():
        if isinstance(module, bnb.nn.Linear4bit):
            module.compute_dtype = torch.float32
    return tower


def compared(
    tower: nn.Module, bits: int, size: str, device: torch.device, *, trains: bool
) -> tuple[Steps, dict[str, Contender], dict[str, float]]:
    """Return both contenders with their errors.

    Raises:
        AssertionError: ours computes something else than stock, or a call was not fast.
    """
    _, grid = parse_size(size)
    steps = Steps(tower, grid, device)
    ours = patch(deepcopy(tower))
    ways = {"stock": steps.plain(tower), "patch(model)": steps.plain(ours)}

    def results(contender: Contender, *, exact: bool = False) -> list[torch.Tensor]:
        if trains:
            return steps.results(contender, exact=exact)
        with torch.no_grad():
            pixels_TP = steps.pixels_TP.float() if exact else steps.pixels_TP
            return [output.cpu() for output in steps.tensors_of(contender.forward(pixels_TP))]

    expected = results(steps.plain(exact_copy(tower)), exact=True)
    stock = results(ways["stock"])
    errors = {"stock": largest_error(stock, expected)}
    for _ in range(4):  # until graphs are replayed
        outputs = results(ways["patch(model)"])
        assert [output.dtype for output in outputs] == [output.dtype for output in stock]
        errors["patch(model)"] = largest_error(outputs, expected)
        bar = max(ERROR_BAR * errors["stock"], torch.finfo(torch.bfloat16).eps)
        assert errors["patch(model)"] <= bar, (bits, size, errors)
    [served] = status(ours).towers
    assert served.calls and not served.stock_calls, served.fallbacks
    return steps, ways, errors


def measure(model: str, bits: int, size: str, rounds: int, device: torch.device, *, trains: bool) -> list[Row]:
    """Return a row for each contender."""
    tower = build(model, bits, device)
    tower = with_adapters(tower, bits) if trains else tower
    steps, ways, errors = compared(tower, bits, size, device, trains=trains)

    def runner(contender: Contender) -> Callable[[], object]:
        def forward() -> object:
            with torch.no_grad():
                return contender.forward(steps.pixels_TP)

        return (lambda: steps.run(contender)) if trains else forward

    times: dict[str, list[float]] = {way: [] for way in ways}
    for index in range(2 * rounds):
        for way in in_turn(ways, index):
            run = runner(ways[way])
            run()
            for _ in range(3):
                ways[way].clear()
                times[way].append(milliseconds(run, cuda=device.type == "cuda"))
    name, grid = parse_size(size)
    [served] = status(ways["patch(model)"].tower).towers
    graphs = served.training if trains else served.graphs
    rows = []
    for way in ways:
        row: Row = dict(model=model, bits=bits, size=name, patches=rows_of(grid), work="step" if trains else "forward")
        row |= dict(contender=way, ms=statistics.median(times[way]), error=errors[way])
        row["last"] = None if way == "stock" or graphs is None else graphs.last
        print(row, flush=True)
        rows.append(row)
    return rows


def main() -> None:
    """Read the options, time all towers, write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--models", default="qwen3-vl-8b,qwen2.5-vl-7b")
    parser.add_argument("--bits", default="4,8")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--sizes", default=",".join(INPUTS))
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    device = torch.device(options.device)
    rows: list[Row] = []
    document: Row = {"device": device_name(device), "dtype": "bfloat16", "versions": machine.versions(), "rows": rows}
    document["bitsandbytes"] = bnb.__version__
    for model in options.models.split(","):
        for bits in map(int, options.bits.split(",")):
            for size in options.sizes.split(","):
                for trains in (False, True):
                    rows += measure(model, bits, size, options.rounds, device, trains=trains)
                    write_json(options.json, document)


if __name__ == "__main__":
    main()
