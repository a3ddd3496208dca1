"""`status`: report for every tower what runs, what does not, and why; every reason once."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hf_vit_accel.backends import BACKENDS, BackendUnavailableError, Choice, LayerKind, resolve
from hf_vit_accel.backends.base import Replay
from hf_vit_accel.config import GraphConfig, Settings
from hf_vit_accel.families import FAMILIES, FAMILIES_OF_COPIES, Family, Tower
from hf_vit_accel.families.copies import CopyFamily, suggest_families
from hf_vit_accel.graphs.runner import Runner
from hf_vit_accel.graphs.status import GraphStatus
from hf_vit_accel.graphs.training import TrainingRunner
from hf_vit_accel.machine import autocast_dtype
from hf_vit_accel.model import around
from hf_vit_accel.ops import PARTS, TABLE, why_not_triton
from hf_vit_accel.options.reuse import ReuseStatus
from hf_vit_accel.tower import fsdp
from hf_vit_accel.tower.code import why_not_reached
from hf_vit_accel.tower.forward import reasons_of
from hf_vit_accel.tower.install import foreign_forward, holds_ours, towers_in
from hf_vit_accel.tower.snapshot import Snapshot
from hf_vit_accel.tower.state import SpecKey, TowerState, state_of
from hf_vit_accel.versions import untested

if TYPE_CHECKING:
    from hf_vit_accel.decoding.text_forward import TextForward  # `text=True` imports the room

_CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class TowerStatus:
    """The status of one tower: the requested options, the parts that run, and reasons for everything that does not.

    Attributes:
        path: The tower's path in the model; empty for the model itself.
        family: The tower's family.
        like: The class that is served as a copy of that family, as `patch` was told; None for transformers' classes.
        proven: The numbers of the proof of a copy.
        patched: Whether the tower is patched. If not, only `attention` follows.
        attention: The requested attention, or the name of stock's.
        backends: The backend of every kind of layer, in the last call. Before the first call, that of full layers which
            is expected. Empty if stock ran the last call on what it was called with; so are `rejected` and `fused`.
        rejected: By kind of layer and backend, the reasons against backends that come first.
        fused: The parts that the last call ran fused. Both are empty before the first call, which builds operations.
        unfused: The parts that it did not run fused, with the reason.
        calls: Forwards on the fast path.
        stock_calls: Forwards on the stock path.
        metadata_calls: Those of them that got our metadata and attention. The others computed their own.
        fallbacks: The calls that did not get a requested option, counted by reason. A call may have several reasons.
        against_fast: The reasons of the last call, if stock ran it; empty if it was fast. Before the first call, the
            reasons against one without gradients. Also why calls do not reach our forward now.
        layouts: (cached, hits, misses) of the cache of layouts.
        rebuilds: How often the tower was read again because it changed.
        rebuild_reason: What changed last; None without rebuilds.
        attention_only: Whether only attention is ours, and the tower's own forward runs.
        graphs: The CUDA graphs for inference; None without, and before the first call that may use automatic ones.
        on_cpu: Whether the weights are on a CPU. Then the text leaves out what needs CUDA, and parts that the tower
            lacks. `rejected` and `unfused` hold them.
        training: The CUDA graphs for training; None before the first step with gradients.
        fp8: How attention in FP8 is scaled, and in which layers values were cut off; "requested" before the first call.
            None unless requested.
        passes: The calls that were split into passes, and halvings after running out of memory. None without.
        ranks: The calls under `data_parallel`; None unless requested.
        reuse: The images that were encoded once; None unless requested.
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
    metadata_calls: int = 0
    fallbacks: Mapping[str, int] = field(default_factory=dict)
    against_fast: tuple[str, ...] = ()
    layouts: tuple[int, int, int] = (0, 0, 0)
    rebuilds: int = 0
    rebuild_reason: str | None = None
    attention_only: bool = False
    like: str | None = None
    proven: str | None = None
    on_cpu: bool = False
    graphs: GraphStatus | None = None
    training: GraphStatus | None = None
    fp8: str | None = None
    passes: str | None = None
    ranks: str | None = None
    reuse: ReuseStatus | None = None

    def __str__(self) -> str:
        path = self.path or "(the model itself)"
        if not self.patched:
            return f"{path}: {self.family}, stock (attention {self.attention})"
        backends = ", ".join(f"{name} ({kind} layers)" for kind, name in self.backends.items())
        is_expected = not (self.calls or self.stock_calls)
        if backends and is_expected:
            backends += ", expected before the first call"
        fused = ", ".join(self.fused) or ("known after the first call" if is_expected else "nothing")
        if self.attention_only:
            fused = "attention only: the tower's own forward runs"
        family = self.family if self.like is None else f"{self.family} (like: {self.like})"
        stock = f"{self.stock_calls} stock"
        if self.stock_calls and not self.attention_only:
            stock += f" ({self.metadata_calls} with our metadata)"
        lines = [
            f"{path}: {family}, patched",
            f"  attention  {self.attention} -> {backends or ('not chosen yet' if is_expected else 'not recorded')}",
            f"  fused      {fused}",
            f"  calls      {self.calls} fast, {stock}",
            "  layouts    {} held, {} hits, {} misses".format(*self.layouts),
        ]
        if self.proven is not None:
            lines.append(f"  proven     {self.proven}")
        if self.rebuilds:
            lines.append(f"  rebuilt    {self.rebuilds} x, last because {self.rebuild_reason}")
        for label, text in (("passes", self.passes), ("shared", self.ranks), ("fp8", self.fp8)):
            if text is not None:
                lines.append(f"  {label:<10} {text}")
        lines += [str(part) for part in (self.graphs, self.training, self.reuse) if part is not None]
        lines += [f"  fallback   {count} x {why}" for why, count in self.fallbacks.items()]
        lines += [f"  not fast   {why}" for why in self.against_fast]
        first_reasons: dict[str, str] = {}
        for reasons_by_backend in self.rejected.values():
            first_reasons |= {name: reasons[0] for name, reasons in reasons_by_backend.items()}
        unfused = dict(self.unfused)
        if self.on_cpu:
            hidden_reasons = {operation.missing for operation in TABLE} | {why_not_triton(_CPU, torch.float32)}
            hidden_backends = {backend.name for backend in BACKENDS if backend.needs.cuda} - {self.attention}
            unfused = {part: why for part, why in unfused.items() if why not in hidden_reasons}
            first_reasons = {name: why for name, why in first_reasons.items() if name not in hidden_backends}
            lines.append("  on a CPU   the kernels and other backends need CUDA; to_dict() has every reason")
        lines += _lines_by_reason("not fused", unfused)
        lines += _lines_by_reason("not used ", first_reasons)
        return "\n".join(lines)


