"""What users call: `patch`, `unpatch`, `patched`, `warmup`, `status`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any, TypeVar

import torch
from torch import nn
from tqdm.auto import tqdm

from hf_vit_accel.backends import FP8, BackendUnavailableError, Choice, Kind, backend_named, require, resolve
from hf_vit_accel.boundary import Settings, request_for
from hf_vit_accel.config import FlexConfig, Fp8Config, GraphConfig
from hf_vit_accel.contract import own_attention
from hf_vit_accel.families import FAMILIES, find_towers
from hf_vit_accel.fusion import PARTS, fuse_tower
from hf_vit_accel.graphs.call import GraphStatus
from hf_vit_accel.metadata import Grid
from hf_vit_accel.ops.window_attention import LONGEST
from hf_vit_accel.registration import name_for, restore_name
from hf_vit_accel.scales import Maxima
from hf_vit_accel.structure import Structure
from hf_vit_accel.tower import FallbackError, Family, TowerState, against_tower, former_of, install, state_of, uninstall

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

    attention: "auto" for the fastest backend that can serve each call, a backend's name, or a `FlexConfig`. A tower
    whose attention is a function of your own, registered with transformers, keeps it under "auto", and is not faster.
    fuse: "auto" or True for every part that can be fused, False for none, or names of parts.
    cuda_graphs: replay the whole tower from CUDA graphs, captured on first use or by `warmup`; True or a `GraphConfig`.
    Small and medium inputs are bound by launches and gain most; what would not gain runs eagerly.
    fp8: attention in FP8 on long segments, where that is faster; True or a `Fp8Config`. Not exact: features keep their
    direction (cosine similarity), not their last digits.
    strict: raise where a call would fall back to another backend or to the stock forward, or cannot be replayed from a
    graph, or where a backend or a kernel fails, instead of counting it. (What is too large or would not gain from a
    graph runs eagerly all the same.)

    Raises ValueError for a model without a supported tower, an unknown backend or part, window_attention among named
    parts or FP8 beside a score_mod, and a file of FP8 maxima that is none or is another model's;
    BackendUnavailableError for a named backend, or FP8, that cannot run on this machine; FallbackError under `strict`
    for named parts that cannot be fused and for a tower that the fast path cannot serve. After an error nothing is
    patched.
    """
    settings = _settings(attention, fuse, cuda_graphs, fp8, strict)
    towers = towers_of(model)
    require(settings.attention, fp8=settings.fp8 is not None)
    for path, tower, family in towers:
        _check_maxima(path, tower, family, settings)
    if settings.strict:
        for path, tower, family in towers:
            _check_strict(path, tower, family, settings)
    for _, tower, family in towers:
        former_name, _ = former_of(tower)
        install(tower, TowerState(family, settings, former_name=former_name))
        own = settings.attention == "auto" and own_attention(tower, former_name)
        tower.config._attn_implementation_internal = former_name if own else name_for(settings.attention)
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
        if state.structure(tower)[0].broken:
            continue  # all its calls go the stock way, as status tells
        merge, weight = tower.spatial_merge_size, tower.patch_embed.proj.weight
        # A token less than each budget, if none below holds that: most calls leave rows over, which FP8 needs.
        counts = [max(most - 1, below + 1) for below, most in pairwise((0, *runner.budgets))]
        budgets: list[Grid] = [((1, merge, merge * tokens),) for tokens in reversed(counts)]
        for grid in tqdm(budgets if calls is None else calls, desc="CUDA graphs", disable=not progress):
            rows = sum(t * h * w for t, h, w in grid)
            pixels_TP = torch.zeros(rows, weight[0].numel(), dtype=weight.dtype, device=weight.device)
            with torch.no_grad(), runner.capturing(exactly=calls is not None):
                tower(pixels_TP, grid_thw=torch.tensor(grid))
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
    backends: Mapping[str, str]
    rejected: Mapping[str, Mapping[str, tuple[str, ...]]]
    fused: tuple[str, ...]
    unfused: Mapping[str, str]
    calls: int
    stock_calls: int
    fallbacks: Mapping[str, int]
    against_fast: tuple[str, ...]
    layouts: tuple[int, int, int]
    graphs: GraphStatus | None = None
    fp8: str | None = None

    def __str__(self) -> str:
        where = self.path or "(the model itself)"
        if not self.patched:
            return f"{where}: {self.family}, stock (attention {self.attention})"
        backends = ", ".join(f"{name} ({kind} layers)" for kind, name in self.backends.items())
        lines = [
            f"{where}: {self.family}, patched",
            f"  attention  {self.attention} -> {backends}",
            f"  fused      {', '.join(self.fused) or 'nothing'}",
            f"  calls      {self.calls} fast, {self.stock_calls} stock",
            "  layouts    {} held, {} hits, {} misses".format(*self.layouts),
        ]
        lines += [f"  fp8        {self.fp8}"] if self.fp8 is not None else []
        lines += [str(self.graphs)] if self.graphs is not None else []
        lines += [f"  not fused  {part}: {why}" for part, why in self.unfused.items()]
        lines += [f"  not fast   {why}" for why in self.against_fast]
        lines += [f"  fallback   {count} x {why}" for why, count in self.fallbacks.items()]
        rejected = {name: reasons[0] for of_kind in self.rejected.values() for name, reasons in of_kind.items()}
        lines += [f"  not used   {name}: {why}" for name, why in rejected.items()]
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
    state = state_of(tower)
    if state is None:
        return TowerStatus(
            path=path,
            family=family.name,
            patched=False,
            attention=tower.config._attn_implementation,
            backends={},
            rejected={},
            fused=(),
            unfused={},
            calls=0,
            stock_calls=0,
            fallbacks={},
            against_fast=(),
            layouts=(0, 0, 0),
        )
    (structure, parameters), choices = state.structure(tower), state.choices
    name = tower.config._attn_implementation
    against = against_tower(tower, family, structure, parameters, name, state.former_forward)
    if not choices and not structure.broken:
        kinds: tuple[Kind, ...] = ("full", "window") if family.full_layers else ("full",)
        device = tower.patch_embed.proj.weight.device
        scales = state.scales(tower, device)
        request = request_for(tower, device, packed=not against, score_mod=state.settings.score_mod, fp8=scales)
        try:
            choices = {kind: resolve(state.settings.attention, replace(request, kind=kind)) for kind in kinds}
        except BackendUnavailableError as error:
            against = [*against, str(error)]
    fusion = None
    if not against:
        weight = tower.patch_embed.proj.weight
        fusion = state.fusion(tower, structure, weight.device, weight.dtype)
    backends: dict[str, str] = {kind: choice.backend.name for kind, choice in choices.items()}
    # A tower that is not served may lack what tells its windows.
    window = family.geometry(tower).window if fusion is not None else None
    kernel_fits = not state.choices and fusion is not None and "window_attention" in fusion.fused
    kernel_fits = kernel_fits and window is not None and (window * tower.spatial_merge_size) ** 2 <= LONGEST
    if backends and family.full_layers and ("window" not in backends or kernel_fits):
        backends["window"] = "fused kernel"
    return TowerStatus(
        path=path,
        family=family.name,
        patched=True,
        attention=state.settings.attention + (" with a score_mod" if state.settings.score_mod else ""),
        backends=backends,
        rejected={kind: choice.rejected for kind, choice in choices.items() if choice.rejected},
        fused=tuple(part for part in PARTS if fusion is not None and part in fusion.fused),
        unfused=dict(fusion.unfused) if fusion is not None else {},
        calls=state.calls,
        stock_calls=state.stock_calls,
        fallbacks=dict(state.fallbacks),
        against_fast=tuple(against),
        layouts=(len(state.prepared), state.prepared.hits, state.prepared.misses),
        graphs=None if state.runner is None else state.runner.status(),
        fp8=_fp8_status(state, choices),
    )


