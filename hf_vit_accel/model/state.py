"""A patched model around its tower: its state, its methods and its hooks, all of them on the instance.

A call outside of the proof runs the method of the class.
"""

from __future__ import annotations

import inspect
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from hf_vit_accel.families import Model, Tower, find_towers
from hf_vit_accel.model import every_rank
from hf_vit_accel.model.every_rank import KINDS, AddDummy, Features
from hf_vit_accel.model.positions import (
    ROPE_INPUTS,
    Arguments,
    HostCopies,
    Result,
    is_plain,
    placeholder_masks,
    positions_of,
)
from hf_vit_accel.model.proof import ModelProof, known_class, parameters_of, prove, tower_in
from hf_vit_accel.tower import checks, fsdp
from hf_vit_accel.tower.forward import is_our_forward, redirect_shallow_copies
from hf_vit_accel.tower.modules import is_inert
from hf_vit_accel.tower.state import state_of as tower_state_of
from hf_vit_accel.versions import cache_name

STATE = "_hf_vit_accel_model"

_REPLACED = ("get_rope_index", "get_placeholder_mask", "get_image_features", "get_video_features")


class ModelState:
    """Runtime state of a patched model. Copies and pickles keep the settings only.

    Attributes:
        every_rank: Whether every training forward calls the tower exactly once.
        calls: How often positions were computed on the host.
        stock_calls: How often transformers computed them.
        fallbacks: Why it did.
        copies: Tensors of the last call on the host.
        features: Features of a forward that were encoded in one call of the tower.
    """

    def __init__(self, every_rank: bool = False) -> None:
        self.every_rank = every_rank
        self.calls = 0
        self.stock_calls = 0
        self.fallbacks: Counter[str] = Counter()
        self.copies = HostCopies()
        self.features = Features()

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.every_rank,)


def holders_of(model: nn.Module) -> Iterator[tuple[str, Model]]:
    """Yield path and module of every model with M-RoPE that holds a supported tower directly."""
    for path, _, _ in find_towers(model):
        holder_path = path.rpartition(".")[0]
        if path and known_class(model.get_submodule(holder_path)) is not None:
            yield holder_path, model.get_submodule(holder_path)


def state_of(model: nn.Module) -> ModelState | None:
    """Return the state of a patched model; None for a stock one."""
    return vars(model).get(STATE)


def install(model: nn.Module, state: ModelState) -> None:
    """Give a model its state, and put our methods and hooks on the instance. Methods of the instance stay."""
    uninstall(model)
    _exclude_from_compile()
    vars(model)[STATE] = state
    for name in _REPLACED:
        vars(model).setdefault(name, Method(model, name))
    model.register_forward_pre_hook(BeforeForward(state.every_rank), with_kwargs=True)
    model.register_forward_hook(AfterForward())


def uninstall(model: nn.Module) -> ModelState | None:
    """Take state, methods and hooks off a model."""
    state: ModelState | None = vars(model).pop(STATE, None)
    for name in _REPLACED:
        if isinstance(vars(model).get(name), Method):
            del vars(model)[name]
    every_rank.drop_hooks(model, OWN_HOOKS)
    text = (vars(model).get("_modules") or {}).get("language_model")
    if isinstance(text, nn.Module):
        every_rank.drop_hooks(text, AddDummy)
    return state


def follow_name(model: nn.Module, is_fast: bool) -> None:
    """Install our methods where a model is loaded by one of our names, or take them off if it gets another.

    Args:
        model: A model of a composite. Under construction it has no modules yet: they come later.
        is_fast: Whether its tower gets one of our names.
    """
    models = [model] if known_class(model) is not None else []
    models += [holder for _, holder in holders_of(model)] if vars(model).get("_modules") else []
    for holder in models:
        if not is_fast:
            uninstall(holder)
        elif state_of(holder) is None:
            install(holder, ModelState())


def proof_of(model: Model) -> tuple[ModelProof, str | None]:
    """Return the proof for a model, and why the model is outside of it; None if it is inside."""
    kind = known_class(model)
    assert kind is not None
    proof = prove(model, kind)
    if proof.is_overridden(model, Method):
        return proof, "the model has methods of its own in the place of transformers'"
    in_model = tower_in(model)
    if in_model is None or tower_state_of(in_model[1]) is None:
        return proof, "the tower is not patched"
    return proof, None


