"""The first product of an MLP with its activation in the product's epilogue, and the gradient of both, by QuACK.

A product's result is still in registers when its epilogue runs: what an activation of its own would read and write
again (564 MB for the gradient of a layer of Qwen3-VL at 16384 rows) is read and written once, behind the products of
the next tile. Results are rounded once, at the end, where stock rounds twice.
`T` rows, `E` width, `F` width of the MLP, `Z` what the first product makes of a row: F, or for a SwiGLU 2F, gate and up
taking turns.
"""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F

from hf_vit_accel import env
from hf_vit_accel.ops.launch import for_descriptor

PACKAGE = env.Package(
    module="quack", distribution="quack-kernels", install="pip install --pre flash-attn-4 brings it (Hopper)"
)
KINDS = {"gelu_tanh": "gelu_tanh_approx", "quick_gelu": "quick_gelu", "swiglu": "swiglu"}
"""Activations, with QuACK's names for them."""
LEAST_ROWS = 12288
"""From how many rows on they are used: below, what the host does for a call (0.1 ms) takes longer than what is saved.

H200, an MLP forward and backward at 16384 rows, without and with, us: Qwen3-VL 1832 and 1644, Qwen2-VL 2324 and 2107,
Qwen2.5-VL 2317 and 2136.
"""


def activate(z_TZ: torch.Tensor, kind: str) -> torch.Tensor:
    """The activation, (T, F), of what the first product made."""
    if kind == "swiglu":
        return F.silu(z_TZ[:, ::2]) * z_TZ[:, 1::2]
    if kind == "quick_gelu":
        return z_TZ * torch.sigmoid(1.702 * z_TZ)
    return F.gelu(z_TZ, approximate="tanh")


