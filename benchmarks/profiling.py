"""Say where the time of one forward goes: group its kernels (on a CPU its operators) into parts of a tower.

python benchmarks/profiling.py --model qwen3-vl-8b --size "16 x 512²" --backend flash_attention_3
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
import typer
from measuring import DEVICE, DTYPE
from torch.profiler import ProfilerActivity
from torch.profiler import profile as torch_profile

from hf_vit_accel.tools.bench.measure import draw_pixels, forward
from hf_vit_accel.tools.bench.towers import build_tower, family_of_tower, parse_size
from hf_vit_accel.tools.bench.ways import choose

PARTS: Mapping[str, re.Pattern[str]] = {
    part: re.compile(pattern, re.IGNORECASE)
    for part, pattern in {
        "attention": r"flash|fmha|sdpa|attention",
        "rope": r"(?<![a-z])rope|rotary",
        "norm": r"norm|rsqrt",
        "activation": r"gelu|silu|swiglu|sigmoid",
        "positions": r"position|interp|embedding",
        "GEMM": r"gemm|gemv|nvjet|cutlass|cublas|splitk|convolve|conv3d|convolution|addmm|::b?mm$|linear",
    }.items()
}
"""Part -> what the names of its kernels contain, the first match counts; the rest is "other". Attention comes first
because FlashAttention's kernels are named after CUTLASS too. A GEMM with an activation in its epilogue is a GEMM."""
_EPILOGUE = re.compile(r"gemm|nvjet|cutlass|addmm", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class Part:
    """One part of a step.

    Attributes:
        part: Its name.
        us: Microseconds.
        share: Of the step's time, 0 to 1.
        kernels: Kernels launched.
        per_layer: Kernels per layer.
    """

    part: str
    us: float
    share: float
    kernels: int
    per_layer: float


def profile(step: Callable[[], object], depth: int, *, cuda: bool) -> tuple[Part, ...]:
    """Run a step once to warm up and once under torch's profiler.

    Returns:
        The parts that took time, the longest first.
    """
    step()
    activities = [ProfilerActivity.CPU]
    if cuda:
        activities.append(ProfilerActivity.CUDA)
    with torch_profile(activities=activities) as recorded:
        step()
        if cuda:
            torch.cuda.synchronize()
    times: defaultdict[str, float] = defaultdict(float)
    counts: Counter[str] = Counter()
    for event in recorded.key_averages():
        if (event.device_type.name == "CUDA") == cuda:
            part = part_of(event.key)
            times[part] += event.self_device_time_total if cuda else event.self_cpu_time_total
            counts[part] += event.count
    total = sum(times.values()) or 1.0
    parts = []
    for part, us in sorted(times.items(), key=lambda item: -item[1]):
        kernels = counts[part]
        parts.append(Part(part=part, us=us, share=us / total, kernels=kernels, per_layer=kernels / depth))
    return tuple(parts)


def part_of(kernel: str) -> str:
    """Return the part that a kernel's name belongs to."""
    part = next((part for part, pattern in PARTS.items() if pattern.search(kernel)), "other")
    return "GEMM" if part == "activation" and _EPILOGUE.search(kernel) else part


def main(model: str = "qwen3-vl-8b", size: str = "16 x 512²", backend: str = "auto") -> None:
    """Print the parts of one forward, the longest first."""
    tower = build_tower(model, DEVICE, DTYPE)
    _, grid = parse_size(size)
    (way,) = choose(tower, [backend], [])
    if way.open is None:
        raise typer.BadParameter("; ".join(way.reasons))
    with way.open(tower, grid) as run:
        parts = profile(
            partial(forward, run, draw_pixels(tower, grid, 0)),
            len(family_of_tower(tower).parts(tower).blocks),
            cuda=DEVICE.type == "cuda",
        )
    for part in parts:
        print(f"{part.part:10}  {part.us:9.0f} us  {part.share:5.1%}  {part.per_layer:6.1f} per layer")


if __name__ == "__main__":
    typer.run(main)
