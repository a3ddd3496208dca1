"""Proof, by running, that our operations compute what transformers' code computes.

The fast path computes what a tower, its blocks and its attention compute without calling them. Whether they still
compute that is not read from their code: a tiny tower of the same class, the twin, runs beside our operations.
Outputs and gradients are compared, over grids that tell layouts apart.

The twin sees nothing of the process around it. It lives on the CPU in fp64, which no matmul precision reduces, in a
thread of its own, which inherits no mode. Its parameters are drawn anew, wherever a patched torch has put them. Its
attention is plain torch, since the choice of SDP kernels is process-wide. Its modules skip global hooks.
"""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from hf_vit_accel import machine
from hf_vit_accel.backends import Request
from hf_vit_accel.config import Settings
from hf_vit_accel.engine.encoder import encode
from hf_vit_accel.engine.route import Spec, lay_out
from hf_vit_accel.families import Config, Family, Tower
from hf_vit_accel.layout import Grid, rows_of
from hf_vit_accel.machine import one_line
from hf_vit_accel.ops import Context, build
from hf_vit_accel.tower.code import Code

NAMES = {"flashinfer_cudnn": "flashinfer_cudnn", "flash_vit_auto": "auto"}
"""Name that is registered with transformers -> the `attention` of `patch` that it stands for."""


def name_for(attention: str) -> str:
    """Return the registered name under which a tower with this `attention` runs: both reach the same function."""
    return attention if attention in NAMES else "flash_vit_auto"


GRIDS = ((1, 6, 10), (3, 4, 8), (1, 2, 18)), ((1, 8, 8),)
"""Images of several sizes and a clip, which share no layout and fill some windows only; and one image."""

_DTYPES = (torch.float64, torch.float32)
"""Of twins: no setting reduces the precision of products in fp64; the grouped products of experts take fp32 only."""

_OUTPUT_BOUND = 2e-5  # norms and rotations compute in fp32 whatever the dtype, in another order: 2e-6
_GRADIENT_BOUND = 2e-4


class Backoff:
    """Counts the calls until a proof that could not run is tried again: after 1, then 2, 4, 8, ... of them."""

    def __init__(self, calls: int = 1) -> None:
        self.calls = calls
        self._counted = 0

    def is_due(self) -> bool:
        """Count a call; return whether the next attempt is due."""
        self._counted += 1
        return self._counted >= self.calls


@dataclass(frozen=True, kw_only=True, eq=False)
class Proof:
    """The result of running one class of towers beside our operations.

    Attributes:
        key: The class, and the fields of its config that the run depended on.
        fast: Why our operations may not take the place of its forward; None where that is proven.
        injected: Why its forward may not be given metadata of ours; None where that is proven.
        classes: The classes of all its modules.
        code: The functions that ran.
        backoff: When to try again, where no numbers could be compared; None for a verdict, which stands.
    """

    key: tuple[type, str]
    fast: str | None
    injected: str | None
    classes: frozenset[type]
    code: Code
    backoff: Backoff | None = None


_PROOFS: dict[tuple[type, str], Proof] = {}
_WARNED: set[str] = set()


def prove(tower: nn.Module, family: Family) -> Proof:
    """Return the proof for a tower's class and config, made once per process and code in 50 to 150 ms.

    The caller's random numbers stay as they are. Two threads may both make a proof: nothing is locked, so forks are
    safe.
    """
    kind = family.tower_class(tower)
    assert kind is not None
    config: Config = tower.config
    key = kind, repr(sorted(_fields(config, family)))
    proof = _PROOFS.get(key)
    if proof is None or not proof.code.unchanged():
        proof = _PROOFS[key] = machine.run_isolated(_prove, key, config, family, Backoff())
    elif proof.backoff is not None and proof.backoff.is_due():
        next_backoff = Backoff(2 * proof.backoff.calls)
        proof = _PROOFS[key] = machine.run_isolated(_prove, key, config, family, next_backoff)
    return proof


def is_outdated(proof: Proof) -> bool:
    """Return whether a proof that could not run has been made since, or is to be tried again now; counts a call."""
    return proof.backoff is not None and (_PROOFS.get(proof.key) is not proof or proof.backoff.is_due())


def warn_stock(kind: type, proof: Proof, reasons: list[str]) -> None:
    """Warn once per class and reason that towers of a class stay stock; `status` gives the same reason.

    Args:
        kind: The tower's class: transformers' own, or a subclass of it.
        proof: What was proven of the class in transformers.
        reasons: Why this tower runs its own forward.
    """
    name = kind.__name__
    why = proof.injected or proof.fast
    if why is None and reasons and kind is not proof.code.kind:
        text = f"{name} stays stock: {reasons[0]}. Only towers of transformers' own classes are accelerated."
    elif why is None:
        return
    elif proof.backoff is not None:
        text = f"{why}. {name} stays stock for now; later calls try again."
    else:
        text = f"transformers {transformers.__version__}: {why}. {name} stays stock; look for a newer hf_vit_accel."
    warn_once(text)


