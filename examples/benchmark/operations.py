"""Times every operation that can be trained, forward and backward, beside stock's autograd; needs a CUDA device.

python examples/benchmark/operations.py [rows]
"""

import sys
from collections.abc import Callable
from typing import Any

import torch

from hf_vit_accel.ops.column_sum import column_sum, column_sum_reference
from hf_vit_accel.ops.gelu_backward import GeluMlp, gelu_mlp_reference
from hf_vit_accel.ops.linear import LinearFunction, linear_reference
from hf_vit_accel.ops.norm_backward import AddNormFunction, Norm, add_norm_reference
from hf_vit_accel.ops.positions import AddPositions, add_positions_reference
from hf_vit_accel.ops.rope import Rope, rope_reference
from hf_vit_accel.ops.swiglu_backward import SwigluMlp, swiglu_mlp_reference
from hf_vit_accel.ops.window_attention import window_attention

ROWS = int(sys.argv[1]) if len(sys.argv) > 1 else 16384
HEADS = 16
Function = Callable[..., Any]


def draw(*shape: int) -> torch.Tensor:
    """A tensor to be trained; a weight so that its product keeps the rows' size."""
    values = torch.randn(shape, device="cuda") * (shape[-1] ** -0.5 if len(shape) == 2 and shape[0] != ROWS else 1.0)
    return values.to(torch.bfloat16).requires_grad_()


def microseconds(function: Callable[[], Any], repeats: int = 20) -> float:
    """The median, with a cold L2 cache before each call."""
    flush = torch.empty(64 << 20, dtype=torch.int32, device="cuda")
    times = []
    for _ in range(repeats + 3):
        flush.zero_()
        torch.cuda._sleep(1_000_000)  # so that the launches are queued before the first one starts
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        function()
        stop.record()
        torch.cuda.synchronize()
        times.append(1000 * start.elapsed_time(stop))
    return sorted(times[3:])[repeats // 2]


def measure(function: Function, tensors: list[Any]) -> tuple[float, float]:
    """Microseconds forward, and backward."""
    forward = microseconds(lambda: function(*tensors))
    outputs = function(*tensors)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    if not outputs[0].requires_grad:
        return forward, 0.0
    trained = [x for x in tensors if isinstance(x, torch.Tensor) and x.requires_grad]
    incoming = [torch.randn_like(out) for out in outputs]
    return forward, microseconds(lambda: torch.autograd.grad(outputs, trained, incoming, retain_graph=True))


def compare(
    name: str, ours: Function, stock: Function, tensors: list[Any], work: tuple[float, float], unit: str
) -> None:
    """One line; work: bytes or operations, forward and backward, of which a rate is made."""
    scale = 1e3 if unit == "GB/s" else 1e6  # from bytes or operations in a microsecond
    cells = []
    for (mine, theirs), amount in zip(
        zip(measure(ours, tensors), measure(stock, tensors), strict=True), work, strict=True
    ):
        if mine:
            cells.append(
                f"{mine:7.0f} us {amount / mine / scale:6.0f} {unit:8} (stock {theirs:6.0f} us, {theirs / mine:4.2f}x)"
            )
    print(f"{name:28}", " | ".join(cells), flush=True)


def main() -> None:
    """The shapes of Qwen3-VL's 8B and Qwen2.5-VL's 7B towers."""
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {ROWS} rows; forward | backward")
    for width, inner, dim, rms in ((1152, 4304, 72, False), (1280, 3420, 80, True)):
        size, norm_bias = 2.0 * ROWS * width, None if rms else draw(width)
        x, delta, scale = draw(ROWS, width), draw(ROWS, width), draw(width)
        compare(
            f"add_norm {width}",
            AddNormFunction.apply,
            add_norm_reference,
            [x, delta, scale, norm_bias, 1e-6, rms],
            (4 * size, 4 * size),
            "GB/s",
        )
        qkv, angles = draw(ROWS, 3, HEADS, dim), torch.randn(ROWS, dim // 2, device="cuda").repeat(1, 2)
        compare(
            f"rope {dim}", Rope.apply, rope_reference, [qkv, angles.cos(), angles.sin()], (6 * size, 6 * size), "GB/s"
        )
        product = 2.0 * ROWS * width * 3 * width
        compare(
            f"linear {width} to {3 * width}",
            LinearFunction.apply,
            linear_reference,
            [x, draw(3 * width, width), draw(3 * width)],
            (product, 2 * product),
            "TFLOP/s",
        )
        wide = draw(ROWS, inner).detach()
        for rows in (wide, wide[:, :width].contiguous()):
            name, moved = f"column_sum {rows.shape[1]}", 2.0 * rows.numel()
            compare(name, column_sum, column_sum_reference, [rows], (moved, 0.0), "GB/s")
        product = 2.0 * ROWS * width * inner
        up = [draw(inner, width), draw(inner)]
        down = [draw(width, inner), draw(width)]
        if rms:
            weights, work = [x, up[0], draw(inner, width), up[1], draw(inner), *down], (3 * product, 6 * product)
            compare("swiglu_mlp", SwigluMlp.apply, swiglu_mlp_reference, weights, work, "TFLOP/s")
            again = [*weights, None, False, Norm(delta.detach(), scale, norm_bias, 1e-6, rms)]
            compare("  norm made again", SwigluMlp.apply, swiglu_mlp_reference, again, work, "TFLOP/s")
            offsets = torch.arange(0, ROWS + 1, 64, dtype=torch.int32, device="cuda")
            compare(
                "window_attention, 64 rows",
                window_attention,
                windows_by_sdpa,
                [qkv, angles.cos(), angles.sin(), offsets, dim**-0.5],
                (4 * size, 7 * size),
                "GB/s",
            )
        else:
            for kind in ("gelu_tanh", "quick_gelu"):
                layer, work = [x, *up, *down, kind], (2 * product, 4 * product)
                compare(f"gelu_mlp {kind}", GeluMlp.apply, gelu_mlp_reference, layer, work, "TFLOP/s")
            indices = torch.randint(0, 2304, (ROWS, 4), dtype=torch.int32, device="cuda")
            taps = [x, draw(2304, width), indices, torch.rand(ROWS, 4, device="cuda")]
            compare("add_positions", AddPositions.apply, add_positions_reference, taps, (2 * size, size), "GB/s")


def windows_by_sdpa(qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, _: torch.Tensor, scale: float) -> Any:
    """Windows of 64 rows as a batch, which is faster than stock's own call per window."""
    q, k, v = rope_reference(qkv, cos, sin).unflatten(0, (-1, 64)).permute(2, 0, 3, 1, 4)
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=scale).transpose(1, 2).flatten(0, 1)


if __name__ == "__main__":
    main()
