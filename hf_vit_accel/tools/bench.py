"""Verify a vision tower run in every way, then time it: stock transformers beside `patch` with each backend.

A way opens a tower for one input. Errors are against an fp32 run of stock. `hf-vit-accel bench` is the command line;
`benchmarks/` adds shapes and stock set-ups. `T` packed patch rows, `P` pixels of a patch.
"""

from __future__ import annotations

import importlib
import math
import random
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from copy import deepcopy
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, TypeAlias

import torch
import transformers
from torch import Tensor, nn

from hf_vit_accel import backends, machine
from hf_vit_accel.api import patched
from hf_vit_accel.backends import Request
from hf_vit_accel.config import GraphConfig
from hf_vit_accel.families import FAMILIES, Config, Family, Tower, family_of, find_towers
from hf_vit_accel.families.interface import named_tensors
from hf_vit_accel.layout import Grid, rows_of
from hf_vit_accel.tower.snapshot import Snapshot

_QWEN2: dict[str, object] = dict(depth=32, embed_dim=1280, num_heads=16, mlp_ratio=4, patch_size=14)
_QWEN2_5: dict[str, object] = dict(depth=32, hidden_size=1280, num_heads=16, intermediate_size=3420, patch_size=14)
_QWEN2_5 |= dict(window_size=112, fullatt_block_indexes=[7, 15, 23, 31])
_QWEN3: dict[str, object] = dict(num_heads=16, patch_size=16, num_position_embeddings=2304)
_QWEN3_SMALL = _QWEN3 | dict(depth=24, hidden_size=1024, intermediate_size=4096, deepstack_visual_indexes=[5, 11, 17])
_QWEN3_LARGE = _QWEN3 | dict(depth=27, hidden_size=1152, intermediate_size=4304, deepstack_visual_indexes=[8, 16, 24])

SHAPES: dict[str, tuple[str, dict[str, object]]] = {
    "qwen2-vl-2b": ("qwen2_vl", _QWEN2 | dict(hidden_size=1536)),
    "qwen2-vl-7b": ("qwen2_vl", _QWEN2 | dict(hidden_size=3584)),
    "qwen2.5-vl-3b": ("qwen2_5_vl", _QWEN2_5 | dict(out_hidden_size=2048)),
    "qwen2.5-vl-7b": ("qwen2_5_vl", _QWEN2_5 | dict(out_hidden_size=3584)),
    "qwen2.5-vl-32b": ("qwen2_5_vl", _QWEN2_5 | dict(intermediate_size=3456, out_hidden_size=5120)),
    "qwen2.5-vl-72b": ("qwen2_5_vl", _QWEN2_5 | dict(intermediate_size=3456, out_hidden_size=8192)),
    "qwen3-vl-2b": ("qwen3_vl", _QWEN3_SMALL | dict(out_hidden_size=2048)),
    "qwen3-vl-4b": ("qwen3_vl", _QWEN3_SMALL | dict(out_hidden_size=2560)),
    "qwen3-vl-8b": ("qwen3_vl", _QWEN3_LARGE | dict(out_hidden_size=4096)),
}
"""Name -> type of the model, and arguments of its vision config."""

SIZES: Mapping[str, Grid] = {
    "one 448²": ((1, 28, 28),),
    "one 1024²": ((1, 64, 64),),
    "one page": ((1, 136, 106),),
    "16 x 512²": ((1, 32, 32),) * 16,
    "8 mixed": (
        *((1, 28, 28), (1, 64, 64), (1, 46, 82), (1, 20, 30)),
        *((1, 96, 54), (1, 36, 36), (1, 72, 68), (1, 12, 46)),
    ),
    "video 8 x 36x64": ((8, 36, 64),),
}
"""Captioning and document workloads: a small image, a medium one, a page, a batch, a mixed batch, a short video."""


# --- towers and inputs ------------------------------------------------------------------------------------------------