def _fp8_status(state: TowerState, choices: Mapping[Kind, Choice]) -> str | None:
    if state.settings.fp8 is None:
        return None
    path = state.settings.fp8.scales
    text = f"scaled by {f'the maxima in {path}' if path is not None else 'the maxima of the last calls'}"
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
    if fuse is False:
        parts: frozenset[str] = frozenset()
    elif fuse in ("auto", True):
        parts = frozenset(PARTS)
    elif isinstance(fuse, Iterable) and not isinstance(fuse, str):
        parts = frozenset(fuse)
    else:
        parts = frozenset({str(fuse)})
    if unknown := sorted(parts - PARTS.keys()):
        raise ValueError(f"expected fuse to be 'auto', True, False or names out of {sorted(PARTS)}, got {unknown}")
    named = fuse not in ("auto", True, False)
    if score_mod is not None:  # the fused kernel for windows is an attention that does not apply it
        if named and "window_attention" in parts:
            raise ValueError("expected fuse without 'window_attention' beside a score_mod, which it does not apply")
        parts -= {"window_attention"}
        if quantized is not None:
            raise ValueError("expected fp8=False beside a score_mod, which attention in FP8 does not apply")
    return Settings(
        attention=attention,
        score_mod=score_mod,
        fuse=parts,
        fuse_named=named,
        graphs=graphs,
        fp8=quantized,
        maxima=None if quantized is None or quantized.scales is None else Maxima.load(quantized.scales),
        strict=strict,
    )


