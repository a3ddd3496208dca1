"""Where the time of one step goes: its kernels (on CPU its operators) grouped into parts of a tower."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity
from torch.profiler import profile as torch_profile

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
    """One part of a forward. us: microseconds. share: of the whole, 0 to 1. per_layer: kernels per layer."""

    part: str
    us: float
    share: float
    kernels: int
    per_layer: float


def profile(step: Callable[[], Any], depth: int, *, cuda: bool) -> tuple[Part, ...]:
    """Run once to warm up and once under torch's profiler; the parts that took time, the longest first."""
    step()
    with torch_profile(activities=[ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * cuda) as recorded:
        step()
        if cuda:
            torch.cuda.synchronize()
    times, counts = defaultdict[str, float](float), Counter[str]()
    for event in recorded.key_averages():
        if (event.device_type.name == "CUDA") == cuda:
            part = part_of(event.key)
            times[part] += event.self_device_time_total if cuda else event.self_cpu_time_total
            counts[part] += event.count
    total = sum(times.values()) or 1.0
    return tuple(
        Part(part=part, us=us, share=us / total, kernels=counts[part], per_layer=counts[part] / depth)
        for part, us in sorted(times.items(), key=lambda item: -item[1])
    )


def part_of(kernel: str) -> str:
    """The part that a kernel's name belongs to."""
    part = next((part for part, pattern in PARTS.items() if pattern.search(kernel)), "other")
    return "GEMM" if part == "activation" and _EPILOGUE.search(kernel) else part