def parse_size(text: str) -> tuple[str, Grid]:
    """Return the name and the grid of a size: a name of `SIZES`, or patches such as `1x64x64*16+8x36x64`."""
    name = text.strip().replace("^2", "²")
    if name in SIZES:
        return name, SIZES[name]
    grid: list[tuple[int, int, int]] = []
    for term in name.split("+"):
        match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)x([1-9]\d*)(?:\*([1-9]\d*))?", term.strip())
        if match is None:
            raise ValueError(
                f"unknown size {text!r}: choose one of {', '.join(SIZES)}, or frames x height x width in patches such "
                "as 1x64x64*16+8x36x64"
            )
        t, h, w, repeats = (int(number or 1) for number in match.groups())
        grid += [(t, h, w)] * repeats
    return name, tuple(grid)


def vision_config(model: str) -> Config:
    """Return the vision config of a built-in shape, a checkpoint (folder or hub id) or a config.json."""
    if model in SHAPES:
        model_type, arguments = SHAPES[model]
        return transformers.AutoConfig.for_model(model_type, vision_config=dict(arguments)).vision_config
    try:
        if "/" not in model and not Path(model).exists():  # the hub would be asked for half a minute without a network
            raise ValueError("no such folder or file")
        config = transformers.AutoConfig.from_pretrained(model)
    except Exception as error:  # also errors of the hub's HTTP client
        raise ValueError(
            f"unknown model {model!r}: pass a built-in shape ({', '.join(SHAPES)}), a checkpoint's folder or hub id, "
            f"or a config.json ({machine.one_line(error)[:300]})"
        ) from error
    return getattr(config, "vision_config", config)


def tower_class(config: Config) -> type[nn.Module]:
    """Return the tower class of a vision config. Raises ValueError for a family that is not supported."""
    home = type(config).__module__.replace(".configuration_", ".modeling_")
    families = [family for family in FAMILIES if not family.attention_only]
    for family in families:
        for module, name in family.towers:
            if module == home:
                return getattr(importlib.import_module(module), name)
    names = ", ".join(family.name for family in families)
    raise ValueError(f"{type(config).__name__} is no config of a vision tower of {names}: choose a model of these")


def build_tower(model: str, device: torch.device, dtype: torch.dtype, *, weights: bool = False) -> Tower:
    """Build a tower as `from_pretrained` leaves it, without gradients: buffers such as rotary frequencies stay fp32.

    Weights are random, and equal for equal model and device, unless the checkpoint's are asked for.
    """
    if weights:
        loaded = transformers.AutoModelForImageTextToText.from_pretrained(model, dtype=dtype)
        tower: nn.Module = next(tower for _, tower, _ in find_towers(loaded)).to(device)
    else:
        config = vision_config(model)
        torch.manual_seed(0)
        with device:
            tower = tower_class(config)(config)
        for parameter in tower.parameters():
            parameter.data = parameter.data.to(dtype)
    return tower.eval().requires_grad_(False)


def family_of_tower(tower: nn.Module) -> Family:
    family = family_of(tower)
    assert family is not None
    return family


def weight_of(tower: nn.Module) -> Tensor:
    """Return the weight of the patch embedding; a row of it is as wide as a patch."""
    return family_of_tower(tower).parts(tower).projection.weight


def draw_pixels(tower: Tower, grid: Grid, seed: int) -> Tensor:
    """Draw random pixels (T, P) in the tower's dtype."""
    weight = weight_of(tower)
    generator = torch.Generator(weight.device).manual_seed(seed)
    pixels_TP = torch.randn(rows_of(grid), weight[0].numel(), device=weight.device, generator=generator)
    return family_of_tower(tower).pixels(tower, pixels_TP.to(weight.dtype))


# --- ways to run a tower ----------------------------------------------------------------------------------------------

Forward: TypeAlias = Callable[[Tensor], object]
"""Runs a tower on pixels (T, P) of one grid."""
Open: TypeAlias = Callable[[Tower, Grid], AbstractContextManager[Forward]]
"""Prepares a tower and yields its forward, or raises CannotRunError."""


class CannotRunError(Exception):
    """A way cannot run on this machine or with this tower; the message holds all reasons."""


@contextmanager
def stock(attention: str, tower: Tower, grid: Grid) -> Iterator[Forward]:
    """Open the stock tower with one of transformers' attentions, called as users call it."""
    tower.set_attn_implementation(attention)
    if tower.config._attn_implementation != attention:  # some versions of transformers only log a warning
        raise CannotRunError(f"transformers cannot run {attention} here")
    yield partial(tower, grid_thw=grid_tensor(grid, tower))


