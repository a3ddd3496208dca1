"""Compare every way to run a tower with fp32, then time those that are right."""

from __future__ import annotations

import importlib
import math
import random
import re
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias

import torch
import transformers
from torch import Tensor, nn
from transformers.utils.hub import has_file
from transformers.utils.import_utils import is_flash_attn_2_available, is_flash_attn_3_available

from hf_vit_accel import backends, machine
from hf_vit_accel.api import patched
from hf_vit_accel.config import GraphConfig
from hf_vit_accel.families import FAMILIES, Config, Family, Tower, family_of, find_towers
from hf_vit_accel.families.interface import Expected, read
from hf_vit_accel.graphs.recorder import why_not_graphs
from hf_vit_accel.layout import Grid, rows_of
from hf_vit_accel.tower.snapshot import Snapshot

_QWEN2: dict[str, Any] = dict(depth=32, embed_dim=1280, num_heads=16, mlp_ratio=4, patch_size=14)
_QWEN2_5: dict[str, Any] = dict(depth=32, hidden_size=1280, num_heads=16, intermediate_size=3420, patch_size=14)
_QWEN2_5 |= dict(window_size=112, fullatt_block_indexes=[7, 15, 23, 31])
_QWEN3: dict[str, Any] = dict(num_heads=16, patch_size=16, num_position_embeddings=2304)
_QWEN3_SMALL = _QWEN3 | dict(depth=24, hidden_size=1024, intermediate_size=4096, deepstack_visual_indexes=[5, 11, 17])
_QWEN3_LARGE = _QWEN3 | dict(depth=27, hidden_size=1152, intermediate_size=4304, deepstack_visual_indexes=[8, 16, 24])

SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
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
_LITERAL = re.compile(r"([1-9]\d*)x([1-9]\d*)x([1-9]\d*)(?:\*([1-9]\d*))?")


def parse_size(text: str) -> tuple[str, Grid]:
    """Return the name and the grid of a size: a name of `SIZES`, or patches such as `1x64x64*16+8x36x64`."""
    name = text.strip().replace("^2", "²")
    if name in SIZES:
        return name, SIZES[name]
    grid: list[tuple[int, int, int]] = []
    for term in name.split("+"):
        match = _LITERAL.fullmatch(term.strip())
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
        # `from_pretrained` would ask the hub again and again for a repository that does not exist.
        is_repository = model.count("/") == 1 and has_file(model, "config.json")
        if not Path(model).exists() and not is_repository:
            raise ValueError("no such folder or file, and no config.json by that name on the hub or in its cache")
        config = transformers.AutoConfig.from_pretrained(model)
    except Exception as error:  # also errors of the hub's HTTP client
        raise ValueError(
            f"unknown model {model!r}: pass a built-in shape ({', '.join(SHAPES)}), a checkpoint's folder or hub id, "
            f"or a config.json ({machine.one_line(error)[:300]})"
        ) from error
    return getattr(config, "vision_config", config)


def tower_class(config: object) -> type[nn.Module]:
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
    """Return the family of a supported tower."""
    family = family_of(tower)
    assert family is not None
    return family


def weight_of(tower: nn.Module) -> Tensor:
    """Return the weight of the patch embedding; a row of it is as wide as a patch."""
    return family_of_tower(tower).parts(tower).projection.weight


OPTIONS: dict[str, dict[str, Any]] = {
    "graph": {
        "cuda_graphs": GraphConfig(exact_after=1, max_tokens=1 << 20, budgets=(1280,), max_training_bytes=1 << 40)
    },
    "eager": {"cuda_graphs": False},
    "fp8": {"fp8": True},
}
"""Options of `patch` by the end of a name: "auto+graph" captures every size at its first call."""
FP8_BOUND = 0.1
"""Largest relative error that passes in FP8: of rows whose cosine similarity is 0.995."""


