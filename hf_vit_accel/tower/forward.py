"""Replacement for the forward of a tower: read the call, decide about it, run.

Only the `forward` of a tower instance is replaced. `decide` makes the plan of a call. A call that cannot be fast
runs the original forward, on our metadata and attention if it can.

`T` packed patch rows, `P` pixels of a patch.
"""

from __future__ import annotations

import copy
import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import lru_cache, partial
from operator import itemgetter
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._C._functorch import peek_interpreter_stack
from torch.autograd import forward_ad
from torch.jit._trace import is_tracing
from torch.nn.modules import module as torch_module
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from hf_vit_accel.attached import OurMethod
from hf_vit_accel.engine.call import Attempt, Batch, FastPlan, WeightMemory
from hf_vit_accel.engine.encoder import CalledBlock
from hf_vit_accel.families import Family, Tower, interface
from hf_vit_accel.families.copies import CopyFamily
from hf_vit_accel.graphs import memory
from hf_vit_accel.machine import KERNELS, Fault, autocast_dtype, raise_if_any, reasons_fake, reasons_untraceable
from hf_vit_accel.tower import attention, fsdp, proof, stock_way
from hf_vit_accel.tower.attention import reasons_custom_attention
from hf_vit_accel.tower.code import why_not_reached
from hf_vit_accel.tower.differences import CallDtypes
from hf_vit_accel.tower.snapshot import HOOKS, Snapshot
from hf_vit_accel.tower.state import STATE, SpecKey, TowerState, state_of
from hf_vit_accel.tower.stock_way import StockPlan
from hf_vit_accel.versions import POPPED, is_inert

Original = Callable[..., object]
"""The stock forward of a tower, or the forward that its instance had before it was patched."""

Arguments = tuple[object, ...]
Options = dict[str, object]
"""Positional and keyword arguments of a call."""

_OUTER_GRAPH = (
    "A patched tower cannot be captured in an outer CUDA graph. By default it captures its own where that pays, with "
    "hf_vit_accel.patch(model, cuda_graphs=True) at the first call"
)
CALLED_ON = "_hf_vit_accel_called_on"
"""Keyword argument that names the instance of a call, where it is not the forward's own (a shallow copy)."""

_GLOBAL_HOOKS = tuple(
    hooks for name, hooks in vars(torch_module).items() if name.startswith("_global_") and isinstance(hooks, dict)
)


class AcceleratedForward(OurMethod):
    """Replacement for a tower's `forward`. Takes pixels (T, P) and the grid, returns the stock output class.

    Behaves like the bound method that it replaces. Other code may bind it again (`MethodType(forward, tower)`), wrap
    it, or ask for its signature, name or code. It is no bound method itself: unpickling one asks the instance for
    `forward` before that attribute is restored, and silently gets the function of the class.

    Attributes:
        former: The callable in whose place it was put; None where the instance had no forward.
    """

    __slots__ = ("__signature__", "_class", "_state", "former")

    def __init__(self, tower: nn.Module, state: TowerState, former: Callable[..., object] | None = None) -> None:
        _exclude_from_compile()
        super().__init__(tower)
        self._state = state
        self._class = type(tower)
        self.former = former
        self.__signature__ = inspect.signature(self._class.forward.__get__(tower))
        if state.former_forward is not None:
            with suppress(TypeError, ValueError):  # raised for callables that are not written in Python
                self.__signature__ = inspect.signature(state.former_forward)

    def __reduce__(self) -> tuple[object, ...]:
        return self._reduced(self._state, self.former)

    def __deepcopy__(self, memo: dict[int, Any]) -> AcceleratedForward:
        tower: Any = self._module()
        former = copy.deepcopy(self.former, memo) if id(tower) in memo else self.former  # bound to the copy, as it is
        return type(self)(memo.get(id(tower), tower), copy.deepcopy(self._state, memo), former)

    def __getattr__(self, name: str) -> Any:
        if name in ("__func__", "__wrapped__"):  # code that unwraps methods would reach the stock forward
            raise AttributeError(name)
        return getattr(self._class.forward, name)

    def __call__(self, *args: object, **kwargs: object) -> object:
        """Return the outputs of a call.

        If a backend or a kernel fails, this call and later ones do without it. Out-of-memory errors reach the caller
        where neither dropped graphs nor shorter passes help.

        Raises:
            ValueError: The inputs do not fit each other.
            FallbackError: The call would not get what was asked for, under `strict`.
        """
        tower: Tower
        state: TowerState | None = self._state
        if CALLED_ON in kwargs:
            tower = kwargs.pop(CALLED_ON)
            state = state_of(tower)
        elif args and isinstance(args[0], nn.Module):
            tower = args[0]
            args = args[1:]
            state = state_of(tower)
            if state is self._state and tower is not self._module():  # a shallow copy: its state is the original's
                redirect_shallow_copies(tower, args, kwargs)
                state = state_of(tower)
        else:
            tower = self._module() or self.__self__
        original: Original = partial(type(tower).forward, tower)
        if state is not None and state.former_forward is not None:
            original = state.former_forward
        current: object = vars(tower).get(STATE)
        if state is None or current is not state:
            return original(*args, **kwargs)  # unpatched or patched again, while other code (a hook) holds this forward
        return _call(tower, state, original, args, kwargs)


