"""Proof, by running, that our operations compute what transformers' code computes.

The fast path computes what a tower, its blocks and its attention compute without calling them. Whether they still
compute that is not read from their code: a tiny tower of the same class, the twin, runs beside our operations.
Outputs and gradients are compared, over grids that tell layouts apart.

The twin sees nothing of the process around it. It lives on the CPU in fp64, which no matmul precision reduces, in a
thread of its own, which inherits no mode. Its parameters are drawn anew, wherever a patched torch has put them. Its
attention is plain torch, since the choice of SDP kernels is process-wide. Its modules skip global hooks.

Code that other libraries put in transformers' place may run on a GPU only, such as Liger's Triton function for the
rotation. Then the twin lives on the device of the tower, and the proof holds for that kind of device alone.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import transformers
from torch import Tensor, nn

from hf_vit_accel import machine, versions
from hf_vit_accel.backends import Request
from hf_vit_accel.config import Settings
from hf_vit_accel.engine.encoder import encode, with_positions
from hf_vit_accel.engine.route import ROUTE, Spec, make_route
from hf_vit_accel.families import Config, Family, Tower
from hf_vit_accel.layout import Grid, rows_of
from hf_vit_accel.machine import one_line
from hf_vit_accel.ops import Context, Ops, build
from hf_vit_accel.tower.code import Code
from hf_vit_accel.tower.exact import exact_products
from hf_vit_accel.tower.twin import ARGUMENTS, STOCK, Isolated, build_twin

NAMES = {"flashinfer_cudnn": "flashinfer_cudnn", "flash_vit_auto": "auto"}
"""Name that is registered with transformers -> the `attention` of `patch` that it stands for."""


def name_for(attention: str) -> str:
    """Return the registered name under which a tower with this `attention` runs: both reach the same function."""
    return attention if attention in NAMES else "flash_vit_auto"


GRIDS = ((1, 6, 10), (3, 4, 8), (1, 2, 18)), ((1, 8, 8),)
"""Images of several sizes and a clip, which share no layout and fill some windows only; and one image."""

_DTYPES = (torch.float64, torch.float32)
"""Of twins: no setting reduces the precision of products in fp64; the grouped products of experts take fp32 only."""

_OUTPUT_BOUND = 2e-5  # norms and rotations compute in fp32 whatever the dtype, in another order: 2e-6
_GRADIENT_BOUND = 2e-4
_AUTOCAST_BOUND = 5e-2  # bf16 rounds by 4e-3 in every layer


class Backoff:
    """Counts the calls until a proof that could not run is tried again: after 1, then 2, 4, 8, ... of them."""

    def __init__(self, calls: int = 1) -> None:
        self.calls = calls
        self._counted = 0

    def count_call(self) -> bool:
        """Count a call; return whether the next attempt is due."""
        self._counted += 1
        return self._counted >= self.calls


class Key(NamedTuple):
    """What a proof is for: a class, the fields of its config that the run depended on, and the kind of device.

    A proof on the CPU serves all devices.
    """

    kind: type
    fields: str
    device_type: str = "cpu"


@dataclass(frozen=True, kw_only=True, eq=False)
class Proof:
    """The result of running one class of towers beside our operations.

    Attributes:
        key: What it is for.
        why_not_fast: Why our operations may not take the place of its forward; None where that is proven.
        why_not_metadata: Why its forward may not be given metadata of ours; None where that is proven.
        why_not_autocast: Why our operations may not run under autocast; None where that is proven.
        taken: The keyword arguments of ours that its forward takes.
        is_bare: Whether it returns tensors without an output class.
        classes: The classes of all its modules.
        code: The functions that ran.
        why_not_hidden_states: Why our operations may not return hidden states; None where that is proven.
        returns_hidden_states: Whether its forward returns them at all. Older ones ignore the request.
        block_arguments: The names of the keyword arguments that it passes to blocks; None where ours are not equal.
        backoff: When to try again, where no numbers could be compared; None for a verdict, which stands.
        trusted: Classes of other code than torch's and transformers' that the run covers, for a copy.
    """

    key: Key
    why_not_fast: str | None
    why_not_metadata: str | None
    why_not_autocast: str | None = None
    taken: frozenset[str] = frozenset()
    is_bare: bool = False
    classes: frozenset[type]
    code: Code
    why_not_hidden_states: str | None = "output_hidden_states is requested"
    returns_hidden_states: bool = False
    block_arguments: frozenset[str] | None = None
    backoff: Backoff | None = None
    trusted: frozenset[type] = frozenset()


_PROOFS: dict[Key, Proof] = {}
_WARNED: set[str] = set()


def prove(tower: nn.Module, family: Family) -> Proof:
    """Return the proof for a tower's class and config, made once per process and code in 50 to 150 ms.

    The caller's random numbers stay as they are. Two threads may both make a proof: nothing is locked, so forks are
    safe.
    """
    kind = family.tower_class(tower)
    assert kind is not None
    config: Config = tower.config
    key = Key(kind, repr(sorted(_fields(config, family))))
    proof = _current_proof(key, torch.device("cpu"), config, family)
    device = next((parameter.device for parameter in tower.parameters()), torch.device("meta"))
    if proof.backoff is not None and device.type not in ("cpu", "meta"):
        proof = _current_proof(key._replace(device_type=device.type), device, config, family)
    return proof


def _current_proof(key: Key, device: torch.device, config: Config, family: Family) -> Proof:
    """Return the cached proof, or a new one if code has changed or another attempt is due."""
    proof = _PROOFS.get(key)
    if proof is None or not proof.code.unchanged():
        backoff = Backoff()
    elif proof.backoff is not None and proof.backoff.count_call():
        backoff = Backoff(2 * proof.backoff.calls)
    else:
        return proof
    proof = _PROOFS[key] = machine.run_isolated(_prove, key, device, config, family, backoff)
    return proof


def count_call(proof: Proof) -> bool:
    """Count a call; return whether a proof that could not run has been made since, or is to be tried again now."""
    return proof.backoff is not None and (_PROOFS.get(proof.key) is not proof or proof.backoff.count_call())


def warn_stock(kind: type, proof: Proof, reasons: list[str]) -> None:
    """Warn once per class and reason that towers of a class stay stock; `status` gives the same reason.

    Args:
        kind: The tower's class: transformers' own, or a subclass of it.
    """
    name = kind.__name__
    why = proof.why_not_metadata or proof.why_not_fast
    if why is None and reasons and kind is not proof.code.kind:
        text = f"{name} stays stock: {reasons[0]}. Only towers of transformers' own classes are accelerated."
    elif why is None:
        return
    elif proof.backoff is not None:
        if machine.has_cuda() and proof.key.device_type == "cpu" and proof.backoff.calls == 1:
            return  # patched on the CPU, with code of others that runs on a GPU only: the tower will move there
        text = f"{why}. {name} stays stock for now; later calls try again."
    else:
        text = f"transformers {transformers.__version__}: {why}. {name} stays stock; look for a newer hf_vit_accel."
    warn_once(text)


def warn_once(text: str) -> None:
    """Warn, unless the same was said before in this process."""
    if text not in _WARNED:
        _WARNED.add(text)
        warnings.warn(text, stacklevel=3)


def _fields(config: Config, family: Family) -> Iterator[tuple[str, str]]:
    """Yield the fields of a config that reach the twin and may choose between ways to compute."""
    for name, value in config.to_dict().items():
        if name not in family.tiny and name not in _UNREAD_FIELDS:
            yield name, repr(value)


_UNREAD_FIELDS = {"dtype", "model_type", "transformers_version", "name_or_path", "_name_or_path", "architectures"}
_UNREAD_FIELDS |= {"initializer_range", "id2label", "label2id", "problem_type"}
# The twin and every call set or read these themselves.
_UNREAD_FIELDS |= {"attn_implementation", "attention_dropout"}
_UNREAD_FIELDS |= {"return_dict", "output_hidden_states", "output_attentions"}


def _prove(key: Key, device: torch.device, config: Config, family: Family, backoff: Backoff) -> Proof:
    """Run a twin beside our operations; an error on the way is no verdict, and asks for another attempt."""
    kind = key.kind
    classes: frozenset[type] = frozenset()
    why = ""
    is_cuda = device.type == "cuda"
    # Threads share the precision of products: it is set only where products would be rounded.
    with torch.cuda.device(device) if is_cuda else nullcontext(), exact_products() if is_cuda else nullcontext():
        for dtype in _DTYPES:
            try:
                with torch.device(device), Isolated():
                    twin = build_twin(kind, config, family, device, dtype)
                    classes = _classes(twin)
                    return _prove_twin(key, twin, family, Code(kind, classes))
            except Exception as error:
                why = f"{kind.__name__} could not be run beside our operations: {one_line(error)}"
    code = Code(kind, classes)
    return Proof(key=key, why_not_fast=why, why_not_metadata=why, classes=classes, code=code, backoff=backoff)


def _classes(twin: Tower) -> frozenset[type]:
    return frozenset(type(module) for module in twin.modules())


def _prove_twin(key: Key, twin: Tower, family: Family, code: Code) -> Proof:
    """Return why our operations are not the twin's forward, and which metadata of ours its forward takes."""
    parameters = inspect.signature(type(twin).forward).parameters
    unknown = [name for name in family.arguments if name not in parameters]
    if unknown:
        why = f"{type(twin).__name__} takes other arguments than {family.name} is known for: no {unknown[0]}"
        return Proof(key=key, why_not_fast=why, why_not_metadata=why, classes=code.classes, code=code)
    try:
        family.parts(twin)
        family.geometry(twin)
    except (AttributeError, TypeError, ValueError) as error:
        why = f"{type(twin).__name__} is not built as {family.name} is known: {one_line(error)}"
        return Proof(key=key, why_not_fast=why, why_not_metadata=why, classes=code.classes, code=code)
    why_not_fast, expected = _compare(twin, family, GRIDS[0], gradients=True, hidden_states=True)
    why_not_states = why_not_fast
    if why_not_fast is not None:
        why_not_fast, expected = _compare(twin, family, GRIDS[0], gradients=True)
    spec = _spec(twin, family)
    taken, why_not_metadata = _injectable(twin, family, spec, expected, versions.popped_by(code.called_names()))
    block_arguments = _block_arguments(twin, family, spec.ops, expected.pixels_TP)
    why_not_fast = why_not_fast or _compare(twin, family, GRIDS[1])[0]
    why_not_autocast = why_not_fast or _compare_under_autocast(twin, family, hidden_states=why_not_states is None)
    if why_not_autocast is not None and why_not_fast is why_not_states is None:
        why_not_states = why_not_autocast
        why_not_autocast = _compare_under_autocast(twin, family)
    with torch.no_grad():  # in a residual stream this small, a norm's epsilon counts
        for name, parameter in twin.named_parameters():
            parameter.mul_(0.02 if parameter.dim() > 1 or name.endswith("bias") else 1.0)
    # In training mode, stock may do what our operations do not.
    return Proof(
        key=key,
        why_not_fast=why_not_fast or _compare(twin.train(), family, GRIDS[0])[0],
        why_not_metadata=why_not_metadata,
        why_not_autocast=why_not_autocast,
        taken=taken,
        is_bare=expected.is_bare,
        classes=code.classes,
        code=code,
        why_not_hidden_states=why_not_states and f"output_hidden_states is requested: {why_not_states}",
        returns_hidden_states=bool(expected.states),
        block_arguments=block_arguments,
    )


