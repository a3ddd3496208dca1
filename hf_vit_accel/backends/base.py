"""The contract of an attention backend: what it needs, why it cannot serve a request, how it plans and attends.

A backend states its needs as data (`Needs`); verdicts against a machine or a request are lists of sentences, empty when
there is nothing against it. `T` packed rows, `S` segments, `H` heads, `D` head dim.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from hf_vit_accel import machine
from hf_vit_accel.layout import Segments, to_device
from hf_vit_accel.ops.fp8.scales import Scales
from hf_vit_accel.ops.window_attention import attention_reference

Kind = Literal["full", "window"]
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(packed projection (T, 3, H, D), cos (T, D), sin (T, D)) to the attended rows (T, H, D)."""
ScoreMod = Callable[..., Tensor]
"""(score, batch, head, q_idx, kv_idx) to the score that takes its place; see `hf_vit_accel.FlexConfig`."""


class BackendUnavailableError(RuntimeError):
    """A backend that was named cannot run on this machine, or a call needs one that cannot serve it.

    The message holds every reason, and its remedy.
    """


@dataclass(frozen=True, kw_only=True)
class Request:
    """What one forward asks of a backend.

    scale: what q k^T is multiplied by. kind: full layers (a segment per frame) or window layers. packed: q, k and v
    will be views of one (T, 3, H, D) projection. grad: gradients must flow. score_mod: applied to every score. fp8: the
    scales of the tower's layers, where attention in FP8 is asked for. max_seqlen, rows: of the longest segment, and of
    all, where they are known. graphs: whether a CUDA graph of it is to serve other layouts, too. replayed: whether this
    very layout may be replayed from one, so that the host's part does not count.
    """

    device: torch.device
    dtype: torch.dtype
    heads: int
    head_dim: int
    scale: float
    kind: Kind = "full"
    packed: bool = False
    grad: bool = False
    score_mod: ScoreMod | None = None
    fp8: Scales | None = None
    max_seqlen: int = 0
    rows: int = 0
    graphs: bool = False
    replayed: bool = False


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What a backend needs, as data.

    cuda: a CUDA device. capability: the lowest compute capability, and the one above the highest. head_dim_multiple
    and head_dim_max bound D. differentiable: whether gradients flow through it. score_mods: whether it applies one.
    """

    packages: tuple[machine.Package, ...] = ()
    cuda: bool = True
    capability: tuple[tuple[int, int], tuple[int, int]] | None = None
    dtypes: tuple[torch.dtype, ...] | None = None
    head_dim_multiple: int = 1
    head_dim_max: int | None = None
    differentiable: bool = False
    score_mods: bool = False


HALF = Needs(
    capability=((8, 0), (13, 0)), dtypes=(torch.bfloat16, torch.float16), head_dim_multiple=8, head_dim_max=128
)
"""What kernels for half precision need, as a rule."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
    """All that one backend needs for one layout of segments, made once per forward and shared by its layers.

    host: integers and tuples decided on the host. arrays: what must reach the device, still on the host.
    tensors: the same after the copy.
    """

    backend: Backend
    segments: Segments
    request: Request
    host: Mapping[str, Any] = field(default_factory=dict)
    arrays: Mapping[str, np.ndarray[Any, Any]] = field(default_factory=dict)
    tensors: Mapping[str, Tensor] = field(default_factory=dict)

    def bind(self, tensors: Mapping[str, Tensor]) -> Plan:
        """This plan with its arrays on the device; then whatever must exist before the first call is built."""
        bound = replace(self, arrays={}, tensors={name: tensors[name] for name in self.arrays})
        self.backend.prepare(bound)
        return bound

    def attend(self, q_THD: Tensor, k_THD: Tensor, v_THD: Tensor) -> Tensor:
        """Attention within segments: softmax(scale * q k^T) v, (T, H, D) each, any strides; returns (T, H, D)."""
        return machine.guarded(self.backend.name, self.backend.attend)(q_THD, k_THD, v_THD, self)