@lru_cache(maxsize=1)
def _exclude_from_compile() -> None:
    """Exclude our forward and attention from `torch.compile`, once: a decorator would import `torch._dynamo`.

    Stock's forward may call compiled blocks (`compile_regions` of accelerate), which call our attention.
    """
    reason = "the layout is decided on the host, and the layers are fused already"
    call = torch.compiler.disable(AcceleratedForward.__call__, reason=reason)
    AcceleratedForward.__call__ = call  # type: ignore[method-assign]
    reason = "backends call their packages, and flex compiles itself"
    attention.attend_packed = torch.compiler.disable(attention.attend_packed, reason=reason)


def redirect_shallow_copies(module: nn.Module, args: Arguments, kwargs: Options) -> tuple[Arguments, Options] | None:
    """Let a shallow copy of a patched tower run its own modules; a forward pre-hook of every patched tower.

    A shallow copy holds the forward of the original: `copy.copy` makes one, and `nn.DataParallel` its replicas. That
    forward cannot see the instance that it is called on, but a hook can. From then on the copy has its own forward.
    """
    forward: Any = vars(module).get("forward")
    if type(forward) is AcceleratedForward and forward._module() is module:
        return None
    state = state_of(module)
    if state is None or not is_our_forward(forward) or forward.__self__ is module or state.former_forward is not None:
        return None
    state = copy.copy(state)
    vars(module)[STATE] = state
    vars(module)["forward"] = AcceleratedForward(module, state)
    return args, {**kwargs, CALLED_ON: module}


def is_our_forward(forward: object) -> bool:
    """Return whether a forward is ours, also where accelerate's `unwrap_model` has bound it as a method."""
    return isinstance(getattr(forward, "__func__", forward), AcceleratedForward)


def _call(tower: Tower, state: TowerState, original: Original, args: Arguments, kwargs: Options) -> object:
    """Serve one call: read it, decide, run. Once more without a backend or a kernel that failed."""
    pixels: Any = args[0] if args else kwargs.get(state.family.arguments[0])
    if isinstance(pixels, Tensor) and (state.settings.normalisation is not None or pixels.dtype == torch.uint8):
        pixels = state.pixel_values(tower, pixels)
        args, kwargs = (pixels, *args[1:]), {name: x for name, x in kwargs.items() if name != state.family.arguments[0]}
    on_cuda = isinstance(pixels, Tensor) and pixels.is_cuda
    faults = state.faults
    stock = partial(stock_way.call_original, original, state.family.arguments[0], args, kwargs)
    with torch.cuda.device(pixels.device) if on_cuda else nullcontext():
        exchanged: str | None = None
        while True:
            attempt = Attempt(
                disable=partial(state.disable, faults, state.faults),
                has_new_room=partial(memory.has_given_up_since, memory.stores_given_up),
                exchanged=exchanged,
            )
            misses = state.routes.cache.misses
            try:
                plan = decide(tower, state, args, kwargs)
                if isinstance(plan, StockPlan):
                    result = stock_way.run(tower, state, plan, attempt, stock)
                else:
                    result = run(state, plan, attempt)
                has_route = plan.route is not None if isinstance(plan, StockPlan) else bool(attempt.passes)
                state.routes.hits += has_route and state.routes.cache.misses == misses
                return result
            except (Fault, torch.OutOfMemoryError) as error:
                attempt.prepare_another(error)
                exchanged = attempt.exchanged
            # Nothing holds what the failed attempt allocated when the next one begins.


