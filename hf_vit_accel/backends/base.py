"""The contract of an attention backend: its needs, the reasons against a request, planning and attending.

A backend states its needs as data (`Needs`). Reasons against a machine or a request are sentences; an empty list means
that the backend can run. `T` packed rows, `S` segments, `H` heads, `D` head dim.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from hf_vit_accel import machine
from hf_vit_accel.layout import Array, Segments, to_device
from hf_vit_accel.ops.base import Rotate
from hf_vit_accel.ops.fp8.scales import Scales
from hf_vit_accel.ops.launch import why_not_triton
from hf_vit_accel.ops.window_attention import attention_reference

LayerKind = Literal["full", "window"]
Replay = Literal["never", "exactly", "padded"]
"""How a CUDA graph may replay a call: not at all, with its own layout only, or also with others, padded to a shape."""
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Attention of one layer: (packed projection (T, 3, H, D), cos (T, D), sin (T, D)) to attended rows (T, H, D)."""
ScoreMod = Callable[..., Tensor]
"""(score, batch, head, q_idx, kv_idx) to the new score; see `hf_vit_accel.FlexConfig`."""


class BackendUnavailableError(RuntimeError):
    """A named backend cannot run on this machine, or no backend can apply the `score_mod` to a call.

    The message holds every reason with its remedy.
    """


@dataclass(frozen=True, kw_only=True)
class Request:
    """The properties of a forward that decide which backends can run it.

    Args:
        kind: Full layers (one segment per frame) or window layers.
        packed: Whether q, k and v are views of one (T, 3, H, D) projection.
        kept: The scales of the tower for attention in FP8; None unless the option asks for it.
        max_seqlen, rows: Rows of the longest segment, and of all; 0 if unknown.
        replay: How a CUDA graph may replay it. Where it may exactly, the host's work does not count.
    """

    device: torch.device
    dtype: torch.dtype
    heads: int
    head_dim: int
    scale: float
    kind: LayerKind = "full"
    packed: bool = False
    grad: bool = False
    score_mod: ScoreMod | None = None
    kept: Scales | None = None
    max_seqlen: int = 0
    rows: int = 0
    replay: Replay = "never"


@dataclass(frozen=True, kw_only=True)
class Needs:
    """The requirements of a backend, as data; None for any.

    Args:
        cuda: Whether it runs on CUDA alone. If not, packages, capability, dtypes and head dims count on CUDA only.
        capability: The lowest compute capability, and the first one that is too high.
        head_dim_multiple: D must be a multiple of it.
        kernels: Whether the backend calls kernels of ours.
    """

    packages: tuple[machine.Package, ...] = ()
    cuda: bool = True
    capability: tuple[tuple[int, int], tuple[int, int]] | None = None
    dtypes: tuple[torch.dtype, ...] | None = None
    head_dim_multiple: int = 1
    head_dim_max: int | None = None
    differentiable: bool = False
    score_mods: bool = False
    kernels: bool = False


