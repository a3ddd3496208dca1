"""The decode steps of one model: which of them stay, why they were captured, what `status` reports."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from threading import Lock
from weakref import WeakKeyDictionary

import torch
from torch import nn

from hf_vit_accel.decoding.step import DecodeStep
from hf_vit_accel.decoding.text_models import Model, Reading, UnservedError, read_model
from hf_vit_accel.graphs.recorder import CudaRecorder


def can_capture(device: torch.device) -> bool:
    """Return whether a device replays graphs. A CPU runs every step."""
    return device.type == "cuda"


class DecodeSteps:
    """The steps of one model. For `status`: calls by steps, and reasons of calls by stock and of new steps."""

    def __init__(self) -> None:
        self._lock = Lock()
        self.decoded = 0
        self.stock_reasons: Counter[str] = Counter()
        self.captures: Counter[str] = Counter()
        self._last_captured: Reading | None = None
        self.refusals: dict[Hashable, str] = {}
        self._steps: OrderedDict[Hashable, DecodeStep] = OrderedDict()
        self._recorder: CudaRecorder | None = None

    @contextmanager
    def locked_for_call(self, max_graphs: int, max_bytes: int) -> Iterator[None]:
        """Lock the steps for one call, and drop surplus steps afterwards."""
        if not self._lock.acquire(blocking=False):
            raise UnservedError("another call decodes")
        try:
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

    def read(self, model: Model) -> Reading:
        """Read the model; `UnservedError` if it has no steps. Drop those that were captured with other weights."""
        reading = read_model(model)
        if self._last_captured is not None and self._last_captured.weights != reading.weights:
            self._trim(0, 0)
            self._recorder = None
            self.refusals.clear()
        if reading.key in self.refusals:
            raise UnservedError(self.refusals[reading.key])
        return reading

    def _trim(self, max_graphs: int, max_bytes: int) -> None:
        while len(self._steps) > max_graphs or self._nbytes > max_bytes:
            if self._recorder is not None:
                self._recorder.settle()
            self._steps.popitem(last=False)

    def free(self) -> bool:
        """Free all steps, and return whether there were any. A call that decodes keeps its own. Counts stay."""
        try:
            with self.locked_for_call(max_graphs=0, max_bytes=0):
                return bool(self._steps)
        except UnservedError:
            return False

    @property
    def _nbytes(self) -> int:
        return sum(step.nbytes for step in self._steps.values())

    def find(self, key: Hashable) -> DecodeStep | None:
        """Return a step that was kept, which becomes the one used last."""
        if key in self._steps:
            self._steps.move_to_end(key)
        return self._steps.get(key)

    def keep(self, step: DecodeStep) -> None:
        """Keep a step that was proven."""
        self._steps[step.key] = step

    def capture(self, step: DecodeStep) -> None:
        """Capture a new step where the device can. Its buffers hold nothing of a call yet."""
        if can_capture(step.device):
            if self._recorder is None:
                self._recorder = CudaRecorder(step.device)
            [step.replay], nbytes = self._recorder.record(step.run)
            step.nbytes += nbytes
        self.captures[self._why_new(step.reading)] += 1
        self._last_captured = step.reading

    def _why_new(self, reading: Reading) -> str:
        if self._last_captured is None:
            return "first call"
        if self._last_captured.weights != reading.weights:
            return "other weights"
        names = sorted({name for name, _ in self._last_captured.state.items() ^ reading.state.items()})
        return f"{names[0]} changed" if names else "another batch or length"

    def __str__(self) -> str:
        calls = f"{self.decoded} call{'s' * (self.decoded != 1)}"
        text = f"{calls} on a static cache ({len(self._steps)} held, {self._nbytes / 2**20:.0f} MiB)"
        for label, reasons in (("captured", self.captures), ("by stock", self.stock_reasons)):
            counts = "; ".join(f"{count} x {why}" for why, count in reasons.items())
            text += f", {reasons.total()} {label} ({counts})" if reasons else ""
        return text


_STEPS: WeakKeyDictionary[nn.Module, DecodeSteps] = WeakKeyDictionary()


def steps_of(model: nn.Module) -> DecodeSteps:
    """Return the steps of a model. Copies and pickles of the model begin without any."""
    return _STEPS.setdefault(model, DecodeSteps())


def free_steps(model: nn.Module) -> bool:
    """Free the memory of the steps of a model and its parts, and return whether there were any."""
    return sum(_STEPS[module].free() for module in model.modules() if module in _STEPS) > 0


def decoding_status(model: nn.Module) -> str | None:
    """Describe what `graphed_decoding` did for a model; None before its first call."""
    texts = [str(_STEPS[module]) for module in model.modules() if module in _STEPS]
    return "; ".join(texts) or None