def _spec(twin: Tower, family: Family, dtype: torch.dtype | None = None, *, hidden_states: bool = False) -> Spec:
    """Return what decides the twin's routes: all operations as plain torch, attention by SDPA.

    Args:
        dtype: Of autocast; None without.
    """
    parts = family.parts(twin)
    weight = parts.projection.weight
    attention = parts.blocks[0].attention
    dtype = dtype or weight.dtype
    grad = torch.is_grad_enabled()
    context = Context(
        device=weight.device,
        dtype=dtype,
        weights_dtype=weight.dtype,
        reference=True,
        grad=grad,
        classes=_classes(twin),
    )
    request = Request(
        device=weight.device,
        dtype=dtype,
        heads=attention.num_heads,
        head_dim=attention.head_dim,
        scale=attention.scaling,
        grad=grad,
    )
    return Spec(
        geometry=family.geometry(twin),
        request=request,
        ops=build(parts, context),
        full_layers=tuple(parts.full(index) for index in range(len(parts.blocks))),
        settings=Settings(attention="sdpa"),
        hidden_states=hidden_states,
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class _Expected:
    """The inputs and the results of a stock twin.

    Attributes:
        grid: The images and videos.
        pixels_TP: The pixels.
        tensors: The outputs.
        is_bare: Whether they came without an output class.
        states: The hidden states; none where they were not requested, or an older forward ignores the request.
    """

    grid: Grid
    pixels_TP: Tensor
    tensors: list[Tensor]
    is_bare: bool = False
    states: Sequence[Tensor] = ()


def _stock(twin: Tower, family: Family, expected: _Expected, **kwargs: object) -> object:
    """Return the output of the stock twin."""
    pixels = family.pixels(twin, expected.pixels_TP)
    return twin(pixels, grid_thw=torch.tensor(expected.grid, device=pixels.device), **kwargs)


def _states(output: object) -> tuple[Tensor, ...]:
    """Return the hidden states of an output; none if it holds none."""
    return getattr(output, "hidden_states", None) or ()


def _run_ours(twin: Tower, family: Family, expected: _Expected, dtype: torch.dtype | None = None) -> object:
    """Return what our operations make of the pixels, in the class and with the hidden states of stock's output."""
    spec = _spec(twin, family, dtype, hidden_states=bool(expected.states))
    tensors = encode(make_route(expected.grid, spec).ready(), expected.pixels_TP)
    output_class = None if expected.is_bare else family.output_class(twin)
    return family.output_of(output_class, tensors, len(spec.full_layers) if spec.hidden_states else 0)


def _draw(twin: Tower, family: Family, grid: Grid) -> _Expected:
    """Return random pixels for a grid; frame by frame where the family takes no videos."""
    generator = torch.Generator("cpu").manual_seed(1)
    if not family.videos:
        grid = tuple((1, h, w) for t, h, w in grid for _ in range(t))
    weight = family.parts(twin).projection.weight
    shape = rows_of(grid), weight[0].numel()
    pixels_TP = torch.randn(shape, generator=generator, device="cpu", dtype=weight.dtype).to(weight.device)
    return _Expected(grid=grid, pixels_TP=pixels_TP, tensors=[])


def _compare(
    twin: Tower, family: Family, grid: Grid, *, gradients: bool = False, hidden_states: bool = False
) -> tuple[str | None, _Expected]:
    """Compare stock with the operations.

    Args:
        hidden_states: Whether they are requested of stock. Where it returns them, they are compared too.

    Returns:
        Why the operations differ from stock, or None; and the results of stock.
    """
    drawn = _draw(twin, family, grid)
    drawn.pixels_TP.requires_grad_()
    name = type(twin).__name__
    request = {"output_hidden_states": True} if hidden_states else {}
    with torch.set_grad_enabled(gradients):
        try:
            output = _stock(twin, family, drawn, **request)
        except TypeError as error:
            if not hidden_states:
                raise
            return f"{name} does not take the request ({one_line(error)})", drawn
        is_bare = isinstance(output, Tensor | tuple)
        expected = replace(drawn, tensors=family.tensors_of(output), is_bare=is_bare, states=_states(output))
        our_output = _run_ours(twin, family, expected)
    ours = [*family.tensors_of(our_output), *_states(our_output)]
    stock = [*expected.tensors, *expected.states]
    if why := _difference(ours, stock, _OUTPUT_BOUND):
        return f"{name} computes something else than our operations ({why})", expected
    if type(our_output) is not type(output):
        return f"{name} returns another class, {type(output).__name__}", expected
    if not gradients:
        return None, expected
    inputs = [drawn.pixels_TP, *(parameter for parameter in twin.parameters() if parameter.requires_grad)]
    generator = torch.Generator("cpu").manual_seed(2)
    incoming = [torch.randn(x.shape, generator=generator, device="cpu").to(x) for x in stock]
    our_gradients = torch.autograd.grad(ours, [*inputs, *_states(our_output)], incoming, allow_unused=True)
    stock_gradients = torch.autograd.grad(stock, [*inputs, *expected.states], incoming, allow_unused=True)
    if why := _difference(our_gradients, stock_gradients, _GRADIENT_BOUND):
        return f"{name} has other gradients than our operations ({why})", expected
    return None, expected


def _injectable(
    twin: Tower, family: Family, spec: Spec, expected: _Expected, popped: frozenset[str]
) -> tuple[frozenset[str], str | None]:
    """Return the keyword arguments that stock takes of us, and why it takes none that it should."""
    first: str | None = None
    for taken in (popped | {ROUTE}, frozenset({ROUTE}), frozenset[str]()):
        why = _compare_injected(twin, family, spec, expected, taken)
        if why is None:
            return taken, None
        first = first or why
    return frozenset(), first


def _compare_injected(
    twin: Tower, family: Family, spec: Spec, expected: _Expected, taken: frozenset[str]
) -> str | None:
    """Return why stock may not be given our metadata: it raises, or computes something else."""
    name = type(twin).__name__
    metadata = make_route(expected.grid, replace(spec, ops=None)).ready().injected(taken)
    twin.config._attn_implementation_internal = "flash_vit_auto"
    try:
        with torch.no_grad():
            output = _stock(twin, family, expected, **metadata)
    except Exception as error:
        return f"{name} does not take our metadata: {one_line(error)}"
    finally:
        twin.config._attn_implementation_internal = STOCK
    why = _difference(family.tensors_of(output), expected.tensors, _OUTPUT_BOUND)
    return why and f"{name} computes something else with our metadata ({why})"


@torch.no_grad()
def _block_arguments(twin: Tower, family: Family, ops: Ops | None, pixels_TP: Tensor) -> frozenset[str] | None:
    """Return the names of the keyword arguments that blocks got in the last run; None where ours are not equal."""
    assert ops is not None
    calls = [vars(block.module)[ARGUMENTS] for block in family.parts(twin).blocks[:2]]  # of both kinds
    route = calls[0][1].get(ROUTE)
    if route is None:
        return None
    names = frozenset(calls[0][1]) - {ROUTE}
    x_TE, *tables = with_positions(ops, route.tensors, ops.embed(pixels_TP))
    arguments = [{**route.block_arguments(layer, names), "position_embeddings": tuple(tables)} for layer in (0, 1)]
    try:
        stock = [{name: value for name, value in kwargs.items() if name != ROUTE} for _, kwargs in calls]
        ours = [(x_TE,), *arguments]
        torch.testing.assert_close(ours, [calls[0][0], *stock], rtol=_OUTPUT_BOUND, atol=_OUTPUT_BOUND)
    except (AssertionError, TypeError, ValueError):
        return None
    return names


def _compare_under_autocast(twin: Tower, family: Family, *, hidden_states: bool = False) -> str | None:
    """Return why our operations do not give what the twin gives under autocast, in dtype or coarsely in value.

    The twin's own residual stream may stay fp32, which no comparison in one dtype shows.
    """
    twin.float()
    expected = _draw(twin, family, GRIDS[0])
    request = {"output_hidden_states": True} if hidden_states else {}
    with torch.no_grad(), torch.autocast(expected.pixels_TP.device.type, torch.bfloat16):
        output = _stock(twin, family, expected, **request)
        expected = replace(expected, is_bare=isinstance(output, Tensor | tuple), states=_states(output))
        our_output = _run_ours(twin, family, expected, torch.bfloat16)
    ours = [*family.tensors_of(our_output), *_states(our_output)]
    tensors = [*family.tensors_of(output), *_states(output)]
    dtypes = [[str(x.dtype).removeprefix("torch.") for x in results] for results in (ours, tensors)]
    name = type(twin).__name__
    if dtypes[0] != dtypes[1]:
        return f"{name} returns {dtypes[1]} under autocast, and our operations {dtypes[0]}"
    why = _difference(ours, tensors, _AUTOCAST_BOUND)
    return why and f"{name} computes something else under autocast than our operations ({why})"


def _difference(ours: Sequence[Tensor | None], expected: Sequence[Tensor | None], bound: float) -> str | None:
    """Say how far our tensors are from the expected ones, where that is more than the bound; None if it is not."""
    shapes = [[None if x is None else tuple(x.shape) for x in tensors] for tensors in (ours, expected)]
    if shapes[0] != shapes[1]:
        return f"shapes {shapes[0]} instead of {shapes[1]}"
    pairs = [(o.detach(), e.detach()) for o, e in zip(ours, expected, strict=True) if o is not None and e is not None]
    total = torch.stack([e.norm() for _, e in pairs]).norm() if pairs else torch.tensor(0.0)
    # What should be zero (a gradient of a key's bias) is rounding: it is measured by all the others.
    errors = [float((o - e).norm() / (e.norm() + 1e-3 * total)) for o, e in pairs]
    worst = max((error if error == error else float("inf") for error in errors), default=0.0)
    return None if worst <= bound else f"relative error {worst:.1e}, at most {bound:.0e} is rounding"
