"""Time towers all of whose Linears bitsandbytes has quantised, in 4 and in 8 bit: stock beside patched.

    pip install bitsandbytes peft
    python benchmarks/quantised.py --json build/quantised.json

A forward runs in bf16 without gradients. A step is QLoRA's: floats upcast as `peft.prepare_model_for_kbit_training`
does, LoRA on all Linears, forward and backward under bf16 autocast. Both contenders hold the same weights, and are
compared before anything is timed: `error` is against the same tower with every product in fp32, of outputs and
gradients.
"""

from copy import deepcopy
from functools import partial

import bitsandbytes as bnb
import torch
from lora import Contender, add_adapters, plain
from lora import results as results_of_step
from measuring import (
    DEVICE,
    ERROR_BAR,
    STEPS_UNTIL_STEADY,
    Row,
    Steps,
    clear,
    measure_models,
    time_rows,
)
from torch import nn

from hf_vit_accel import patch, status
from hf_vit_accel.families.interface import named_tensors
from hf_vit_accel.layout import rows_of
from hf_vit_accel.tools.bench import SIZES, build_tower, largest_error

INPUTS = "one 448²", "one 1024²", "16 x 512²"


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


def build(model: str, bits: int) -> nn.Module:
    """Build a tower with random weights whose Linears are quantised."""
    torch.manual_seed(0)
    tower = build_tower(model, DEVICE, torch.bfloat16)
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
    return add_adapters(tower, linears)


def exact_copy(tower: nn.Module) -> nn.Module:
    """Return a copy that computes in fp32 what it can: bitsandbytes casts rows to fp16 in 8 bit."""
    tower = upcast(deepcopy(tower))
    for module in tower.modules():
        if isinstance(module, bnb.nn.Linear4bit):
            module.compute_dtype = torch.float32
    return tower


def compared(
    tower: nn.Module, bits: int, size: str, *, trains: bool
) -> tuple[Steps, dict[str, Contender], dict[str, float]]:
    """Return both contenders with their errors. They are copies: `tower` itself is never called.

    Raises:
        AssertionError: ours computes something else than stock, or a call was not fast.
    """
    steps = Steps(tower, SIZES[size])
    ours = patch(deepcopy(tower))
    ways = {"stock": plain(steps, deepcopy(tower)), "patch(model)": plain(steps, ours)}

    def results(contender: Contender, *, exact: bool = False) -> list[torch.Tensor]:
        if trains:
            return results_of_step(steps, contender, exact=exact)
        with torch.no_grad():
            pixels_TP = steps.pixels_TP.float() if exact else steps.pixels_TP
            return [output.cpu() for output in named_tensors(contender.forward(pixels_TP)).values()]

    expected = results(plain(steps, exact_copy(tower)), exact=True)
    stock = results(ways["stock"])
    errors = {"stock": largest_error(stock, expected)}
    for _ in range(STEPS_UNTIL_STEADY):
        outputs = results(ways["patch(model)"])
        assert [output.dtype for output in outputs] == [output.dtype for output in stock]
        errors["patch(model)"] = largest_error(outputs, expected)
        bar = max(ERROR_BAR * errors["stock"], torch.finfo(torch.bfloat16).eps)
        assert errors["patch(model)"] <= bar, (bits, size, errors)
    [served] = status(ours).towers
    assert served.calls and not served.stock_calls, served.fallbacks
    return steps, ways, errors


def measure(tower: nn.Module, size: str, rounds: int, *, trains: bool, model: str, bits: int) -> list[Row]:
    """Return a row for each contender."""
    steps, ways, errors = compared(tower, bits, size, trains=trains)

    def run(contender: Contender) -> None:
        if trains:
            steps.step(contender.forward)
            return
        with torch.no_grad():
            contender.forward(steps.pixels_TP)

    runs = {way: partial(run, contender) for way, contender in ways.items()}
    before = {way: partial(clear, contender.tower) for way, contender in ways.items()}
    common = dict(model=model, bits=bits, size=size, patches=rows_of(SIZES[size]), work="step" if trains else "forward")
    rows = time_rows(runs, rounds, before=before, **common)
    [served] = status(ways["patch(model)"].tower).towers
    graphs = served.training if trains else served.graphs
    for row in rows:
        row["error"] = errors[row["contender"]]
        row["last"] = None if row["contender"] == "stock" or graphs is None else graphs.last
    return rows


def measure_model(model: str, rounds: int) -> list[Row]:
    """Return the rows of a model: of both numbers of bits and all sizes, forwards and then steps."""
    rows = []
    for bits in (4, 8):
        tower = build(model, bits)
        for trains in (False, True):
            tower = with_adapters(tower, bits) if trains else tower
            for size in INPUTS:
                rows += measure(tower, size, rounds, trains=trains, model=model, bits=bits)
    return rows


if __name__ == "__main__":
    measure_models(__doc__, "qwen3-vl-8b,qwen2.5-vl-7b", measure_model, bitsandbytes=bnb.__version__)