@contextmanager
def _compiled(tower: Tower, grid: Grid) -> Iterator[Forward]:
    """Open the stock tower compiled as a whole, as users compile it."""
    if not weight_of(tower).is_cuda:
        raise CannotRunError("it needs a CUDA device")
    try:
        yield partial(torch.compile(tower, dynamic=False), grid_thw=grid_tensor(grid, tower))
    finally:
        torch.compiler.reset()  # the next size would count against the limit of recompiles


@contextmanager
def _patched(name: str, tower: Tower, grid: Grid) -> Iterator[Forward]:
    """Open the patched tower. Strict: where a call would fall back, the way is wrong rather than timed."""
    reasons = reasons_against(name, request_of(tower, weight_of(tower).device))
    if reasons:
        raise CannotRunError("; ".join(reasons))
    attention, *ends = name.split("+")
    options = {key: value for end in ends for key, value in OPTIONS[end].items()}
    with patched(tower, attention=attention, strict=True, **options):
        yield partial(tower, grid_thw=grid_tensor(grid, tower))


BASELINES: dict[str, Open] = {
    "sdpa": partial(stock, "sdpa"),
    "flash_attention_2": partial(stock, "flash_attention_2"),
    "flash_attention_3": partial(stock, "flash_attention_3"),
    "compile": _compiled,
}
"""Stock set-ups by name: transformers' attentions, and torch.compile of the tower."""
OPTIONS: dict[str, dict[str, object]] = {
    "graph": {
        "cuda_graphs": GraphConfig(exact_after=1, max_tokens=1 << 20, budgets=(1280,), max_training_bytes=1 << 40)
    },
    "eager": {"cuda_graphs": False},
    "fp8": {"fp8": True},
}
"""Options of `patch` by the end of a name: "auto+graph" captures every size at its first call."""


def reasons_against(name: str, request: Request) -> list[str]:
    """List why a backend with ends of `OPTIONS` cannot run. Raises ValueError for a name that does not exist."""
    attention, *ends = name.split("+")
    unknown = [end for end in ends if end not in OPTIONS]
    if unknown:
        raise ValueError(f"unknown option +{unknown[0]} in {name}: choose out of {', '.join(OPTIONS)}")
    reasons = [] if attention == "auto" else list(backends.backend_named(attention).reasons_against(request))
    if "fp8" in ends:
        reasons += backends.FP8.reasons_against_machine()
    if "graph" in ends and request.device.type != "cuda":
        reasons.append("CUDA graphs need a CUDA device")
    return reasons


def request_of(tower: Tower, device: torch.device) -> Request:
    """Return what a tower's layers ask of a backend; with gradients if a parameter requires one."""
    is_trained = any(parameter.requires_grad for parameter in tower.parameters())
    return replace(Snapshot(tower, family_of_tower(tower)).request(device), grad=is_trained)


def choose(tower: Tower, attentions: Sequence[str] | None, baselines: Sequence[str]) -> dict[str, Open]:
    """Return the ways to run a tower by name, baselines first. Without attentions: "auto" and all that can run it."""
    if attentions is None:
        request = request_of(tower, weight_of(tower).device)
        usable = [backend.name for backend in backends.BACKENDS if not backend.reasons_against(request)]
        attentions = ["auto", *usable]
    ways = {f"stock {name}": BASELINES[name] for name in baselines}
    return ways | {name: partial(_patched, name) for name in attentions}


def grid_tensor(grid: Grid, tower: Tower) -> Tensor:
    return torch.tensor(grid, device=weight_of(tower).device)


def twin_of(tower: Tower) -> Tower:
    """Return the same tower again: modules and buffers are copies. Parameters are shared, since copies may not fit."""
    return deepcopy(tower, {id(parameter): parameter for parameter in tower.parameters()})


# --- verify, then time ------------------------------------------------------------------------------------------------

FP8_BOUND = 0.1
"""Largest relative error that passes in FP8: of rows whose cosine similarity is 0.995."""
PROMISED = 1.1
"""Times stock's own error in the dtype that ours may have."""
PEERS = 2.0
"""The same for other libraries, which promise less; a wrong result is many times off."""
BATCHES = 3
"""By default the second call of a small input is replayed padded, the third as it is. All must be right."""

