"""Replacement for the forward of a tower: read the call, decide about it, run.

Only the `forward` of a tower instance is replaced. `decide` names the ways of a call. A call that cannot be fast
runs the original forward, on our metadata and attention if it can.

`T` packed patch rows, `P` pixels of a patch.
"""

from __future__ import annotations

import copy
import inspect
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from hf_vit_accel.engine import inputs
from hf_vit_accel.engine.encoder import encode
from hf_vit_accel.families import Tower
from hf_vit_accel.graphs import memory
from hf_vit_accel.graphs.store import Replayed
from hf_vit_accel.machine import Fault, raise_if_any
from hf_vit_accel.options.data_parallel import NotSharedError
from hf_vit_accel.options.joined import JoinedOutputs
from hf_vit_accel.options.passes import RecomputedPasses
from hf_vit_accel.tower import attention_only, checks
from hf_vit_accel.tower.decide import decide
from hf_vit_accel.tower.plan import Call, CallPlan, FastPlan, Outcome, Pass, PassDone, StockPlan, Way
from hf_vit_accel.tower.retry import can_retry_out_of_memory, disable
from hf_vit_accel.tower.state import STATE, TowerState, state_of

Original = Callable[..., object]
"""The stock forward of a tower, or the forward that its instance had before it was patched."""

Arguments = tuple[object, ...]
Options = dict[str, object]
"""Positional and keyword arguments of a call."""

CALLED_ON = "_hf_vit_accel_called_on"
"""Keyword argument that names the instance of a call, where it is not the forward's own (a shallow copy)."""


class AcceleratedForward:
    """Replacement for a tower's `forward`. Takes pixels (T, P) and the grid, returns the stock output class.

    Behaves like the bound method that it replaces. Other code may bind it again (`MethodType(forward, tower)`), wrap
    it, or ask for its signature, name or code. It is no bound method itself: unpickling one asks the instance for
    `forward` before that attribute is restored, and silently gets the function of the class.

    Holds its tower weakly, so that a deleted model is freed at once. A caller may keep the forward alone: then the
    stock forward runs on the attributes that the tower had.

    Attributes:
        former: The callable in whose place it was put; None where the instance had no forward.
    """

    __slots__ = ("__signature__", "__weakref__", "_class", "_state", "_tower", "former")

    def __init__(self, tower: nn.Module, state: TowerState, former: Callable[..., object] | None = None) -> None:
        _exclude_from_compile()
        self._tower = weakref.ref(tower)
        self._state = state
        self._class: Any = type(tower)
        self.former = former
        self.__signature__ = inspect.signature(self._class.forward.__get__(tower))
        if state.former_forward is not None:
            with suppress(TypeError, ValueError):  # raised for callables that are not written in Python
                self.__signature__ = inspect.signature(state.former_forward)

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self._tower(), self._state, self.former)

    def __deepcopy__(self, memo: dict[int, Any]) -> AcceleratedForward:
        tower: Any = self._tower()
        former = copy.deepcopy(self.former, memo) if id(tower) in memo else self.former  # bound to the copy, as it is
        return type(self)(memo.get(id(tower), tower), copy.deepcopy(self._state, memo), former)

    def __getattr__(self, name: str) -> Any:
        if name in ("__func__", "__wrapped__"):  # code that unwraps methods would reach the stock forward
            raise AttributeError(name)
        return getattr(self._class.forward, name)

    @property
    def __self__(self) -> Any:
        tower = self._tower()
        if tower is None:
            tower = self._class.__new__(self._class)
            vars(tower).update(self._state.attributes)
        return tower

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
            if state is self._state and tower is not self._tower():  # a shallow copy: its state is the original's
                redirect_shallow_copies(tower, args, kwargs)
                state = state_of(tower)
        else:
            tower = self._tower() or self.__self__
        original: Original = partial(self._class.forward, tower)
        if state is not None and state.former_forward is not None:
            original = state.former_forward
        current: object = vars(tower).get(STATE)
        if state is None or current is not state:
            return original(*args, **kwargs)  # unpatched or patched again, while other code (a hook) holds this forward
        return _call(tower, state, original, args, kwargs)


