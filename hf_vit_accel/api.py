"""What users call: `patch`, `unpatch`, `patched`, `warmup`, `status`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from typing import Any, TypeVar

import torch
from torch import nn
from tqdm.auto import tqdm

from hf_vit_accel import guard
from hf_vit_accel.backends import FP8, BackendUnavailableError, Choice, Kind, backend_named, require, resolve
from hf_vit_accel.config import FlexConfig, Fp8Config, GraphConfig, Settings
from hf_vit_accel.families import FAMILIES, Family, find_towers
from hf_vit_accel.graphs.runner import GraphStatus
from hf_vit_accel.guard import Snapshot
from hf_vit_accel.metadata import Grid
from hf_vit_accel.ops import PARTS
from hf_vit_accel.ops.window_attention import LONGEST
from hf_vit_accel.registration import name_for, restore_name
from hf_vit_accel.route import Spec
from hf_vit_accel.scales import Amax
from hf_vit_accel.tower import TowerState, former_of, install, refuse, state_of, uninstall

__all__ = ["Status", "TowerStatus", "patch", "patched", "status", "unpatch", "warmup"]

Model = TypeVar("Model", bound=nn.Module)


def patch(
    model: Model,
    *,
    attention: str | FlexConfig = "auto",
    fuse: str | bool | Iterable[str] = "auto",
    cuda_graphs: bool | GraphConfig = False,
    fp8: bool | Fp8Config = False,
    strict: bool = False,
) -> Model:
    """Accelerate every supported vision tower inside a loaded model; returns the same object.

    Patching again reconfigures, and drops captured graphs. Weights stay where and what they are; `unpatch` undoes
    everything.

    attention: "auto" for the fastest backend that can serve each call, a backend's name, or a `FlexConfig`. Under
    "auto", an attention function that you registered with transformers is kept, and that tower stays stock.
    fuse: "auto" or True for every part that can be fused, False for none, or names of parts.
    cuda_graphs: replay the whole tower from CUDA graphs, captured on first use or by `warmup`; True or a `GraphConfig`.
    Small and medium inputs are bound by launches and gain most; what would not gain runs eagerly.
    fp8: attention in FP8 on long segments, where that is faster; True or a `Fp8Config`. Not exact: features keep their
    direction (cosine similarity), not their last digits.
    strict: raise where a call would fall back to another backend or to the stock forward, or cannot be replayed from a
    graph, or where a backend or a kernel fails, instead of counting it. (What is too large or would not gain from a
    graph runs eagerly all the same.)

    Raises ValueError for a model without a supported tower, an unknown backend or part, window_attention among named
    parts or FP8 beside a score_mod, and a file of FP8 amax that is none or is another model's;
    BackendUnavailableError for a named backend, or FP8, that cannot run on this machine; FallbackError under `strict`
    for named parts that cannot be fused and for a tower that the fast path cannot serve. After an error nothing is
    patched.
    """
    settings = _settings(attention, fuse, cuda_graphs, fp8, strict)
    towers = towers_of(model)
    require(settings.attention, fp8=settings.fp8 is not None)
    made = []
    for path, tower, family in towers:
        _check_amax(path, tower, family, settings)
        state = TowerState(family, settings, former_name=former_of(tower)[0])
        # Whoever loaded with "eager" may ask for attention weights, which nothing else returns.
        kept = state.former_name == "eager" or bool(guard.reasons_own_attention(tower, state.former_name))
        kept = kept and settings.attention == "auto"
        made.append((tower, state, state.former_name if kept else name_for(settings.attention)))
        if family.attention_only:
            if settings.strict:
                beyond = [f"{name}: {why}" for name, why in _beyond_attention(settings).items()]
                refuse(beyond, f"the tower {path or '(the model itself)'}")
            continue
        snapshot = state.snapshot(tower)  # what transformers computes is proven here, not in the first call
        if settings.strict:
            reasons, spec = _reasons_now(tower, state, snapshot, made[-1][2], former_of(tower)[1])
            if spec is not None and spec.ops is not None and settings.fuse is not None:
                unfused = spec.ops.unfused.items()
                reasons += [f"{part} is not fused: {why}" for part, why in unfused if part in settings.fuse]
            refuse(reasons, f"the tower {path or '(the model itself)'}")
    for tower, state, name in made:
        install(tower, state)
        tower.config._attn_implementation_internal = name
    return model


def unpatch(model: Model) -> Model:
    """Bring every tower back to stock: forward, attention name, cached memory. Returns the same object."""
    for _, tower, _ in towers_of(model):
        state = uninstall(tower)
        restore_name(tower, state.former_name if state else None)
    for module in model.modules():  # a composite loaded with one of our names carries it too
        restore_name(module, None)
    return model


@contextmanager
def patched(
    model: Model,
    *,
    attention: str | FlexConfig = "auto",
    fuse: str | bool | Iterable[str] = "auto",
    cuda_graphs: bool | GraphConfig = False,
    fp8: bool | Fp8Config = False,
    strict: bool = False,
) -> Iterator[Model]:
    """`patch` for the length of a with block; afterwards the model is as it was, patched otherwise or not at all."""
    towers = towers_of(model)
    before = [(state_of(tower), tower.config._attn_implementation) for _, tower, _ in towers]
    patch(model, attention=attention, fuse=fuse, cuda_graphs=cuda_graphs, fp8=fp8, strict=strict)
    try:
        yield model
    finally:
        for (_, tower, _), (state, name) in zip(towers, before, strict=True):
            if state is None:
                uninstall(tower)
            else:
                install(tower, state)
            tower.config._attn_implementation_internal = name


def warmup(model: nn.Module, sizes: Iterable[Grid] | None = None, *, progress: bool = True) -> Status:
    """Capture CUDA graphs ahead of time, for a model patched with `cuda_graphs`; returns the status.

    sizes: calls to capture in their exact shapes, each the (frames, height, width) in patches of its images; by default
    every budget once. progress: show a bar, and print what each graph holds.

    Raises ValueError for a model that is not patched with `cuda_graphs`, and for sizes that are no grids.
    """
    states = [(tower, state_of(tower)) for _, tower, _ in towers_of(model)]
    towers = [(tower, state, state.runner) for tower, state in states if state is not None and state.runner is not None]
    if not towers:
        raise ValueError("expected a model patched with cuda_graphs; call hf_vit_accel.patch(model, cuda_graphs=True)")
    calls = None if sizes is None else [_checked_grid(grid) for grid in sizes]
    for tower, state, runner in towers:
        snapshot = state.snapshot(tower)
        if snapshot.stock:
            continue  # all its calls run the stock forward, as status tells
        merge, weight = snapshot.geometry.merge, snapshot.parts.projection.weight
        assert isinstance(weight, torch.Tensor)
        # A token less than each budget, if none below holds that: most calls leave rows over, which FP8 needs.
        counts = [max(most - 1, below + 1) for below, most in pairwise((0, *runner.budgets_of(merge)))]
        budgets: list[Grid] = [((1, merge, merge * tokens),) for tokens in reversed(counts)]
        for grid in tqdm(budgets if calls is None else calls, desc="CUDA graphs", disable=not progress):
            rows = sum(t * h * w for t, h, w in grid)
            pixels_TP = torch.zeros(rows, weight[0].numel(), dtype=weight.dtype, device=weight.device)
            pixels = state.family.pixels(tower, pixels_TP)
            with torch.no_grad(), runner.capturing(exactly=calls is not None):
                tower(pixels, grid_thw=torch.tensor(grid))
        if progress:
            for label, nbytes, _ in runner.status().graphs:
                tqdm.write(f"{nbytes / 2**20:8.1f} MiB  {label}")
    return status(model)


def _checked_grid(grid: Any) -> Grid:
    rows = grid.tolist() if isinstance(grid, torch.Tensor) else grid
    try:
        return tuple((int(t), int(h), int(w)) for t, h, w in rows)
    except (TypeError, ValueError):
        raise ValueError(
            "expected sizes as a list of calls, each a list of (frames, height, width) in patches such as "
            f"[[(1, 32, 32)], [(1, 64, 64), (8, 36, 64)]], got the call {grid!r}"
        ) from None


@dataclass(frozen=True, kw_only=True)
class TowerStatus:
    """One tower's state: what was asked for, what runs, and what did not and why.

    backends: backend per kind of layer, of the last call or, before any, as it would be chosen now. rejected: per kind,
    why backends that come first did not serve it. fused: parts that run fused. unfused: parts that do not, with the
    reason. calls, stock_calls: forwards that went the fast path and the stock way. fallbacks: reason -> count of calls
    that did not get what was asked for (a call may have several). against_fast: what currently keeps every call off the
    fast path. layouts: (held, hits, misses) of the cache of layouts. graphs: what CUDA graphs did; None without them.
    fp8: by what attention in FP8 is scaled, and what it cut off; None where it is not asked for.
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
    fp8: str | None = None

    def __str__(self) -> str:
        return "\n".join([*self._state(), *_reasons_once([self])])

    def _state(self) -> list[str]:
        where = self.path or "(the model itself)"
        if not self.patched:
            return [f"{where}: {self.family}, stock (attention {self.attention})"]
        backends = ", ".join(f"{name} ({kind} layers)" for kind, name in self.backends.items())
        fused = "attention only: the tower's own forward runs" if self.attention_only else ", ".join(self.fused)
        lines = [
            f"{where}: {self.family}, patched",
            f"  attention  {self.attention} -> {backends or 'chosen at the first call'}",
            f"  fused      {fused or 'nothing'}",
            f"  calls      {self.calls} fast, {self.stock_calls} stock",
            "  layouts    {} held, {} hits, {} misses".format(*self.layouts),
        ]
        lines += [f"  fp8        {self.fp8}"] if self.fp8 is not None else []
        lines += [str(self.graphs)] if self.graphs is not None else []
        return lines + [f"  fallback   {count} x {why}" for why, count in self.fallbacks.items()]

    def _reasons(self) -> Iterator[tuple[str, str, str]]:
        """What does not run: its label, its name if it has one, and why."""
        yield from (("not fused", part, why) for part, why in self.unfused.items())
        yield from (("not fast", "", why) for why in self.against_fast)
        rejected = {name: reasons[0] for of_kind in self.rejected.values() for name, reasons in of_kind.items()}
        yield from (("not used", name, why) for name, why in rejected.items())