def _check_maxima(path: str, tower: Any, family: Family, settings: Settings) -> None:
    if settings.fp8 is None or settings.maxima is None:
        return
    if settings.maxima.model not in ("", family.name):
        raise ValueError(
            f"expected FP8 maxima of {family.name}, got those of {settings.maxima.model!r} in {settings.fp8.scales}; "
            "make them with this model by hf_vit_accel.calibrate"
        )
    expected = len(tower.blocks), tower.blocks[0].attn.num_heads
    if settings.maxima.shape != expected:
        raise ValueError(
            f"expected FP8 maxima for the {expected[0]} layers of {expected[1]} heads of {path or 'the tower'}, got "
            f"{settings.maxima.shape[0]} of {settings.maxima.shape[1]} in {settings.fp8.scales}; make them with this "
            "model by hf_vit_accel.calibrate"
        )
    if silent := silent_layers(settings.maxima, tower, family):
        raise ValueError(
            "expected FP8 maxima of every layer that attends per frame, got zeros for layers "
            f"{', '.join(map(str, silent))} in {settings.fp8.scales}; make them with this model by "
            "hf_vit_accel.calibrate"
        )


def silent_layers(maxima: Maxima, tower: Any, family: Family) -> list[int]:
    """Layers that FP8 serves and of which there are no maxima: all zeros, as of those that it does not serve."""
    full = range(len(maxima.values)) if family.full_layers is None else set(family.full_layers(tower))
    return [index for index, layer in enumerate(maxima.values) if index in full and not any(map(any, layer))]


def _check_strict(path: str, tower: Any, family: Family, settings: Settings) -> None:
    structure, (name, forward) = Structure(tower), former_of(tower)
    name = name if settings.attention == "auto" else None  # a named backend replaces what is there
    against = against_tower(tower, family, structure, structure.parameters(), name, forward)
    if not against and settings.fuse_named:
        weight = tower.patch_embed.proj.weight
        fusion = fuse_tower(tower, settings.fuse, weight.device, weight.dtype)
        against = [f"{part} is not fused: {why}" for part, why in fusion.unfused.items() if part in settings.fuse]
    if against:
        where = path or "(the model itself)"
        raise FallbackError(f"strict=True and the tower {where} cannot be served as asked: " + "; ".join(against))