def reason_not_one_call(model: Model) -> str | None:
    """Return why images and videos cannot be encoded in one call; None if they can."""
    kind = known_class(model)
    assert kind is not None
    proof = prove(model, kind)
    if proof.is_overridden(model, Method):
        return "the model has methods of its own in the place of transformers'"
    return None if proof.one_call else "; ".join(proof.reasons)


class Method:
    """Replacement for a method of a model. Behaves like the bound method, and holds the model weakly."""

    __slots__ = ("__weakref__", "_class", "_model", "_name")

    def __init__(self, model: nn.Module, name: str) -> None:
        self._model = weakref.ref(model)
        self._class = type(model)
        self._name = name

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.__self__, self._name)

    def __deepcopy__(self, memo: dict[int, nn.Module]) -> Method:
        model = self.__self__
        twin: Model = memo.get(id(model), model)
        return type(self)(twin, self._name)

    def __getattr__(self, name: str) -> Any:
        if name in ("__func__", "__wrapped__", *self.__slots__):
            raise AttributeError(name)
        if name == "__signature__":
            return inspect.signature(getattr(self._class, self._name).__get__(self))
        return getattr(getattr(self._class, self._name), name)

    @property
    def __self__(self) -> Model:
        model = self._model()
        if model is None:
            raise ReferenceError(f"the model of this {self._name} was deleted; keep a reference to the model")
        return model

    def __call__(self, *args: object, **kwargs: Result) -> Result:
        model = self.__self__
        stock = getattr(type(model), self._name)
        state = state_of(model)
        if state is None or torch.compiler.is_compiling():
            return stock(model, *args, **kwargs)
        names = parameters_of(stock)
        if len(args) > len(names) or kwargs.keys() & set(names[: len(args)]):
            return stock(model, *args, **kwargs)  # raises
        result = _SERVED[self._name](model, state, dict(zip(names, args, strict=False)) | kwargs)
        return stock(model, *args, **kwargs) if result is None else result


def _rope_index(model: Model, state: ModelState, arguments: Arguments) -> Result:
    """Return positions and deltas, counted; None to let transformers compute them."""
    proof, reason = proof_of(model)
    reasons = [] if reason is None else [reason]
    if proof.rule is None:
        reasons += proof.reasons
    reasons += checks.reasons_untraceable()
    if not reasons and proof.rule is not None:
        result = positions_of(state.copies, proof.rule, model.config, arguments)
        if result is not None:
            state.calls += 1
            return result
        reasons = ["tokens and grids do not fit, or are in a form of their own"]
    state.stock_calls += 1
    state.fallbacks[reasons[0]] += 1
    return None


def _placeholder_mask(model: Model, state: ModelState, arguments: Arguments) -> Result:
    """Return the masks if a copy of the ids is on the host; None to let transformers count, or raise."""
    ids = arguments.get("input_ids")
    embeddings = arguments.get("inputs_embeds")
    features = [arguments.get(name) for name in ("image_features", "video_features")]
    if not is_plain(ids, "input_ids") or type(embeddings) is not Tensor or checks.reasons_untraceable():
        return None
    proof, reason = proof_of(model)
    if proof.video_token is None or reason is not None:
        return None
    ids_BS = state.copies.find(ids)
    if ids_BS is None:
        return None
    return placeholder_masks(model.config, proof.video_token, ids, ids_BS, embeddings, features)


def _image_features(model: Model, state: ModelState, arguments: Arguments) -> Result:
    return _features(model, state, "image", type(model).get_image_features, arguments)


def _video_features(model: Model, state: ModelState, arguments: Arguments) -> Result:
    return _features(model, state, "video", type(model).get_video_features, arguments)


def _features(model: Model, state: ModelState, kind: str, stock: Callable[..., Result], arguments: Arguments) -> Result:
    """Return features that this forward has encoded already, or encode them with the grid on the host."""
    pixels, grid = [arguments.get(name) for name in parameters_of(stock)[:2]]
    result = state.features.take(kind, pixels)
    if result is not None or not is_plain(grid, "grid_thw") or state.copies.is_on_host(grid):
        return result
    proof, reason = proof_of(model)
    if reason is None and not checks.reasons_untraceable():
        _fetch(model, state, proof, arguments, parameters_of(stock)[1:2])
    return stock(model, **arguments)


_SERVED: Mapping[str, Callable[[Model, ModelState, Arguments], Result]] = {
    "get_rope_index": _rope_index,
    "get_placeholder_mask": _placeholder_mask,
    "get_image_features": _image_features,
    "get_video_features": _video_features,
}


