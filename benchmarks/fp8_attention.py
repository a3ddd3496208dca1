"""Time the attention of one layer in FP8 and in bf16, from the packed projection to attended rows.

python benchmarks/fp8_attention.py [rows, or segments x rows, ...]

Needs a CUDA device. In bf16, q and k are rotated in place before the backend runs. FP8 includes everything from
centring to unpadding. Times are medians of replays of a CUDA graph of one layer, with contenders interleaved. Errors
are relative L2 to fp64 over the first 64 rows.
"""

import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from measuring import in_turn

from hf_vit_accel.backends import BACKENDS, FP8, Plan, Request, plan_alone
from hf_vit_accel.config import Fp8Config, Settings
from hf_vit_accel.layout import Segments
from hf_vit_accel.ops.embedding import rope_

HEADS = 16
ROUNDS = 7
REPLAYS = 5
BF16 = ("flashinfer_cudnn", "flash_attention_3")

Tables = Sequence[torch.Tensor]
"""cos and sin (T, D)."""
Run = Callable[[], torch.Tensor]
"""Compute the attended rows (T, H, D)."""


def contenders(qkv: torch.Tensor, tables: Tables, lengths: list[int]) -> dict[str, Run]:
    """Return a function for every backend that runs here.

    Args:
        qkv: the packed projection (T, 3, H, D)
        tables: cos and sin of the rotation
        lengths: the rows of every segment
    """
    dim = qkv.shape[-1]
    segments = Segments(np.array(lengths, dtype=np.int32))
    request = Request(
        device=qkv.device,
        dtype=qkv.dtype,
        heads=HEADS,
        head_dim=dim,
        scale=dim**-0.5,
        packed=True,
        max_seqlen=max(lengths),
    )

    def in_bf16(plan: Plan, rotated: torch.Tensor) -> torch.Tensor:
        attended: torch.Tensor = plan.attend(*rope_(rotated, *tables).unbind(1))
        return attended

    runs: dict[str, Run] = {}
    for backend in BACKENDS:
        if backend.name in BF16 and not backend.reasons_against(request):
            plan = plan_alone(backend, segments, request)
            copy = qkv.clone()  # the rotation overwrites it
            runs[backend.name] = lambda plan=plan, copy=copy: in_bf16(plan, copy)
    kept = FP8.keep(Settings(fp8=Fp8Config()), qkv.device, layers=1, heads=HEADS)
    fp8 = plan_alone(FP8, segments, replace(request, kept=kept))
    runs[FP8.name] = lambda: fp8.backend.attend_layers(fp8, 1, rope_)[0](qkv, *tables)
    return runs


def captured(run: Run) -> Callable[[], None]:
    """Capture one call in a CUDA graph and return its replay."""
    stream = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def microseconds(replay: Callable[[], None]) -> float:
    """Measure the mean microseconds of a replay."""
    start = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    replay()
    start.record()
    for _ in range(REPLAYS):
        replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / REPLAYS * 1e3


def exact(qkv: torch.Tensor, tables: Tables, length: int) -> torch.Tensor:
    """Attend the first 64 rows of the first segment in fp64."""
    q, k, v = rope_(qkv[:length].clone(), *tables).double().unbind(1)
    weights = (torch.einsum("qhd,khd->hqk", q[:64], k) * q.shape[-1] ** -0.5).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v)


def measure(dim: int, layout: str) -> None:
    """Time one head dim and layout and print a line."""
    count, _, rows = layout.rpartition("x")
    lengths = [int(rows)] * int(count or 1)
    torch.manual_seed(0)
    qkv = torch.randn(sum(lengths), 3, HEADS, dim, device="cuda").bfloat16()
    angles = torch.randn(sum(lengths), dim // 2, device="cuda").repeat(1, 2)
    tables = (angles.cos(), angles.sin())
    expected = exact(qkv, [table[: lengths[0]] for table in tables], lengths[0])
    runs = contenders(qkv, tables, lengths)
    # Errors come from the first run: every run in bf16 rotates its copy further.
    outputs = {name: run()[:64].double() for name, run in runs.items()}
    errors = {name: float((output - expected).norm() / expected.norm()) for name, output in outputs.items()}
    replays = {name: captured(run) for name, run in runs.items()}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for index in range(ROUNDS):
        for name in in_turn(runs, index):
            times[name].append(microseconds(replays[name]))
    medians = {name: statistics.median(of_run) for name, of_run in times.items()}
    cells = ", ".join(f"{name} {us:.0f} us ({errors[name]:.1e})" for name, us in medians.items())
    print(f"D {dim}, {layout}: {cells}; {medians[BF16[0]] / medians[FP8.name]:.2f} times {BF16[0]}", flush=True)


@torch.no_grad()
def main(layouts: list[str]) -> None:
    """Time every head dim and layout."""
    for dim in (72, 80):
        for layout in layouts:
            measure(dim, layout)


if __name__ == "__main__":
    if {"-h", "--help"} & {*sys.argv[1:]}:
        print(__doc__)
        raise SystemExit
    main(sys.argv[1:] or ["14416", "9216", "6400", "4096", "4x4096", "16x1024"])
