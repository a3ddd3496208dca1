"""The three ways through the stock forward: how a call is decided that goes one of them, and how it runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from torch import Tensor

from hf_vit_accel.engine.call import Attempt, FastPlan
from hf_vit_accel.engine.encoder import CalledBlock
from hf_vit_accel.engine.route import Spec
from hf_vit_accel.families import Tower
from hf_vit_accel.families.copies import CopyFamily
from hf_vit_accel.machine import raise_if_any
from hf_vit_accel.tower import attention_only
from hf_vit_accel.tower.plan import Call, StockPlan, Way
from hf_vit_accel.tower.proof import NAMES
from hf_vit_accel.tower.snapshot import Snapshot
from hf_vit_accel.tower.state import TowerState
from hf_vit_accel.versions import knows_segments


def decide_metadata(
    tower: Tower, state: TowerState, plan: FastPlan, snapshot: Snapshot, reasons_slow: list[str]
) -> StockPlan:
    """Return the plan of a call whose blocks are called one by one, on our metadata and attention."""
    settings = state.settings
    if isinstance(state.family, CopyFamily):  # its forward may take no metadata
        raises = state.why_raised
        return StockPlan(way=Way.STOCK, reasons=tuple(reasons_slow), raises=raises, instead_of=plan)
    name = tower.config._attn_implementation
    route = state.routes.get(plan.inputs.grid, plan.spec)
    reasons = [*reasons_slow, *route.unmet]
    raises = "strict=True" if settings.strict else None
    if settings.score_mod is not None and name not in NAMES:
        raises = "a score_mod was given"
        reasons.append(f"blocks attend by {name!r}")
    elif settings.score_mod is not None and not knows_segments(snapshot.proof.code.called_names()):
        raises = "a score_mod was given"
        reasons.append("blocks attend without our segments")
    return StockPlan(
        way=Way.METADATA,
        reasons=tuple(reasons),
        raises=raises,
        injected={} if raises else route.ready().injected(snapshot.proof.taken),
        route=route,
        instead_of=plan,
    )


def called_blocks(state: TowerState, call: Call, spec: Spec, reasons: list[str]) -> dict[int, CalledBlock]:
    """Return the hooked blocks of a call, by the index of the layer. Add to `reasons` what their attention lacks."""
    inputs, snapshot = call.inputs, call.snapshot
    assert inputs is not None and snapshot is not None
    hooked = {
        layer: block for layer, block in snapshot.callable_blocks.items() if id(block) in call.reasons.hooked_parts
    }
    names = snapshot.proof.block_arguments
    if not hooked or names is None:
        return {}
    route = state.routes.get(inputs.grid, spec).ready()
    reasons += route.unmet
    options = {name: value for name, value in inputs.options.items() if name != "return_dict"}
    return {layer: partial(block, **route.block_arguments(layer, names), **options) for layer, block in hooked.items()}


def call_original(
    original: Callable[..., object],
    pixels_name: str,
    args: tuple[object, ...],
    kwargs: Mapping[str, object],
    **injected: object,
) -> object:
    """Call the stock forward, which computes with a grid on the device of the pixels."""
    pixels = args[0] if args else kwargs.get(pixels_name)
    grid = kwargs.get("grid_thw")
    if isinstance(pixels, Tensor) and isinstance(grid, Tensor) and grid.device != pixels.device:
        injected["grid_thw"] = grid.to(pixels.device)
    return original(*args, **{**kwargs, **injected})


def run(state: TowerState, plan: StockPlan, attempt: Attempt, original: Callable[..., object]) -> object:
    """Run the stock forward on what the plan injects, and count the call.

    Raises:
        FallbackError: The call would not get what was asked for, under `strict` or with a score_mod.
        Fault: A backend failed.
    """
    if state.on_stock is not None and plan.instead_of is not None:
        state.on_stock(plan.instead_of, attempt, plan.reasons)
    if plan.raises is not None:
        raise_if_any([*plan.reasons, *attempt.reasons], because=plan.raises)
    output = original(**plan.injected)
    if plan.way is Way.ATTENTION:
        assert plan.route is not None
        attempt.reasons += attention_only.reasons_unserved(state, plan.route)
    if plan.way is Way.ATTENTION and not attempt.reasons:
        state.fast_calls += 1
    else:
        state.count_stock_call()
    state.fallbacks.update({*plan.reasons, *attempt.reasons})
    state.last_route = plan.route or state.last_route  # a call that goes STOCK has no route
    return output
