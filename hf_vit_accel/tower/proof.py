"""What we take from transformers: proof, by running, that we compute what its code computes; wrapping its functions.

The fast path computes what a tower, its blocks and its attention compute without calling them. Whether they still
compute that is not read from their code: a tiny tower of the same class runs beside our operations, outputs and
gradients, over grids that tell layouts apart.
"""

from __future__ import annotations

import copy
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import wraps
from operator import attrgetter
from types import FunctionType
from typing import Any

import torch
import transformers
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import modeling_utils
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from hf_vit_accel import machine
from hf_vit_accel.backends import Request
from hf_vit_accel.config import Settings
from hf_vit_accel.engine.encoder import encode
from hf_vit_accel.engine.route import Spec, lay_out
from hf_vit_accel.families import Family
from hf_vit_accel.layout import Grid, rows_of
from hf_vit_accel.machine import one_line
from hf_vit_accel.ops import Context, build

NAMES = {"flashinfer_cudnn": "flashinfer_cudnn", "flash_vit_auto": "auto"}
"""Name that is registered with transformers -> the `attention` of `patch` that it stands for."""

GRIDS = ((1, 6, 10), (3, 4, 8), (1, 2, 18)), ((1, 8, 8),)
"""Images of several sizes and a clip, which share no layout and fill some windows only; and one image."""

_BOUND, _GRADIENT_BOUND = 2e-5, 2e-4  # fp32 in another order of operations comes to 2e-6


@dataclass(frozen=True, kw_only=True)
class Proof:
    """What was proven of one class of towers.

    fast: why the operations may not take the place of its forward; injected: why its forward may not be given metadata
    of ours; both None where it is proven. classes: of all its modules. code: what ran.
    """

    fast: str | None
    injected: str | None
    classes: frozenset[type]
    code: Code


_PROOFS: dict[Any, Proof] = {}
_WARNED: set[str] = set()


def prove(tower: nn.Module, family: Family) -> Proof:
    """The proof for a tower's class and its config's switches: made once per process and code, in 50 to 150 ms.

    It is made in a thread of its own, which has no mode, device, stream or autocast of the caller's, and draws no
    random numbers of his. Two threads may both make it; nothing is locked, so forks are safe.
    """
    kind = family.tower_class(tower)
    assert kind is not None
    config = tower.config
    key = kind, repr(sorted(_switches(config, family)))
    proof = _PROOFS.get(key)
    if proof is None or not proof.code.unchanged():
        proof = _PROOFS[key] = machine.run_isolated(_prove, kind, config, family)
    return proof


def warn_of(tower: nn.Module, proof: Proof) -> None:
    """Say once that a tower's class is not what was proven; `status` gives the same reason."""
    name, why = type(tower).__name__, proof.injected or proof.fast
    if why is not None and f"{name}: {why}" not in _WARNED:
        _WARNED.add(f"{name}: {why}")
        warnings.warn(
            f"transformers {transformers.__version__}: {why}. {name} stays stock; look for a newer hf_vit_accel.",
            stacklevel=2,
        )


def _switches(config: Any, family: Family) -> Iterator[tuple[str, str]]:
    """The fields of a config that may choose between ways to compute: no sizes, no names."""
    for name, value in config.to_dict().items():
        if name not in family.tiny and name not in _UNREAD and isinstance(value, str | bool | float):
            yield name, repr(value)


_UNREAD = {"dtype", "model_type", "transformers_version", "name_or_path", "_name_or_path", "initializer_range"}


class Code:
    """The functions that a proof ran: the forwards of classes, and the functions in the tower's module.

    Anyone may replace them, at any time. home, names: that module's globals, and those that are functions. kind: the
    tower's class; methods: its own functions, by name.
    """

    def __init__(self, kind: type, classes: frozenset[type]) -> None:
        self.home, self.kind, self._classes = vars(sys.modules[kind.__module__]), kind, list(classes)
        functions = {name: value for name, value in vars(kind).items() if isinstance(value, FunctionType | property)}
        self.methods = [*functions.keys() - {"forward"}]  # which is asked for by itself
        self.names = [name for name, value in self.home.items() if callable(value) and not isinstance(value, type)]
        self._read = self._now()

    def _now(self) -> list[Any]:
        methods = map(vars(self.kind).get, self.methods)
        return [*map(self.home.get, self.names), *methods, *map(attrgetter("forward"), self._classes)]

    def reasons_overridden(self, tower: nn.Module) -> list[str]:
        """Which of the methods a tower, or a class made of its class, has of its own: the twin ran without."""
        same = {name: getattr(type(tower), name) is vars(self.kind)[name] for name in self.methods}
        return [f"the tower has a {name} of its own" for name in same if not same[name] or name in vars(tower)]

    def unchanged(self) -> bool:
        """Whether all of them are still the same."""
        return self._now() == self._read


class _Unrandom(TorchFunctionMode):
    """Drops what initialises weights at random, on this thread: the generator stays as it is."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if re.search("uniform_$|normal_$|orthogonal_$|sparse_$", getattr(func, "__name__", "")):
            return args[0] if args else kwargs["tensor"]
        return func(*args, **(kwargs or {}))


_STOCK = "hf_vit_accel_stock"
"""The name of transformers' own sdpa attention for twins: anyone may register another function under the usual one."""