Row = dict[str, Any]
"""One way on one input of one model, as JSON holds it; the command line documents the keys."""


def measure(model: str, tower: Tower, size: str, grid: Grid, ways: Mapping[str, Open], rounds: int) -> list[Row]:
    """Verify all ways, each on a twin of a stock tower, then time those that are right. Return a row for each."""
    batches, stock_error = _run_stock(tower, grid)
    is_cuda = weight_of(tower).is_cuda
    rows = {name: new_row(model, size, grid, name) for name in ways}
    timers: dict[str, Callable[[], float]] = {}
    with ExitStack() as stack:
        for name, row in rows.items():
            say(f"verifying {name}")
            row["bound"] = bound = bound_of(name, stock_error, weight_of(tower).dtype)
            try:
                forward = stack.enter_context(ways[name](twin_of(tower), grid))
                error = max(largest_error(run(forward, pixels_TP), expected) for pixels_TP, expected in batches)
            except Exception as raised:
                fail(row, raised)
                continue
            row["error"] = error if math.isfinite(error) else None
            if error > bound:
                row |= {"status": "wrong", "problem": f"relative error {error:.1e}, at most {bound:.1e} is allowed"}
                continue
            timers[name] = partial(milliseconds, partial(run, forward, batches[-1][0]), cuda=is_cuda)
        add_times(rows, time_in_turns(timers, rounds))
    return list(rows.values())


def _run_stock(tower: Tower, grid: Grid) -> tuple[list[tuple[Tensor, list[Tensor]]], float]:
    """Return batches of pixels (T, P) with their outputs in fp32, and stock's largest error in the tower's dtype."""
    batches = []
    errors = []
    with stock("sdpa", deepcopy(tower).float(), grid) as exact, stock("sdpa", twin_of(tower), grid) as same:
        for seed in range(BATCHES):
            pixels_TP = draw_pixels(tower, grid, seed)
            with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):  # matrix products have no TF32 by default
                expected = run(exact, pixels_TP.float())
            batches.append((pixels_TP, expected))
            errors.append(largest_error(run(same, pixels_TP), expected))
    return batches, max(errors)


def new_row(model: str, size: str, grid: Grid, way: str) -> Row:
    row: Row = {"model": model, "size": size, "patches": rows_of(grid), "contender": way, "status": "timed"}
    return row | dict.fromkeys(("problem", "ms", "ms_low", "ms_high", "speedup", "error", "bound"))


def fail(row: Row, raised: Exception) -> None:
    """Note that a call raised: a backend is wrong, but a stock set-up may not fit the installed versions."""
    if isinstance(raised, CannotRunError):
        row |= {"status": "skipped", "problem": str(raised)}
    else:
        status = "skipped" if is_stock(row["contender"]) else "wrong"
        row |= {"status": status, "problem": machine.one_line(raised)[:300]}


def is_stock(way: str) -> bool:
    return way.startswith("stock ")


def bound_of(way: str, stock_error: float, dtype: torch.dtype) -> float:
    """Return the largest error that passes, by stock's own error in the dtype."""
    if "+fp8" in way:
        return FP8_BOUND
    factor = PEERS if is_stock(way) else PROMISED
    return max(factor * stock_error, torch.finfo(dtype).eps, 1e-5)  # the reference is itself rounded to fp32


def run(forward: Forward, pixels_TP: Tensor) -> list[Tensor]:
    """Run what is timed; return all tensors of the output."""
    with torch.no_grad():
        return list(named_tensors(forward(pixels_TP)).values())