@dataclass(frozen=True)
class BeforeForward:
    """Forward pre-hook of a model: fetch small tensors in one transfer, before the tower fills the device's queue."""

    every_rank: bool

    def __call__(self, model: nn.Module, args: tuple[object, ...], kwargs: Arguments) -> Result:
        if torch.compiler.is_compiling() and not self.every_rank:
            return None
        return _before(model, args, kwargs)


@dataclass(frozen=True)
class AfterForward:
    """Forward hook of a model: end the time in which inference tensors count as unmodified."""

    def __call__(self, model: nn.Module, args: object, output: object) -> None:
        state = None if torch.compiler.is_compiling() else state_of(model)
        if state is not None:
            state.copies.in_forward = False


OWN_HOOKS = (BeforeForward, AfterForward)
"""The classes of our hooks on a model."""


@lru_cache(maxsize=1)
def _exclude_from_compile() -> None:
    """Exclude `_before` from `torch.compile`, once: a decorator would import `torch._dynamo` in a second."""
    globals()["_before"] = torch.compiler.disable(_before, reason="positions are computed on the host")


def _before(model: Model, args: tuple[object, ...], kwargs: Arguments) -> Result:
    """Return the arguments of a forward, with grids on the host where that is proven."""
    state = _own_state(model)
    names = parameters_of(type(model).forward)
    if len(args) > len(names) or (is_in_torch_dispatch_mode() and checks.reasons_fake()):
        return None
    arguments: Arguments = dict(zip(names, args, strict=False)) | kwargs
    has_pictures = any(arguments.get(pixels) is not None for pixels, _ in KINDS.values())
    has_pictures = has_pictures or bool(arguments.get("mm_encoder_outputs"))
    if not has_pictures and not state.every_rank:
        return None
    proof, reason = proof_of(model)
    in_model = tower_in(model)
    why = reason_not_one_call(model) if state.every_rank else None
    if why is not None:
        raise ValueError(f"every_rank cannot encode all pictures of a forward in one call: {why}; patch again")
    if in_model is None:
        return None
    _, tower, family = in_model
    state.copies.in_forward = True
    if has_pictures and reason is None and not checks.reasons_untraceable():
        small = ROPE_INPUTS if arguments.get("position_ids") is None else ("input_ids", *_GRIDS)
        _fetch(model, state, proof, arguments, small)
    if state.every_rank and every_rank.applies(tower, arguments.get(cache_name())):
        options = {name: value for name, value in kwargs.items() if name not in names}
        encode = type(model).get_image_features.__get__(model)
        every_rank.add_dummies(model, state.features)
        every_rank.encode_once(state.features, encode, tower, family, arguments, options)
    return (), arguments


_GRIDS = tuple(grid for _, grid in KINDS.values())


def _fetch(model: Model, state: ModelState, proof: ModelProof, arguments: Arguments, names: tuple[str, ...]) -> None:
    """Copy these arguments to the host in one transfer, and put the copies of grids in their place."""
    tensors = {name: arguments[name] for name in names if is_plain(arguments.get(name), name)}
    arrays = dict(zip(tensors, state.copies.read(list(tensors.values())), strict=True))
    in_model = tower_in(model)
    if in_model is None or not proof.host_grids or not _takes_host_grids(in_model[1]):
        return
    for name in _GRIDS:
        if name in tensors and not state.copies.is_on_host(tensors[name]):
            arguments[name] = torch.from_numpy(arrays[name]).to(tensors[name].dtype)


def _takes_host_grids(tower: Tower) -> bool:
    """Return whether our forward gets the grid as it is: no wrapper or hook of others sees it."""
    hooks = [*tower._forward_pre_hooks.values(), *tower._forward_hooks.values()]
    return is_our_forward(vars(tower).get("forward")) and all(
        hook is redirect_shallow_copies or is_inert(hook) or fsdp.hooked_by_fsdp(hook) for hook in hooks
    )


def _own_state(model: nn.Module) -> ModelState:
    """Return the state of a model. A shallow copy gets a state and methods of its own."""
    attributes = vars(model)
    state: ModelState = attributes[STATE]
    replaced = [attributes[name] for name in _REPLACED if isinstance(attributes.get(name), Method)]
    if any(method._model() is not model for method in replaced):
        state = ModelState(state.every_rank)
        attributes[STATE] = state
        for name in _REPLACED:
            if isinstance(attributes.get(name), Method):
                attributes[name] = Method(model, name)
    return state