@lru_cache(maxsize=1)
def _exclude_from_compile() -> None:
    """Exclude `AcceleratedForward` from `torch.compile`, once: a decorator would import `torch._dynamo` in a second."""
    reason = "the layout is decided on the host, and the layers are fused already"
    call = torch.compiler.disable(AcceleratedForward.__call__, reason=reason)
    AcceleratedForward.__call__ = call  # type: ignore[method-assign]


def redirect_shallow_copies(module: nn.Module, args: Arguments, kwargs: Options) -> tuple[Arguments, Options] | None:
    """Let a shallow copy of a patched tower run its own modules; a forward pre-hook of every patched tower.

    A shallow copy holds the forward of the original: `copy.copy` makes one, and `nn.DataParallel` its replicas. That
    forward cannot see the instance that it is called on, but a hook can. From then on the copy has its own forward.
    """
    forward: Any = vars(module).get("forward")
    if type(forward) is AcceleratedForward and forward._tower() is module:
        return None
    state = state_of(module)
    if state is None or not is_our_forward(forward) or forward.__self__ is module or state.former_forward is not None:
        return None
    state = state.copy()
    vars(module)[STATE] = state
    vars(module)["forward"] = AcceleratedForward(module, state)
    own_hooks(module)
    return args, {**kwargs, CALLED_ON: module}


def own_hooks(tower: nn.Module) -> None:
    """Give a tower hook dictionaries of its own: a shallow copy shares those of the original."""
    for name in ("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs"):
        vars(tower)[name] = OrderedDict(vars(tower)[name])


def is_our_forward(forward: object) -> bool:
    """Return whether a forward is ours, also where accelerate's `unwrap_model` has bound it as a method."""
    return isinstance(getattr(forward, "__func__", forward), AcceleratedForward)


def is_class_forward(forward: object, tower: nn.Module) -> bool:
    """Return whether a callable is the forward of the tower's class: bound to it, or the function of the class."""
    function = type(tower).forward
    is_bound = getattr(forward, "__func__", None) is function and getattr(forward, "__self__", None) is tower
    return forward is function or is_bound


def _call(tower: Tower, state: TowerState, original: Original, args: Arguments, kwargs: Options) -> object:
    """Serve one call, again without a backend, a kernel or a way of sharing that failed, and in shorter passes."""
    pixels: Any = args[0] if args else kwargs.get(state.family.arguments[0])
    if isinstance(pixels, Tensor) and (state.settings.normalisation is not None or pixels.dtype == torch.uint8):
        pixels = state.pixel_values(tower, pixels)
        args, kwargs = (pixels, *args[1:]), {name: x for name, x in kwargs.items() if name != state.family.arguments[0]}
    on_cuda = isinstance(pixels, Tensor) and pixels.is_cuda
    faults_at_call = state.faults
    not_shared: str | None = None
    stock = partial(_call_original, original, state.family.arguments[0], args, kwargs)
    with torch.cuda.device(pixels.device) if on_cuda else nullcontext(), state.sharing or nullcontext():
        while True:
            faults_at_attempt = state.faults
            given_up_at_attempt = memory.stores_given_up
            plan: CallPlan | None = None
            try:
                call = read(tower, state, args, kwargs)
                plan = decide(tower, state, call, not_shared)
                return _count(state, run(tower, state, plan, stock))
            except Fault as fault:
                disable(state, faults_at_call, faults_at_attempt, fault)
            except NotSharedError as error:
                not_shared = str(error)
            except torch.OutOfMemoryError:
                if not can_retry_out_of_memory(state, plan, given_up_at_attempt):
                    raise
            # Nothing holds what the failed attempt allocated when the next one begins.


def _call_original(
    original: Original, pixels_name: str, args: Arguments, kwargs: Options, **injected: object
) -> object:
    """Call the stock forward, which computes with a grid on the device of the pixels."""
    pixels = args[0] if args else kwargs.get(pixels_name)
    grid = kwargs.get("grid_thw")
    if isinstance(pixels, Tensor) and isinstance(grid, Tensor) and grid.device != pixels.device:
        injected["grid_thw"] = grid.to(pixels.device)
    return original(*args, **(kwargs | injected))