def _reasons_once(towers: Sequence[TowerStatus]) -> list[str]:
    """A line a reason, with all that it holds for; and with the towers, where it does not hold for all."""
    found: dict[tuple[str, str], dict[str, list[str]]] = {}
    for tower in towers:
        for label, name, why in tower._reasons():
            found.setdefault((label, why), {}).setdefault(name, []).append(tower.path)
    lines = []
    for (label, why), names in sorted(found.items(), key=lambda each: each[0][0]):
        where = (
            f"{name} of {' and '.join(paths)}".strip() if len(paths) < len(towers) else name
            for name, paths in names.items()
        )
        lines.append(f"  {label:<9}  " + ": ".join(filter(None, [", ".join(where), why])))
    return lines


@dataclass(frozen=True, kw_only=True)
class Status:
    """The status of every tower in a model; prints as text, `to_dict()` for JSON."""

    towers: tuple[TowerStatus, ...]

    def __str__(self) -> str:
        patched = [tower for tower in self.towers if tower.patched]
        if len(patched) < 2:
            return "\n".join(map(str, self.towers))
        lines = [line for tower in self.towers for line in tower._state()]
        if reasons := _reasons_once(patched):
            lines += ["in all of these that are patched, or in those named:", *reasons]
        return "\n".join(lines)

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
        return TowerStatus(**told, backends=dict(state.served), unfused=_beyond_attention(state.settings))
    snapshot, choices, name = state.snapshot(tower), state.choices, tower.config._attn_implementation
    against, spec = _reasons_now(tower, state, snapshot, name, state.former_forward)
    if spec is not None and not choices:
        kinds: tuple[Kind, ...] = ("full", "window") if family.windows else ("full",)
        try:
            choices = {kind: resolve(spec.settings.attention, replace(spec.request, kind=kind)) for kind in kinds}
        except BackendUnavailableError as error:
            against, spec = [*against, str(error)], None
    ops = None if spec is None else spec.ops
    backends: dict[str, str] = {kind: choice.backend.name for kind, choice in choices.items()}
    if ops is not None and ops.attend_window is not None:
        side = (snapshot.geometry.window or 0) * snapshot.geometry.merge
        if "window" not in state.choices and (state.choices or side**2 <= LONGEST):
            backends["window"] = "fused kernel"
    return TowerStatus(
        **told,
        backends=backends,
        rejected={kind: choice.rejected for kind, choice in choices.items() if choice.rejected},
        fused=tuple(part for part in PARTS if ops is not None and part in ops.fused),
        unfused=dict(ops.unfused) if ops is not None else {},
        against_fast=tuple(against),
        graphs=None if state.runner is None else state.runner.status(),
        fp8=_fp8_status(state, choices),
    )