@dataclass(frozen=True)
class Run:
    """A tower that is ready to run: `tower` holds its parameters, `forward` takes pixels (T, P)."""

    tower: nn.Module
    forward: Callable[[Tensor], Any]

    def __call__(self, pixels_TP: Tensor) -> Any:
        """Return the tower's output."""
        return self.forward(pixels_TP)


Open: TypeAlias = Callable[[Tower, Grid], AbstractContextManager[Run]]
Baseline: TypeAlias = Callable[[Tower], Open | list[str]]
"""Looks at a tower, and returns how to open stock on it, or all reasons against that."""


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way to run a tower. `open` is None where it cannot run: `reasons` say why. `bound` is that of its errors."""

    name: str
    open: Open | None
    reasons: Sequence[str] = ()
    is_stock: bool = False
    bound: float | None = None


def choose(
    tower: Tower, attentions: Sequence[str] | None, baselines: Sequence[str], *, device: torch.device | None = None
) -> list[Way]:
    """Return the ways to run a tower, baselines first. Raises ValueError for a name that does not exist.

    Args:
        attentions: "auto" and names of backends, with ends of `OPTIONS`; None for "auto" and each that can run it.
        device: Where the tower will be; by default where it is.
    """
    unknown = [name for name in baselines if name not in BASELINES]
    if unknown:
        raise ValueError(f"unknown baselines {', '.join(unknown)}: choose out of {', '.join(BASELINES)}")
    request = request_of(tower, device)
    if attentions is None:
        usable = [backend.name for backend in backends.BACKENDS if not backend.reasons_against(request)]
        attentions = ["auto", *usable]
    ways = []
    for name in baselines:
        looked = BASELINES[name](tower)
        reasons, opens = (looked, None) if isinstance(looked, list) else ([], looked)
        ways.append(Way(name=f"stock {name}", open=opens, reasons=reasons, is_stock=True))
    return [*ways, *(_patched_way(name, request) for name in attentions)]


def _patched_way(name: str, request: backends.Request) -> Way:
    attention, *ends = name.split("+")
    unknown = [end for end in ends if end not in OPTIONS]
    if unknown:
        raise ValueError(f"unknown option +{unknown[0]} in {name}: choose out of {', '.join(OPTIONS)}")
    options = {key: value for end in ends for key, value in OPTIONS[end].items()}
    reasons = [] if attention == "auto" else backends.backend_named(attention).reasons_against(request)
    why_not = why_not_graphs(request.device) if "graph" in ends else None
    if reasons or why_not:
        return Way(name=name, open=None, reasons=[*reasons, *([why_not] if why_not else [])])

    @contextmanager
    def opened(tower: Tower, grid: Grid) -> Iterator[Run]:
        # Strict: where a call would fall back, the way is wrong rather than timed.
        with patched(tower, attention=attention, strict=True, **options):
            yield run_with(tower, grid_thw=grid_tensor(grid, tower))

    return Way(name=name, open=opened, bound=FP8_BOUND if "fp8" in ends else None)


def is_trained(tower: nn.Module) -> bool:
    """Return whether any parameter requires a gradient."""
    return any(parameter.requires_grad for parameter in tower.parameters())


def request_of(tower: Tower, device: torch.device | None = None, *, grad: bool | None = None) -> backends.Request:
    """Return what a tower's layers ask of a backend, by default where the tower is and with its gradients."""
    snapshot = Snapshot(tower, family_of_tower(tower))
    return snapshot.request(device or weight_of(tower).device, grad=is_trained(tower) if grad is None else grad)


def run_with(tower: Tower, **kwargs: Any) -> Run:
    """Return a run that passes the same arguments in every call."""
    return Run(tower, lambda pixels_TP: tower(pixels_TP, **kwargs))


@contextmanager
def stock(attention: str, tower: Tower, grid: Grid) -> Iterator[Run]:
    """Open the stock tower with one of transformers' attentions, called as users call it."""
    tower.set_attn_implementation(attention)
    yield run_with(tower, grid_thw=grid_tensor(grid, tower))