class Reasons(NamedTuple):
    """Why a call does not run our operations, and what was read of its tower to know.

    Attributes:
        stock: Why it must go `stock_way.Way.STOCK`. If there are any, nothing else was read.
        metadata: Why it must go METADATA, where blocks are called one by one.
        parameters: Of the tower, as they are now.
        weights: Their addresses, dtypes and sizes.
        hidden_states: Whether hidden states are returned, too.
        hooked_parts: The `id` of every callable part with hooks: these run as modules.
    """

    stock: Sequence[str] = ()
    metadata: Sequence[str] = ()
    parameters: tuple[nn.Parameter, ...] = ()
    weights: WeightMemory | None = None
    hidden_states: bool = False
    hooked_parts: frozenset[int] = frozenset()


def reasons_of(
    tower: Tower,
    family: Family,
    snapshot: Snapshot,
    former_forward: Callable[..., object] | None,
    name: str | None,
    options: Mapping[str, object],
    *,
    grad: bool,
    between_calls: bool = False,
    holder: nn.Module | None = None,
) -> Reasons:
    """Return why a call with these options does not run our operations.

    Args:
        former_forward: A forward of others on the instance, which does not call the class's; None for none.
        name: The attention name of the config, or the one that it will have.
        between_calls: Whether no call is under way, so that FSDP2 has not gathered the weights.
        holder: A module around the tower that FSDP2 shards.
    """
    reasons = list(snapshot.reasons_stock)
    if former_forward is not None:
        reasons.append(why_not_reached(former_forward))
    if not options.keys().isdisjoint(POPPED):
        reasons.append("the caller supplies sequence metadata")
    is_own_code = snapshot.is_copy and name == "eager"  # which the proof of a copy ran
    if name not in proof.NAMES and not is_own_code:
        reasons += reasons_custom_attention(tower, name)
    if is_tracing():  # a trace does not record tensors that numpy makes
        reasons.append("torch.jit.trace is at work")
    if reasons:
        return Reasons(reasons)
    parameters, weights = snapshot.weights()
    if between_calls:
        weights = _as_gathered(tower, snapshot, weights, holder)
    if snapshot.is_copy:
        reasons = _reasons_of_copy(tower, family, snapshot, weights, options)
        if reasons:
            return Reasons(reasons)
    requested = options.get("output_hidden_states", snapshot.defaults["output_hidden_states"])
    hooked_parts: set[int] = set()
    reasons_metadata = [*snapshot.reasons_metadata, *weights.reasons]
    if grad and snapshot.proof.why_not_gradients is not None:
        reasons_metadata.append(snapshot.proof.why_not_gradients)
    if any(_GLOBAL_HOOKS):
        reasons_metadata.append("global module hooks")
    for hooks_of in HOOKS if grad else HOOKS[:2]:  # without gradients, hooks of the forward alone
        if any(map(hooks_of, snapshot.attributes_inside)):
            reasons_metadata += _reasons_hooked(snapshot, hooks_of, hooked_parts)
    if hooked_parts and grad and snapshot.outputs_require_grad():
        reasons_metadata.append("hooks inside, and one of transformers that our patch embedding does not run")
    if hooked_parts and requested and getattr(tower, "_output_capturing_hooks_installed", False):
        reasons_metadata.append("hooks inside, and older ones of transformers that capture hidden states")
    if snapshot.sharded_layers:
        reasons_metadata += fsdp.reasons_against(snapshot.sharded_layers.values(), weights.dtype)
    if requested and snapshot.proof.why_not_hidden_states is not None:
        reasons_metadata.append(snapshot.proof.why_not_hidden_states)
    elif requested and requested is not True:  # newer towers take a number, or several, to select some
        reasons_metadata.append(f"output_hidden_states={requested!r} selects hidden states of the tower")
    if options.get("output_attentions", snapshot.defaults["output_attentions"]):
        reasons_metadata.append("output_attentions is requested")
    if snapshot.dropout and any(block.attention.training for block in snapshot.parts.blocks):
        reasons_metadata.append("attention weights are dropped out")
    if weights.mixed is not None or snapshot.proof.why_not_autocast is not None:
        autocast = autocast_dtype(snapshot.parts.projection.weight.device, weights.dtype)
        if autocast is None and weights.mixed is not None and weights.mixed not in reasons_metadata:
            reasons_metadata.append(f"{weights.mixed} without autocast")
        if snapshot.proof.why_not_autocast is not None and autocast is not None and weights.dtypes != {autocast}:
            reasons_metadata.append(snapshot.proof.why_not_autocast)
    if peek_interpreter_stack() is not None or forward_ad._current_level >= 0 or is_in_torch_dispatch_mode():
        reasons_metadata += reasons_untraceable()
    hidden_states = bool(requested) and snapshot.proof.returns_hidden_states
    return Reasons((), reasons_metadata, parameters, weights, hidden_states, frozenset(hooked_parts))


