"""The decode steps of one model: which of them stay, why they were captured, what `status` reports."""

from __future__ import annotations

import sys
from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from threading import Lock
from weakref import WeakKeyDictionary

import torch
from torch import nn

from hf_vit_accel.decoding.room import Size
from hf_vit_accel.decoding.step import DecodeStep
from hf_vit_accel.decoding.text_models import TextReading, UnservedError
from hf_vit_accel.graphs.memory import drop_when_memory_runs_out
from hf_vit_accel.graphs.recorder import CudaRecorder, free_bytes

FEWEST = 8
"""The fewest tokens to come for which a new step is captured. A capture takes some 0.1 s."""
_PART_FOR_A_ROOM = 0.65
"""Of the free memory, for keys and values. The rest is for forwards, and may lie in pieces."""


def can_capture(device: torch.device) -> bool:
    """Return whether a device replays graphs. A CPU runs every step."""
    return device.type == "cuda"


def spare_bytes(device: torch.device) -> int:
    """Return the bytes of a device that torch can still allocate; some may lie in pieces."""
    return free_bytes(device) + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def _bytes_of_forwards(device: torch.device) -> int:
    """Return the bytes that are left for forwards."""
    return int(torch.cuda.get_device_properties(device).total_memory) // 16


class DecodeSteps:
    """The steps of one model that were proven, those used last at the end.

    For `status`: calls by steps, and reasons of calls by stock, of new steps and of features that were not taken.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self.decoded = 0
        self.prompts = 0  # calls of one new token
        self.groups = 0  # forwards of prompts that were divided
        self.rows_left = 0  # rows that left their step when they had ended
        self.rows_waited = 0  # rows that began in the place of one that had ended
        self.padded_reasons: dict[
            tuple[Hashable, Hashable], str
        ] = {}  # why stock's text model runs a prompt; empty where ours does
        self.stock_reasons: Counter[str] = Counter()
        self.divided: Counter[str] = Counter()  # why calls ran in parts
        self.captures: Counter[str] = Counter()
        self.encoded_again: Counter[str] = Counter()
        self._last_captured: TextReading | None = None
        self._given_up: str | None = None  # why earlier steps went
        self.refusals: dict[Hashable, str] = {}
        self.kept: OrderedDict[Hashable, DecodeStep] = OrderedDict()
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
                if self.kept:
                    drop_when_memory_runs_out(self)
                self._lock.release()

    @property
    def device(self) -> torch.device | None:
        """The device of the steps; None while there are none."""
        return next((step.device for step in self.kept.values()), None)

    def give_up(self, why: str) -> bool:
        """Drop all steps, but for their counts: a program needs their memory. Return False while a call decodes."""
        try:
            with self.locked_for_call(max_graphs=0, max_bytes=0):
                self._given_up = why
        except UnservedError:
            return False
        return True

    def find(self, key_of_model: Hashable, key_of_inputs: Hashable, size: Size) -> DecodeStep | None:
        """Return the proven step with the fewest slots of at least so many, and of at most twice as many."""
        fitting = sorted(step.room.size for step in self.kept.values() if step.room.size.holds(size))
        steps = (self.kept.get((key_of_model, key_of_inputs, of_step)) for of_step in fitting)
        return next(filter(None, steps), None)

    def bytes_for_room(self, device: torch.device) -> int:
        """Return the bytes that a room may take once all steps are dropped. On a CPU there is no bound.

        The rest is for forwards, and for what a program prepares meanwhile.
        """
        if device.type != "cuda":
            return sys.maxsize
        return int(_PART_FOR_A_ROOM * (spare_bytes(device) + self._nbytes - _bytes_of_forwards(device)))

    def make_space(self, nbytes: int, device: torch.device) -> None:
        """Drop the steps used least recently as long as memory is short of so many bytes, and of some for forwards."""
        if device.type != "cuda":
            return
        nbytes += _bytes_of_forwards(device)
        while self.kept and spare_bytes(device) < nbytes:
            self._trim(len(self.kept) - 1, sys.maxsize)

    def _trim(self, max_graphs: int, max_bytes: int) -> None:
        while len(self.kept) > max_graphs or self._nbytes > max_bytes:
            if self._recorder is not None:
                self._recorder.settle()
            self.kept.popitem(last=False)
        if not self.kept:
            self._recorder = None  # a pool of memory cannot be used again once its graphs are gone

    @property
    def _nbytes(self) -> int:
        return sum(step.nbytes for step in self.kept.values())

    def capture(self, step: DecodeStep) -> None:
        """Capture a new step where the device can. Its buffers hold nothing of a call yet."""
        last = self._last_captured
        if last is None:
            why_new = "first call"
        elif last.weights != step.reading.weights:
            why_new = "other weights"
            self._trim(0, 0)  # no earlier step is of use any more
            self.refusals.clear()
        else:
            names = sorted({name for name, _ in last.state.items() ^ step.reading.state.items()})
            why_new = f"{names[0]} changed" if names else self._given_up or "another batch or length"
        if can_capture(step.device):
            if self._recorder is None:
                self._recorder = CudaRecorder(step.device)
            [step.replay], nbytes = self._recorder.record(step.run)
            step.graph_bytes = nbytes
        self.captures[why_new] += 1
        self._last_captured = step.reading
        self._given_up = None

    def __str__(self) -> str:
        calls = f"{self.decoded} call{'s' * (self.decoded != 1)}"
        text = f"{calls} on a static cache ({len(self.kept)} held, {self._nbytes / 2**20:.0f} MiB)"
        if self.prompts:
            text += f", {self.prompts} of one new token"
        if self.groups:
            text += f", prompts in {self.groups} groups"
            padded = dict.fromkeys(reason for reason in self.padded_reasons.values() if reason)
            text += f" (padded: {'; '.join(padded)})" if padded else ""
        if self.rows_waited:
            text += f", {self.rows_waited} rows waited for a place"
        if self.rows_left:
            text += f", {self.rows_left} rows left early"
        counted = {
            "captured": self.captures,
            "by stock": self.stock_reasons,
            "in parts": self.divided,
            "encoded again": self.encoded_again,
        }
        for label, reasons in counted.items():
            counts = "; ".join(f"{count} x {why}" for why, count in reasons.items())
            text += f", {reasons.total()} {label} ({counts})" if reasons else ""
        return text


_STEPS: WeakKeyDictionary[nn.Module, DecodeSteps] = WeakKeyDictionary()


def steps_of(model: nn.Module) -> DecodeSteps:
    """Return the steps of a model. Copies and pickles of the model begin without any."""
    return _STEPS.setdefault(model, DecodeSteps())


def _steps_in(model: nn.Module) -> list[DecodeSteps]:
    return [_STEPS[module] for module in model.modules() if module in _STEPS]


def free_steps(model: nn.Module) -> None:
    """Free the memory of all steps of a model and its parts."""
    for steps in _steps_in(model):
        steps.give_up("earlier steps were freed")


def decoding_status(model: nn.Module) -> str | None:
    """Describe what `graphed_decoding` did for a model; None before its first call."""
    return "; ".join(map(str, _steps_in(model))) or None