@contextmanager
def _compiled(tower: Tower, grid: Grid) -> Iterator[Run]:
    """Open the stock tower compiled as a whole, as users compile it."""
    grid_thw = grid_tensor(grid, tower)
    forward = torch.compile(tower, dynamic=False)
    try:
        yield Run(tower, lambda pixels_TP: forward(pixels_TP, grid_thw=grid_thw))
    finally:
        torch.compiler.reset()  # the next size would count against the limit of recompiles


def _with_attention(attention: str, is_installed: Callable[[], bool] = lambda: True) -> Baseline:
    """Return the baseline of one of transformers' attentions. All but sdpa take half precision alone."""

    def look(tower: Tower) -> Open | list[str]:
        reasons = [] if is_installed() else [f"transformers finds no package for {attention}"]
        if attention != "sdpa" and weight_of(tower).dtype == torch.float32:
            reasons.append("the dtype is float32, it takes bfloat16 or float16")
        return reasons or (lambda tower, grid: stock(attention, tower, grid))

    return look


BASELINES: dict[str, Baseline] = {
    "sdpa": _with_attention("sdpa"),
    "flash_attention_2": _with_attention("flash_attention_2", is_flash_attn_2_available),
    "flash_attention_3": _with_attention("flash_attention_3", is_flash_attn_3_available),
    "compile": lambda tower: _compiled if weight_of(tower).is_cuda else ["it needs a CUDA device"],
}
"""Stock set-ups by name: transformers' attentions, and torch.compile of the tower."""


def grid_tensor(grid: Grid, tower: Tower) -> Tensor:
    """Return a grid as towers take it."""
    return torch.tensor(grid, device=weight_of(tower).device)


TURNS = 4
"""Turns of a step in a round, on a GPU. A CPU, where a step of a full-size tower may take seconds, has one."""
WARM_UP_MS = 10.0
TIMED_MS = 25.0
"""The least milliseconds of a turn before anything is timed, and timed: short steps run more often."""
ENOUGH_MS = 700.0
"""A step on a GPU that was timed for so long leaves out the other turns of the round."""
SHORT_MS = 10.0
ROUNDS_OF_SHORT_STEPS = 3
"""Steps below `SHORT_MS` get so many times the rounds: the host is slow for longer than a round of them takes."""

Step = Callable[[], object]


def nothing(*_: object) -> None:
    """Do nothing."""


def milliseconds(step: Step, *, cuda: bool, before: Step = nothing) -> float:
    """Time one call by CUDA events after a synchronisation, or on a CPU by the clock. `before` is not timed."""
    before()
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


def time_in_turns(
    steps: Mapping[str, Step],
    rounds: int,
    *,
    cuda: bool,
    say: Callable[[str], None] = nothing,
    before: Mapping[str, Step] = MappingProxyType({}),
) -> dict[str, list[float]]:
    """Return the milliseconds of every timed call, by name. All steps have run before, so graphs are captured.

    All take a short turn in a random order, then again in another one. After another step, which heats a GPU more or
    less, a step may take longer for some 100 ms. So none always follows the same one.
    """
    times: dict[str, list[float]] = {name: [] for name in steps}
    names = list(steps)
    order = random.Random(0)
    index = 0
    while index < rounds:
        say(f"timing, round {index + 1} of {rounds}")
        in_round: dict[str, list[float]] = {name: [] for name in steps}
        for _ in range(TURNS if cuda else 1):
            order.shuffle(names)
            for name in names:
                if sum(in_round[name]) < ENOUGH_MS:
                    in_round[name] += _turn(steps[name], cuda, before.get(name, nothing))
        for name in steps:
            times[name] += in_round[name]
        index += 1
        medians = [statistics.median(of_step) for of_step in times.values()]
        if cuda and index == 1 and min(medians, default=SHORT_MS) < SHORT_MS:
            rounds *= ROUNDS_OF_SHORT_STEPS
    return times


