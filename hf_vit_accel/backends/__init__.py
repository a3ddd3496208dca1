"""All attention backends, and the choice among them: `AUTO` ranks them by measurement.

A new backend is one file here, its line in `BACKENDS` and, unless it runs by name only, its place in the rules of
`AUTO`. Tests of exactness, doctor, status and bench then pick it up; CONTRIBUTING.md has the other tests.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from types import MappingProxyType

from hf_vit_accel.backends.base import Backend, BackendUnavailableError, LayerKind, Request
from hf_vit_accel.backends.cudnn_fp8 import CudnnFp8
from hf_vit_accel.backends.flash_attention_3 import FlashAttention3
from hf_vit_accel.backends.flash_attention_4 import FlashAttention4
from hf_vit_accel.backends.flashinfer_cudnn import FlashinferCudnn
from hf_vit_accel.backends.flex import Flex
from hf_vit_accel.backends.sdpa import Sdpa
from hf_vit_accel.backends.torch_cudnn import TorchCudnn
from hf_vit_accel.backends.torch_varlen import TorchVarlen
from hf_vit_accel.config import Settings
from hf_vit_accel.layout import Segments
from hf_vit_accel.machine import KERNELS

__all__ = ["Backend", "BackendUnavailableError", "LayerKind", "Request"]

BACKENDS: tuple[Backend, ...] = (
    FlashAttention3(),
    FlashAttention4(),
    FlashinferCudnn(),
    TorchVarlen(),
    TorchCudnn(),
    Flex(),
    Sdpa(),
)

FP8 = CudnnFp8()
"""Not exact, so it cannot be named: an option of its own asks for it."""


@dataclass(frozen=True, kw_only=True)
class Rule:
    """The order in which "auto" tries backends for some requests. The first rule of `AUTO` that matches applies.

    Every backend is in a rule, but for those that run only if they are named (`by_name_only`).

    Args:
        measured: The measurement behind the order. FA2 is `torch_varlen`, FA3 and FA4 are `flash_attention_3` and `_4`,
            batched SDPA is `sdpa`. Numbers in brackets are segments x rows.
        grad: Whether the rule is only for requests with gradients.
        longest_from, rows_from: The fewest rows of the longest segment, and of the request.
        in_exact_graph: Whether the rule is only for exact replays by a CUDA graph. The host does not count there.
    """

    kind: LayerKind
    order: tuple[str, ...]
    measured: str
    grad: bool = False
    longest_from: int = 0
    rows_from: int = 0
    in_exact_graph: bool = False

    def matches(self, request: Request) -> bool:
        return (
            request.kind == self.kind
            and request.max_seqlen >= self.longest_from
            and request.rows >= self.rows_from
            and (request.replay == "exactly" or not self.in_exact_graph)
            and (request.grad or not self.grad)
        )


AUTO: tuple[Rule, ...] = (
    Rule(
        kind="window",
        order=("torch_varlen", "sdpa", "flashinfer_cudnn", "flash_attention_3"),
        measured="H200, bf16, D 80, 256 windows of 64 rows: FA2 98 us, batched SDPA 94, cuDNN 139, FA3 162",
    ),
    Rule(
        kind="full",
        grad=True,
        longest_from=1024,
        rows_from=8192,
        order=("flash_attention_4", "torch_cudnn", "torch_varlen", "sdpa"),
        measured="H200, bf16, forward + backward us, D 72 / 80: FA4 864 / 835 (16 x 1024), 7774 / 7431 (14416); D 72: "
        "torch's cuDNN 960, 10123; FA2 1559, 16804",
    ),
    Rule(
        kind="full",
        grad=True,
        longest_from=576,
        in_exact_graph=True,
        order=("flash_attention_4", "torch_cudnn", "torch_varlen", "sdpa"),
        measured="H200, bf16, a tower forward and backward from CUDA graphs, ms, Qwen3-VL-8B / Qwen2.5-VL-7B / "
        "Qwen2-VL-7B, 4096 rows: FA4 44.2 / 38.9 / 57.1, torch's cuDNN 49.0 / 39.1 / 60.6; 784 rows: FA4 10.8 / 13.3 "
        "/ 13.2, torch's cuDNN 10.9 / 13.3 / 13.8",
    ),
    Rule(
        kind="full",
        grad=True,
        order=("torch_cudnn", "flash_attention_4", "torch_varlen", "sdpa"),
        measured="H200, bf16, D 72, forward + backward us: torch's cuDNN 74 (784), 396 (64 x 256); FA4 81, 457; FA2 "
        "183, 599; a call takes the host 50 us with cuDNN, 170 with FA4",
    ),
    Rule(
        kind="full",
        longest_from=2048,
        rows_from=8192,
        order=("flash_attention_4", "flash_attention_3", "torch_cudnn", "flashinfer_cudnn", "torch_varlen", "sdpa"),
        measured="H200, bf16, us, D 72 / 80: FA4 443 / 404 (8 x 2304), 1909 / 1816 (14416); FA3 463 / 453, 2177 / "
        "2154; torch's cuDNN 521 / 512, 2641 / 2610; FlashInfer's 641 / 613, 2837 / 2784; FA2 966 / 919, 4393 / 4158",
    ),
    Rule(
        kind="full",
        longest_from=1100,
        in_exact_graph=True,
        order=("flash_attention_4", "flash_attention_3", "torch_cudnn", "flashinfer_cudnn", "torch_varlen", "sdpa"),
        measured="H200, bf16, us from CUDA graphs, D 72 / 80: FA4 25 / 22 (1296), 194 / 179 (4096), 147 / 136 (4 x "
        "1600); FA3 28 / 26, 199 / 190, 148 / 144; torch's cuDNN 45 / 44, 220 / 207, 176 / 169",
    ),
    Rule(
        kind="full",
        longest_from=1100,
        order=("flash_attention_3", "torch_cudnn", "flashinfer_cudnn", "flash_attention_4", "torch_varlen", "sdpa"),
        measured="H200, bf16, us, D 72 / 80: FA3 193 / 189 (4096), 270 / 262 (10 x 1536); torch's cuDNN 210 / 205, 304 "
        "/ 294; FlashInfer's 238 / 235 (4096); FA4 187 / 174, 274 / 248, and 65 us more of the host's a call",
    ),
    Rule(
        kind="full",
        longest_from=65,
        rows_from=8192,
        order=("torch_cudnn", "flash_attention_3", "flash_attention_4", "flashinfer_cudnn", "torch_varlen", "sdpa"),
        measured="H200, bf16, us, D 72 / 80: torch's cuDNN 228 / 221 (16 x 1024), 132 / 127 (32 x 512); FA3 246 / 246, "
        "156 / 152; FA4 257 / 235, 194 / 152; FlashInfer's cuDNN 261 / 256 (16 x 1024)",
    ),
    Rule(
        kind="full",
        rows_from=8192,
        order=("torch_varlen", "sdpa", "flashinfer_cudnn", "torch_cudnn", "flash_attention_3", "flash_attention_4"),
        measured="H200, bf16, us, D 80, 256 windows of 64 rows: FA2 98, batched SDPA 94, FlashInfer's cuDNN 139, FA3 "
        "162. A tower of 256 x 64 rows, ms, Qwen3-VL-8B / Qwen2-VL-7B: FA2 30.7 / 41.3, FlashInfer's cuDNN 31.4 / "
        "41.8, FA3 32.2 / 43.4, FA4 36.9 / 47.5",
    ),
    Rule(
        kind="full",
        longest_from=1024,
        in_exact_graph=True,
        order=("torch_cudnn", "flash_attention_4", "flash_attention_3", "flashinfer_cudnn", "torch_varlen", "sdpa"),
        measured="H200, bf16, us from CUDA graphs, D 72 / 80: torch's cuDNN 20 / 18 (1024), 62 / 59 (4 x 1024); FA4 23 "
        "/ 21, 68 / 61; FA3 25 / 24, 68 / 64",
    ),
    Rule(
        kind="full",
        longest_from=576,
        in_exact_graph=True,
        order=("flash_attention_4", "torch_cudnn", "flash_attention_3", "flashinfer_cudnn", "torch_varlen", "sdpa"),
        measured="H200, bf16, us from CUDA graphs, D 72 / 80: FA4 18 / 17 (784), 52 / 48 (4 x 784), 41 / 38 (6 x 576); "
        "torch's cuDNN 19 / 18, 59 / 58, 46 / 45; FA3 21 / 20, 53 / 51, 41 / 40. A replayed tower of 784 rows, ms, "
        "Qwen3-VL-8B / Qwen2-VL-7B: FA4 3.11 / 4.01, torch's cuDNN 3.19 / 4.20",
    ),
    Rule(
        kind="full",
        in_exact_graph=True,
        order=("torch_cudnn", "flash_attention_3", "flashinfer_cudnn", "torch_varlen", "sdpa"),
        measured="H100, bf16, us from CUDA graphs, D 72 / 80: torch's cuDNN 9 / 9 (256), 19 / 18 (784), 20 / 19 "
        "(1024), 34 / 31 (2 x 1024), 46 / 44 (6 x 576); FA3 13 / 12, 21 / 20, 27 / 24, 44 / 42, 42 / 41; FA2 13 / 12, "
        "28 / 26, 33 / 31, 51 / 47, 59 / 57",
    ),
    Rule(
        kind="full",
        order=("flash_attention_3", "torch_cudnn", "flashinfer_cudnn", "torch_varlen", "sdpa"),
        measured="H200, bf16, us, D 80: torch's cuDNN 21 (784), 62 (4 x 1024); FA3 24, 70; FlashInfer's 26, 75. But "
        "the host decides: ms of a tower of 784 rows, Qwen3-VL-8B / Qwen2-VL-7B: FA3 9.5 / 11.6, torch's cuDNN 10.1 / "
        "13.1, FA2 10.3 / 12.8, FlashInfer's 10.6 / 13.3, FA4 11.5 / 14.4",
    ),
)


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The backend that runs a request, and why the backends tried before it do not.

    Args:
        rejected: Reasons against other backends, by name.
        unmet: The reasons among them against backends that were asked for, or that failed when they ran.
        not_worth: Why the backend of an option would not be faster, if it could run.
    """

    backend: Backend
    rejected: Mapping[str, tuple[str, ...]]
    unmet: tuple[str, ...] = ()
    not_worth: str | None = None