def _lines_by_reason(label: str, reasons: Mapping[str, str]) -> list[str]:
    """Return one line per reason, with all names that it holds for."""
    names_by_reason: dict[str, list[str]] = {}
    for name, why in reasons.items():
        names_by_reason.setdefault(why, []).append(name)
    return [f"  {label}  {', '.join(names)}: {why}" for why, names in names_by_reason.items()]


@dataclass(frozen=True, kw_only=True)
class ModelStatus:
    """The status of a model around its tower.

    Attributes:
        path: Where it is in the model that `status` was given.
        calls: How often positions were computed on the host.
        stock_calls: How often transformers computed them.
        fallbacks: Why it did, with the number of calls.
        unknown: Methods that are not transformers' own, and so run as they are.
        every_rank: Forwards that called the tower once, and how many of them encoded a dummy. None without
            `every_rank`.
    """

    path: str
    calls: int
    stock_calls: int
    fallbacks: Mapping[str, int]
    unknown: tuple[str, ...] = ()
    every_rank: tuple[int, int] | None = None

    def __str__(self) -> str:
        path = self.path or "(the model itself)"
        lines = [
            f"{path}: positions on the host ({self.calls} call{'s' * (self.calls != 1)}), {self.stock_calls} stock"
        ]
        if self.every_rank is not None:
            lines.append("  every rank {} forwards, {} of them with a dummy".format(*self.every_rank))
        lines += [f"  fallback   {count} x {why}" for why, count in self.fallbacks.items()]
        lines += [f"  not fast   {name} is not transformers' own" for name in self.unknown]
        return "\n".join(lines)


