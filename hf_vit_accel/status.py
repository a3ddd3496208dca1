"""What `status` tells of every tower: what runs, what does not, and why, each reason once."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from torch import nn

from hf_vit_accel.backends import BackendUnavailableError, Choice, Kind, resolve
from hf_vit_accel.config import Settings
from hf_vit_accel.engine.route import Spec
from hf_vit_accel.families import FAMILIES, Family, find_towers
from hf_vit_accel.graphs.store import GraphStatus
from hf_vit_accel.ops import PARTS
from hf_vit_accel.ops.window_attention import LONGEST
from hf_vit_accel.sharing.reuse import ReuseStatus
from hf_vit_accel.tower import checks as guard
from hf_vit_accel.tower import fsdp as sharding
from hf_vit_accel.tower.snapshot import Snapshot, Weights
from hf_vit_accel.tower.state import TowerState, state_of


@dataclass(frozen=True, kw_only=True)
class TowerStatus:
    """One tower's state: what was asked for, what runs, and what did not and why.

    backends: backend per kind of layer, of the last call or, before any with such weights, as it would be chosen now.
    rejected: per kind, why backends that come first did not serve it. fused: parts that ran, or would run, fused.
    unfused: parts that do not, with the reason. calls, stock_calls: forwards that went the fast path and the stock
    way. fallbacks: reason -> count of calls that did not get what was asked for (a call may have several).
    against_fast: what currently keeps every call off the fast path. layouts: (held, hits, misses) of the cache of
    layouts. graphs: what CUDA graphs did. training: those of forward and backward, once a step had gradients. fp8: by
    what attention in FP8 is scaled, and what it cut off. passes: the calls that were cut, and what memory told. ranks:
    what became of calls under `data_parallel`. reuse: what was encoded once. These are None where nothing of the kind
    was asked for, or happened.
    """

    path: str
    family: str
    patched: bool
    attention: str
    backends: Mapping[str, str] = field(default_factory=dict)
    rejected: Mapping[str, Mapping[str, tuple[str, ...]]] = field(default_factory=dict)
    fused: tuple[str, ...] = ()
    unfused: Mapping[str, str] = field(default_factory=dict)
    calls: int = 0
    stock_calls: int = 0
    fallbacks: Mapping[str, int] = field(default_factory=dict)
    against_fast: tuple[str, ...] = ()
    layouts: tuple[int, int, int] = (0, 0, 0)
    attention_only: bool = False
    graphs: GraphStatus | None = None
    training: GraphStatus | None = None
    fp8: str | None = None
    passes: str | None = None
    ranks: str | None = None
    reuse: ReuseStatus | None = None

    def __str__(self) -> str:
        where = self.path or "(the model itself)"
        if not self.patched:
            return f"{where}: {self.family}, stock (attention {self.attention})"
        backends = ", ".join(f"{name} ({kind} layers)" for kind, name in self.backends.items())
        fused = "attention only: the tower's own forward runs" if self.attention_only else ", ".join(self.fused)
        lines = [
            f"{where}: {self.family}, patched",
            f"  attention  {self.attention} -> {backends or 'chosen at the first call'}",
            f"  fused      {fused or 'nothing'}",
            f"  calls      {self.calls} fast, {self.stock_calls} stock",
            "  layouts    {} held, {} hits, {} misses".format(*self.layouts),
        ]
        lines += [f"  passes     {self.passes}"] if self.passes is not None else []
        lines += [f"  shared     {self.ranks}"] if self.ranks is not None else []
        lines += [f"  fp8        {self.fp8}"] if self.fp8 is not None else []
        lines += [str(each) for each in (self.graphs, self.training, self.reuse) if each is not None]
        lines += [f"  fallback   {count} x {why}" for why, count in self.fallbacks.items()]
        lines += [f"  not fast   {why}" for why in self.against_fast]
        rejected = {name: reasons[0] for of_kind in self.rejected.values() for name, reasons in of_kind.items()}
        for label, reasons in (("not fused", self.unfused), ("not used ", rejected)):
            for reason in dict.fromkeys(reasons.values()):  # once, with all that it holds for
                names = ", ".join(name for name, why in reasons.items() if why == reason)
                lines.append(f"  {label}  {names}: {reason}")
        return "\n".join(lines)


@dataclass(frozen=True, kw_only=True)
class Status:
    """The status of every tower in a model; prints as text, `to_dict()` for JSON."""

    towers: tuple[TowerStatus, ...]

    def __str__(self) -> str:
        return "\n".join(map(str, self.towers))

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts, lists, strings and numbers."""
        return asdict(self)


def status(model: nn.Module) -> Status:
    """What runs in each tower of a model, and every fallback with its reason."""
    return Status(towers=tuple(_tower_status(*found) for found in towers_of(model)))


