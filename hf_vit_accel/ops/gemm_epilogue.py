"""Products with what follows them in their epilogue, by QuACK: an MLP's activation, its gradient, the residual stream.

A product's result is still in registers when its epilogue runs: what an activation of its own would read and write
again (564 MB for the gradient of a layer of Qwen3-VL at 16384 rows) is read and written once, behind the products of
the next tile. Results are rounded once, at the end, where stock rounds twice.
`T` rows, `E` width, `F` width of the MLP (or of attention's heads), `Z` what the first product makes of a row: F, or
for a SwiGLU 2F, gate and up taking turns.
"""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from functools import lru_cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_vit_accel import machine
from hf_vit_accel.ops.activation import ACTIVATIONS
from hf_vit_accel.ops.launch import for_descriptor

PACKAGE = machine.Package(
    module="quack", distribution="quack-kernels", install="pip install --pre flash-attn-4 brings it (Hopper)"
)
KINDS = "gelu_tanh", "quick_gelu", "swiglu", "residual"
"""Activations, and the addition of the residual stream."""
LEAST_ROWS = 12288
"""From how many rows on they are used: below, what the host does for a call (0.1 ms) takes longer than what is saved.

H200, forward and backward of 16 x 512², from CUDA graphs, without and with, ms: Qwen3-VL 115.8 and 113.4, Qwen2.5-VL
131.0 and 128.5, Qwen2-VL 153.7 and 148.3; at 4096 rows eagerly up to 9% more.
"""


def activate(z_TZ: Tensor, kind: str) -> Tensor:
    """The activation, (T, F), of what the first product made."""
    if kind == "swiglu":
        return F.silu(z_TZ[:, ::2]) * z_TZ[:, 1::2]
    return ACTIVATIONS[kind](z_TZ)


def gemm_act_reference(x_TE: Tensor, weight_ZE: Tensor, bias_Z: Tensor | None, kind: str) -> tuple[Tensor, Tensor]:
    """z = x W^T + b, (T, Z), and its activation, (T, F)."""
    z_TZ = F.linear(x_TE, weight_ZE, bias_Z)
    return z_TZ, activate(z_TZ, kind)


def gemm_dact_reference(dy_TE: Tensor, weight_EF: Tensor, z_TZ: Tensor, kind: str) -> tuple[Tensor, Tensor, Tensor]:
    """From the gradient of y = h W^T, with h the activation of z: that of z, (T, Z), h itself, and the sum of dz, (Z,).

    The sum is in fp32.
    """
    with torch.enable_grad():
        z_TZ = z_TZ.detach().requires_grad_()
        h_TF = activate(z_TZ, kind)
        (dz_TZ,) = torch.autograd.grad(h_TF, z_TZ, dy_TE @ weight_EF)
    return dz_TZ, h_TF.detach(), dz_TZ.sum(0, dtype=torch.promote_types(dz_TZ.dtype, torch.float32))


def gemm_add_reference(
    h_TF: Tensor, weight_EF: Tensor, bias_E: Tensor | None, x_TE: Tensor, out_TE: Tensor | None = None
) -> Tensor:
    """x + h W^T + b, (T, E), rounded once; out_TE, which may be x, receives it."""
    wide = torch.promote_types(x_TE.dtype, torch.float32)
    made_TE = F.linear(h_TF.to(wide), weight_EF.to(wide), None if bias_E is None else bias_E.to(wide))
    made_TE = (x_TE + made_TE).to(x_TE.dtype)
    return made_TE if out_TE is None else out_TE.copy_(made_TE)


def serves(x_TE: Tensor, kind: str) -> bool:
    """Whether it is faster for these rows, and right here."""
    return x_TE.shape[0] >= LEAST_ROWS and why_not(x_TE.device, x_TE.dtype, kind) is None


@lru_cache(maxsize=16)
def _config(kind: str, width: int) -> Any:
    """Two tiles take turns: one's epilogue runs during the other's product. width: of the product's result.

    A residual stream of 1152, six tiles of 192, takes 70 us after attention and 74 with tiles of 160; of 1280, 88 and
    84 (H200, 16384 rows). cuBLAS takes 78 and 95, and the norm that adds 12 to 24 more than the norm alone. A SwiGLU of
    3424 takes 388 us with tiles of 160 and 413 with those of 128, its gradient 400 and 324.
    """
    from quack.gemm_config import GemmConfig

    tile_n = 192 if kind == "residual" and width % 192 == 0 else 128 if kind == "swiglu_gradient" else 160
    tile = dict(tile_m=128, tile_n=tile_n, cluster_m=2, cluster_n=1)
    return GemmConfig(**tile, pingpong=True, is_dynamic_persistent=False, device_capacity=9)


