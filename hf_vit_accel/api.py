"""The functions for users: `patch`, `unpatch`, `patched` and `warmup`. `status` has a file of its own."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from operator import index
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from hf_vit_accel.backends import asked_for, backend_named, require
from hf_vit_accel.backends.base import Replay
from hf_vit_accel.config import Amax, FlexConfig, Fp8Config, GraphConfig, ReuseConfig, Settings, ranks_of
from hf_vit_accel.families import FAMILIES_OF_COPIES, Family, Tower
from hf_vit_accel.families.copies import CopyFamily
from hf_vit_accel.layout import Grid, rows_of
from hf_vit_accel.machine import raise_if_any
from hf_vit_accel.model import around
from hf_vit_accel.status import Status, ignored_options, status, text_forwards_in, towers_of
from hf_vit_accel.tower import fsdp
from hf_vit_accel.tower.attention import attention_name
from hf_vit_accel.tower.forward import reasons_of
from hf_vit_accel.tower.install import foreign_forward, install, uninstall
from hf_vit_accel.tower.loading import restore_name
from hf_vit_accel.tower.processors import Processor, normalisation_of, parts_of
from hf_vit_accel.tower.proof import warn_once
from hf_vit_accel.tower.state import TowerState, state_of

if TYPE_CHECKING:
    from hf_vit_accel.decoding.text_forward import TextForward  # `text=True` imports the room

Model = TypeVar("Model", bound=nn.Module)
C = TypeVar("C", GraphConfig, Fp8Config, ReuseConfig)


def patch(
    model: Model,
    *,
    attention: str | FlexConfig = "auto",
    fuse: bool = True,
    cuda_graphs: bool | Literal["auto"] | GraphConfig = "auto",
    fp8: bool | Fp8Config = False,
    max_rows: int | Literal["auto"] | None = "auto",
    data_parallel: Any = False,
    reuse: bool | ReuseConfig = False,
    like: Mapping[str, str] | None = None,
    every_rank: bool = False,
    processor: Processor = None,
    text: bool = False,
    strict: bool = False,
) -> Model:
    """Accelerate every supported vision tower inside a loaded model; returns the same object.

    A model around its tower also gets its M-RoPE positions from the host, with the integers of transformers.

    Patching again reconfigures and drops captured graphs. Weights stay as they are, and `unpatch` undoes everything.
    After an error nothing is patched.

    Args:
        model: Any module that holds a supported tower, or the tower itself.
        attention: "auto" for the fastest backend of every call, a backend's name, or a `FlexConfig`. "auto" keeps an
            attention function that you registered with transformers; that tower stays stock.
        fuse: True fuses whatever is exact and faster. False leaves attention and metadata alone.
        cuda_graphs: "auto" replays sizes that come again from CUDA graphs, where that saves time and memory is free, in
            inference and in training. True or a `GraphConfig` captures at the first call, within your bounds. False
            captures nothing.
        fp8: Attention in FP8 where that is faster: True or a `Fp8Config`. Not exact, for inference only.
        max_rows: Patch rows in one pass. Larger calls are split between frames and images, to bound their memory.
            "auto" is a limit that costs at most 3% of the time, on CUDA alone; None uses one pass.
        data_parallel: Share every call among ranks that hold the same tower and make the same calls: True, a process
            group or a one-dimensional device mesh. Gradients of the tower are summed over the ranks, not averaged.
        reuse: Encode images and videos that are equal bit for bit once in a call: True. A `ReuseConfig` can keep
            features for later calls, too. Nothing is reused if pixel values require gradients.
        like: Copies of a family's tower that remote code ships: the name of the class, and that of the family. A copy
            runs beside our operations now, which takes seconds; see the FAQ. It stays served when you
            patch again without `like`.
        every_rank: For distributed training of a whole model. Every forward with gradients calls the tower exactly
            once, whatever the batch of a rank holds: images and videos together, and a dummy of weight zero for text
            alone. Without gradients, it does so where FSDP2 or ZeRO-3 shard the tower.
        processor: The model's processor, which then returns the bytes of pictures (uint8): a quarter of the memory, and
            less work on the CPU. The tower rescales and normalises them. `unpatch` sets the processor back.
        text: Run the layers of the language model by our operations, too, without padding, in forwards without
            gradients and with `use_cache=False`: embedding, retrieval, reranking. Hidden states of padding are zeros.
        strict: Raise instead of falling back to another backend or to the stock forward. Also raise if a graph cannot
            be replayed or a kernel fails. Inputs that would not gain from a graph still run eagerly.

    Raises:
        ValueError: If the model has no supported tower, or if options make no sense, alone or together. Also if a copy
            computes something else than its family: the message says how far off it is, and where.
        BackendUnavailableError: If a named backend or FP8 cannot run on this machine.
        FallbackError: Under `strict`, if a tower cannot take the fast path.
    """
    score_mod = None
    if isinstance(attention, FlexConfig):
        score_mod = attention.score_mod
        attention = "flex"
    if attention != "auto":
        backend_named(attention)
    fp8_config = _config("fp8", fp8, Fp8Config)
    settings = Settings(
        attention=attention,
        score_mod=score_mod,
        fuse=fuse,
        graphs="auto" if cuda_graphs == "auto" else _config("cuda_graphs", cuda_graphs, GraphConfig),
        fp8=fp8_config,
        amax=None if fp8_config is None or fp8_config.amax_file is None else Amax.load(fp8_config.amax_file),
        max_rows=max_rows,
        ranks=ranks_of(data_parallel),
        reuse=_config("reuse", reuse, ReuseConfig),
        like=_families_of_copies(like),
        every_rank=every_rank,
        normalisation=None if processor is None else normalisation_of(processor),
        text=text,
        strict=strict,
    )
    towers = towers_of(model, settings.like)
    holders = _checked_holders(model, settings.every_rank)
    texts: dict[str, TextForward] = {}
    if text:
        from hf_vit_accel.decoding.text_forward import forwards_for  # imports transformers' models

        texts = forwards_for(model, strict)
    require(settings.attention, fp8=settings.fp8 is not None)
    prepared = [_prepare(path, tower, family, settings, fsdp.holder_of(model, tower)) for path, tower, family in towers]
    for tower, state, name in prepared:
        state.processors = () if processor is None else tuple(weakref.ref(part) for part in parts_of(processor))
        install(tower, state)
        tower.config._attn_implementation_internal = name
    for holder in holders:
        around.install(holder, around.ModelState(every_rank))
    _set_text_forwards(model, texts)
    return model


def _set_text_forwards(model: nn.Module, forwards: Mapping[str, TextForward]) -> None:
    """Give text models these forwards of ours, and take ours off all others."""
    for path, former in text_forwards_in(model).items():
        former.take_off(model.get_submodule(path))
    for path, forward in forwards.items():
        forward.put_on(model.get_submodule(path))


def _checked_holders(model: nn.Module, every_rank: bool) -> list[nn.Module]:
    """Return the models around the towers; ValueError if one cannot call its tower once in every forward."""
    holders = [holder for _, holder in around.holders_of(model)]
    for holder in holders:
        why = around.reason_not_one_call(holder)  # runs the proof now, not in the first call
        if every_rank and why is not None:
            raise ValueError(f"every_rank=True does not work with {type(holder).__name__}: {why}")
    held = {id(tower) for holder in holders for _, tower, _ in towers_of(holder)}
    if every_rank and any(id(tower) not in held for _, tower, _ in towers_of(model)):
        raise ValueError("every_rank=True needs a model with M-RoPE around every tower; pass the whole model")
    return holders


def _prepare(
    path: str, tower: Tower, family: Family, settings: Settings, holder: nn.Module | None
) -> tuple[Tower, TowerState, str | None]:
    """Check that a tower can be patched; return it, unchanged, its new state, and the attention name for its config."""
    backend = asked_for(settings)
    if backend is not None and not family.attention_only:
        backend.check(settings, family.name, family.parts(tower), path)
    former_state = state_of(tower)
    former_name = tower.config._attn_implementation if former_state is None else former_state.former_name
    former_forward = foreign_forward(tower)
    state = TowerState(family, settings, former_name=former_name)
    is_copy = isinstance(family, CopyFamily)
    if settings.normalisation is not None and former_forward is not None:
        raise ValueError(
            f"processor= needs a tower that gets the pixels, but {type(tower).__name__} has a forward of its own"
        )
    if is_copy and former_forward is not None:
        raise ValueError(f"{type(tower).__name__} has a forward of its own on the instance, which `like` cannot prove")
    # A copy keeps its attention: its own forward runs untouched, or not at all.
    name = former_name if is_copy else attention_name(tower, settings, former_name)
    label = f"the tower {path or '(the model itself)'}"
    if family.attention_only:
        if settings.strict:
            raise_if_any([f"{option}: {why}" for option, why in ignored_options(settings).items()], label)
        return tower, state, name
    snapshot = state.snapshot(tower)  # runs the proof now, not in the first call
    if is_copy and snapshot.reasons_stock:
        raise ValueError(snapshot.reasons_stock[0])
    if not (snapshot.reasons_stock or snapshot.uses_fsdp or holder or snapshot.offloaded):
        for reason in snapshot.weights()[1].reasons:
            warn_once(f"{type(tower).__name__} stays stock: {reason}. {_LEAVE_OUT}")
    if settings.strict:
        reasons = reasons_of(
            tower, family, snapshot, former_forward, name, {}, grad=False, between_calls=True, holder=holder
        )
        raise_if_any([*reasons.stock, *reasons.metadata], label)
    return tower, state, name


_LEAVE_OUT = (
    "Norms, embeddings and plain linears need parameters of torch and one dtype. A quantiser can leave the tower out: "
    'transformers\' configs take `llm_int8_skip_modules=["model.visual", "lm_head"]` or `modules_to_not_convert`'
)


def unpatch(model: Model) -> Model:
    """Restore the stock state of every tower: forward, attention name, memory. Returns the same object.

    The memory of `graphed_decoding` is freed, too. A later call of it captures anew.

    Args:
        model: A model, patched or not.

    Raises:
        ValueError: If the model has no supported tower, and `graphed_decoding` was never called for it.
    """
    for _, tower, _ in towers_of(model, or_decoded=True):
        state = uninstall(tower)
        restore_name(tower, state.former_name if state else None)
    for _, holder in around.holders_of(model):
        around.uninstall(holder)
    for module in model.modules():  # the configs of a composite loaded with one of our names hold it, too
        restore_name(module, None)
    _set_text_forwards(model, {})
    steps = sys.modules.get("hf_vit_accel.decoding.steps")  # imported by the first call of `graphed_decoding`
    if steps is not None:
        steps.free_steps(model)
    return model


@contextmanager
def patched(model: Model, **options: Any) -> Iterator[Model]:
    """Patch a model for the length of a with block, then restore its former state, patched or not.

    Args:
        model: The model.
        options: The options of `patch`, which raise the same errors.

    Yields:
        The model.
    """
    towers = towers_of(model, options.get("like"))
    before = [(state_of(tower), tower.config._attn_implementation) for _, tower, _ in towers]
    holders = [(holder, around.state_of(holder)) for _, holder in around.holders_of(model)]
    texts = text_forwards_in(model)
    patch(model, **options)
    try:
        yield model
    finally:
        _set_text_forwards(model, texts)
        for holder, holder_state in holders:
            around.uninstall(holder)
            if holder_state is not None:
                around.install(holder, holder_state)
        for (_, tower, _), (state, name) in zip(towers, before, strict=True):
            if state is None:
                uninstall(tower)
            else:
                install(tower, state)
            tower.config._attn_implementation_internal = name


def warmup(model: nn.Module, sizes: Iterable[Grid] | None = None, *, progress: bool = True) -> Status:
    """Capture CUDA graphs, or compile backends and kernels, before the first calls need them.

    Args:
        model: A patched model.
        sizes: The calls to come, each a list of (frames, height, width) in patches. With `cuda_graphs` they are
            captured in their exact shapes; None captures every budget once. Without `cuda_graphs` each call runs once,
            under the current autocast.
        progress: Whether to show a progress bar, and to print the memory of every graph.

    Returns:
        The status of the model.

    Raises:
        ValueError: If no tower is patched with more than attention, if a size is no grid or if there are none. Also
            without both `cuda_graphs` and sizes.
    """
    calls = None
    if sizes is not None:
        calls = [_checked_grid(grid) for grid in (sizes if isinstance(sizes, Iterable) else [sizes])]
        if not calls:
            raise ValueError("No sizes given: `sizes` is empty. Pass at least one call, or None for every budget.")
    patched_towers = []
    for _, tower, family in towers_of(model):
        state = None if family.attention_only else state_of(tower)
        if state is not None:
            patched_towers.append((tower, state))
    if not patched_towers:
        raise ValueError(
            "no tower to warm up: call hf_vit_accel.patch(model) first; with attention alone there is nothing"
        )
    towers = [pair for pair in patched_towers if calls is not None or _captures_budgets(*pair)]
    if not towers:
        raise ValueError(
            "expected sizes, since this model captures no graphs by budget: it is not on a CUDA device, or it is "
            "patched with cuda_graphs=False. Pass them as hf_vit_accel.warmup(model, sizes=[[(1, 64, 64)]])"
        )
    for tower, state in towers:
        _warm_up_tower(tower, state, calls, progress)
    return status(model)


def _captures_budgets(tower: nn.Module, state: TowerState) -> bool:
    """Return whether a tower has graphs to capture: always if they were asked for, else on a CUDA device."""
    if state.settings.graphs != "auto":
        return state.inference_runner is not None
    return any(parameter.is_cuda for parameter in tower.parameters())


def _warm_up_tower(tower: Tower, state: TowerState, calls: list[Grid] | None, progress: bool) -> None:
    snapshot = state.snapshot(tower)
    runner = state.inference_runner
    if snapshot.reasons_stock or snapshot.offloaded:
        return  # every call runs the stock forward, as `status` reports, or its weights come with the call
    merge = snapshot.geometry.merge
    weight = snapshot.parts.projection.weight
    assert isinstance(weight, Tensor)
    replay: Replay = "padded" if calls is None else "exactly"
    grids = calls or []
    if runner is not None and calls is None:
        grids = _grids_of_budgets(runner.budgets_of(merge), merge)
    state.warming = threading.get_ident()  # turns `reuse` off in this thread: all pictures are equal here
    try:
        for grid in tqdm(grids, desc="warming up", disable=not progress):
            if not state.family.videos:  # the model calls such a tower with every frame as an image
                grid = tuple((1, h, w) for t, h, w in grid for _ in range(t))
            pixels_TP = torch.zeros(rows_of(grid), weight[0].numel(), dtype=weight.dtype, device=weight.device)
            pixels = state.family.pixels(tower, pixels_TP)
            with torch.no_grad(), runner.warming_up(replay) if runner else nullcontext():
                tower(pixels, grid_thw=torch.tensor(grid))
    finally:
        state.warming = None
    if progress and runner is not None:
        for label, nbytes, _ in runner.status().graphs:
            tqdm.write(f"{nbytes / 2**20:8.1f} MiB  {label}")


def _grids_of_budgets(budgets: Iterable[int], merge: int) -> list[Grid]:
    """Return one grid for every budget, the largest first.

    A grid is a token smaller than its budget, unless the next smaller budget would hold it. So there are padding rows,
    as in most calls. Without them the padding segment would be empty, and FP8 could not run in the graph.
    """
    grids: list[Grid] = []
    for smaller, budget in pairwise((0, *budgets)):
        tokens = max(budget - 1, smaller + 1)
        grids.append(((1, merge, merge * tokens),))
    return grids[::-1]


def _checked_grid(grid: Grid | Tensor) -> Grid:
    """Return one call of `sizes` as a grid; ValueError if it is none."""
    rows = grid.tolist() if isinstance(grid, Tensor) else grid
    try:
        checked = tuple((index(t), index(h), index(w)) for t, h, w in rows)
        if not checked or any(min(entry) < 1 for entry in checked):
            raise ValueError
        return checked
    except (TypeError, ValueError):
        raise ValueError(
            "expected sizes as a list of calls, each a list of (frames, height, width) in patches such as "
            f"[[(1, 32, 32)], [(1, 64, 64), (8, 36, 64)]], got the call {grid!r}"
        ) from None


def _config(name: str, option: object, kind: type[C]) -> C | None:
    """Return the config that an option asks for, which is a flag or a config; None for False."""
    if not isinstance(option, bool | kind):
        automatic = '"auto", ' if kind is GraphConfig else ""
        raise ValueError(f"expected {name} to be {automatic}True, False or a {kind.__name__}, got {option!r}")
    if option is True:
        return kind()
    return option if isinstance(option, kind) else None


def _families_of_copies(like: object) -> dict[str, str]:
    """Return `like` as a dict; ValueError unless it names families that have a fast path."""
    if like is None:
        return {}
    names = [family.name for family in FAMILIES_OF_COPIES]
    if not isinstance(like, Mapping) or not all(isinstance(name, str) for name in like):
        raise ValueError(f'expected like as {{"NameOfAClass": "family"}}, got {like!r}')
    unknown = [family for family in like.values() if family not in names]
    if unknown:
        raise ValueError(f"expected the families in like out of {', '.join(names)}, got {unknown[0]!r}")
    return dict(like)
