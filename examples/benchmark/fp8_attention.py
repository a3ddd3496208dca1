"""Attention of one layer in FP8 beside bf16, from the packed projection to attended rows; needs a CUDA device.

python examples/benchmark/fp8_attention.py [rows, or segments x rows, ...]

In bf16: rotation in place, then the backend. In FP8: everything, from centring to unpadding. Times are medians of
replays of a CUDA graph of one layer, contenders interleaved; errors are relative L2 to fp64 over the first 64 rows.
"""

import statistics
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from hf_vit_accel.backends import BACKENDS, FP8, Request, plan_alone
from hf_vit_accel.layout import Segments
from hf_vit_accel.ops.fp8.scales import Scales
from hf_vit_accel.ops.rope import rope_

HEADS, ROUNDS, REPLAYS = 16, 7, 5
BF16 = ("flashinfer_cudnn", "flash_attention_3")


def contenders(qkv: torch.Tensor, tables: Any, lengths: list[int]) -> dict[str, Callable[[], torch.Tensor]]:
    """Attended rows (T, H, D) of a packed projection (T, 3, H, D), by every way that runs here."""
    dim, segments = qkv.shape[-1], Segments(np.array(lengths, dtype=np.int32))
    request = Request(
        device=qkv.device,
        dtype=qkv.dtype,
        heads=HEADS,
        head_dim=dim,
        scale=dim**-0.5,
        packed=True,
        max_seqlen=max(lengths),
    )

    def plain(plan: Any, own: torch.Tensor) -> torch.Tensor:
        return plan.attend(*rope_(own, *tables).unbind(1))  # type: ignore[no-any-return]

    found: dict[str, Callable[[], torch.Tensor]] = {}
    for backend in BACKENDS:
        if backend.name in BF16 and not backend.reasons_against(request):
            plan, own = plan_alone(backend, segments, request), qkv.clone()
            found[backend.name] = lambda plan=plan, own=own: plain(plan, own)
    scales = Scales(device=qkv.device, layers=1, heads=HEADS)
    fp8 = plan_alone(FP8, segments, replace(request, fp8=scales))
    found[FP8.name] = lambda: fp8.backend.attend_layers(fp8, 1, rope_)[0](qkv, *tables)
    return found


def captured(run: Callable[[], torch.Tensor]) -> Callable[[], None]:
    """A replay of one call."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def microseconds(replay: Callable[[], None]) -> float:
    """One replay, on average."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    replay()
    start.record()
    for _ in range(REPLAYS):
        replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / REPLAYS * 1e3


def exact(qkv: torch.Tensor, tables: Any, length: int) -> torch.Tensor:
    """The first 64 rows in fp64."""
    q, k, v = rope_(qkv[:length].clone(), *tables).double().unbind(1)
    weights = (torch.einsum("qhd,khd->hqk", q[:64], k) * q.shape[-1] ** -0.5).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v)


@torch.no_grad()
def main(layouts: list[str]) -> None:
    """Print a line for each head dim and layout."""
    for dim in (72, 80):
        for layout in layouts:
            count, _, rows = layout.rpartition("x")
            lengths = [int(rows)] * int(count or 1)
            torch.manual_seed(0)
            qkv = torch.randn(sum(lengths), 3, HEADS, dim, device="cuda").bfloat16()
            angles = torch.randn(sum(lengths), dim // 2, device="cuda").repeat(1, 2)
            tables = angles.cos(), angles.sin()
            expected = exact(qkv, [table[: lengths[0]] for table in tables], lengths[0])
            runs = contenders(qkv, tables, lengths)
            found = {name: run()[:64].double() for name, run in runs.items()}  # before rotation in place goes on
            errors = {name: float((rows - expected).norm() / expected.norm()) for name, rows in found.items()}
            replays = {name: captured(run) for name, run in runs.items()}
            times: dict[str, list[float]] = {name: [] for name in runs}
            for index in range(ROUNDS):
                for name in list(runs)[:: -1 if index % 2 else 1]:
                    times[name].append(microseconds(replays[name]))
            best = {name: statistics.median(each) for name, each in times.items()}
            cells = ", ".join(f"{name} {us:.0f} us ({errors[name]:.1e})" for name, us in best.items())
            print(f"D {dim}, {layout}: {cells}; {best[BF16[0]] / best[FP8.name]:.2f} times {BF16[0]}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:] or ["14416", "9216", "6400", "4096", "4x4096", "16x1024"])