@lru_cache(maxsize=len(KINDS))
def _epilogues(kind: str) -> tuple[Any, Any]:
    """What QuACK computes behind the first product, and behind that of the gradient.

    It keys what it compiled by the functions' names: one that computes something else needs another name. tanh(u) is
    2 sigmoid(2u) - 1, without the cancellation, and the 11 bits, of its own instruction.
    """
    from quack import activation
    from quack.epilogue.frontend import gemm_epilogue
    from quack.epilogue.math import pack, unpack
    from quack.epilogue.ops import RowVecLoad, RowVecReduce

    def gelu_by_sigmoid(acc, bias):
        z = acc + bias
        return {"D": z, "h": z * activation.sigmoid(z * (z * z * 0.0713548162726009 + 1.5957691216057308))}

    def gelu_by_sigmoid_gradient(acc, c):
        square = c * c
        gate = activation.sigmoid(c * (square * 0.0713548162726009 + 1.5957691216057308))
        h = c * gate
        dz = acc * (h * (1.0 - gate) * (square * 0.2140644488178027 + 1.5957691216057308) + gate)
        return {"D": dz, "h": h, "dbias": dz}

    def quick_gelu(acc, bias):
        z = acc + bias
        return {"D": z, "h": activation.quick_gelu(z)}

    def quick_gelu_gradient(acc, c):
        dz, h = activation.dquick_gelu(c, acc)
        return {"D": dz, "h": h, "dbias": dz}

    def swiglu(acc, bias):
        gate, up = unpack(acc + bias)
        return {"D": pack(gate, up), "h": activation.swiglu(gate, up)}

    def swiglu_gradient(acc, c):
        gate, up = unpack(c)
        dgate, dup, h = activation.dswiglu(gate, up, acc)
        return {"D": pack(dgate, dup), "h": h, "dgate": dgate, "dup": dup}

    forward, backward = {
        "gelu_tanh": (gelu_by_sigmoid, gelu_by_sigmoid_gradient),
        "quick_gelu": (quick_gelu, quick_gelu_gradient),
        "swiglu": (swiglu, swiglu_gradient),
    }[kind]
    pairs = kind == "swiglu"
    sums = {name: RowVecReduce(name) for name in (("dgate", "dup") if pairs else ("dbias",))}
    bias = {"bias": RowVecLoad("bias")}
    return (
        gemm_epilogue(outputs=("h",), ops=bias, mode="acc_pair" if pairs else None)(forward),
        gemm_epilogue(outputs=("h",), reduces=sums, mode="packed_cd_b16x2" if pairs else None)(backward),
    )


@lru_cache(maxsize=1)
def _addition() -> Any:
    """What QuACK computes behind a product that is added to the residual stream, which it names `c`."""
    from quack.epilogue.frontend import gemm_epilogue
    from quack.epilogue.ops import RowVecLoad

    def bias_and_residual(acc, c, bias):
        return {"D": acc + bias + c}

    return gemm_epilogue(ops={"bias": RowVecLoad("bias")})(bias_and_residual)


def _run(mod: Any, kind: str, x: Tensor, weight: Tensor, *rest: Any, **more: Any) -> dict[str, Tensor]:
    """A product x W with its epilogue. How it is launched is kept for each number of rows: of the last some hundred."""
    for held in (mod._plan_cache, mod._call_cache):
        if len(held) > 256:
            held.clear()
    return mod(x, weight, *rest, config=_config(kind, weight.shape[1]), tuned=False, **more)


_guarded = partial(machine.guarded, machine.EPILOGUES)