@dataclass(frozen=True, kw_only=True)
class Status:
    """The status of every tower in a model. It prints as text; `to_dict()` is for JSON.

    Attributes:
        towers: The status of every tower, in the order of the model.
        models: The status of every patched model around a tower.
        decoding: The calls of `graphed_decoding`, and the reasons of those that stock decoded. None without any.
        text: The calls of the language model under `text=True`, and the reasons of those by stock. None without.
        untested: Packages that are newer than those that the tests ran with. Towers are proven there, too.
    """

    towers: tuple[TowerStatus, ...]
    models: tuple[ModelStatus, ...] = ()
    decoding: str | None = None
    text: str | None = None
    untested: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [str(part) for part in (*self.towers, *self.models)]
        if self.decoding is not None:
            lines.append(f"decoding: {self.decoding}")
        if self.text is not None:
            lines.append(f"text: {self.text}")
        lines += [f"not tested: {line}; towers that are fast are proven with it" for line in self.untested]
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Return plain dicts, tuples, strings and numbers."""
        return asdict(self)


def status(model: nn.Module) -> Status:
    """Report what runs in every tower of a model, and every fallback with its reason.

    Args:
        model: Any module that holds a supported tower, or the tower itself.

    Raises:
        ValueError: If the model has no supported tower, and `graphed_decoding` was never called for it.
    """
    found = towers_of(model, or_decoded=True)
    towers = [_tower_status(path, tower, family, fsdp.holder_of(model, tower)) for path, tower, family in found]
    models = [_model_status(path, holder) for path, holder in around.holders_of(model) if around.state_of(holder)]
    return Status(
        towers=tuple(towers),
        models=tuple(models),
        decoding=_decoding_of(model),
        text="; ".join(map(str, text_forwards_in(model).values())) or None,
        untested=tuple(untested()),
    )


def _decoding_of(model: nn.Module) -> str | None:
    """Describe what `graphed_decoding` did for a model; None before its first call, which imports the room."""
    steps = sys.modules.get("hf_vit_accel.decoding.steps")
    return None if steps is None else steps.decoding_status(model)


def text_forwards_in(model: nn.Module) -> dict[str, TextForward]:
    """Return our forwards of text models in a model, by their paths; none before `text=True` imports the room."""
    room = sys.modules.get("hf_vit_accel.decoding.text_forward")
    if room is None:
        return {}
    forwards = {path: room.TextForward.in_text(module) for path, module in model.named_modules()}
    return {path: forward for path, forward in forwards.items() if forward is not None}


def _model_status(path: str, model: nn.Module) -> ModelStatus:
    state = around.state_of(model)
    assert state is not None
    return ModelStatus(
        path=path,
        calls=state.calls,
        stock_calls=state.stock_calls,
        fallbacks=dict(state.fallbacks),
        unknown=tuple(around.unknown_methods(model, around.SERVED)),
        every_rank=(state.features.calls, state.features.dummies) if state.every_rank else None,
    )


def _tower_status(path: str, tower: Tower, family: Family, holder: nn.Module | None) -> TowerStatus:
    """Return what the last call of a tower recorded; before its first call, what is expected."""
    state = state_of(tower)
    unpatched = TowerStatus(
        path=path,
        family=family.name,
        like=family.copied if isinstance(family, CopyFamily) else None,
        attention_only=family.attention_only,
        patched=False,
        attention=tower.config._attn_implementation,
    )
    if state is None:
        return unpatched
    settings = state.settings
    snapshot = state.last_snapshot
    route = state.last_route
    former_forward = foreign_forward(tower)
    against = state.why_stock
    choices: Mapping[LayerKind, Choice] = {} if route is None else route.choices
    if not (state.fast_calls or state.stock_calls or family.attention_only):
        snapshot = _reading_before_calls(tower, state)
        against, choices = _expected(tower, state, snapshot, former_forward, holder)
    if former_forward is not None:  # a call that does not reach our forward records nothing
        against = (why_not_reached(former_forward), *against)
    elif not holds_ours(tower):
        against = ("other code took the forward of patch off the tower; patch again", *against)
    backends = {} if route is None else route.attended
    backends |= {kind: choice.backend.name for kind, choice in choices.items()}
    fused: tuple[str, ...] = ()
    unfused = ignored_options(settings) if family.attention_only else {}
    if route is not None and route.spec.ops is not None:
        ops = route.spec.ops
        fused = tuple(part for part in PARTS if part in ops.fused)
        unfused = dict(ops.unfused)
        if ops.attend_window is not None:
            backends["window"] = "fused kernel"
    return replace(
        unpatched,
        patched=True,
        attention=settings.attention + (" with a score_mod" if settings.score_mod else ""),
        proven=str(snapshot.proof.report) if snapshot is not None and snapshot.is_copy else None,
        calls=state.fast_calls,
        stock_calls=state.stock_calls,
        metadata_calls=state.metadata_calls,
        fallbacks=dict(state.fallbacks),
        layouts=(len(state.routes.cache), state.routes.hits, state.routes.cache.misses),
        rebuilds=state.rebuilds,
        rebuild_reason=state.rebuild_reason,
        on_cpu=bool(choices) and all(parameter.device.type == "cpu" for parameter in tower.parameters()),
        backends=backends,
        rejected={kind: dict(choice.rejected) for kind, choice in choices.items() if choice.rejected},
        fused=fused,
        unfused=unfused,
        against_fast=tuple(dict.fromkeys(against)),
        graphs=_graph_status(state.inference_runner, is_asked_for=settings.graphs != "auto"),
        training=_graph_status(state.training_runner),
        fp8=None if settings.fp8 is None else _report_of_fp8(state),
        passes=None if state.passes is None else str(state.passes) or None,
        ranks=None if state.sharing is None else str(state.sharing),
        reuse=None if state.reuse is None else state.reuse.status(),
    )


def _reading_before_calls(tower: Tower, state: TowerState) -> Snapshot:
    """Return a reading of the tower as it is now, which the first call makes again, unless `patch` made it.

    `status` keeps its own apart, as no call may find it: reading a copy again takes the seconds of its proof.
    """
    for reading in (state.last_snapshot, state.read_by_status):
        if reading is not None and reading.watch.unchanged():
            return reading
    state.read_by_status = Snapshot(tower, state.family)
    return state.read_by_status


def _expected(
    tower: Tower,
    state: TowerState,
    snapshot: Snapshot,
    former_forward: Callable[..., object] | None,
    holder: nn.Module | None,
) -> tuple[tuple[str, ...], Mapping[LayerKind, Choice]]:
    """Return the reasons against a first call without gradients, and the choice for its full layers.

    Nothing is built. Only operations tell which parts are fused, and whether windows have a kernel.
    """
    name = tower.config._attn_implementation
    family = state.family
    reasons = reasons_of(
        tower, family, snapshot, former_forward, name, {}, grad=False, between_calls=True, holder=holder
    )
    against = (*reasons.stock, *reasons.metadata)
    weights = reasons.weights
    if weights is None:
        return against, {}
    device = snapshot.parts.projection.weight.device
    autocast = autocast_dtype(device, weights.dtype)
    key = SpecKey(device, autocast, not against, False, weights.dtype, weights.key, None)
    replay: Replay = "padded" if isinstance(state.settings.graphs, GraphConfig) else "never"
    request = replace(state.request(snapshot, weights, key), replay=replay)
    try:
        return against, {"full": resolve(state.settings.attention, request, None, state.faults)}
    except BackendUnavailableError as error:
        return (*against, str(error)), {}


def _graph_status(runner: Runner | TrainingRunner | None, *, is_asked_for: bool = False) -> GraphStatus | None:
    """Return the counters of graphs; None without, and before their first call unless they were asked for."""
    if runner is None or not (runner.policy.calls or is_asked_for):
        return None
    return runner.status()


def ignored_options(settings: Settings) -> dict[str, str]:
    """Return the requested options that a family without more than attention ignores, with the reason."""
    requested = {
        "cuda_graphs": settings.graphs != "auto" and settings.graphs,
        "fp8": settings.fp8,
        "max_rows": settings.max_rows != "auto" and settings.max_rows,
        "data_parallel": settings.ranks,
        "reuse": settings.reuse,
    }
    return {name: "this family is served attention only" for name, option in requested.items() if option}


def _report_of_fp8(state: TowerState) -> str:
    """Describe how attention is scaled, and why the last call did not use FP8."""
    if state.scales is None:
        return "requested"
    report = state.scales.report()
    route = state.last_route
    why_not_worth = None if route is None or "full" not in route.choices else route.choices["full"].not_worth
    return report if why_not_worth is None else f"{report}; not used by the last call: {why_not_worth}"


def towers_of(
    model: nn.Module, like: Mapping[str, str] | None = None, *, or_decoded: bool = False
) -> list[tuple[str, Tower, Family]]:
    """Return (path, tower, family) of every supported tower in a model; ValueError for a model without one.

    `or_decoded`: a model without a tower will do if `graphed_decoding` was called for it.
    """
    if not isinstance(model, nn.Module):
        loaded = "its `model`" if isinstance(getattr(model, "model", None), nn.Module) else "the loaded model"
        raise ValueError(f"expected a torch module, got {type(model).__name__}; pass {loaded}")
    towers = towers_in(model, like or {})
    if not towers and not (or_decoded and _decoding_of(model)):
        supported = ", ".join(family.name for family in FAMILIES)
        raise ValueError(
            f"expected a model with a vision tower of one of the families {supported}, found none in "
            f"{type(model).__name__}; "
            + ("; ".join(suggest_families(model, FAMILIES_OF_COPIES)) or "pass the loaded model, or its vision tower")
        )
    return towers
