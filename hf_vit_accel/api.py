"""What users call: `patch`, `unpatch`, `patched`, `warmup`; `status` is in `status`."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from hf_vit_accel.backends import backend_named, require
from hf_vit_accel.config import FlexConfig, Fp8Config, GraphConfig, ReuseConfig, Settings
from hf_vit_accel.families import Family
from hf_vit_accel.layout import Grid, rows_of
from hf_vit_accel.machine import refuse
from hf_vit_accel.ops import PARTS
from hf_vit_accel.ops.fp8.scales import Amax
from hf_vit_accel.sharing.ranks import ranks_of
from hf_vit_accel.status import Status, beyond_attention, reasons_now, status, towers_of
from hf_vit_accel.tower import checks as guard
from hf_vit_accel.tower.install import former_of, install, uninstall
from hf_vit_accel.tower.loading import name_for, restore_name
from hf_vit_accel.tower.state import TowerState, state_of

Model = TypeVar("Model", bound=nn.Module)
C = TypeVar("C", GraphConfig, Fp8Config, ReuseConfig)


def patch(
    model: Model,
    *,
    attention: str | FlexConfig = "auto",
    fuse: str | bool | Iterable[str] = "auto",
    cuda_graphs: bool | GraphConfig = False,
    fp8: bool | Fp8Config = False,
    max_rows: int | Literal["auto"] | None = "auto",
    data_parallel: Any = False,
    reuse: bool | ReuseConfig = False,
    strict: bool = False,
) -> Model:
    """Accelerate every supported vision tower inside a loaded model; returns the same object.

    Patching again reconfigures, and drops captured graphs. Weights stay as they are; `unpatch` undoes everything.

    attention: "auto" for the fastest backend that can serve each call, a backend's name, or a `FlexConfig`. Under
    "auto", an attention function that you registered with transformers is kept, and that tower stays stock.
    fuse: "auto" or True for every part that can be fused, False for none, or names of parts.
    cuda_graphs: replay the whole tower from CUDA graphs, captured on first use or by `warmup`; True or a `GraphConfig`.
    Small and medium inputs are bound by launches and gain most; what would not gain runs eagerly.
    fp8: attention in FP8, where that is faster; True or a `Fp8Config`. Not exact: features keep their
    direction (cosine similarity), not their last digits. For inference only.
    max_rows: patch rows in one pass. A call of more is cut between frames and images (a frame is never cut) and encoded
    in passes, so that a long video takes the memory of one pass, and of its outputs. "auto": on CUDA, as many as make
    passes free, and with gradients no limit, as each pass then runs again in the backward pass. None: one pass. Where
    memory runs out, passes are halved once; `status` tells. Layers that FSDP2 shards are never run in passes.
    data_parallel: True, a process group or a device mesh of one dimension, whose ranks hold the same tower and make the
    same calls, as beside a text model under tensor parallelism: each encodes a part of the images and frames, all get
    all features, and what a rank raises is raised on all. With gradients, all must make the same loss; those of the
    tower are summed over the ranks once, and are not averaged. A call too small to gain is encoded by every rank.
    reuse: encode images and videos that are equal bit for bit once in a call; True, or a `ReuseConfig` that keeps
    features for later calls, too. Gradients of copies add up; where pixel values require gradients nothing is reused.
    strict: raise where a call would fall back to another backend or to the stock forward, or cannot be replayed from a
    graph, or where a backend or a kernel fails, instead of counting it. (What is too large or would not gain from a
    graph runs eagerly all the same.)

    Raises ValueError for a model without a supported tower, an unknown backend or part, window_attention among named
    parts or FP8 beside a score_mod, a file of FP8 amax that is none or is another model's, max_rows below 1, and a
    data_parallel that is no group of this process; BackendUnavailableError for a named backend, or FP8, that cannot run
    on this machine; FallbackError under `strict` for named parts that cannot be fused and for a tower that the fast
    path cannot serve. After an error nothing is patched.
    """
    settings = _settings(attention, fuse, cuda_graphs, fp8, max_rows, data_parallel, reuse, strict)
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
                beyond = [f"{name}: {why}" for name, why in beyond_attention(settings).items()]
                refuse(beyond, f"the tower {path or '(the model itself)'}")
            continue
        snapshot = state.snapshot(tower)  # what transformers computes is proven here, not in the first call
        if settings.strict:
            reasons, spec = reasons_now(tower, state, snapshot, made[-1][2], former_of(tower)[1])
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
def patched(model: Model, **options: Any) -> Iterator[Model]:
    """`patch` for the length of a with block; afterwards the model is as it was, patched otherwise or not at all.

    options: those of `patch`, which raises what it raises there.
    """
    towers = towers_of(model)
    before = [(state_of(tower), tower.config._attn_implementation) for _, tower, _ in towers]
    patch(model, **options)
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
    """Get ready ahead of time what later calls use: CUDA graphs, or what is compiled; returns the status.

    sizes: the calls to come, each the (frames, height, width) in patches of its images. With `cuda_graphs` they are
    captured in their exact shapes, by default every budget once. Without, each runs once, under the autocast of this
    moment: backends and kernels are compiled. progress: show a bar, and print what each graph holds.

    Raises ValueError for a model without a patched tower that has more than its attention served, for one without
    `cuda_graphs` where no sizes are given, and for sizes that are no grids.
    """
    found = [(tower, state_of(tower)) for _, tower, family in towers_of(model) if not family.attention_only]
    calls = None if sizes is None else [_checked_grid(grid) for grid in sizes]
    towers = [(tower, state) for tower, state in found if state is not None and (state.runner or calls is not None)]
    if not towers:
        raise ValueError(
            "expected a model patched with cuda_graphs, or sizes; call hf_vit_accel.patch(model, cuda_graphs=True), or "
            "hf_vit_accel.warmup(model, sizes=[[(1, 64, 64)]])"
        )
    for tower, state in towers:
        snapshot, runner = state.snapshot(tower), state.runner
        if snapshot.stock or snapshot.offloaded:
            continue  # all its calls run the stock forward, as status tells, or their weights come with them
        merge, weight = snapshot.geometry.merge, snapshot.parts.projection.weight
        assert isinstance(weight, Tensor)
        grids = calls or []
        if runner is not None and calls is None:
            # A token less than each budget, if none below holds that: most calls leave rows over, which FP8 needs.
            counts = [max(most - 1, below + 1) for below, most in pairwise((0, *runner.budgets_of(merge)))]
            grids = [((1, merge, merge * tokens),) for tokens in reversed(counts)]
        state.warming = threading.get_ident()  # all its pictures are alike: `reuse` would encode one
        try:
            for grid in tqdm(grids, desc="warming up", disable=not progress):
                if not state.family.videos:  # its model gives the tower frame by frame
                    grid = tuple((1, h, w) for t, h, w in grid for _ in range(t))
                pixels_TP = torch.zeros(rows_of(grid), weight[0].numel(), dtype=weight.dtype, device=weight.device)
                pixels = state.family.pixels(tower, pixels_TP)
                with torch.no_grad(), runner.capturing(exactly=calls is not None) if runner else nullcontext():
                    tower(pixels, grid_thw=torch.tensor(grid))
        finally:
            state.warming = None
        if progress and runner is not None:
            for label, nbytes, _ in runner.status().graphs:
                tqdm.write(f"{nbytes / 2**20:8.1f} MiB  {label}")
    return status(model)


def _checked_grid(grid: Any) -> Grid:
    rows = grid.tolist() if isinstance(grid, Tensor) else grid
    try:
        found = tuple((int(t), int(h), int(w)) for t, h, w in rows)
        if any(min(each) < 1 for each in found):
            raise ValueError
        return found
    except (TypeError, ValueError):
        raise ValueError(
            "expected sizes as a list of calls, each a list of (frames, height, width) in patches such as "
            f"[[(1, 32, 32)], [(1, 64, 64), (8, 36, 64)]], got the call {grid!r}"
        ) from None


def _config(name: str, value: Any, kind: type[C]) -> C | None:
    """What an option asks for that is a flag or a config."""
    if not isinstance(value, bool | kind):
        raise ValueError(f"expected {name} to be True, False or a {kind.__name__}, got {value!r}")
    return kind() if value is True else value or None


def _settings(
    attention: Any, fuse: Any, cuda_graphs: Any, fp8: Any, max_rows: Any, data_parallel: Any, reuse: Any, strict: Any
) -> Settings:
    if not isinstance(strict, bool):
        raise ValueError(f"expected strict to be True or False, got {strict!r}")
    graphs, quantized = _config("cuda_graphs", cuda_graphs, GraphConfig), _config("fp8", fp8, Fp8Config)
    reused = _config("reuse", reuse, ReuseConfig)
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
        max_rows=max_rows,
        ranks=ranks_of(data_parallel),
        reuse=reused,
        strict=strict,
    )


def _check_amax(path: str, tower: Any, family: Family, settings: Settings) -> None:
    if settings.fp8 is None or settings.amax is None or family.attention_only:
        return
    amax, parts = settings.amax, family.parts(tower)
    layers, heads = len(parts.blocks), parts.blocks[0].attention.num_heads
    if amax.model not in ("", family.name):
        wrong = f"of {family.name}, got those of {amax.model!r}"
    elif (found := tuple(amax.amax_L3H.shape[::2])) != (layers, heads):
        wrong = f"for the {layers} layers of {heads} heads of {path or 'the tower'}, got {found[0]} of {found[1]}"
    elif silent := silent_layers(amax, tower, family):
        wrong = f"of every layer that attends per frame, got zeros for layers {', '.join(map(str, silent))}"
    else:
        return
    file = settings.fp8.amax_file
    raise ValueError(f"expected FP8 amax {wrong} in {file}; make them with this model by hf_vit_accel.calibrate")


def silent_layers(amax: Amax, tower: Any, family: Family) -> list[int]:
    """Layers that FP8 serves and of which nothing was seen: all zeros, as of those that it does not serve."""
    full = family.parts(tower).full
    return [index for index, amax_3H in enumerate(amax.amax_L3H) if full(index) and not amax_3H.any()]