def _beyond_attention(settings: Settings) -> dict[str, str]:
    """What was asked for, and is not to be had for a tower whose attention alone is ours."""
    asked = {"cuda_graphs": settings.graphs, "fp8": settings.fp8, **dict.fromkeys(settings.fuse or (), True)}
    return {name: "this family is served attention only" for name, wanted in asked.items() if wanted}


def _reasons_now(
    tower: Any, state: TowerState, snapshot: Snapshot, name: str | None, former_forward: Any
) -> tuple[list[str], Spec | None]:
    """What keeps every call off the fast path, under an attention of that name; and what decides routes, if known."""
    reasons = guard.reasons_stock(tower, former_forward, name, snapshot, {})
    if snapshot.stock:
        return reasons, None
    _, weights = snapshot.weights()
    slow = guard.reasons_slow(tower, snapshot, weights, {}, grad=False)  # FSDP2 shards weights between calls
    reasons += [why for why in slow if not (snapshot.sharded and why in weights.reasons)]
    weight: Any = snapshot.parts.projection.weight
    return reasons, state.spec(snapshot, weights, weight.device, fast=not reasons, grad=False)


def _fp8_status(state: TowerState, choices: Mapping[Kind, Choice]) -> str | None:
    if state.settings.fp8 is None:
        return None
    path = state.settings.fp8.amax_file
    text = f"scaled by {f'the amax in {path}' if path is not None else 'the amax of the last calls'}"
    if saturated := state.saturated():
        text += f", cut off beyond them in layers {', '.join(map(str, saturated))}"
    if why := choices["full"].not_worth.get(FP8.name) if "full" in choices else None:
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