def backend_named(name: str) -> Backend:
    """Return the backend with a name; raise ValueError, with a similar name, if there is none."""
    for backend in BACKENDS:
        if backend.name == name:
            return backend
    names = ["auto", *(backend.name for backend in BACKENDS)]
    full_name = re.sub(r"^(fa|flash_attn_)(?=\d$)", "flash_attention_", str(name).lower())
    similar = ["flex"] if full_name == "flex_attention" else get_close_matches(full_name, names, n=1)
    hint = f"; did you mean {similar[0]!r}?" if similar else ""
    if re.fullmatch(r"eager|flash_attention_2|paged\|.*|.+/.+", full_name):  # the last is a kernel of the Hub
        hint = f"; {full_name!r} is transformers' own name: attention='auto' takes the fastest backend and needs none"
    if name == "flash_vit_auto":
        hint = f"; {name} is what models are loaded with, here it is 'auto'"
    raise ValueError(f"expected attention to be one of {', '.join(repr(name) for name in names)}, got {name!r}{hint}")


def require(name: str, *, fp8: bool = False) -> None:
    """Raise BackendUnavailableError, with the reasons, if this machine cannot run a backend or FP8."""
    if fp8:
        require_fp8("\nUse fp8=False.")
    if name != "auto":
        advice = "\nUse attention='auto' (at load time attn_implementation='flash_vit_auto') for the fastest "
        advice += "that can run. `hf-vit-accel doctor` lists the others."
        _require(backend_named(name), f"attention backend {name!r}", advice)