def _turn(step: Step, cuda: bool, before: Step) -> list[float]:
    """Warm a step up, then time it: on a CPU two calls."""
    warm_ups: list[float] = []
    timed: list[float] = []
    while not warm_ups or (cuda and sum(warm_ups) < WARM_UP_MS):
        warm_ups.append(milliseconds(step, cuda=cuda, before=before))
    while len(timed) < (1 if cuda else 2) or (cuda and sum(timed) < TIMED_MS):
        timed.append(milliseconds(step, cuda=cuda, before=before))
    return timed


ROUNDING: Mapping[torch.dtype, float] = {
    torch.bfloat16: torch.finfo(torch.bfloat16).eps,
    torch.float16: torch.finfo(torch.float16).eps,
    torch.float32: 1e-5,  # the reference is itself rounded to fp32, layer after layer
}
"""Dtype -> an error that passes in any case."""
PROMISED = 1.1
"""Times stock's own error in the dtype that ours may have."""
PEERS = 2.0
"""The same for other libraries, which promise less; a wrong result is many times off."""
BATCHES = 3
"""By default the second call of a small input is replayed padded, the third as it is. All must be right."""

Row = dict[str, Any]
"""One way on one input of one model, as JSON holds it; the command line documents the keys."""
KEYS = (
    *("model", "size", "patches", "contender", "status", "problem"),
    *("ms", "ms_low", "ms_high", "speedup", "error", "bound"),
)


def check_grid(tower: Tower, grid: Grid) -> None:
    """Raise ValueError for a grid that the tower does not take."""
    family = family_of_tower(tower)
    expected = Expected(merge=family.geometry(tower).merge, width=None, device=None)
    read(expected, None, torch.empty(rows_of(grid), 1, device="meta"), torch.tensor(grid))
    if not family.videos and any(t > 1 for t, _, _ in grid):
        raise ValueError(f"{family.name} takes videos frame by frame, but a size is {grid}: pass images")


def draw_pixels(tower: Tower, grid: Grid, seed: int) -> Tensor:
    """Draw random pixels (T, P) in the tower's dtype."""
    weight = weight_of(tower)
    generator = torch.Generator(weight.device).manual_seed(seed)
    pixels_TP = torch.randn(rows_of(grid), weight[0].numel(), device=weight.device, generator=generator)
    return family_of_tower(tower).pixels(tower, pixels_TP.to(weight.dtype))


def outputs_of(output: Any) -> list[Tensor]:
    """Return the features that a model takes: merged rows (or a tower's last rows) and deepstack features."""
    if isinstance(output, Tensor):
        return [output]
    if type(output) is tuple:
        return [output[0], *output[1]]
    merged = output.last_hidden_state if output.pooler_output is None else output.pooler_output
    return [merged, *(output.get("deepstack_features") or [])]


def forward(run: Run, pixels_TP: Tensor) -> list[Tensor]:
    """Run what is timed."""
    with torch.no_grad():
        return outputs_of(run(pixels_TP))


def relative_error(value: Tensor, expected: Tensor) -> float:
    """Return |value - expected| / |expected| in L2: infinite for another shape, and for what is not finite."""
    if value.shape != expected.shape:
        return math.inf
    difference = (value.float() - expected).norm()
    norm = expected.norm()
    error = float(difference / norm if norm else difference)
    return error if math.isfinite(error) else math.inf