def _as_gathered(tower: Tower, snapshot: Snapshot, weights: WeightMemory, holder: nn.Module | None) -> WeightMemory:
    """Return the weights as calls will see them: FSDP2 gathers sharded weights, in the dtype of its policy.

    If a parent of the tower is sharded with its layers, the policy of the layers counts.
    """
    if not (snapshot.uses_fsdp or holder) or not (weights.reasons or weights.mixed):
        return weights
    if snapshot.uses_fsdp:
        holder = tower if isinstance(tower, fsdp.wrapper()) else next(iter(snapshot.sharded_layers.values()))
    assert holder is not None
    gathered = copy.copy(weights)
    gathered.dtype = fsdp.gathered_dtype(holder, weights.dtype)
    gathered.reasons = []
    gathered.mixed = None
    return gathered


def _reasons_of_copy(
    tower: Tower, family: Family, snapshot: Snapshot, weights: WeightMemory, options: Mapping[str, object]
) -> list[str]:
    """Return why a call of a copy must reach its own forward."""
    assert isinstance(family, CopyFamily)
    if weights.mixed is not None:
        return [weights.mixed]
    device = snapshot.parts.projection.weight.device
    dtypes = CallDtypes(weights.dtype, autocast_dtype(device, weights.dtype))
    reasons = proof.reasons_of_call(tower, family, snapshot.proof, dtypes, options)
    # Blocks that are checkpointed themselves are served; older code checkpoints them in the tower's forward.
    blocks = [block.module for block in snapshot.parts.blocks]
    is_checkpointed = tower.training and getattr(tower, "gradient_checkpointing", False)
    if is_checkpointed and not any(getattr(block, "gradient_checkpointing", False) for block in blocks):
        reasons.append("gradient checkpointing in the copy's own forward")
    return reasons


def _reasons_hooked(snapshot: Snapshot, hooks_of: itemgetter[str], hooked_parts: set[int]) -> list[str]:
    """Return a sentence about the first module inside with a hook that the fast path would skip; empty for none.

    Hooks inside a part that can run as a module add it to `hooked_parts` instead.
    """
    sharded_ids = {id(vars(block)) for block in snapshot.sharded_layers.values()}
    for name, attributes in zip(snapshot.names_inside, snapshot.attributes_inside, strict=True):
        is_sharded = id(attributes) in sharded_ids
        part = snapshot.callable_parts.get(id(attributes))
        for hook in hooks_of(attributes).values():
            if is_inert(hook) or (is_sharded and fsdp.hooked_by_fsdp(hook)):
                continue
            if part is None:
                return [f"hooks on {name}"]
            hooked_parts.add(part)
    return []