def asked_for(settings: Settings) -> CudnnFp8 | None:
    """Return the backend that an option asks for, beside `attention`."""
    return None if settings.fp8 is None else FP8


def require_fp8(advice: str = "") -> None:
    """Raise BackendUnavailableError, with the reasons and the advice, if this machine cannot run attention in FP8."""
    _require(FP8, "attention in FP8", advice)


def _require(backend: Backend, subject: str, advice: str) -> None:
    reasons = backend.reasons_against_machine()
    if reasons:
        raise BackendUnavailableError(f"{subject} cannot run on this machine:\n  - " + "\n  - ".join(reasons) + advice)


def resolve(
    name: str, request: Request, segments: Segments | None = None, faults: Mapping[str, str] = MappingProxyType({})
) -> Choice:
    """Choose the backend for a request: the named one if it can run it, else the first in `AUTO`'s order that can.

    Full layers use the backend that an option asks for where it can run them, and is faster. If the layout is unknown,
    only reasons against it are listed. Backends that failed when they ran are not chosen again.
    """
    rule = next(rule for rule in AUTO if rule.matches(request))
    by_option = FP8 if request.kept is not None and request.kind == "full" else None
    asked: list[Backend] = [] if by_option is None else [by_option]
    if name != "auto":
        asked.append(backend_named(name))
    rejected: dict[str, tuple[str, ...]] = {}
    unmet: list[str] = []
    not_worth: str | None = None
    for backend in [*asked, *map(backend_named, rule.order)]:
        reasons = _reasons_against(backend, request, segments, faults)
        if reasons:
            rejected[backend.name] = tuple(reasons)
            if backend in asked or backend.name in faults:
                unmet += [f"{backend.name} cannot serve the call: {reason}" for reason in reasons]
            continue
        why = None if segments is None or backend.name == name else backend.why_not_worth(segments, request)
        if backend is by_option:
            not_worth = why
        if why is None and not (backend is by_option and segments is None):
            frozen = MappingProxyType(rejected)
            return Choice(backend=backend, rejected=frozen, unmet=tuple(unmet), not_worth=not_worth)
    assert request.score_mod is not None, "sdpa can run every request without a score_mod"
    because = "; ".join(f"{backend_name}: {reasons[0]}" for backend_name, reasons in rejected.items())
    raise BackendUnavailableError(f"no attention backend can apply the score_mod to this call: {because}")


def _reasons_against(
    backend: Backend, request: Request, segments: Segments | None, faults: Mapping[str, str]
) -> list[str]:
    """List why a backend cannot run a request, or the layout if it is known; empty if it can."""
    if backend.name in faults:
        return [faults[backend.name]]
    if backend.needs.kernels and KERNELS in faults:
        return [faults[KERNELS]]
    reasons = backend.reasons_against(request)
    if not reasons and segments is not None:
        reasons = backend.reasons_against_layout(segments, request)
    return reasons
