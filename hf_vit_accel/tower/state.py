"""The state of a patched tower between calls: settings, counts, routes, graphs, and the reading of its modules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from hf_vit_accel.backends import Request, asked_for
from hf_vit_accel.backends.sdpa import Sdpa
from hf_vit_accel.config import GraphConfig, Settings
from hf_vit_accel.engine.call import Attempt, Encode, FastPlan, WeightMemory
from hf_vit_accel.engine.route import Route, Routes, Spec
from hf_vit_accel.families import Family, Tower
from hf_vit_accel.graphs import recorder
from hf_vit_accel.graphs.runner import Runner
from hf_vit_accel.graphs.training import TrainingRunner
from hf_vit_accel.layout import Geometry
from hf_vit_accel.machine import KERNELS, Fault, raise_if_any
from hf_vit_accel.ops import PARTS, Context, Ops, build, why_not_triton
from hf_vit_accel.ops.fp8.scales import Scales
from hf_vit_accel.ops.window_attention import LONGEST
from hf_vit_accel.options.data_parallel import Sharing
from hf_vit_accel.options.passes import InPasses, OnePass
from hf_vit_accel.options.reuse import Reuse
from hf_vit_accel.tower import fsdp, proof
from hf_vit_accel.tower.processors import BYTES_UNKNOWN, References
from hf_vit_accel.tower.snapshot import Snapshot

STATE = "_hf_vit_accel"
HOOKS = "_hf_vit_accel_hooks"
_EARLIER_READINGS = 7
"""Readings that are kept beside the current one: adapters and switches are set and set back at every step."""


class SpecKey(NamedTuple):
    """The key of a kind of calls: decides their spec, with the snapshot and the settings of the tower.

    `fast` is false for calls that go `stock_way.Way.METADATA`. `hooked_parts` are mergers and patch embeddings alone.
    """

    device: torch.device
    autocast: torch.dtype | None
    fast: bool
    grad: bool
    weights_dtype: torch.dtype
    weights_key: Hashable
    kept: Scales | None
    hooked_parts: frozenset[int] = frozenset()


class TowerState:
    """Runtime state of a patched tower. Copies and pickles keep the settings only.

    Attributes:
        former_name: The attention name that the config had; None if it was loaded with one of ours.
        former_forward: The forward of others that the instance had, if it does not call the class's; None otherwise.
        fast_calls: Calls that ran our operations, or attended through our backends alone.
        stock_calls: All others.
        metadata_calls: Those of them whose stock forward got our metadata.
        last_route: Of the last call; None if stock ran it on what it was called with.
        why_stock: The reasons of the last call, if stock ran it; empty for a fast one.
        warming: The thread that runs `warmup`.
        popped: The metadata that a tower pops whose attention alone is ours; None before its first call.
        faults: Backends and kernels that failed, with the reason. They are unused until `patch` is called again.
        earlier: Other readings of the same modules, the last one first. The tower may be as they were again.
        read_by_status: The reading that `status` made before the first call, if `patch` made none of the tower as it
            is. No call takes it.
        rebuilds: How often the tower was read, and built, again because it changed.
        asked_for: The backend that an option asks for, beside `attention`; None for none.
        scales: What that backend keeps for the tower; None before a call that may take it.
        processors: Those that leave rescaling and normalising to the tower.
    """

    def __init__(self, family: Family, settings: Settings, *, former_name: str | None) -> None:
        self.family = family
        self.settings = settings
        self.former_name = former_name
        self.former_forward: Callable[..., object] | None = None

        self.fast_calls = 0
        self.stock_calls = 0
        self.metadata_calls = 0
        self.fallbacks: Counter[str] = Counter()
        self.last_route: Route | None = None
        self.why_stock: tuple[str, ...] = ()
        self.warming: int | None = None
        self.popped: frozenset[str] | None = None
        self.faults: dict[str, str] = {}
        self.rebuilds = 0
        self.rebuild_reason: str | None = None
        self.processors: References = ()
        self.has_checked_bytes = False

        self.routes = Routes()
        self.inference_runner: Runner | None = None
        self.training_runner: TrainingRunner | None = None
        self.passes: InPasses | None = None
        self.sharing: Sharing | None = None
        self.reuse: Reuse | None = None
        self.read_grid: Callable[..., tuple[list[list[int]], object]] | None = None
        self.on_stock: Callable[[FastPlan, Attempt, Sequence[str]], None] | None = None
        self.encode = self._compose()

        self.last_snapshot: Snapshot | None = None
        self.earlier: tuple[Snapshot, ...] = ()
        self.read_by_status: Snapshot | None = None
        self.asked_for = asked_for(settings)
        self.scales: Scales | None = None
        self._attention_spec: Spec | None = None

    def _compose(self) -> Encode:
        """Return the function that encodes the images of a call: one pass, and the options around it."""
        settings = self.settings
        graphs = settings.graphs
        if self.family.attention_only:
            graphs = None
        elif graphs == "auto" and settings.score_mod is None:  # it may capture what graphs would not read again
            self.inference_runner = Runner(None, self.routes)
            self.training_runner = TrainingRunner(None, self.routes)
        elif isinstance(graphs, GraphConfig):
            self.inference_runner = Runner(graphs, self.routes)
            self.training_runner = TrainingRunner(graphs, self.routes) if graphs.max_training_bytes else None
        one_pass = OnePass(self.routes, self.inference_runner, self.training_runner)
        self.drop_graphs = one_pass.drop_graphs
        encode: Encode = one_pass
        if self.family.attention_only:
            return encode
        if settings.max_rows is not None:
            self.passes = encode = InPasses(encode, settings.max_rows, one_pass.drop_graphs)
        if settings.ranks is not None:
            self.sharing = encode = Sharing(encode, settings.ranks)
            self.on_stock = self.sharing.decline
        if settings.reuse is not None:
            self.reuse = encode = Reuse(encode, settings.reuse, has_score_mod=settings.score_mod is not None)
            self.read_grid = self.reuse.read_grid
        return encode

    def __getstate__(self) -> dict[str, object]:
        names = ("family", "settings", "former_name", "former_forward")
        return {name: getattr(self, name) for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["family"], state["settings"], former_name=state["former_name"])  # type: ignore[misc]
        self.former_forward = state["former_forward"]

    def pixel_values(self, tower: Tower, pixels: Tensor) -> Tensor:
        """Return the pixel values of a call whose processor may leave them to the tower."""
        normalisation = self.settings.normalisation
        if normalisation is None:
            raise ValueError(BYTES_UNKNOWN)
        can_look = not (self.has_checked_bytes or pixels.dtype == torch.uint8 or is_in_torch_dispatch_mode())
        lowest, highest = torch.stack(pixels.aminmax()).tolist() if can_look and pixels.numel() else (0, 0)
        if lowest < 0:
            raise ValueError(
                "expected the bytes of pictures, since patch was given their processor, got negative pixel values; "
                "drop do_rescale and do_normalize from the processor's call, or patch without `processor`"
            )
        self.has_checked_bytes = self.has_checked_bytes or highest > 0  # `warmup` and `every_rank` send zeros
        return normalisation(pixels, tower.dtype)

    def count_stock_call(self) -> None:
        """Count a call of the original forward. It is the last call, or step, for the reports of graphs, too."""
        self.stock_calls += 1
        training_runner = self.training_runner if torch.is_grad_enabled() else None
        for runner in (self.inference_runner, training_runner):
            if runner is not None and runner.last_way is not None:
                runner.last_way = "the original forward ran"

    def snapshot(self, tower: nn.Module) -> Snapshot:
        """Return the tower as it is now."""
        snapshot = self.last_snapshot
        return snapshot if snapshot is not None and snapshot.watch.unchanged() else self.read_tower(tower)

    def read_tower(self, tower: nn.Module) -> Snapshot:
        """Return the reading of a tower that changed: an earlier one that is current again, or a new one.

        What was made of modules that are no longer there is dropped.
        """
        former = self.last_snapshot
        readings = self.earlier if former is None else (former, *self.earlier)
        snapshot = next((reading for reading in self.earlier if reading.watch.unchanged()), None)
        if snapshot is None:
            reason = None if former is None else former.watch.what_changed()
            if reason is not None:
                self.rebuilds += 1
                self.rebuild_reason = reason
            if not all(reading.can_return() for reading in readings):
                self.drop_caches()
                readings = ()
            snapshot = Snapshot(tower, self.family)
            for reason in snapshot.reasons_metadata:
                if reason != snapshot.proof.why_not_fast:  # of which `warn_stock` tells more
                    proof.warn_once(f"{fsdp.class_of(tower).__name__} stays stock: {reason}.")
            if not snapshot.is_copy:
                proof.warn_stock(fsdp.class_of(tower), snapshot.proof, snapshot.reasons_stock)
            elif snapshot.reasons_stock and state_of(tower) is self:  # `patch` raises instead
                proof.warn_once(f"{type(tower).__name__} stays stock: {snapshot.reasons_stock[0]}")
        if self.reuse is not None:
            self.reuse.drop_features()
        self.earlier = tuple(reading for reading in readings if reading is not snapshot)[:_EARLIER_READINGS]
        self.last_snapshot = snapshot
        self.read_by_status = None
        return snapshot

    def _build(self, snapshot: Snapshot, weights: WeightMemory, request: Request, hooked_parts: frozenset[int]) -> Ops:
        """Build the operations for weights and rows of these dtypes on this device."""
        why_plain = {} if self.settings.fuse else dict.fromkeys(PARTS, "fuse=False")
        side = (snapshot.geometry.window or 0) * snapshot.geometry.merge
        if side and request.score_mod is not None:
            why_plain["window_attention"] = "it applies no score_mod"
        elif side**2 > LONGEST:
            why_plain["window_attention"] = f"windows have more than {LONGEST} patches"
        context = Context(
            device=request.device,
            dtype=request.dtype,
            weights_dtype=next(iter(weights.dtypes - {request.dtype}), request.dtype),
            no_kernels=self.faults.get(KERNELS) or why_not_triton(request.device, request.dtype),
            classes=snapshot.proof.code.classes,
            trusted=snapshot.trusted,
            watch=snapshot.watch,
            grad=request.grad,
            hooked_parts=hooked_parts,
        )
        ops = build(snapshot.parts, context, why_plain)
        snapshot.watch.remember()
        self.routes.allow(weights.nbytes)
        return ops

    def kept(self, snapshot: Snapshot, device: torch.device) -> Scales:
        """Return what the backend that an option asks for keeps for the tower on a device."""
        assert self.asked_for is not None
        layers = len(snapshot.parts.blocks)
        kept = self.scales
        if kept is not None and (kept.device, kept.layers, kept.heads) == (device, layers, snapshot.heads):
            return kept
        if kept is not None:
            if self.inference_runner is not None:
                self.inference_runner.drop_graphs()  # its graphs write to the memory that goes
            kept.wait_for_writes()
        self.scales = self.asked_for.keep(self.settings, device, layers, snapshot.heads)
        return self.scales

    def request(self, snapshot: Snapshot, weights: WeightMemory, key: SpecKey) -> Request:
        """Return what the layers of a kind of calls ask of a backend."""
        # Stock's blocks may attend in another dtype than that of the weights.
        dtype = key.autocast or (weights.dtype if key.fast or snapshot.uses_fsdp else None)
        request = snapshot.request(key.device, dtype)
        return replace(request, packed=key.fast, kept=key.kept, grad=key.grad, score_mod=self.settings.score_mod)

    def spec(self, snapshot: Snapshot, weights: WeightMemory, key: SpecKey) -> Spec:
        """Return the spec of a kind of calls: the one that the snapshot keeps, or a new one with its operations."""
        if key in snapshot.specs:
            return snapshot.specs[key]
        request = self.request(snapshot, weights, key)
        spec = Spec(
            geometry=snapshot.geometry,
            request=request,
            ops=self._build(snapshot, weights, request, key.hooked_parts) if key.fast else None,
            full_layers=snapshot.full_layers,
            faults=MappingProxyType(self.faults),
            settings=self.settings,
            against_graphs=_reason_against_graphs(snapshot, key),
            called_linears=snapshot.called_linears,
        )
        snapshot.specs[key] = spec
        return spec

    def attention_spec(self, geometry: Geometry, device: torch.device) -> Spec:
        """Return the spec of calls whose attention alone is ours; the same object while nothing of it changes."""
        spec = self._attention_spec
        if spec is None or spec.geometry != geometry or spec.request.device != device:
            request = Request(device=device, dtype=torch.float32, heads=0, head_dim=0, scale=0.0)
            spec = Spec(
                geometry=geometry,
                request=request,
                ops=None,
                faults=MappingProxyType(self.faults),
                settings=self.settings,
            )
            self._attention_spec = spec
        return spec

    @property
    def why_raised(self) -> str | None:
        """Why a call that would go the stock way raises instead; None where it may."""
        if self.settings.score_mod is not None:
            return "a score_mod was given"
        return "strict=True" if self.settings.strict else None

    def disable(self, faults_at_call: dict[str, str], faults: dict[str, str], fault: Fault) -> None:
        """Disable the backend or kernel that failed, so that the next attempt goes without; else raise its error.

        Args:
            faults_at_call: What was disabled when the first attempt began.
            faults: What was disabled when this one began.
        """
        if fault.name in self.faults and fault.name not in faults:
            return  # another thread disabled it meanwhile
        error = fault.__cause__ or fault
        needs_backend = self.settings.score_mod is not None and fault.name != KERNELS  # only its backend applies it
        is_last_resort = fault.name == Sdpa.name
        if needs_backend or is_last_resort or fault.name in faults:  # disabling it gains nothing
            if self.faults != faults_at_call:  # earlier attempts disabled others in vain: enable them again
                failures = "; ".join(f"{name} {why}" for name, why in self.faults.items())
                error.add_note(f"Earlier attempts of this call failed, too: {failures}.")
                self._set_faults(faults_at_call)
            raise error
        if self.settings.strict:
            raise_if_any([f"{fault.name} {fault.why}"])
        self._set_faults({**self.faults, fault.name: fault.why})

    def _set_faults(self, faults: dict[str, str]) -> None:
        """Set what is disabled, and drop all that was built. The next call builds anew."""
        self.faults = faults
        self.drop_caches()

    def drop_caches(self) -> None:
        """Drop the snapshot and everything that was built or kept, device memory included."""
        self.drop_graphs()
        if self.reuse is not None:
            self.reuse.drop_features()
        if self.scales is not None:
            self.scales.wait_for_writes()
        self.routes.cache.clear()
        self.last_snapshot = None
        self.earlier = ()
        self.read_by_status = None
        self.scales = None
        self._attention_spec = None
        self.last_route = None


def _reason_against_graphs(snapshot: Snapshot, key: SpecKey) -> str | None:
    """Return why calls of a kind cannot be replayed from CUDA graphs, whatever their layout."""
    reason = recorder.why_not_graphs(key.device)
    if reason is not None:
        return reason
    unpredictable = snapshot.unpredictable if key.grad else snapshot.unpredictable_others
    if unpredictable:  # it may act on state that Python holds: an adapter that is switched off, a counter
        return f"{unpredictable}, and might act otherwise at a later call"
    if snapshot.mixing:  # a graph pads its rows, and a module that mixes rows would see them
        return snapshot.mixing[0]
    if snapshot.sharded_layers:
        return "FSDP2 gathers weights again at every call"
    return None


def state_of(tower: nn.Module) -> TowerState | None:
    """Return the state of a patched tower; None for a stock one."""
    return vars(tower).get(STATE)