def decide(tower: Tower, state: TowerState, args: Arguments, kwargs: Options) -> StockPlan | FastPlan:
    """Return the plan of a call, by the tower as it is now and its inputs, which are checked once.

    Operations that it needs are built, and kept.
    """
    if is_in_torch_dispatch_mode() and (why_fake := reasons_fake()):
        return stock_way.decide_stock(state, why_fake)
    if state.family.attention_only:
        return stock_way.decide_attention(tower, state, args, kwargs)
    snapshot = state.last_snapshot
    if snapshot is None or not snapshot.watch.unchanged():
        snapshot = state.read_tower(tower)
    grad_mode = torch.is_grad_enabled()
    # transformers' configs run seven Python functions to tell `_attn_implementation`.
    name = object.__getattribute__(tower.config, "_attn_implementation_internal")
    reasons = reasons_of(tower, state.family, snapshot, state.former_forward, name, kwargs, grad=grad_mode)
    if reasons.weights is None:
        return stock_way.decide_stock(state, reasons.stock)
    parameters, weights = reasons.parameters, reasons.weights
    read_grid = None
    is_warming = state.warming == threading.get_ident()
    if state.read_grid is not None and not (reasons.hidden_states or reasons.hooked_parts or is_warming):
        read_grid = partial(state.read_grid, snapshot, parameters, weights, state.faults.get(KERNELS))
    call = interface.read(snapshot.expected, read_grid, *args, **kwargs)
    if call is None:
        why_not_read = "arguments are missing, or pixel values are in a shape or of a class of their own"
        return stock_way.decide_stock(state, [why_not_read])
    device = call.pixels.device
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(_OUTER_GRAPH)
    grad = grad_mode and (
        bool(reasons.hooked_parts)
        or snapshot.unpredictable_others is not None  # an adapter may train parameters outside of the tower
        or call.pixels.requires_grad
        or snapshot.is_trained(parameters)
    )
    reasons_metadata = list(reasons.metadata)
    if not state.family.videos and any(frames > 1 for frames, _, _ in call.grid):
        reasons_metadata.append("this family takes the frames of a video one by one")
    key = SpecKey(
        device=device,
        autocast=autocast_dtype(device, weights.dtype),
        fast=not reasons_metadata,
        grad=grad,
        weights_dtype=weights.dtype,
        weights_key=weights.key,
        kept=None if state.asked_for is None else state.kept(snapshot, device),
    )
    unmet: list[str] = []
    called: Mapping[int, CalledBlock] = MappingProxyType({})
    if key.fast and reasons.hooked_parts:
        spec_of_blocks = state.spec(snapshot, weights, key._replace(fast=False))
        called = stock_way.called_blocks(state, call, snapshot, reasons.hooked_parts, spec_of_blocks, unmet)
        ids_of_blocks = map(id, snapshot.callable_blocks.values())  # which run in the place of operations
        key = key._replace(hooked_parts=reasons.hooked_parts.difference(ids_of_blocks))
    if called and state.settings.score_mod is not None:
        reasons_metadata.append("hooks inside blocks, which may attend without the score_mod")
        key = key._replace(fast=False)
    spec = snapshot.specs.get(key) or state.spec(snapshot, weights, key)
    form = snapshot.proof.form
    has_class = not snapshot.is_copy and form is not None and bool(form.fields)
    plan = FastPlan(
        reasons=tuple(unmet),
        inputs=call,
        reading=snapshot,
        parameters=parameters,
        weights=weights,
        spec=spec,
        checkpoints=snapshot.checkpoints() if grad else MappingProxyType({}),
        called=called,
        is_hooked=bool(reasons.hooked_parts),
        hidden_states=reasons.hidden_states,
        outputs_require_grad=grad_mode and not grad and snapshot.outputs_require_grad(),
        form=form,
        as_tuple=has_class and call.options.get("return_dict", snapshot.defaults["return_dict"]) is False,
    )
    if reasons_metadata:
        return stock_way.decide_metadata(tower, state, plan, snapshot, reasons_metadata)
    if unmet and state.settings.strict:
        raise_if_any(unmet)
    return plan


def run(state: TowerState, plan: FastPlan, attempt: Attempt) -> object:
    """Encode the images of a call, and count it if it succeeds; return what the stock forward would."""
    inputs = plan.inputs
    with torch.no_grad() if plan.outputs_require_grad else nullcontext():
        outputs = state.encode(Batch(plan=plan, attempt=attempt, grid=inputs.grid, pixels_TP=inputs.pixels))
    if plan.outputs_require_grad:  # copies: stock's outputs are no leaves either, and may be written to
        outputs = [output.requires_grad_().clone() for output in outputs]
    states = len(plan.reading.parts.blocks) if plan.hidden_states else 0
    assert plan.form is not None, "proven"
    output = plan.form.build(outputs, states)
    state.fast_calls += 1
    state.why_stock = ()
    unmet: list[str] = []
    way = "no image was encoded: all features were known, or are those of other ranks"
    for route, way_of_pass in attempt.passes:
        unmet += route.unmet
        state.last_route = route
        way = way if way.startswith("eager") else way_of_pass
    if plan.reasons or attempt.reasons or unmet:
        state.fallbacks.update({*plan.reasons, *attempt.reasons, *unmet})
    runner = state.training_runner if plan.spec.request.grad else state.inference_runner
    if runner is not None and runner.policy.calls:
        runner.last_way = way
    return output.to_tuple() if plan.as_tuple else output