def gemm_act_reference(
    x_TE: torch.Tensor, weight_ZE: torch.Tensor, bias_Z: torch.Tensor | None, kind: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """z = x W^T + b, (T, Z), and its activation, (T, F)."""
    z_TZ = F.linear(x_TE, weight_ZE, bias_Z)
    return z_TZ, activate(z_TZ, kind)


def gemm_dact_reference(
    dy_TE: torch.Tensor, weight_EF: torch.Tensor, z_TZ: torch.Tensor, kind: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """From the gradient of y = h W^T, with h the activation of z: that of z, (T, Z), h itself, and the sum of dz, (Z,).

    The sum is in fp32.
    """
    with torch.enable_grad():
        z_TZ = z_TZ.detach().requires_grad_()
        h_TF = activate(z_TZ, kind)
        (dz_TZ,) = torch.autograd.grad(h_TF, z_TZ, dy_TE @ weight_EF)
    return dz_TZ, h_TF.detach(), dz_TZ.sum(0, dtype=torch.promote_types(dz_TZ.dtype, torch.float32))


def serves(x_TE: torch.Tensor, kind: str) -> bool:
    """Whether it is faster for these rows, and right here."""
    return len(x_TE) >= LEAST_ROWS and why_not(x_TE.device, x_TE.dtype, kind) is None


@cache
def _config(kind: str) -> Any:
    """Two tiles take turns: one's epilogue runs during the other's product."""
    from quack.gemm_config import GemmConfig

    tile = dict(tile_m=128, tile_n=128 if kind == "swiglu" else 160, cluster_m=2, cluster_n=1)
    return GemmConfig(**tile, pingpong=True, is_dynamic_persistent=False, device_capacity=9)


@cache
def _forward(kind: str, biased: bool) -> Any:
    from quack.epilogue.library import linear_act_mod

    gated = kind == "swiglu"
    return linear_act_mod(KINDS[kind], gated=gated, has_c=False, has_rowvec=biased, has_colvec=False)


@cache
def _backward(kind: str) -> Any:
    """QuACK keys what it compiles by the name of the function: one that computes something else needs another name."""
    from quack import activation
    from quack.epilogue.frontend import gemm_epilogue
    from quack.epilogue.math import pack, unpack
    from quack.epilogue.ops import RowVecReduce

    sums = {name: RowVecReduce(name) for name in (("dgate", "dup") if kind == "swiglu" else ("dbias",))}

    def gelu_tanh_gradient(acc, c):
        dz, h = activation.dgelu_tanh_approx(c, acc)
        return {"D": dz, "h": h, "dbias": dz}

    def quick_gelu_gradient(acc, c):
        dz, h = activation.dquick_gelu(c, acc)
        return {"D": dz, "h": h, "dbias": dz}

    def swiglu_gradient(acc, c):
        gate, up = unpack(c)
        dgate, dup, h = activation.dswiglu(gate, up, acc)
        return {"D": pack(dgate, dup), "h": h, "dgate": dgate, "dup": dup}

    known = {"gelu_tanh": gelu_tanh_gradient, "quick_gelu": quick_gelu_gradient, "swiglu": swiglu_gradient}
    mode = {"mode": "packed_cd_b16x2"} if kind == "swiglu" else {}
    return gemm_epilogue(outputs=("h",), reduces=sums, **mode)(known[kind])


def gemm_act(
    x_TE: torch.Tensor, weight_ZE: torch.Tensor, bias_Z: torch.Tensor | None, kind: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """`gemm_act_reference` as one kernel; the activation is that of z before it is rounded."""
    z_TZ = x_TE.new_empty(len(x_TE), len(weight_ZE))
    h_TF = x_TE.new_empty(len(x_TE), len(weight_ZE) // 2 if kind == "swiglu" else len(weight_ZE))
    bias = {} if bias_Z is None else {"mRowVecBroadcast": for_descriptor(bias_Z)}
    out = {"D": z_TZ, "mAuxOut": h_TF}
    _forward(kind, bool(bias))(
        for_descriptor(x_TE), for_descriptor(weight_ZE).t(), out=out, config=_config(kind), tuned=False, **bias
    )
    return z_TZ, h_TF


def gemm_dact(
    dy_TE: torch.Tensor, weight_EF: torch.Tensor, z_TZ: torch.Tensor, kind: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`gemm_dact_reference` as one kernel and the sum of what its tiles of rows add up to."""
    dz_TZ, h_TF = torch.empty_like(z_TZ), z_TZ.new_empty(len(z_TZ), weight_EF.shape[1])
    out = {"D": dz_TZ, "h": h_TF}
    found = _backward(kind)(
        for_descriptor(dy_TE), for_descriptor(weight_EF), z_TZ, out=out, config=_config(kind), tuned=False
    )
    if kind == "swiglu":
        return dz_TZ, h_TF, torch.stack((found["dgate"].flatten(), found["dup"].flatten()), dim=1).flatten()
    return dz_TZ, h_TF, found["dbias"].flatten()


def why_not(device: torch.device, dtype: torch.dtype, kind: str) -> str | None:
    """Why an MLP's activation is not in the epilogues of its products; None if it can be."""
    if device.type != "cuda":
        return f"the tensors are on {device.type}, QuACK needs CUDA"
    if dtype != torch.bfloat16:  # its tanh is an instruction with 11 bits, as many as fp16 has
        return f"the dtype is {str(dtype).removeprefix('torch.')}, epilogues are as exact as bfloat16"
    if (found := env.cuda_capability(device.index)) != (9, 0):
        return f"the GPU's compute capability is {found[0]}.{found[1]}, epilogues are measured on 9.0"
    return env.why_missing(PACKAGE) or _tried(device, kind)


@env.probe
def _tried(device: torch.device, kind: str) -> str | None:
    """What is wrong with them here: each runs once, beside plain torch in fp64. So they are compiled, too."""
    generator = torch.Generator("cpu").manual_seed(0)
    rows, width, inner = 300, 64, 104
    shapes = (rows, width), (inner * (1 + (kind == "swiglu")), width), (inner * (1 + (kind == "swiglu")),)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu").to(device, torch.bfloat16)

    with torch.inference_mode(False), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its compiler's, about its own code
        x, weight, bias, dy, down = (draw(*shape) for shape in (*shapes, (rows, width), (width, inner)))
        weight, down = weight / width**0.5, down / width**0.5
        try:
            found = gemm_act(x, weight, bias, kind)
            back = gemm_dact(dy, down, found[0], kind)
            exact = gemm_act_reference(x.double(), weight.double(), bias.double(), kind)
            exact_back = gemm_dact_reference(dy.double(), down.double(), found[0].double(), kind)
            pairs = zip((*found, *back), (*exact, *exact_back), strict=True)
            worst = max(float((one.double() - other).norm() / other.norm()) for one, other in pairs)
        except Exception as error:
            return f"QuACK's products fail here: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return None if worst < 0.01 else f"QuACK's products are wrong here: relative error {worst:.1e}"