@_guarded
def gemm_act(x_TE: Tensor, weight_ZE: Tensor, bias_Z: Tensor | None, kind: str) -> tuple[Tensor, Tensor]:
    """`gemm_act_reference` as one kernel; the activation is that of z before it is rounded."""
    width = len(weight_ZE)
    z_TZ = x_TE.new_empty(len(x_TE), width)
    h_TF = x_TE.new_empty(len(x_TE), width // 2 if kind == "swiglu" else width)
    bias_Z = weight_ZE.new_zeros(width) if bias_Z is None else for_descriptor(bias_Z)
    x_TE, weight_ZE = for_descriptor(x_TE), for_descriptor(weight_ZE)
    _run(_epilogues(kind)[0], kind, x_TE, weight_ZE.t(), out={"D": z_TZ, "h": h_TF}, bias=bias_Z)
    return z_TZ, h_TF


@_guarded
def gemm_dact(dy_TE: Tensor, weight_EF: Tensor, z_TZ: Tensor, kind: str) -> tuple[Tensor, Tensor, Tensor]:
    """`gemm_dact_reference` as one kernel and the sum of what its tiles of rows add up to."""
    dy_TE, weight_EF, z_TZ = map(for_descriptor, (dy_TE, weight_EF, z_TZ))
    dz_TZ, h_TF = torch.empty_like(z_TZ), z_TZ.new_empty(len(z_TZ), weight_EF.shape[1])
    found = _run(_epilogues(kind)[1], f"{kind}_gradient", dy_TE, weight_EF, z_TZ, out={"D": dz_TZ, "h": h_TF})
    if kind == "swiglu":
        return dz_TZ, h_TF, torch.stack((found["dgate"].flatten(), found["dup"].flatten()), dim=1).flatten()
    return dz_TZ, h_TF, found["dbias"].flatten()


@_guarded
def gemm_add(
    h_TF: Tensor, weight_EF: Tensor, bias_E: Tensor | None, x_TE: Tensor, out_TE: Tensor | None = None
) -> Tensor:
    """`gemm_add_reference` as one kernel. A tile of x is read by who writes that tile: so both may be the same."""
    out_TE = torch.empty_like(x_TE) if out_TE is None else out_TE
    bias_E = weight_EF.new_zeros(len(weight_EF)) if bias_E is None else for_descriptor(bias_E)
    h_TF, weight_EF = for_descriptor(h_TF), for_descriptor(weight_EF)
    _run(_addition(), "residual", h_TF, weight_EF.t(), x_TE, out={"D": out_TE}, bias=bias_E)
    return out_TE


def add_product_(h_TF: Tensor, weight_EF: Tensor, bias_E: Tensor | None, x_TE: Tensor) -> None:
    """`gemm_add` in place: nothing is left that the next norm would add."""
    gemm_add(h_TF, weight_EF, bias_E, x_TE, x_TE)


def why_not(device: torch.device, dtype: torch.dtype, kind: str) -> str | None:
    """Why one of `KINDS` is not in the epilogue of its product; None if it can be."""
    if device.type != "cuda":
        return f"the tensors are on {device.type}, QuACK needs CUDA"
    if dtype != torch.bfloat16:  # its sigmoid is as exact as that
        return f"the dtype is {str(dtype).removeprefix('torch.')}, epilogues are for bfloat16"
    if (found := machine.cuda_capability(device.index)) != (9, 0):
        return f"the GPU's compute capability is {found[0]}.{found[1]}, epilogues are measured on 9.0"
    return machine.why_missing(PACKAGE) or _tried(device, kind)


@machine.probe
def _tried(device: torch.device, kind: str) -> str | None:
    return machine.run_isolated(_try, device, kind)


def _try(device: torch.device, kind: str) -> str | None:
    """What is wrong with them here: each runs once, beside plain torch in fp64. So they are compiled, too."""
    # Of two widths of the residual stream, each takes a tile of its own, see `_config`, and several of them.
    tries = (_try_width(device, kind, inner) for inner in ((192 * 2, 104 * 3) if kind == "residual" else (104,)))
    return next(filter(None, tries), None)


def _try_width(device: torch.device, kind: str, inner: int) -> str | None:
    generator = torch.Generator("cpu").manual_seed(0)
    rows, width = 300, 64
    z = inner * (1 + (kind == "swiglu"))

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu").to(device, torch.bfloat16)

    on = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
    with on, torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its compiler's, about its own code
        x, dy = draw(rows, width), draw(rows, width)
        weight, bias, down = draw(z, width), draw(z), draw(width, inner)
        weight, bias, down = weight / width**0.5, bias - 2, down / width**0.5  # where gates close, formulas cancel
        try:
            if kind == "residual":
                stream = draw(rows, z)
                arguments = x, weight, bias, stream
                exact = [gemm_add_reference(*(each.double() for each in arguments))] * 2
                found = [gemm_add(*arguments), gemm_add(*arguments, stream)]
            else:
                found = [*gemm_act(x, weight, bias, kind)]
                found += gemm_dact(dy, down, found[0], kind)
                exact = [*gemm_act_reference(x.double(), weight.double(), bias.double(), kind)]
                exact += gemm_dact_reference(dy.double(), down.double(), found[0].double(), kind)
        except machine.Fault as fault:
            return f"QuACK's products {fault.why}"
        pairs = zip(found, exact, strict=True)
        worst = max(float((one.double() - other).norm() / other.norm()) for one, other in pairs)
    return None if worst < 0.01 else f"QuACK's products are wrong here: relative error {worst:.1e}"