def _tower_status(path: str, tower: Any, family: Family) -> TowerStatus:
    told: dict[str, Any] = dict(path=path, family=family.name, attention_only=family.attention_only)
    if (state := state_of(tower)) is None:
        return TowerStatus(**told, patched=False, attention=tower.config._attn_implementation)
    told |= dict(
        patched=True,
        attention=state.settings.attention + (" with a score_mod" if state.settings.score_mod else ""),
        calls=state.calls,
        stock_calls=state.stock_calls,
        fallbacks=dict(state.fallbacks),
        layouts=(len(state.routes.cache), state.routes.cache.hits, state.routes.cache.misses),
    )
    if family.attention_only:
        return TowerStatus(**told, backends=dict(state.served), unfused=beyond_attention(state.settings))
    snapshot, name = state.snapshot(tower), tower.config._attn_implementation
    against, spec = reasons_now(tower, state, snapshot, name, state.former_forward)
    last, places = state.last, {id(made): (key[0], key[4]) for key, made in snapshot.specs.items()}
    if last is not None and spec is not None and places.get(id(last.spec)) != places.get(id(spec)):
        last = None  # the weights were on another device, or of another dtype
    choices = {} if last is None else last.choices
    if spec is not None and not choices:
        kinds: tuple[Kind, ...] = ("full", "window") if family.windows else ("full",)
        try:
            choices = {kind: resolve(spec.settings.attention, replace(spec.request, kind=kind)) for kind in kinds}
        except BackendUnavailableError as error:
            against, spec = [*against, str(error)], None
    ops = None if spec is None else spec.ops
    if ops is not None and last is not None and last.spec.ops is not None:
        ops = last.spec.ops
    backends: dict[str, str] = {kind: choice.backend.name for kind, choice in choices.items()}
    if ops is not None and ops.attend_window is not None:
        side = (snapshot.geometry.window or 0) * snapshot.geometry.merge
        if "window" not in (last.choices if last else ()) and (last or side**2 <= LONGEST):
            backends["window"] = "fused kernel"
    return TowerStatus(
        **told,
        backends=backends,
        rejected={kind: choice.rejected for kind, choice in choices.items() if choice.rejected},
        fused=tuple(part for part in PARTS if ops is not None and part in ops.fused),
        unfused={} if ops is None else ops.unfused,
        against_fast=tuple(against),
        graphs=None if state.runner is None else state.runner.status(),
        training=None if state.training is None or not state.training.used else state.training.status(),
        fp8=_fp8_status(state, choices),
        passes=str(state.passes) or None,
        ranks=None if state.sharing is None else str(state.sharing),
        reuse=None if state.reuse is None else state.reuse.status(),
    )


def beyond_attention(settings: Settings) -> dict[str, str]:
    """What was asked for, and is not to be had for a tower whose attention alone is ours."""
    asked = {
        "cuda_graphs": settings.graphs,
        "fp8": settings.fp8,
        "data_parallel": settings.ranks,
        "reuse": settings.reuse,
        **dict.fromkeys(settings.fuse or (), True),
    }
    return {name: "this family is served attention only" for name, wanted in asked.items() if wanted}


def _weights_of_calls(tower: Any, snapshot: Snapshot) -> Weights:
    """The weights between calls, as calls find them: FSDP2 brings what are shards then, by its policies.

    (Where a parent of the tower is sharded with it, by the policy of the layers: the parent's is not known here.)
    """
    weights = snapshot.weights()[1]
    if snapshot.brought and weights.reasons:
        holder = tower if isinstance(tower, sharding.wrapper()) else next(iter(snapshot.sharded.values()))
        weights = copy.copy(weights)
        weights.dtype, weights.reasons = sharding.brought(holder, weights.dtype), []
    return weights


def reasons_now(
    tower: Any, state: TowerState, snapshot: Snapshot, name: str | None, former_forward: Any
) -> tuple[list[str], Spec | None]:
    """What keeps every call off the fast path, under an attention of that name; and what decides routes, if known."""
    reasons = guard.reasons_stock(tower, former_forward, name, snapshot, {})
    if snapshot.stock:
        return reasons, None
    weights = _weights_of_calls(tower, snapshot)
    reasons += guard.reasons_slow(tower, snapshot, weights, {}, grad=False)
    weight: Any = snapshot.parts.projection.weight
    return reasons, state.spec(snapshot, weights, weight.device, fast=not reasons, grad=False)


def _fp8_status(state: TowerState, choices: Mapping[Kind, Choice]) -> str | None:
    if state.settings.fp8 is None:
        return None
    path = state.settings.fp8.amax_file
    text = f"scaled by {f'the amax in {path}' if path is not None else 'the amax of each call'}"
    if saturated := state.saturated():
        text += f", cut off beyond them in layers {', '.join(map(str, saturated))}"
    if why := choices["full"].not_worth if "full" in choices else None:
        text += f"; not used by the last call: {why}"
    return text


def towers_of(model: nn.Module) -> list[tuple[str, Any, Family]]:
    """(path, tower, family) of every supported tower in a model; ValueError where there is none."""
    if not isinstance(model, nn.Module):
        raise ValueError(f"expected a torch module, got {type(model).__name__}; pass the loaded model")
    towers = list(find_towers(model))
    if not towers:
        supported = ", ".join(family.name for family in FAMILIES)
        raise ValueError(
            f"expected a model with a vision tower of one of the families {supported}, found none in "
            f"{type(model).__name__}; pass the loaded model, or its vision tower"
        )
    return towers