def read(tower: Tower, state: TowerState, args: Arguments, kwargs: Options) -> Call:
    """Return a call: the tower as it is now, the reasons against the fast path, and the inputs, checked once."""
    if is_in_torch_dispatch_mode() and (reasons := checks.reasons_fake()):
        return Call(reasons_stock=reasons)
    if state.family.attention_only:
        return attention_only.read(tower, state, args, kwargs)
    snapshot = state.last_snapshot
    if snapshot is None or not snapshot.current():
        snapshot = state.read_tower(tower)
    name = tower.config._attn_implementation
    reasons = checks.reasons_stock(tower, state.former_forward, name, snapshot, kwargs)
    if reasons:
        return Call(reasons_stock=reasons)
    parameters, weights = snapshot.weights()
    if snapshot.copy_proof is not None:
        reasons = checks.reasons_of_copy(tower, state.family, snapshot, weights, kwargs)
        if reasons:
            return Call(reasons_stock=reasons)
    requested = kwargs.get("output_hidden_states", getattr(tower.config, "output_hidden_states", False))
    hidden_states = bool(requested) and snapshot.proof.returns_hidden_states
    hooked: set[int] = set()
    grad = torch.is_grad_enabled()
    reasons_slow = checks.reasons_slow(tower, snapshot, weights, kwargs, requested, hooked, grad=grad)
    find_repeats = None
    if state.reuse is not None and not (hidden_states or hooked) and state.warming != threading.get_ident():
        find_repeats = partial(state.find_repeats, snapshot, parameters, weights)
    read_inputs = inputs.read(snapshot.expected, find_repeats, *args, **kwargs)
    why_not_read = "arguments are missing, or pixel values are in a shape or of a class of their own"
    return Call(
        inputs=read_inputs,
        reasons_stock=[] if read_inputs else [why_not_read],
        reasons_slow=reasons_slow,
        hidden_states=hidden_states,
        hooked_parts=frozenset(hooked),
        snapshot=snapshot,
        parameters=parameters,
        weights=weights,
    )


def run(tower: Tower, state: TowerState, plan: CallPlan, original: Original) -> Outcome:
    """Run a plan and return its outcome.

    Raises:
        Fault: A backend or a kernel failed.
        NotSharedError: The ranks could not share the call.
        OutOfMemoryError: Memory ran out.
    """
    if isinstance(plan, StockPlan):
        if state.sharing is not None:
            state.sharing.decline(plan.reasons)
        output = original(**plan.injected)
        unserved = attention_only.reasons_unserved(state) if plan.way is Way.ATTENTION else ()
        return Outcome(plan=plan, output=output, reasons=unserved)
    done: list[PassDone] = []
    with torch.no_grad() if plan.outputs_require_grad else nullcontext():
        if plan.inputs.repeats is None and plan.shared.assignment is None and len(plan.passes) == 1:  # for speed
            outputs = _encode_pass(state, plan, plan.passes[0], done, plan.inputs.pixels)
        else:
            outputs = _encode_call(tower, state, plan, done)
    if plan.outputs_require_grad:  # copies: stock's outputs are no leaves either, and may be written to
        outputs = [output.requires_grad_().clone() for output in outputs]
    states = len(plan.snapshot.parts.blocks) if plan.spec.hidden_states else 0
    output = state.family.output_of(plan.snapshot.output_class, outputs, states)
    has_class = plan.snapshot.copy_proof is None and plan.snapshot.output_class is not None
    if has_class and plan.inputs.options.get("return_dict", tower.config.return_dict) is False:
        output = output.to_tuple()
    return Outcome(plan=plan, output=output, passes=done)


def _encode_call(tower: Tower, state: TowerState, plan: FastPlan, done: list[PassDone]) -> list[Tensor]:
    """Return the outputs of all images of a call: encoded here or by other ranks, or reused."""
    inputs = plan.inputs
    assignment = plan.shared.assignment
    reuse = state.reuse
    pixels_TP = inputs.pixels
    if reuse is not None and inputs.repeats is not None:
        pixels_TP = reuse.select(inputs.repeats, inputs.grid, pixels_TP)
    if state.sharing is not None and assignment is not None:
        request = plan.spec.request
        share = state.sharing.start(assignment, plan.snapshot.facts, tower, pixels_TP, grad=request.grad)
        with share:
            outputs = _encode_passes(state, plan, done, share.pixels_TP)
        outputs = share.gather(outputs, request.dtype)
    else:
        outputs = _encode_passes(state, plan, done, pixels_TP)
    if reuse is not None and inputs.repeats is not None:
        outputs = reuse.collect(inputs.repeats, inputs.grid, outputs)
    return outputs