def largest_error(outputs: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Return the largest relative error of an output."""
    if len(outputs) != len(expected):
        return math.inf
    return max(relative_error(output, exact) for output, exact in zip(outputs, expected, strict=True))


def twin_of(tower: Tower) -> Tower:
    """Return the same tower again: modules and buffers are copies, parameters are shared."""
    return deepcopy(tower, {id(parameter): parameter for parameter in tower.parameters()})


def measure(
    model: str,
    tower: Tower,
    sizes: Mapping[str, Grid],
    ways: Sequence[Way],
    *,
    rounds: int,
    say: Callable[[str], None] = nothing,
) -> Iterator[list[Row]]:
    """Verify and time all ways on a stock tower; yield the rows of one size at a time.

    Every way gets modules of its own, and sees no other's traces. Parameters are shared: copies would not fit a GPU.
    """
    reference = deepcopy(tower).float()
    for size, grid in sizes.items():
        rows = {way.name: new_row(model, size, grid, way) for way in ways}
        with ExitStack() as stack:
            runs = open_all(stack, ways, rows, tower, grid)
            pixels_TP = _verify(runs, rows, ways, reference, tower, grid, say)
            steps = {name: partial(forward, run, pixels_TP) for name, run in runs.items()}
            add_times(rows, time_in_turns(steps, rounds, cuda=pixels_TP.is_cuda, say=say))
        yield list(rows.values())


def new_row(model: str, size: str, grid: Grid, way: Way) -> Row:
    """Return the row of a way before anything is measured."""
    row: Row = dict.fromkeys(KEYS)
    row |= {"model": model, "size": size, "patches": rows_of(grid), "contender": way.name, "status": "timed"}
    return row if way.open else row | {"status": "skipped", "problem": "; ".join(way.reasons)}


def open_all(
    stack: ExitStack, ways: Sequence[Way], rows: Mapping[str, Row], tower: Tower, grid: Grid
) -> dict[str, Run]:
    """Open every way that can run, each on a twin of the tower."""
    runs: dict[str, Run] = {}
    for way in ways:
        if way.open is not None:
            try:
                runs[way.name] = stack.enter_context(way.open(twin_of(tower), grid))
            except Exception as raised:
                rows[way.name] |= {"status": "skipped", "problem": machine.one_line(raised)[:300]}
    return runs


def add_times(rows: Mapping[str, Row], times: Mapping[str, list[float]]) -> None:
    """Write medians and speed-ups over the first way into the rows."""
    for name, of_way in times.items():
        rows[name] |= {"ms": statistics.median(of_way), "ms_low": min(of_way), "ms_high": max(of_way)}
    first_ms = next((row["ms"] for row in rows.values()), None)
    for name in times:
        rows[name]["speedup"] = first_ms and first_ms / rows[name]["ms"]


def fail(row: Row, way: Way, raised: Exception) -> None:
    """Note that a call raised: a backend is wrong, but a stock set-up may not fit the installed versions."""
    row |= {"status": "skipped" if way.is_stock else "wrong", "problem": machine.one_line(raised)[:300]}


def _verify(
    runs: dict[str, Run],
    rows: Mapping[str, Row],
    ways: Sequence[Way],
    reference: Tower,
    tower: Tower,
    grid: Grid,
    say: Callable[[str], None],
) -> Tensor:
    """Compare all runs with stock in fp32, drop those that are wrong, and return pixels to time with."""
    stock_errors: list[float] = []
    errors: dict[str, list[float]] = {way.name: [] for way in ways}
    with stock("sdpa", reference, grid) as exact, stock("sdpa", twin_of(tower), grid) as same:
        for seed in range(BATCHES):
            pixels_TP = draw_pixels(tower, grid, seed)
            with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):  # matrix products have no TF32 by default
                expected = forward(exact, pixels_TP.float())
            stock_errors.append(largest_error(forward(same, pixels_TP), expected))
            for way in ways:
                if way.name in runs:
                    say(f"verifying {way.name}, {seed + 1} of {BATCHES}")
                    try:
                        errors[way.name].append(largest_error(forward(runs[way.name], pixels_TP), expected))
                    except Exception as raised:
                        del runs[way.name]
                        fail(rows[way.name], way, raised)
    for way in ways:
        row = rows[way.name]
        factor = PEERS if way.is_stock else PROMISED
        row["bound"] = way.bound or max(factor * max(stock_errors), ROUNDING[weight_of(tower).dtype])
        error = max(errors[way.name], default=math.inf)
        row["error"] = error if math.isfinite(error) else None
        if way.name in runs and not error <= row["bound"]:
            del runs[way.name]
            problem = f"relative error {error:.1e}, at most {row['bound']:.1e} is allowed"
            row |= {"status": "wrong", "problem": problem}
    return pixels_TP
