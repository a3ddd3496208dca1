"""The three ways through the stock forward: how a call is decided that goes one of them, and how it runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.jit._trace import is_tracing

from hf_vit_accel import versions
from hf_vit_accel.engine.call import Attempt, FastPlan
from hf_vit_accel.engine.encoder import CalledBlock
from hf_vit_accel.engine.route import ROUTE, Route, Spec
from hf_vit_accel.families import Tower
from hf_vit_accel.families.copies import CopyFamily
from hf_vit_accel.families.interface import Inputs
from hf_vit_accel.layout import Grid
from hf_vit_accel.machine import raise_if_any
from hf_vit_accel.tower.attention import note_state, reasons_custom_attention
from hf_vit_accel.tower.code import names_of_forwards, reasons_foreign_forward, why_not_reached
from hf_vit_accel.tower.proof import NAMES
from hf_vit_accel.tower.snapshot import Snapshot
from hf_vit_accel.tower.state import TowerState
from hf_vit_accel.versions import POPPED


class Way(Enum):
    """The way of a call that the stock forward runs. All others have a `FastPlan`: our operations and attention.

    `forward.Reasons.stock` sends a call the way STOCK, `metadata` the way METADATA: stock calls the blocks one by one.
    `status` counts ATTENTION as fast calls if a backend of ours has attended in any call of this layout. A copy never
    goes METADATA, since its forward may take none, and neither does a tower that computes on several devices.
    """

    METADATA = "through the stock forward, with our metadata and attention"
    ATTENTION = "through the stock forward, with our attention alone: a family whose blocks we do not know"
    STOCK = "through the stock forward, on what it was called with"


@dataclass(frozen=True, kw_only=True, eq=False)
class StockPlan:
    """The decisions about a call that runs the stock forward.

    Attributes:
        reasons: Why it is not fast, and why it gets less than was requested.
        raises: Why reasons are raised; None where they are counted.
        injected: Keyword arguments that the stock forward is given.
        route: Of the layout, on the ways METADATA and ATTENTION.
        instead_of: The plan by which our operations would run the call; None where they cannot be told.
    """

    way: Way
    reasons: tuple[str, ...]
    raises: str | None = None
    injected: Mapping[str, object] = field(default_factory=lambda: MappingProxyType({}))
    route: Route | None = None
    instead_of: FastPlan | None = None


def decide_stock(state: TowerState, reasons: Sequence[str], instead_of: FastPlan | None = None) -> StockPlan:
    """Return the plan of a call that reaches the stock forward as it is."""
    return StockPlan(way=Way.STOCK, reasons=tuple(reasons), raises=state.why_raised, instead_of=instead_of)


def decide_metadata(
    tower: Tower, state: TowerState, plan: FastPlan, snapshot: Snapshot, reasons_metadata: list[str]
) -> StockPlan:
    """Return the plan of a call whose blocks are called one by one, on our metadata and attention."""
    settings = state.settings
    # A copy's forward may take no metadata. Ours is on one device, transformers' window_index on the CPU, which
    # serves parts on every device.
    if isinstance(state.family, CopyFamily) or len(_devices_of(tower)) > 1:
        return decide_stock(state, reasons_metadata, instead_of=plan)
    route = state.routes.get(plan.inputs.grid, plan.spec)
    reasons = [*reasons_metadata, *route.unmet]
    raises = "strict=True" if settings.strict else None
    if settings.score_mod is not None:
        name = tower.config._attn_implementation
        has_segments = versions.knows_segments(snapshot.proof.code.called_names())
        if name not in NAMES or not has_segments:
            raises = "a score_mod was given"
            reasons.append(f"blocks attend by {name!r}" if has_segments else "blocks attend without our segments")
    injected = {} if raises else route.bound.injected(snapshot.proof.taken)
    return StockPlan(
        way=Way.METADATA,
        reasons=tuple(reasons),
        raises=raises,
        injected=MappingProxyType(injected),
        route=route,
        instead_of=plan,
    )


def _devices_of(tower: Tower) -> set[torch.device]:
    """Return the devices on which a tower computes: where weights are, or where accelerate brings offloaded ones."""
    devices = set()
    for module in tower.modules():
        hook = vars(module).get("_hf_hook")
        for parameter in module.parameters(recurse=False):
            device = getattr(hook, "execution_device", None) if parameter.is_meta else None
            device = parameter.device if device is None else device
            devices.add(torch.device("cuda", device) if isinstance(device, int) else torch.device(device))
    return devices


def called_blocks(
    state: TowerState, inputs: Inputs, snapshot: Snapshot, hooked_parts: frozenset[int], spec: Spec, reasons: list[str]
) -> Mapping[int, CalledBlock]:
    """Return the hooked blocks of a call, by the index of the layer. Add to `reasons` what their attention lacks."""
    hooked = {layer: block for layer, block in snapshot.callable_blocks.items() if id(block) in hooked_parts}
    names = snapshot.proof.block_arguments
    if not hooked or names is None:
        return MappingProxyType({})
    route = state.routes.get(inputs.grid, spec).bound
    reasons += route.unmet
    options = {name: value for name, value in inputs.options.items() if name != "return_dict"}
    called: dict[int, CalledBlock] = {}
    for layer, block in hooked.items():
        called[layer] = CalledBlock(block, MappingProxyType({**route.block_arguments(layer, names), **options}))
    return MappingProxyType(called)


def decide_attention(tower: Tower, state: TowerState, args: tuple[object, ...], kwargs: dict[str, object]) -> StockPlan:
    """Return the plan of a call of a tower whose attention alone is ours: by a route without operations."""
    if state.popped is None:
        state.popped = versions.popped_by(names_of_forwards({type(module) for module in tower.modules()}))
        state.routes.allow(sum(parameter.nbytes for parameter in tower.parameters()))
    taken = state.popped
    names = state.family.arguments
    arguments: dict[str, Any] = dict(zip(names, args)) | kwargs  # noqa: B905
    grid: Grid = ()
    reasons = _reasons_without_segments(tower, arguments, names)
    if "cu_seqlens" not in taken:
        reasons = [f"transformers {transformers.__version__} computes the segments of this tower by itself"]
    if state.settings.score_mod is not None and len(_devices_of(tower)) > 1:
        # Between devices layers get copies of our offsets, which do not know the score_mod.
        reasons = ["the tower lies on several devices"]
    reasons = reasons_foreign_forward(tower) or reasons
    if state.former_forward is not None:
        reasons = [why_not_reached(state.former_forward)]
    if not reasons:
        geometry = state.family.geometry(tower)
        grid = state.family.grid(tower, arguments[names[1]].tolist())
        if not grid or min(min(sizes) for sizes in grid) < 1:  # the stock forward reports what else is wrong
            reasons = [f"a row of {names[1]} has no frames, or no size"]
        elif geometry.quarters and any(h % 2 or w % 2 for _, h, w in grid):
            reasons = [f"{names[1]} has an odd height or width, and a merger takes two by two rows"]
    if reasons:
        return decide_stock(state, reasons)
    route = state.routes.get(grid, state.attention_spec(geometry, arguments[names[0]].device)).bound
    if geometry.quarters:  # the tower would pass our offsets to the layers behind its merger, too
        taken = (taken - {"cu_seqlens"}) | {ROUTE}
    injected = MappingProxyType(route.injected(taken))
    return StockPlan(way=Way.ATTENTION, reasons=(), raises=state.why_raised, injected=injected, route=route)


def _reasons_without_segments(tower: Tower, arguments: Mapping[str, object], names: tuple[str, ...]) -> list[str]:
    """Return why a tower whose attention alone is ours gets no segments from us, and must compute them itself."""
    name = tower.config._attn_implementation
    if name not in NAMES:
        return reasons_custom_attention(tower, name) or [f"its attention is {name!r}"]
    if any(popped in arguments for popped in POPPED):
        return ["the caller supplies sequence metadata"]
    pixels = arguments.get(names[0])
    grid = arguments.get(names[1])
    has_grid = isinstance(grid, Tensor) and grid.dim() == 2 and not grid.is_floating_point()
    if not has_grid or not isinstance(pixels, Tensor) or is_tracing():
        return ["the arguments are not those that are known, or torch.jit.trace is at work"]
    return []


def call_original(
    original: Callable[..., object],
    pixels_name: str,
    args: tuple[object, ...],
    kwargs: Mapping[str, object],
    **injected: object,
) -> object:
    """Call the stock forward, which computes with a grid on the device of the pixels. It reads no values on meta."""
    pixels = args[0] if args else kwargs.get(pixels_name)
    grid = kwargs.get("grid_thw")
    if (
        isinstance(pixels, Tensor)
        and isinstance(grid, Tensor)
        and grid.device != pixels.device
        and not (pixels.is_meta or grid.is_meta)
    ):
        injected["grid_thw"] = grid.to(pixels.device)
    return original(*args, **{**kwargs, **injected})


def run(tower: Tower, state: TowerState, plan: StockPlan, attempt: Attempt, original: Callable[..., object]) -> object:
    """Run the stock forward on what the plan injects, and count the call."""
    if state.on_stock is not None and plan.instead_of is not None:
        state.on_stock(plan.instead_of, attempt, plan.reasons)
    if plan.raises is not None:
        raise_if_any([*plan.reasons, *attempt.reasons], because=plan.raises)  # none so far on the way ATTENTION
    if plan.way is Way.STOCK:
        note_state(tower.config, state)
    output = original(**plan.injected)
    if plan.way is Way.ATTENTION and plan.route is not None and not plan.route.attended:
        # MiniMax-M3 in older versions: its layers know no segments.
        version = transformers.__version__
        attempt.reasons.append(f"no layer attended by segments, through a backend (transformers {version})")
        if plan.raises is not None:
            raise_if_any(attempt.reasons, because=plan.raises)
    if plan.way is Way.ATTENTION and not attempt.reasons:
        state.fast_calls += 1
    else:
        state.count_stock_call()
        state.metadata_calls += plan.way is Way.METADATA
    state.why_stock = plan.reasons or tuple(attempt.reasons)
    state.fallbacks.update({*plan.reasons, *attempt.reasons})
    state.last_route = plan.route  # none on the way STOCK
    return output