def _encode_passes(state: TowerState, plan: FastPlan, done: list[PassDone], pixels_TP: Tensor) -> list[Tensor]:
    """Return the joined outputs of all passes. Of several with gradients, each is encoded again in the backward."""
    if not plan.passes:
        return []
    if len(plan.passes) == 1:
        return _encode_pass(state, plan, plan.passes[0], done, pixels_TP)
    grad = plan.spec.request.grad
    joined = JoinedOutputs(len(pixels_TP), grad=grad)
    recomputed = RecomputedPasses(plan.snapshot.facts, plan.spec) if grad else None
    for one_pass in plan.passes:
        rows_TP = pixels_TP[one_pass.rows]
        if recomputed is not None:
            outputs = recomputed.run(partial(_encode_pass, state, plan, one_pass, done), rows_TP)
        else:
            outputs = _encode_pass(state, plan, one_pass, done, rows_TP, output_slices=joined.slices(one_pass.rows))
        joined.add(one_pass.rows, outputs)
        del outputs  # before the next pass begins
    return joined.complete()


def _encode_pass(
    state: TowerState,
    plan: FastPlan,
    one_pass: Pass,
    done: list[PassDone],
    pixels_or_rows: Tensor,
    *,
    output_slices: Sequence[Tensor] = (),
    is_embedded: bool = False,
) -> list[Tensor]:
    """Return the outputs of one pass, replayed from a CUDA graph or encoded, and append to `done` how it ran."""
    route = None
    why_eager = "such calls are never replayed"
    runner = plan.runner
    if runner is not None and not is_embedded:
        if plan.why_eager is None:
            dicts = plan.snapshot.parameter_dicts
            ran = runner.run(one_pass.grid, plan.spec, pixels_or_rows, plan.memory, plan.parameters, dicts)
        else:
            ran = runner.count_eager(plan.why_eager)
        if isinstance(ran, Replayed):
            done.append(PassDone(ran.route, ran.way))
            return ran.outputs
        why_eager = ran.why
        if state.settings.strict and not ran.allowed_under_strict:
            raise_if_any([f"not replayed from a CUDA graph: {why_eager}"])
        route = None if state.settings.strict else ran.failed  # it fails again, and is disabled
    if route is None:
        route = state.routes.get(one_pass.grid, plan.spec)
    if state.settings.strict:
        raise_if_any(route.unmet)
    blocks = plan.called or plan.snapshot.sharded_layers
    outputs = encode(
        route.ready(), pixels_or_rows, plan.checkpoints, blocks, output_slices=output_slices, is_embedded=is_embedded
    )
    done.append(PassDone(route, f"eager: {why_eager}"))
    return outputs


def _count(state: TowerState, outcome: Outcome) -> object:
    """Count a call that is over, and return its output. A call that failed is not counted."""
    plan = outcome.plan
    unmet = [why for route, _ in outcome.passes for why in route.unmet]
    state.fallbacks.update({*plan.reasons, *outcome.reasons, *unmet})
    if state.sharing is not None and plan.shared.result is not None:
        state.sharing.counts[plan.shared.result] += 1
    if plan.way is Way.FAST or (plan.way is Way.ATTENTION and not outcome.reasons):
        state.fast_calls += 1
    else:
        state.count_stock_call()
    if isinstance(plan, StockPlan):
        state.last_route = plan.route or state.last_route  # a call that goes STOCK has no route
        return outcome.output
    way = "no image was encoded: all features were known, or are those of other ranks"
    for route, way_of_pass in outcome.passes:
        state.last_route = route
        way = way if way.startswith("eager") else way_of_pass
    runner = state.training_runner if plan.spec.request.grad else state.inference_runner
    if runner is not None and (plan.runner is not None or runner.last_way is not None):
        runner.last_way = way
    if len(plan.passes) > 1:
        state.pass_limit.calls += 1
        state.pass_limit.passes += len(plan.passes)
    return outcome.output