HALF = Needs(
    capability=((8, 0), (13, 0)), dtypes=(torch.bfloat16, torch.float16), head_dim_multiple=8, head_dim_max=128
)
"""The usual requirements of kernels for half precision."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
    """The decisions of a backend for one layout, shared by all layers; after `bind`, `tensors` hold the `arrays`."""

    backend: Backend
    request: Request
    host: Mapping[str, Any] = field(default_factory=dict)
    arrays: Mapping[str, Array] = field(default_factory=dict)
    tensors: Mapping[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("host", "arrays", "tensors"):
            object.__setattr__(self, name, MappingProxyType(getattr(self, name)))

    def bind(self, tensors: Mapping[str, Tensor]) -> Plan:
        """Return this plan with its arrays on the device, ready for its first call."""
        bound = replace(self, arrays={}, tensors={name: tensors[name] for name in self.arrays})
        self.backend.prepare(bound)
        return bound

    def attend(self, q_THD: Tensor, k_THD: Tensor, v_THD: Tensor) -> Tensor:
        """Compute softmax(scale * q k^T) v within segments, (T, H, D) with any strides; q and k are rotated already.

        Layers of a route attend by `attend_layers` instead.
        """
        return machine.guarded(self.backend.name, self.backend.attend)(q_THD, k_THD, v_THD, self)


class Backend(ABC):
    """One way to compute variable-length attention."""

    name: ClassVar[str]
    needs: ClassVar[Needs]
    replays_other_layouts: ClassVar[bool] = True
    """Whether a CUDA graph captured for one layout can replay others that are padded to the same budget."""
    by_name_only: ClassVar[bool] = False
    """Whether "auto" never takes it: then no rule of `AUTO` lists it."""

    def graph_bounds(self, segments: int, max_seqlen: int, rows: int) -> tuple[int, int]:
        """Return the (segments, max_seqlen) that a CUDA graph of so many rows declares: at least those given.

        By default both are rounded up far: empty segments and a large max_seqlen cost less than more graphs.
        """
        return max(4, 1 << (segments - 1).bit_length()), rows

    def reasons_against_machine(self) -> list[str]:
        """List why this backend cannot run any call on this machine; empty if it can."""
        return (missing_requirements(self.needs) if self.needs.cuda else []) or [*self.probe()]

    @machine.probe
    def probe(self) -> tuple[str, ...]:
        """List what `lacks` does, once, where there is no other reason; any error of an import becomes a reason."""
        try:
            return tuple(self.lacks())
        except Exception as error:
            remedy = f" ({self.needs.packages[0].install})" if self.needs.packages else ""
            return (f"importing what {self.name} needs failed: {machine.one_line(error)}{remedy}",)

    def lacks(self) -> Sequence[str]:
        """Import the functions that the backend calls, and list the missing ones."""
        return ()

    def reasons_against(self, request: Request) -> list[str]:
        """List why this backend cannot run a request on this machine; empty if it can."""
        needs = self.needs
        on_cuda = request.device.type == "cuda"
        reasons = []
        if on_cuda or needs.cuda:
            reasons += missing_requirements(needs, request.device.index if on_cuda else None)
            if not on_cuda:
                reasons.append(f"the tensors are on {request.device}, it runs on cuda")
            if needs.dtypes is not None and request.dtype not in needs.dtypes:
                supported = " or ".join(str(dtype).removeprefix("torch.") for dtype in needs.dtypes)
                reasons.append(f"the dtype is {str(request.dtype).removeprefix('torch.')}, it takes {supported}")
            if request.head_dim % needs.head_dim_multiple:
                reasons.append(f"the head dim {request.head_dim} is not a multiple of {needs.head_dim_multiple}")
            if needs.head_dim_max is not None and request.head_dim > needs.head_dim_max:
                reasons.append(f"the head dim {request.head_dim} is above {needs.head_dim_max}")
        if request.grad and not needs.differentiable:
            reasons.append("gradients are required and it has no backward pass here")
        if request.score_mod is not None and not needs.score_mods:
            reasons.append("a score_mod is given and it applies none")
        why_no_kernels = why_not_triton(request.device, request.dtype) if needs.kernels else None
        if why_no_kernels is not None:
            reasons.append(why_no_kernels)
        return reasons or [*self.probe()]

    def reasons_against_layout(self, segments: Segments, request: Request) -> list[str]:
        """List why this backend cannot run a layout, although it can run the request; empty if it can."""
        return []

    def why_not_worth(self, segments: Segments, request: Request) -> str | None:
        """Return why "auto" prefers the next backend for a layout, although this one can run it; None if not."""
        return None

    def plan(self, segments: Segments, request: Request) -> Plan:
        """Decide everything about a layout on the host, without device work. By default cu_seqlens and max_seqlen."""
        host = {"max_seqlen": segments.max_seqlen}
        arrays = {"cu_seqlens_S1": segments.cu_seqlens_S1}
        return Plan(backend=self, request=request, host=host, arrays=arrays)

    def prepare(self, plan: Plan) -> None:  # noqa: B027  (most backends have nothing to build)
        """Build the kernels and library plans that the plan's first call needs, before any CUDA graph is captured."""

    @abstractmethod
    def attend(self, q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, plan: Plan) -> Tensor:
        """Compute `Plan.attend`."""

    def attend_layers(self, plan: Plan, layers: int, rotate: Rotate) -> list[Attend]:
        """Return one attention function for every layer of the tower; those of another kind of layer go unused.

        A layer that trains is one autograd node only if its attention is an `OpWithBackward`. The functions returned
        here are plain: their layer runs operation by operation, each a node of its own.

        A backend with a backward of its own returns `OpWithBackward(function=..., settings=..., fault=self.name)` if
        the request has gradients and the rotation is ours; else it calls `super()`. The autograd function takes
        (T, 3, H, D), cos, sin and the settings, none of which is trained, and rotates q and k itself. Its backward has
        `@machine.once_differentiable`, and returns the gradient of the rows before that, and None for each other
        argument. Its context has what `InnerContext` has (`ops/training/nodes.py`), and any attribute.
        """

        def attend(qkv_T3HD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
            q_THD, k_THD, v_THD = rotate(qkv_T3HD, cos_TD, sin_TD).unbind(1)
            return self.attend(q_THD, k_THD, v_THD, plan)

        return [attend] * layers


def missing_requirements(needs: Needs, index: int | None = None) -> list[str]:
    """List the requirements on CUDA that this machine, or the device of an index, lacks, each with its remedy."""
    reasons = []
    for package in needs.packages:
        why = machine.why_missing(package)
        if why is not None:
            reasons.append(why)
    if not machine.has_cuda():
        reasons.append("torch finds no CUDA device (install a CUDA build of torch on a machine with a GPU)")
    elif needs.capability is not None:
        low, above = needs.capability
        try:
            capability = machine.cuda_capability(index)
        except RuntimeError as error:  # the GPU is full, or another process uses it exclusively
            return [*reasons, f"the GPU cannot be used: {' '.join(str(error).split())}"]
        if not low <= capability < above:
            bounds = f"at least {low[0]}.{low[1]} and below {above[0]}.{above[1]}"
            reasons.append(f"the GPU's compute capability is {capability[0]}.{capability[1]}, it needs {bounds}")
    return reasons


def plan_alone(backend: Backend, segments: Segments, request: Request) -> Plan:
    """Plan and bind at once, with a copy to the device of its own, where no forward packs the arrays."""
    plan = backend.plan(segments, request)
    return plan.bind(to_device(plan.arrays, request.device) if plan.arrays else {})


def reasons_from_trial(
    attend: Callable[[Tensor], Tensor],
    lengths: Sequence[int],
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    *,
    grad: bool,
) -> tuple[str, ...]:
    """Run `trial_error` once on this machine and list what is wrong with the attention; empty if nothing is."""
    subject = "its gradients" if grad else "its results"
    try:
        error = machine.run_isolated(lambda: trial_error(attend, lengths, device, dtype, head_dim, grad=grad))
    except Exception as raised:
        return (f"{subject} fail here: {machine.one_line(raised)[:220]}",)
    return () if error < _TRIAL_BOUND else (f"{subject} are wrong here: relative error {error:.1e}",)


_TRIAL_BOUND = 0.03
"""Largest relative L2 error that counts as rounding of half precision."""
TRIAL_HEADS = 2


def trial_scale(head_dim: int) -> float:
    """Return the softmax scale of trials: another than the default of kernels, which may ignore what they are given."""
    return 0.7 * head_dim**-0.5


def trial_error(
    attend: Callable[[Tensor], Tensor],
    lengths: Sequence[int],
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    *,
    grad: bool = False,
) -> float:
    """Run an attention on random rows; return its largest relative L2 error beside the plain-torch reference in fp32.

    It maps (T, 3, H, D) to (T, H, D), scaled by `trial_scale(D)`. Results of another shape or dtype raise ValueError.
    With `grad`, the gradients of q, k and v count, too.
    """
    generator = torch.Generator("cpu").manual_seed(0)
    shape = sum(lengths), 3, TRIAL_HEADS, head_dim
    wide_T3HD = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")
    wide_dout_THD = torch.randn(shape[0], *shape[2:], generator=generator, dtype=torch.float32, device="cpu")
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        qkv_T3HD = wide_T3HD.to(device, dtype).requires_grad_(grad)
        out_THD = attend(qkv_T3HD)
        if out_THD.shape != wide_dout_THD.shape or out_THD.dtype != dtype:
            expected = f"{str(dtype).removeprefix('torch.')} of shape {tuple(wide_dout_THD.shape)}"
            got = f"{str(out_THD.dtype).removeprefix('torch.')} of shape {tuple(out_THD.shape)}"
            raise ValueError(f"expected {expected}, got {got}")
        exact_T3HD = qkv_T3HD.detach().float().requires_grad_(grad)
        exact_out_THD = attention_reference(exact_T3HD, lengths, trial_scale(head_dim))
        pairs = [(out_THD, exact_out_THD)]
        if grad:
            dout_THD = wide_dout_THD.to(device, dtype)
            (dqkv_T3HD,) = torch.autograd.grad(out_THD, qkv_T3HD, dout_THD)
            (exact_dqkv_T3HD,) = torch.autograd.grad(exact_out_THD, exact_T3HD, dout_THD.float())
            pairs += zip(dqkv_T3HD.unbind(1), exact_dqkv_T3HD.unbind(1), strict=True)
        with torch.no_grad():
            return max(float((ours.float() - exact).norm() / exact.norm()) for ours, exact in pairs)