def warn_once(text: str) -> None:
    """Warn, unless the same was said before in this process."""
    if text not in _WARNED:
        _WARNED.add(text)
        warnings.warn(text, stacklevel=3)


def _fields(config: Config, family: Family) -> Iterator[tuple[str, str]]:
    """Yield the fields of a config that reach the twin and may choose between ways to compute."""
    for name, value in config.to_dict().items():
        if name not in family.tiny and name not in _UNREAD_FIELDS:
            yield name, repr(value)


_UNREAD_FIELDS = {"dtype", "model_type", "transformers_version", "name_or_path", "_name_or_path", "architectures"}
_UNREAD_FIELDS |= {"initializer_range", "id2label", "label2id", "problem_type"}
# The twin and every call set or read these themselves.
_UNREAD_FIELDS |= {"attn_implementation", "attention_dropout"}
_UNREAD_FIELDS |= {"return_dict", "output_hidden_states", "output_attentions"}


def _plain_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute `scaled_dot_product_attention` by products and a softmax."""
    if enable_gqa:
        groups = q.shape[-3] // k.shape[-3]
        k = k.repeat_interleave(groups, dim=-3)
        v = v.repeat_interleave(groups, dim=-3)
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device="cpu").tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, float("-inf"))
    elif attn_mask is not None:
        scores = scores + attn_mask
    return functional.dropout(scores.softmax(dim=-1), dropout_p) @ v


_SDPA = functional.scaled_dot_product_attention


class _Isolated(TorchFunctionMode):
    """Makes one thread's torch independent of the process: no random initialisation, no choice of SDP kernels."""

    def __torch_function__(self, func: Callable[..., Any], types: object, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _SDPA:
            return _plain_attention(*args, **kwargs)
        if re.search("uniform_$|normal_$|orthogonal_$|sparse_$", getattr(func, "__name__", "")):
            return args[0] if args else kwargs["tensor"]  # the generator stays as it is
        return func(*args, **kwargs)


_STOCK = "hf_vit_accel_stock"
"""The name of transformers' own sdpa attention for twins: anyone may register another function under the usual one."""


def _twin(kind: Any, config: Config, family: Family, dtype: torch.dtype) -> Any:
    """Build a tiny tower of a class on the CPU, whose weights are random: none zero, and no norm's one."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward  # slow; models have imported it

    transformers.modeling_utils.AttentionInterface.register(_STOCK, sdpa_attention_forward)
    config = copy.deepcopy(config)
    for name, value in family.tiny.items():
        setattr(config, name, copy.deepcopy(value))
    config._attn_implementation_internal = _STOCK
    config.attention_dropout = 0.0  # every call reads it anew
    config.return_dict = True
    config.output_hidden_states = False
    config.output_attentions = False
    twin = kind(config).to(dtype).eval()
    generator = torch.Generator("cpu").manual_seed(0)
    for module in twin.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                values = _random_weight(name, parameter.shape, generator).to(dtype)
                module._parameters[name] = nn.Parameter(values, requires_grad=parameter.requires_grad)
        _skip_global_hooks(module)
    return twin


def _random_weight(name: str, shape: torch.Size, generator: torch.Generator) -> Tensor:
    noise = torch.randn(shape, generator=generator, device="cpu", dtype=torch.float32)
    if len(shape) > 1:
        return noise / shape[1:].numel() ** 0.5
    return noise * 0.1 + float(name == "weight")


def _skip_global_hooks(module: nn.Module) -> None:
    """Call a module's forward directly: users' global hooks are not for the twin, and would count its calls.

    `nn.Module.compile` sets this attribute too. The dictionaries of global hooks cannot be emptied for a moment, since
    other threads run their modules meanwhile.
    """
    hooks = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
    if not any(hooks):
        module._compiled_call_impl = module.forward


def _prove(key: tuple[type, str], config: Config, family: Family, backoff: Backoff) -> Proof:
    """Run a twin beside our operations; an error on the way is no verdict, and asks for another attempt."""
    kind: Any = key[0]
    classes: frozenset[type] = frozenset()
    why = ""
    for dtype in _DTYPES:
        try:
            with torch.device("cpu"), _Isolated():
                twin = _twin(kind, config, family, dtype)
                classes = frozenset(type(module) for module in twin.modules())
                fast, injected = _verdict(twin, family)
            return Proof(key=key, fast=fast, injected=injected, classes=classes, code=Code(kind, classes))
        except Exception as error:
            why = f"{kind.__name__} could not be run beside our operations: {one_line(error)}"
    return Proof(key=key, fast=why, injected=why, classes=classes, code=Code(kind, classes), backoff=backoff)


def _verdict(twin: Tower, family: Family) -> tuple[str | None, str | None]:
    """Return why our operations are not the twin's forward, and why its forward may not be given our metadata."""
    try:
        family.parts(twin)
        family.geometry(twin)
    except (AttributeError, TypeError, ValueError) as error:
        why = f"{type(twin).__name__} is not built as {family.name} is known: {one_line(error)}"
        return why, why
    fast, injected = _compare(twin, family, GRIDS[0], complete=True)
    fast = fast or _compare(twin, family, GRIDS[1])[0]
    with torch.no_grad():  # in a residual stream this small, a norm's epsilon counts
        for name, parameter in twin.named_parameters():
            parameter.mul_(0.02 if parameter.dim() > 1 or name.endswith("bias") else 1.0)
    # In training mode, stock may do what our operations do not.
    return fast or _compare(twin.train(), family, GRIDS[0])[0], injected


def _spec(twin: Tower, family: Family) -> Spec:
    """Return what decides the twin's routes: all operations as plain torch, attention by SDPA."""
    parts = family.parts(twin)
    weight = parts.projection.weight
    attention = parts.blocks[0].attention
    request = Request(
        device=weight.device,
        dtype=weight.dtype,
        heads=attention.num_heads,
        head_dim=attention.head_dim,
        scale=attention.scaling,
        grad=True,
    )
    return Spec(
        geometry=family.geometry(twin),
        request=request,
        ops=build(parts, Context(device=weight.device, dtype=weight.dtype, reference=True)),
        full_layers=tuple(parts.full(index) for index in range(len(parts.blocks))),
        settings=Settings(attention="sdpa"),
    )


def _compare(twin: Tower, family: Family, grid: Grid, *, complete: bool = False) -> tuple[str | None, str | None]:
    """Compare stock with the operations.

    Args:
        twin: The tiny stock tower.
        family: Its family.
        grid: Images and videos to encode; frame by frame where the family takes no videos.
        complete: Whether gradients are compared too, and stock with metadata of ours.

    Returns:
        Why the operations differ from stock, and why stock differs with our metadata; None where they agree.
    """
    generator = torch.Generator("cpu").manual_seed(1)
    if not family.videos:
        grid = tuple((1, h, w) for t, h, w in grid for _ in range(t))
    weight = family.parts(twin).projection.weight
    shape = rows_of(grid), weight[0].numel()
    pixels_TP = torch.randn(shape, generator=generator, device="cpu", dtype=weight.dtype)
    pixels_TP.requires_grad_()
    grid_thw = torch.tensor(grid, device="cpu")
    spec = _spec(twin, family)
    name = type(twin).__name__
    with torch.set_grad_enabled(complete):
        output = twin(family.pixels(twin, pixels_TP), grid_thw=grid_thw)
        expected = family.tensors_of(output)
        ours = encode(lay_out(grid, spec).ready(), pixels_TP)
    fast = None
    if why := _difference(ours, expected, _OUTPUT_BOUND):
        fast = f"{name} computes something else than our operations ({why})"
    elif type(family.output_of(family.output_class(twin), ours)) is not type(output):
        fast = f"{name} returns another class, {type(output).__name__}"
    if not complete:
        return fast, None
    if fast is None:
        inputs = [pixels_TP, *(parameter for parameter in twin.parameters() if parameter.requires_grad)]
        incoming = [torch.randn(x.shape, generator=generator, device="cpu", dtype=x.dtype) for x in expected]
        our_gradients = torch.autograd.grad(ours, inputs, incoming, allow_unused=True)
        gradients = torch.autograd.grad(expected, inputs, incoming, allow_unused=True)
        if why := _difference(list(our_gradients), list(gradients), _GRADIENT_BOUND):
            fast = f"{name} has other gradients than our operations ({why})"
    twin.config._attn_implementation_internal = "flash_vit_auto"
    metadata = lay_out(grid, replace(spec, ops=None)).ready().injected()
    with torch.no_grad():
        output = twin(family.pixels(twin, pixels_TP), grid_thw=grid_thw, **metadata)
        injected = _difference(family.tensors_of(output), expected, _OUTPUT_BOUND)
    twin.config._attn_implementation_internal = _STOCK
    return fast, injected and f"{name} computes something else with our metadata ({injected})"


def _difference(ours: list[Any], expected: list[Any], bound: float) -> str | None:
    """Say how far our tensors are from the expected ones, where that is more than the bound; None if it is not."""
    shapes = [[None if x is None else tuple(x.shape) for x in tensors] for tensors in (ours, expected)]
    if shapes[0] != shapes[1]:
        return f"shapes {shapes[0]} instead of {shapes[1]}"
    pairs = [(o.detach(), e.detach()) for o, e in zip(ours, expected, strict=True) if e is not None]
    total = torch.stack([e.norm() for _, e in pairs]).norm() if pairs else torch.tensor(0.0)
    # What should be zero (a gradient of a key's bias) is rounding: it is measured by all the others.
    errors = [float((o - e).norm() / (e.norm() + 1e-3 * total)) for o, e in pairs]
    worst = max((error if error == error else float("inf") for error in errors), default=0.0)
    return None if worst <= bound else f"relative error {worst:.1e}, at most {bound:.0e} is rounding"