def largest_error(outputs: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    return max(relative_error(output, exact) for output, exact in zip(outputs, expected, strict=True))


@torch.no_grad()
def relative_error(value: Tensor, expected: Tensor) -> float:
    """Return |value - expected| / |expected| in L2: infinite for another shape, and for what is not finite."""
    if value.shape != expected.shape:
        return math.inf
    difference = (value.float() - expected.float()).norm()
    norm = expected.float().norm()
    error = float(difference / norm if norm else difference)
    return error if math.isfinite(error) else math.inf


def add_times(rows: Mapping[str, Row], times: Mapping[str, list[float]]) -> None:
    """Write medians and speed-ups over the first way into the rows."""
    for name, of_way in times.items():
        rows[name] |= {"ms": statistics.median(of_way), "ms_low": min(of_way), "ms_high": max(of_way)}
    first_ms = next(iter(rows.values()))["ms"]
    for name in times:
        rows[name]["speedup"] = first_ms and first_ms / rows[name]["ms"]


# --- the clock --------------------------------------------------------------------------------------------------------

TURNS = 4
"""Turns of a step in a round."""
WARM_UP_MS = 10.0
TIMED_MS = 75.0
"""The least milliseconds of a turn before anything is timed, and timed: short steps run more often."""
ENOUGH_MS = 700.0
"""A step that was timed for so long leaves out the other turns of the round."""


def milliseconds(step: Callable[[], object], *, cuda: bool) -> float:
    """Time one call by CUDA events after a synchronisation, or on a CPU by the clock."""
    if not cuda:
        begin = time.perf_counter()
        step()
        return (time.perf_counter() - begin) * 1e3
    start = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    step()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end))


def time_in_turns(timers: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Return the milliseconds of every timed call, by name. All steps have run before, so graphs are captured.

    All take a short turn in a random order, then again in another one. After another step, which heats a GPU more or
    less, a step may take longer for some 100 ms. So none always follows the same one.
    """
    times: dict[str, list[float]] = {name: [] for name in timers}
    names = list(timers)
    order = random.Random(0)
    for index in range(rounds):
        say(f"timing, round {index + 1} of {rounds}")
        in_round = dict.fromkeys(names, 0.0)
        for _ in range(TURNS):
            order.shuffle(names)
            for name in names:
                if in_round[name] < ENOUGH_MS:
                    _calls_for(WARM_UP_MS, timers[name])
                    timed = _calls_for(TIMED_MS, timers[name])
                    in_round[name] += sum(timed)
                    times[name] += timed
    return times


def _calls_for(least_ms: float, timer: Callable[[], float]) -> list[float]:
    """Call until the calls took so many milliseconds; return those of every call."""
    times: list[float] = []
    while sum(times) < least_ms:
        times.append(timer())
    return times


# --- what the command line checks and prints --------------------------------------------------------------------------


def check(
    model: str, grids: Iterable[Grid], attentions: Sequence[str], device: torch.device, dtype: torch.dtype
) -> None:
    """Raise ValueError for what does not exist or fit, before anything runs."""
    outline = build_tower(model, torch.device("meta"), dtype)
    family = family_of_tower(outline)
    merge = family.geometry(outline).merge
    for t, h, w in chain.from_iterable(grids):
        if h % merge or w % merge:
            raise ValueError(f"{model} takes heights and widths in multiples of the merge size {merge}, not {h}x{w}")
        if t > 1 and not family.videos:
            raise ValueError(f"{model} takes videos frame by frame, not {t} frames: pass images")
    request = request_of(outline, device)
    reasons = {name: reasons_against(name, request) for name in attentions}
    if reasons and all(reasons.values()):
        raise ValueError("; ".join(f"{name} cannot run: {'; '.join(why)}" for name, why in reasons.items()))


def lines(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the table of one model and size."""
    bound = min(row["bound"] for row in rows)  # ways in FP8 have a larger one
    yield f"{rows[0]['model']}, {rows[0]['size']}: {rows[0]['patches']} patches, error <= {bound:.1e}"
    width = max(len(row["contender"]) for row in rows)
    yield f"  {'':{width}}  {'ms':>9}  {'low - high':>19}  {'speed-up':>8}  {'error':>8}"
    for row in rows:
        if row["ms"] is None:
            yield f"  {row['contender']:{width}}  {row['status'].replace('wrong', 'WRONG')}: {row['problem']}"
        else:
            spread = f"{row['ms_low']:.2f} - {row['ms_high']:.2f}"
            speedup = f"{row['speedup']:.2f}x" if row["speedup"] else ""
            yield f"  {row['contender']:{width}}  {row['ms']:9.2f}  {spread:>19}  {speedup:>8}  {row['error']:8.1e}"


def say(line: str) -> None:
    print(f"... {line}", file=sys.stderr, flush=True)