def _twin(kind: Any, config: Any, family: Family) -> Any:
    """A tower of a class in its smallest shape, fp32 on the CPU; no weight is zero, and no norm's one."""
    modeling_utils.AttentionInterface.register(_STOCK, sdpa_attention_forward)
    config = copy.deepcopy(config)
    for name, value in family.tiny.items():
        setattr(config, name, copy.deepcopy(value))
    config._attn_implementation_internal = _STOCK
    config.attention_dropout = 0.0  # is asked for at every call
    config.return_dict, config.output_hidden_states, config.output_attentions = True, False, False
    with torch.device("cpu"), _Unrandom():
        twin = kind(config).float().eval()
    generator = torch.Generator("cpu").manual_seed(0)
    with torch.no_grad():
        for name, parameter in twin.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator, device="cpu", dtype=torch.float32)
            if parameter.dim() > 1:
                parameter.copy_(noise / parameter[0].numel() ** 0.5)
            else:
                parameter.copy_(noise * 0.1 + float(name.endswith("weight")))
    return twin


def _prove(kind: Any, config: Any, family: Family) -> Proof:
    classes: frozenset[type] = frozenset()
    fast = injected = None
    try:
        twin = _twin(kind, config, family)
        classes = frozenset(map(type, twin.modules()))
        fast, injected = _compare(twin, family, GRIDS[0], whole=True)
        fast = fast or _compare(twin, family, GRIDS[1])[0]
        with torch.no_grad():  # in a residual stream this small, a norm's epsilon counts
            for name, parameter in twin.named_parameters():
                parameter.mul_(0.02 if parameter.dim() > 1 or name.endswith("bias") else 1.0)
        fast = fast or _compare(twin.train(), family, GRIDS[0])[0]  # what is done in training only, ours does not
    except Exception as error:
        fast = injected = f"{kind.__name__} could not be run beside our operations: {one_line(error)}"
    return Proof(fast=fast, injected=injected, classes=classes, code=Code(kind, classes))


def _compare(twin: Any, family: Family, grid: Grid, *, whole: bool = False) -> tuple[str | None, str | None]:
    """What differs between stock and the operations; whole: also in gradients, and in stock with metadata of ours."""
    generator, parts = torch.Generator("cpu").manual_seed(1), family.parts(twin)
    weight, attention = parts.projection.weight, parts.blocks[0].attention
    if not family.videos:
        grid = tuple((1, h, w) for t, h, w in grid for _ in range(t))
    pixels_TP = torch.randn(rows_of(grid), weight[0].numel(), generator=generator, device="cpu", dtype=torch.float32)
    pixels_TP.requires_grad_()
    grid_thw = torch.tensor(grid, device="cpu")
    request = Request(
        device=weight.device,
        dtype=torch.float32,
        heads=attention.num_heads,
        head_dim=attention.head_dim,
        scale=attention.scaling,
        grad=True,
    )
    spec = Spec(
        geometry=family.geometry(twin),
        request=request,
        ops=build(parts, Context(device=weight.device, dtype=torch.float32, reference=True)),
        full_layers=tuple(map(parts.full, range(len(parts.blocks)))),
        settings=Settings(attention="sdpa"),
    )
    name, route = type(twin).__name__, lay_out(grid, spec).ready()
    with torch.set_grad_enabled(whole):
        output = twin(family.pixels(twin, pixels_TP), grid_thw=grid_thw)
        expected, found = family.tensors_of(output), encode(route, pixels_TP)
    fast, inputs = None, [pixels_TP, *twin.parameters()]
    if why := _difference(found, expected, _BOUND):
        fast = f"{name} computes something else than our operations ({why})"
    elif type(family.output_of(twin, found)) is not type(output):
        fast = f"{name} returns another class, {type(output).__name__}"
    if not whole:
        return fast, None
    if fast is None:
        wanted = [torch.randn(x.shape, generator=generator, device="cpu", dtype=torch.float32) for x in expected]
        ours, theirs = (list(torch.autograd.grad(x, inputs, wanted, allow_unused=True)) for x in (found, expected))
        if why := _difference(ours, theirs, _GRADIENT_BOUND):
            fast = f"{name} has other gradients than our operations ({why})"
    twin.config._attn_implementation_internal = "flash_vit_auto"
    metadata = lay_out(grid, replace(spec, ops=None)).ready().injected()
    with torch.no_grad():
        output = twin(family.pixels(twin, pixels_TP), grid_thw=grid_thw, **metadata)
        injected = _difference(family.tensors_of(output), expected, _BOUND)
    twin.config._attn_implementation_internal = _STOCK
    return fast, injected and f"{name} computes something else with our metadata ({injected})"


def _difference(found: list[Any], expected: list[Any], bound: float) -> str | None:
    """How far tensors are from others, where that is more than the bound; None if it is not."""
    shapes = [[None if x is None else tuple(x.shape) for x in tensors] for tensors in (found, expected)]
    if shapes[0] != shapes[1]:
        return f"shapes {shapes[0]} instead of {shapes[1]}"
    pairs = [(f.detach(), e.detach()) for f, e in zip(found, expected, strict=True) if e is not None]
    whole = torch.stack([e.norm() for _, e in pairs]).norm() if pairs else torch.tensor(0.0)
    # What should be zero (a gradient of a key's bias) is rounding: it is measured by all the others.
    errors = [float((f - e).norm() / (e.norm() + 1e-3 * whole)) for f, e in pairs]
    worst = max((error if error == error else float("inf") for error in errors), default=0.0)
    return None if worst <= bound else f"relative error {worst:.1e}, at most {bound:.0e} is rounding"


def wrap(owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> str | None:
    """Put a wrapper around a function of transformers, once however often; or say what is missing."""
    original = getattr(owner, name, None)
    if original is None:
        return f"transformers {transformers.__version__} has no {getattr(owner, '__name__', owner)}.{name}"
    original = getattr(original, _ORIGINAL, original)
    wrapper = wraps(original)(make(original))
    setattr(wrapper, _ORIGINAL, original)
    setattr(owner, name, wrapper)
    return None


_ORIGINAL = "_hf_vit_accel_original"