def _settings(
    attention: str | FlexConfig,
    fuse: str | bool | Iterable[str],
    cuda_graphs: bool | GraphConfig,
    fp8: bool | Fp8Config,
    strict: bool,
) -> Settings:
    if not isinstance(strict, bool):
        raise ValueError(f"expected strict to be True or False, got {strict!r}")
    if not isinstance(cuda_graphs, bool | GraphConfig):
        raise ValueError(f"expected cuda_graphs to be True, False or a GraphConfig, got {cuda_graphs!r}")
    if not isinstance(fp8, bool | Fp8Config):
        raise ValueError(f"expected fp8 to be True, False or a Fp8Config, got {fp8!r}")
    graphs = GraphConfig() if cuda_graphs is True else cuda_graphs or None
    quantized = Fp8Config() if fp8 is True else fp8 or None
    score_mod = attention.score_mod if isinstance(attention, FlexConfig) else None
    if isinstance(attention, FlexConfig):
        attention = "flex"
    if attention != "auto":
        backend_named(attention)
    parts: frozenset[str] | None = None
    if fuse is False:
        parts = frozenset()
    elif fuse not in ("auto", True):
        parts = frozenset(fuse) if isinstance(fuse, Iterable) and not isinstance(fuse, str) else frozenset({str(fuse)})
    if unknown := sorted((parts or frozenset()) - PARTS.keys()):
        raise ValueError(f"expected fuse to be 'auto', True, False or names out of {sorted(PARTS)}, got {unknown}")
    if score_mod is not None and "window_attention" in (parts or ()):  # an attention that does not apply it
        raise ValueError("expected fuse without 'window_attention' beside a score_mod, which it does not apply")
    if score_mod is not None and quantized is not None:
        raise ValueError("expected fp8=False beside a score_mod, which attention in FP8 does not apply")
    return Settings(
        attention=attention,
        score_mod=score_mod,
        fuse=parts,
        graphs=graphs,
        fp8=quantized,
        amax=None if quantized is None or quantized.amax_file is None else Amax.load(quantized.amax_file),
        strict=strict,
    )


def _check_amax(path: str, tower: Any, family: Family, settings: Settings) -> None:
    if settings.fp8 is None or settings.amax is None or family.attention_only:
        return
    if settings.amax.model not in ("", family.name):
        raise ValueError(
            f"expected FP8 amax of {family.name}, got those of {settings.amax.model!r} in {settings.fp8.amax_file}; "
            "make them with this model by hf_vit_accel.calibrate"
        )
    parts = family.parts(tower)
    expected = len(parts.blocks), parts.blocks[0].attention.num_heads
    if settings.amax.shape != expected:
        raise ValueError(
            f"expected FP8 amax for the {expected[0]} layers of {expected[1]} heads of {path or 'the tower'}, got "
            f"{settings.amax.shape[0]} of {settings.amax.shape[1]} in {settings.fp8.amax_file}; make them with this "
            "model by hf_vit_accel.calibrate"
        )
    if silent := silent_layers(settings.amax, tower, family):
        raise ValueError(
            "expected FP8 amax of every layer that attends per frame, got zeros for layers "
            f"{', '.join(map(str, silent))} in {settings.fp8.amax_file}; make them with this model by "
            "hf_vit_accel.calibrate"
        )


def silent_layers(amax: Amax, tower: Any, family: Family) -> list[int]:
    """Layers that FP8 serves and of which nothing was seen: all zeros, as of those that it does not serve."""
    full = family.parts(tower).full
    return [index for index, layer in enumerate(amax.values) if full(index) and not any(map(any, layer))]
