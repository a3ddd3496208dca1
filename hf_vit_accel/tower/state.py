"""The state of a patched tower between calls: its settings, counts, routes, graphs and the reading of its modules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import modeling_utils

from hf_vit_accel.backends import Request
from hf_vit_accel.config import Settings
from hf_vit_accel.engine.passes import Passes
from hf_vit_accel.engine.route import Route, Routes, Spec
from hf_vit_accel.families import Family
from hf_vit_accel.graphs.runner import Runner
from hf_vit_accel.graphs.training import TrainingRunner
from hf_vit_accel.machine import KERNELS, refuse
from hf_vit_accel.ops import PARTS, Context, Ops, build, why_not_triton
from hf_vit_accel.ops.fp8.scales import Scales
from hf_vit_accel.sharing.data_parallel import Sharing
from hf_vit_accel.sharing.reuse import Reuse
from hf_vit_accel.tower import checks
from hf_vit_accel.tower import fsdp as sharding
from hf_vit_accel.tower import proof as upstream
from hf_vit_accel.tower.modules import Weights
from hf_vit_accel.tower.snapshot import Snapshot

STATE = "_hf_vit_accel"


class TowerState:
    """Runtime state of a patched tower. Copies and pickles keep the configuration only.

    Args:
        family: The tower's family.
        settings: The options of `patch`.
        former_name: The attention name that the config had; None if it was loaded with one of ours.

    Attributes:
        former_forward: The forward that the instance had; None for none.
        faults: The failed backends and kernels with the reason; they are disabled until the tower is patched again.
        last: The route of the last call.
        warming: The thread that prepares later calls; None while no thread does.
        attributes: The tower's attributes when it was last read.
        served: The backend of every kind of layer, where attention alone is ours.
        rebuilds: How often all caches were dropped because the tower changed.
        rebuild_reason: What changed last.
        keeps_attention: Whether `patch` chose the attention, so that a function that the user registers later is kept.
    """

    def __init__(self, family: Family, settings: Settings, *, former_name: str | None) -> None:
        self.family = family
        self.settings = settings
        self.former_name = former_name
        self.former_forward: Callable[..., Any] | None = None
        self.calls = self.stock_calls = 0
        self.fallbacks: Counter[str] = Counter()
        self.last: Route | None = None
        self.warming: int | None = None
        self.served: dict[str, str] = {}
        self.faults: dict[str, str] = {}
        self.routes = Routes()
        self.passes = Passes(settings.max_rows)
        graphs = None if family.attention_only else settings.graphs
        ranks = None if family.attention_only else settings.ranks
        self.sharing = None if ranks is None else Sharing(ranks, graphs=graphs is not None)
        self.runner = None if graphs is None else Runner(graphs, self.routes)
        self.training = TrainingRunner(graphs) if graphs is not None and graphs.max_training_bytes else None
        self.reuse = None if family.attention_only or settings.reuse is None else Reuse(settings.reuse)
        self.attributes: dict[str, Any] = {}
        self.rebuilds = 0
        self.rebuild_reason: str | None = None
        self.keeps_attention = False
        self._attention_function = modeling_utils.ALL_ATTENTION_FUNCTIONS.get(former_name)
        self.last_snapshot: Snapshot | None = None
        self._scales: Scales | None = None

    def __getstate__(self) -> dict[str, Any]:
        names = ("family", "settings", "former_name", "former_forward", "keeps_attention")
        return {name: getattr(self, name) for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["family"], state["settings"], former_name=state["former_name"])  # type: ignore[misc]
        self.former_forward = state["former_forward"]
        self.keeps_attention = state["keeps_attention"]
        self._attention_function = None  # another process may have registered another

    def copy(self) -> TowerState:
        """Return a state with the same configuration, for another tower."""
        state = TowerState(self.family, self.settings, former_name=self.former_name)
        state.keeps_attention = self.keeps_attention
        state._attention_function = self._attention_function
        return state

    def snapshot(self, tower: nn.Module) -> Snapshot:
        """Return the tower as it is now."""
        snapshot = self.last_snapshot
        return snapshot if snapshot is not None and snapshot.current() else self.read_tower(tower)

    def read_tower(self, tower: nn.Module) -> Snapshot:
        """Read a tower that changed, and drop everything that was made of its former modules."""
        former = self.last_snapshot
        if former is not None and (reason := former.reason_changed()):
            self.rebuilds += 1
            self.rebuild_reason = reason
        self.close()
        self.follow_attention(tower)
        self.last_snapshot = snapshot = Snapshot(tower, self.family, self.former_name)
        self.attributes = attributes_of(tower)
        upstream.warn_stock(sharding.class_of(tower), snapshot.proof, snapshot.stock)
        return snapshot

    def follow_attention(self, tower: Any) -> None:
        """Give a tower the attention name that `patch` would give it now.

        Its former name may stand for a function of the user's that was registered, or replaced, after `patch`.
        """
        function = modeling_utils.ALL_ATTENTION_FUNCTIONS.get(self.former_name)
        if function is self._attention_function:
            return
        self._attention_function = function
        if self.keeps_attention and tower.config._attn_implementation in (*upstream.NAMES, self.former_name):
            tower.config._attn_implementation_internal = checks.attention_name(tower, self.settings, self.former_name)

    def _build(self, snapshot: Snapshot, weights: Weights, request: Request) -> Ops:
        """Build the operations for a request's device and dtype, and these weights."""
        parts = self.settings.fuse
        if self.settings.score_mod is not None:  # the fused kernel for windows cannot apply it
            parts = frozenset(PARTS if parts is None else parts) - {"window_attention"}
        context = Context(
            device=request.device,
            dtype=request.dtype,
            weights=weights.dtype,
            no_kernels=self.faults.get(KERNELS) or why_not_triton(request.device, request.dtype),
            classes=snapshot.proof.classes,
            reads=snapshot.reads,
            grad=request.grad,
        )
        ops = build(snapshot.parts, context, parts)
        snapshot.reads.seal()
        self.routes.cache.cost = max(1 << 20, weights.nbytes // 50)
        return ops

    def scales(self, snapshot: Snapshot, device: torch.device) -> Scales:
        """Return the scales of FP8 attention on a device, as earlier calls left them."""
        fp8 = self.settings.fp8
        assert fp8 is not None
        scales = self._scales
        layers = len(snapshot.parts.blocks)
        heads = snapshot.heads
        if scales is None or (scales.device, scales.layers, scales.heads) != (device, layers, heads):
            if scales is not None:
                if self.runner is not None:
                    self.runner.close()  # its graphs write to the memory that is freed here
                scales.close()
            self._scales = scales = Scales(
                device=device, layers=layers, heads=heads, fixed=self.settings.amax, min_seqlen=fp8.min_seqlen
            )
        return scales

    def spec(self, snapshot: Snapshot, weights: Weights, device: torch.device, *, fast: bool, grad: bool) -> Spec:
        """Return what decides the routes of a kind of call; the same object while nothing of it changes.

        Args:
            snapshot: The tower as it is now.
            weights: Its parameters as they are in memory.
            device: Of the pixels.
            fast: Whether our operations run.
            grad: Whether the call records gradients.
        """
        settings = self.settings
        autocast = checks.autocast_dtype(device, weights.dtype)
        scales = self.scales(snapshot, device) if settings.fp8 is not None else None
        key = device, autocast, fast, grad, weights.dtype, *weights.kinds, scales, len(self.passes.fewer)
        spec = snapshot.specs.get(key)
        if spec is None:
            request = snapshot.request(
                device,
                autocast or (weights.dtype if snapshot.uses_fsdp else None),  # FSDP2's shards may have another
                packed=fast,
                fp8=scales,
                grad=grad,
                graphs=self.runner is not None and not grad,
                replayed=self.training is not None and grad,
                score_mod=settings.score_mod,
            )
            snapshot.specs[key] = spec = Spec(
                geometry=snapshot.geometry,
                request=request,
                ops=self._build(snapshot, weights, request) if fast else None,
                full_layers=snapshot.full_layers,
                faults=tuple(self.faults.items()),
                max_rows=self.passes.most(device, grad=grad, whole=bool(snapshot.sharded or snapshot.mixing)),
                settings=settings,
            )
            ignores_autocast = spec.ops is not None and not snapshot.foreign and spec.ops.fused >= _INSENSITIVE
            if ignores_autocast and request.dtype == weights.dtype:
                snapshot.specs |= {(device, same, *key[2:]): spec for same in (None, weights.dtype)}
        return spec

    def saturated(self) -> list[int]:
        """Return the layers in which FP8 attention cut values off."""
        return [] if self._scales is None else self._scales.saturated()

    def refuse_stock(self, reasons: list[str]) -> None:
        """Raise FallbackError for a call that would go the stock way, under `strict` or with a score_mod."""
        if self.settings.score_mod is not None:
            refuse(reasons, because="a score_mod was given")
        if self.settings.strict:
            refuse(reasons)

    def go_without(self, faults: dict[str, str]) -> None:
        """Choose everything again, without the given backends and kernels."""
        self.faults = faults
        self.close()

    def close(self) -> None:
        """Drop everything that was cached, device memory included."""
        for cache in (self.runner, self.training, self.reuse, self._scales):
            if cache is not None:
                cache.close()
        self.routes.cache.clear()
        self.last_snapshot = self._scales = self.last = None


_INSENSITIVE = {"patch_embed", "norms", "mergers", "mlp"}
"""With these fused, autocast to the dtype of the weights changes nothing, unless a third-party module is inside."""


def attributes_of(tower: nn.Module) -> dict[str, Any]:
    """Return the attributes of a tower, without what patching added."""
    ours = (STATE, "forward", "_old_forward")
    return {name: value for name, value in vars(tower).items() if name not in ours}


def state_of(tower: nn.Module) -> TowerState | None:
    """Return the state of a patched tower; None for a stock one."""
    return vars(tower).get(STATE)