class Backend(ABC):
    """One way to compute variable-length attention."""

    name: ClassVar[str]
    needs: ClassVar[Needs]
    capturable: ClassVar[bool] = True
    """Whether a CUDA graph of `attend` serves every layout whose plan has the same shapes and the same `host`."""

    def graph_bounds(self, segments: int, max_seqlen: int, rows: int) -> tuple[int, int]:
        """What a graph of so many rows declares to serve many layouts: (segments, max_seqlen), at least those given.

        By default empty segments and a max_seqlen that is too large cost nothing worth a graph of its own.
        """
        return max(4, 1 << (segments - 1).bit_length()), rows

    def needs_on(self, device: torch.device) -> Needs:
        """What it needs for tensors on a device, where that is more than it needs to run at all."""
        return self.needs

    def reasons_against_machine(self) -> list[str]:
        """Why this backend cannot run on this machine at all, whatever the call; empty if it can."""
        return against_machine(self.needs) or self.probe()

    def probe(self) -> list[str]:
        """What only importing the packages can tell, once; asked where nothing else stands against the backend."""
        return list(_imported(self))

    def lacks(self) -> Sequence[str]:
        """Import what the backend calls, and say what is not there; whatever is raised is told, too."""
        return ()

    def reasons_against(self, request: Request) -> list[str]:
        """Why this backend cannot serve a request, this machine included; empty if it can."""
        needs, reasons = self.needs_on(request.device), against_machine(self.needs)
        if needs is not self.needs:
            reasons += against_machine(needs)
        if needs.cuda and request.device.type != "cuda":
            reasons.append(f"the tensors are on {request.device}, it runs on cuda")
        elif needs.cuda and not reasons:
            reasons += _against_capability(needs, request.device.index)
        if needs.dtypes is not None and request.dtype not in needs.dtypes:
            known = " or ".join(str(dtype).removeprefix("torch.") for dtype in needs.dtypes)
            reasons.append(f"the dtype is {str(request.dtype).removeprefix('torch.')}, it takes {known}")
        if request.head_dim % needs.head_dim_multiple:
            reasons.append(f"the head dim {request.head_dim} is not a multiple of {needs.head_dim_multiple}")
        if needs.head_dim_max is not None and request.head_dim > needs.head_dim_max:
            reasons.append(f"the head dim {request.head_dim} is above {needs.head_dim_max}")
        if request.grad and not needs.differentiable:
            reasons.append("gradients are required and it has no backward pass here")
        if request.score_mod is not None and not needs.score_mods:
            reasons.append("a score_mod is given and it applies none")
        return reasons or self.probe()

    def reasons_against_layout(self, segments: Segments, request: Request) -> list[str]:
        """Why this backend cannot serve a layout, where it could serve others of the same request."""
        return []

    def why_not_worth(self, segments: Segments, request: Request) -> str | None:
        """Why "auto" leaves a layout to the next one, though this could serve it."""
        return None

    def close(self) -> None:  # noqa: B027  (most backends hold no memory between calls)
        """Give back memory that is held between calls."""

    def plan(self, segments: Segments, request: Request) -> Plan:
        """Decide everything about a layout on the host; no device work. By default offsets and the longest segment."""
        host, arrays = {"max_seqlen": segments.max_seqlen}, {"cu_seqlens_S1": segments.cu_seqlens_S1}
        return Plan(backend=self, segments=segments, request=request, host=host, arrays=arrays)

    def prepare(self, plan: Plan) -> None:  # noqa: B027  (most backends have nothing to build)
        """Build what the plan's first call would otherwise build (kernels, library plans), before any capture."""

    @abstractmethod
    def attend(self, q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, plan: Plan) -> Tensor:
        """See `Plan.attend`. Traceable: torch's own operators, or a custom operator with a fake implementation."""

    def attend_layers(self, plan: Plan, layers: int, rotate: Attend) -> list[Attend]:
        """What each layer attends by. rotate: q and k of a packed projection, rotated."""

        def attend(qkv_T3HD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
            q_THD, k_THD, v_THD = rotate(qkv_T3HD, cos_TD, sin_TD).unbind(1)
            return self.attend(q_THD, k_THD, v_THD, plan)

        return [attend] * layers


@machine.probe
def _imported(backend: Backend) -> tuple[str, ...]:
    try:
        return tuple(backend.lacks())
    except Exception as error:
        remedy = "".join(f" ({package.install})" for package in backend.needs.packages[:1])
        return (f"importing what {backend.name} needs failed: {machine.one_line(error)}{remedy}",)


def against_machine(needs: Needs) -> list[str]:
    """Why a machine has not what is needed."""
    reasons = [why for package in needs.packages if (why := machine.why_missing(package))]
    if needs.cuda and not machine.has_cuda():
        return [*reasons, "torch finds no CUDA device (install a CUDA build of torch on a machine with a GPU)"]
    return reasons + _against_capability(needs, None) if needs.cuda else reasons


def _against_capability(needs: Needs, index: int | None) -> list[str]:
    if needs.capability is None:
        return []
    low, above = needs.capability
    try:
        found = machine.cuda_capability(index)
    except RuntimeError as error:  # the GPU is full, or another process has it to itself
        return [f"the GPU cannot be used: {' '.join(str(error).split())}"]
    if low <= found < above:
        return []
    bounds = f"at least {low[0]}.{low[1]} and below {above[0]}.{above[1]}"
    return [f"the GPU's compute capability is {found[0]}.{found[1]}, it needs {bounds}"]


def plan_alone(backend: Backend, segments: Segments, request: Request) -> Plan:
    """Plan and bind at once, in a copy of its own (where no forward's packed copy can carry the arrays)."""
    plan = backend.plan(segments, request)
    return plan.bind(to_device(plan.arrays, request.device) if plan.arrays else {})


def attention_op(
    name: str, cuda: Callable[..., Tensor], arguments: str = "Tensor cu_seqlens, int max_seqlen, float scale"
) -> Callable[..., Tensor]:
    """Register `hf_vit_accel::<name>`, a forward-only operator of q, k, v and arguments: new, and shaped as q.

    The operator is what torch.compile sees. Else its function is called at once: the way through the dispatcher takes 7
    us of a layer (by `torch.library.custom_op` 18).
    """
    full = f"hf_vit_accel::{name}"
    torch.library.define(full, f"(Tensor q, Tensor k, Tensor v, {arguments}) -> Tensor")
    torch.library.impl(full, "cuda", cuda)
    torch.library.register_fake(full, lambda q_THD, *_: q_THD.new_empty(q_THD.shape))
    op: Callable[..., Tensor] = getattr(torch.ops.hf_vit_accel, name).default

    def attend(*arguments: Any) -> Tensor:
        return op(*arguments) if torch.compiler.is_compiling() else cuda(*arguments)

    return attend


def reasons_tried(
    attend: Callable[[Tensor], Tensor],
    lengths: Sequence[int],
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    *,
    grad: bool,
) -> tuple[str, ...]:
    """What is wrong with an attention on this machine: it runs once, beside attention by its definition in fp32.

    attend: (T, 3, H, D) of segments of these lengths to (T, H, D), scaled by D ** -0.5. grad: its gradient runs, too.
    """
    generator = torch.Generator("cpu").manual_seed(0)
    wide_T3HD = torch.randn(sum(lengths), 3, 2, head_dim, generator=generator, dtype=torch.float32, device="cpu")
    given_THD = torch.randn(sum(lengths), 2, head_dim, generator=generator, dtype=torch.float32, device="cpu")
    what = "its gradients" if grad else "its results"

    def run() -> float:
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            qkv_T3HD, dout_THD = wide_T3HD.to(device, dtype).requires_grad_(grad), given_THD.to(device, dtype)
            found_THD = attend(qkv_T3HD)
            exact_T3HD = qkv_T3HD.detach().float().requires_grad_()
            wanted_THD = attention_reference(exact_T3HD, lengths, head_dim**-0.5)
            pairs = [(found_THD, wanted_THD)]
            if grad:
                (found,) = torch.autograd.grad(found_THD, qkv_T3HD, dout_THD)
                (wanted,) = torch.autograd.grad(wanted_THD, exact_T3HD, dout_THD.float())
                pairs += zip(found.unbind(1), wanted.unbind(1), strict=True)
            with torch.no_grad():
                return max(float((one.float() - exact).norm() / exact.norm()) for one, exact in pairs)

    try:
        worst = machine.run_isolated(run)
    except Exception as error:
        return (f"{what} fail here: {machine.one_line(error)[:220]}",)
    return () if worst < 0.03 else (f"{what} are wrong here: relative error {worst:.1e}",)
