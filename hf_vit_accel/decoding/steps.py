"""The decode steps of one model: when they are stale, how many stay, which are proven, what `status` reports."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterator
from contextlib import contextmanager, suppress
from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn

from hf_vit_accel import machine
from hf_vit_accel.decoding.step import DecodeStep, UnservedError
from hf_vit_accel.families import family_of
from hf_vit_accel.graphs.automatic import capture_of_ours
from hf_vit_accel.graphs.recorder import CudaRecorder
from hf_vit_accel.model.around import is_own_hook
from hf_vit_accel.tower.modules import is_inert

_PLAIN = {bool, int, float, str, type(None)}
_IGNORED = {*vars(nn.Module()), "rope_deltas"} - {"training"}
"""Attributes that every module has, and one that every call changes but no decode step reads."""


def can_capture(device: torch.device) -> bool:
    """Return whether a device replays graphs. A CPU runs every step."""
    return device.type == "cuda"


class _SameObject(ref[object]):
    """A weak reference that equals another only while both refer to the very same object.

    The address alone would not do: Python gives the memory of a freed object to the next one of its size.
    """

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _SameObject) and self() is not None and self() is other()

    def __hash__(self) -> int:
        return hash(_SameObject)


def _fingerprint(value: Any) -> Hashable:
    """Return a value that changes with everything of an attribute that a captured step may have read."""
    kind = type(value)  # `isinstance` would ask configs for their `__class__`, which is slow
    if kind in _PLAIN or issubclass(kind, int | float | str):
        return value
    if issubclass(kind, Tensor):
        return value.data_ptr(), value.dtype, value.shape, value.stride()
    if issubclass(kind, dict):
        return tuple([(_fingerprint(key), _fingerprint(item)) for key, item in value.items()])
    if issubclass(kind, list | tuple | set):
        return tuple([_fingerprint(item) for item in value])
    with suppress(TypeError):  # builtins, and others that nothing refers to weakly
        return _SameObject(value)
    return kind, id(value)


def _modules_beside_towers(model: nn.Module) -> Iterator[nn.Module]:
    """Yield every module of a model once, without towers and their modules."""
    seen: set[nn.Module] = set()
    waiting = [model]
    while waiting:
        module = waiting.pop()
        if module not in seen and family_of(module) is None:
            seen.add(module)
            yield module
            waiting += [child for child in module._modules.values() if child is not None]


def _reason_of_module(module: nn.Module) -> str | None:
    """Return why a step that is replayed would not do what this module does, or None."""
    attributes = vars(module)
    for hooks in (module._forward_hooks, module._forward_pre_hooks):
        # Hooks of transformers stay after calls that asked for hidden states, and after checkpoints are disabled.
        # Ours only act on pictures.
        if not all(is_own_hook(hook) or is_inert(hook) for hook in hooks.values()):
            return "a forward hook"
    if "_hf_hook" in attributes:
        return "hooks of accelerate"
    if module._compiled_call_impl is not None or hasattr(attributes.get("forward"), "_torchdynamo_orig_callable"):
        return "torch.compile"
    for tensors in (module._parameters, module._buffers):
        for tensor in tensors.values():
            if tensor is not None and type(tensor) not in (nn.Parameter, Tensor, nn.Buffer):
                return f"weights of class {type(tensor).__name__}"
    return None


def read_model(model: nn.Module) -> Hashable:
    """Return the identity of a model without its towers: it is equal while captured steps stay valid.

    Raises:
        UnservedError: If a step of the model must run module by module.
    """
    if torch.nn.modules.module._has_any_global_hook():
        raise UnservedError("a global hook on all modules")
    autocast = [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")]
    facts: list[Hashable] = [machine.numerics(), *autocast]
    for module in _modules_beside_towers(model):
        reason = _reason_of_module(module)
        if reason is not None:
            name = next(name for name, other in model.named_modules() if other is module)
            raise UnservedError(f"{reason} on {name or 'the model'}")
        attributes = {key: value for key, value in vars(module).items() if key not in _IGNORED}
        children = tuple([id(child) for child in module._modules.values()])
        facts += [ref(module), children, _fingerprint(attributes)]
        for tensors in (module._parameters, module._buffers):
            if tensors:
                facts.append(_fingerprint(tensors))
    return tuple(facts)


class DecodeSteps:
    """The steps of one model, and the counts for `status`.

    Attributes:
        decoded: Calls that static steps decoded.
        stock_reasons: Reason -> calls that stock decoded, wholly or from some token on.
        refusal: Why no static step computes what this model computes; None as long as steps do.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self.decoded = 0
        self.stock_reasons: Counter[str] = Counter()
        self.refusal: str | None = None
        self._identity: Hashable = None
        self._steps: OrderedDict[Hashable, DecodeStep] = OrderedDict()
        self._recorder: CudaRecorder | None = None

    @contextmanager
    def locked_for_call(self, model: nn.Module, max_graphs: int, max_bytes: int) -> Iterator[None]:
        """Lock the steps for one call. Drop all of them before it, if the model changed, and surplus ones afterwards.

        Raises:
            UnservedError: If the model has no static steps, or another call decodes.
        """
        identity = read_model(model)
        if not self._lock.acquire(blocking=False):
            raise UnservedError("another call decodes")
        try:
            if identity != self._identity:
                self._trim(0, 0)
                self.refusal = None
                self._recorder = None
                self._identity = identity
            if self.refusal is not None:
                raise UnservedError(self.refusal)
            if self._recorder is not None:
                self._recorder.wait()
            yield
        finally:
            try:
                if self._recorder is not None:
                    self._recorder.done()
                self._trim(max_graphs, max_bytes)
            finally:
                self._lock.release()

    def _trim(self, max_graphs: int, max_bytes: int) -> None:
        """Drop the least recently used steps beyond the bounds."""
        while len(self._steps) > max_graphs or self._nbytes > max_bytes:
            if self._recorder is not None:
                self._recorder.settle()
            self._steps.popitem(last=False)

    def free(self) -> bool:
        """Free all steps, and return whether there were any. Counts stay.

        A call that decodes keeps its steps: it may be the caller's own.
        """
        if not self._lock.acquire(blocking=False):
            return False
        try:
            has_steps = bool(self._steps)
            self._trim(0, 0)
            return has_steps
        finally:
            self._lock.release()

    @property
    def _nbytes(self) -> int:
        return sum(step.nbytes for step in self._steps.values())

    def find(self, key: Hashable) -> DecodeStep | None:
        """Return the step of a key, if there is one."""
        return self._steps.get(key)

    def capture(self, step: DecodeStep, model: nn.Module) -> None:
        """Capture a new step where the device can. Its buffers hold nothing of a call yet."""
        if can_capture(step.device):
            if self._recorder is None:
                self._recorder = CudaRecorder(step.device)
            why = self._recorder.against()
            if why is not None:
                raise UnservedError(why)
            with capture_of_ours():
                [step.replay], nbytes = self._recorder.record(lambda: step.run(model))
            step.nbytes += nbytes

    def keep(self, key: Hashable, step: DecodeStep) -> None:
        """Keep a step as the one that was used last."""
        self._steps[key] = step
        self._steps.move_to_end(key)

    def __str__(self) -> str:
        calls = f"{self.decoded} call{'s' * (self.decoded != 1)}"
        text = f"{calls} on a static cache ({len(self._steps)} held, {self._nbytes / 2**20:.0f} MiB)"
        if self.stock_reasons:
            reasons = "; ".join(f"{count} x {why}" for why, count in self.stock_reasons.items())
            text += f", {self.stock_reasons.total()} by stock ({reasons})"
        return text


_STEPS: WeakKeyDictionary[nn.Module, DecodeSteps] = WeakKeyDictionary()


def steps_of(model: nn.Module) -> DecodeSteps:
    """Return the steps of a model. Copies and pickles of the model begin without any."""
    return _STEPS.setdefault(model, DecodeSteps())


def free_steps(model: nn.Module) -> bool:
    """Free the memory of the steps of a model and its parts, and return whether there were any.

    The next call captures anew.
    """
    had_steps = [_STEPS[module].free() for module in model.modules() if module in _STEPS]
    return any(had_steps)


def decoding_status(model: nn.Module) -> str | None:
    """Describe what `graphed_decoding` did for a model; None before its first call."""
    texts = [str(_STEPS[module]) for module in model.modules() if module in _STEPS]
    return "; ".join(texts) or None
