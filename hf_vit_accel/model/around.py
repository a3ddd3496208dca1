"""A patched model around its tower: its methods read small tensors on the host, where they wait for nothing.

Only transformers' own functions run there, unmodified. A function of others runs as it is, and `status` says so.
Methods and hooks are on the instance.
"""

from __future__ import annotations

import inspect
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from functools import lru_cache
from types import FunctionType
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from hf_vit_accel.attached import OurHooks, OurMethod
from hf_vit_accel.families import FAMILIES, Model, find_towers
from hf_vit_accel.machine import is_upstream, one_line, reasons_untraceable
from hf_vit_accel.model.every_rank import (
    FEATURES,
    Features,
    add_dummy,
    calls_of,
    encode_once,
    must_call_once,
    tower_in,
    try_host_grids,
    try_one_call,
    try_out,
)
from hf_vit_accel.model.host import Arguments, HostCopies, Result, to_device
from hf_vit_accel.model.positions import image_positions, numbers_images_alike
from hf_vit_accel.tower import fsdp
from hf_vit_accel.tower.code import names_of_method
from hf_vit_accel.tower.forward import is_our_forward, redirect_shallow_copies
from hf_vit_accel.tower.processors import BYTES_UNKNOWN
from hf_vit_accel.tower.state import HOOKS
from hf_vit_accel.tower.state import state_of as tower_state_of
from hf_vit_accel.versions import cache_name, is_inert

STATE = "_hf_vit_accel_model"

StockMethod = Callable[..., Result]
"""A method of a model's class as a function, which takes the model first."""


class ModelState:
    """Runtime state of a patched model. Copies and pickles keep the settings only.

    Attributes:
        takes_host_grids: Whether the methods for features take a grid on the host; None before they were tried.
        is_numbering_proven: Whether the model numbers images as we do; None before it was compared.
    """

    def __init__(self, every_rank: bool = False) -> None:
        self.every_rank = every_rank
        self.calls = 0
        self.stock_calls = 0
        self.fallbacks: Counter[str] = Counter()
        self.copies = HostCopies()
        self.features = Features()
        self.takes_host_grids: bool | None = None
        self.is_numbering_proven: bool | None = None

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.every_rank,)


def is_model(kind: type[Model]) -> bool:
    """Return whether a class has the methods of a model with M-RoPE, for grids."""
    if not all(hasattr(kind, name) for name in SERVED):
        return False
    return "target_sizes" not in parameters_of(kind.get_rope_index)  # MiniCPM-V 4.7: its images are cut into slices


def holders_of(model: nn.Module) -> list[tuple[str, Model]]:
    """Return path and module of the nearest model with M-RoPE around every supported tower; none twice."""
    holders: dict[str, Model] = {}
    for path, _, _ in find_towers(model):
        while path:
            path = path.rpartition(".")[0]
            holder = model.get_submodule(path)
            if is_model(type(holder)):
                holders[path] = holder
                break
    return list(holders.items())


def state_of(model: nn.Module) -> ModelState | None:
    return vars(model).get(STATE)


def install(model: nn.Module, state: ModelState) -> None:
    """Give a model its state, and put our methods and hooks on the instance. Methods of others stay."""
    uninstall(model)
    vars(model)[STATE] = state
    for name in SERVED:
        if not unknown_methods(model, [name]):
            vars(model)[name] = Method(model, name)
    before = model.register_forward_pre_hook(BeforeForward(), with_kwargs=True)
    vars(model)[HOOKS] = OurHooks(before, model.register_forward_hook(after_forward, always_call=True))


def uninstall(model: nn.Module) -> ModelState | None:
    """Take state, methods and hooks off a model."""
    state: ModelState | None = vars(model).pop(STATE, None)
    for name in SERVED:
        if isinstance(vars(model).get(name), Method):
            del vars(model)[name]
    text = (vars(model).get("_modules") or {}).get("language_model")
    for module in (model, text):
        if isinstance(module, nn.Module):
            for name in (HOOKS, FEATURES):
                vars(module).pop(name, None)
    return state


def follow_name(model: nn.Module, is_fast: bool) -> None:
    """Install our methods where a model is loaded by one of our names, or take them off if it gets another.

    A model of a composite that is under construction has no modules yet: they come later.
    """
    models = [model] if is_model(type(model)) else []
    models += [holder for _, holder in holders_of(model)] if vars(model).get("_modules") else []
    for holder in models:
        if not is_fast:
            uninstall(holder)
        elif state_of(holder) is None:
            install(holder, ModelState())


def reason_not_one_call(model: Model) -> str | None:
    """Return why images and videos cannot be encoded in one call; None if they can."""
    parameters = inspect.signature(type(model).get_image_features).parameters.values()
    if not any(entry.name == "return_dict" or entry.kind is entry.VAR_KEYWORD for entry in parameters):
        return f"transformers {transformers.__version__} is too old for it; upgrade: pip install -U transformers"
    unknown = unknown_methods(model, _FEATURES)
    if unknown:
        return f"methods of its own, {', '.join(unknown)}"
    why = try_out(try_one_call, model)
    return None if why is None else f"images and videos need more than one call: {why}"


class Method(OurMethod):
    """Replacement for a method of a model. Behaves like the bound method."""

    def __init__(self, model: Model, name: str) -> None:
        super().__init__(model)
        self.__name__ = name
        self.__signature__ = inspect.signature(getattr(type(model), name).__get__(model))

    def __reduce__(self) -> tuple[object, ...]:
        return self._reduced(self.__name__)

    def __call__(self, *args: object, **kwargs: Result) -> Result:
        model = self.__self__
        stock = getattr(type(model), self.__name__)
        state = state_of(model)
        if state is None or torch.compiler.is_compiling() or reasons_untraceable():
            return stock(model, *args, **kwargs)
        names = parameters_of(stock)
        if len(args) > len(names) or kwargs.keys() & set(names[: len(args)]):
            return stock(model, *args, **kwargs)  # raises
        if _is_unknown(model, self.__name__):
            state.stock_calls += self.__name__ == "get_rope_index"
            state.fallbacks[f"{self.__name__} is not transformers' own"] += 1
            return stock(model, *args, **kwargs)
        result = SERVED[self.__name__](model, state, stock, dict(zip(names, args, strict=False)) | kwargs)
        return stock(model, *args, **kwargs) if result is None else result


def unknown_methods(model: Model, names: Iterable[str]) -> list[str]:
    """List the methods that are not transformers' own, of the instance or its class; they run as they are."""
    return [name for name in names if not isinstance(vars(model).get(name), Method | None) or _is_unknown(model, name)]


def _is_unknown(model: Model, name: str) -> bool:
    """Return whether the class has another method than transformers' own, or it calls another."""
    kind: Any = type(model)
    for called in {name, *names_of_method(kind, name)}:
        method = getattr(kind, called, None)
        if isinstance(method, FunctionType | property) and method is not getattr(nn.Module, called, None):
            is_own = called != name and not isinstance(vars(model).get(called), Method | None)
            if is_own or not (_is_known(kind, called, method) or _is_new(model, called, method)):
                return True
    return False


def _is_new(model: Model, name: str, method: FunctionType | property) -> bool:
    """Return whether a subclass adds a property of which transformers' class has nothing.

    Transformers' methods then read an attribute of this name of another object. colpali's ColQwen2_5 adds a
    `spatial_merge_size`, which they read of the config and the tower.
    """
    if not isinstance(method, property) or method.fset is not None:  # the __init__ of transformers' class may set it
        return False
    stock = next((kind for kind in type(model).__mro__ if kind.__module__ in _FILES), type(model))
    return not hasattr(stock, name) and name not in model._modules


@lru_cache(maxsize=256)
def _is_known(kind: type, name: str, method: FunctionType | property) -> bool:
    """Return whether a declared file of transformers defines this method of a class, or of one that it inherits."""
    owner = next(owner for owner in kind.__mro__ if name in vars(owner))
    function: Any = method.fget if isinstance(method, property) else method
    if owner in transformers.PreTrainedModel.__mro__:
        return is_upstream(function)
    if owner.__module__ not in _FILES or not is_upstream(function):
        return False
    code = inspect.unwrap(function).__code__
    return code.co_filename == sys.modules[owner.__module__].__file__ and code.co_qualname == f"{owner.__name__}.{name}"


_FILES = {"transformers.models.glm46v.modeling_glm46v", *(file for family in FAMILIES for file, _ in family.towers)}
"""The files of transformers with the models around the declared towers. GLM-4.6V's has the tower of another."""


@lru_cache(maxsize=64)
def parameters_of(method: Callable[..., Result]) -> tuple[str, ...]:
    """Return the names of a method's parameters, without `self` and the one for all other keyword arguments."""
    parameters = list(inspect.signature(method).parameters.values())[1:]
    return tuple(parameter.name for parameter in parameters if parameter.kind is not parameter.VAR_KEYWORD)


def _rope_index(model: Model, state: ModelState, stock: StockMethod, arguments: Arguments) -> Result:
    """Return positions and deltas, computed on the host.

    Images are numbered at once where the method does it alike. Otherwise the method itself runs.
    """
    try:
        host = state.copies.on_host(arguments, parameters_of(stock))
        if state.is_numbering_proven is None:
            state.is_numbering_proven = False  # also where the comparison raises
            state.is_numbering_proven = "mm_token_type_ids" in parameters_of(stock) and numbers_images_alike(model)
        result = None
        if state.is_numbering_proven:
            result = image_positions(host, model.config.vision_config.spatial_merge_size)
        result = to_device(result or stock(model, **host), arguments["input_ids"].device)
    except Exception as error:  # the same call on the device raises it again, or does not
        state.stock_calls += 1
        state.fallbacks[one_line(error)] += 1
        return None
    state.calls += 1
    return result


def _placeholder_mask(model: Model, state: ModelState, stock: StockMethod, arguments: Arguments) -> Result:
    """Return the masks of placeholders, which the model's method computes and checks on the host.

    It gets stand-ins for embeddings and features: their width is two, since only their sizes count.
    """
    ids = arguments.get("input_ids")
    embeddings = arguments.get("inputs_embeds")
    host_ids = state.copies.find(ids) if isinstance(ids, Tensor) else None
    if host_ids is None or host_ids is ids or not isinstance(embeddings, Tensor):
        return None
    small = arguments | {"input_ids": host_ids, "inputs_embeds": torch.empty(*embeddings.shape[:-1], 2, device="cpu")}
    for name, tensor in arguments.items():
        if isinstance(tensor, Tensor) and name.endswith("features"):
            if tensor.dim() != 2 or tensor.shape[1] != embeddings.shape[-1]:
                return None
            small[name] = torch.empty(len(tensor), 2, device="cpu")
    try:
        masks = stock(model, **small)
        sent = to_device(tuple(mask[..., :1] for mask in masks), embeddings.device)
    except Exception:  # stock raises it again
        return None
    return tuple(x if mask.shape[-1] == 1 else x.expand_as(embeddings) for x, mask in zip(sent, masks, strict=True))


def _features(model: Model, state: ModelState, stock: StockMethod, arguments: Arguments) -> Result:
    """Return features that this forward has encoded already, or encode them with the grid on the host.

    None if the grid on the host would be seen by code of others.
    """
    pixels_name, grid_name = parameters_of(stock)[:2]
    _refuse_bytes(model, arguments)
    features = state.features.find(arguments.get(pixels_name))
    if features is not None:
        return features
    if state.takes_host_grids is None:
        state.takes_host_grids = try_out(try_host_grids, model) is None
    in_model = tower_in(model)
    if not state.takes_host_grids or in_model is None or not _passes_on_grids(model._modules[in_model[0]]):
        return None
    return stock(model, **state.copies.on_host(arguments, [grid_name]))


def _passes_on_grids(tower: nn.Module) -> bool:
    """Return whether our forward gets the grid as it is: no wrapper or hook of others sees it."""
    hooks = [*tower._forward_pre_hooks.values(), *tower._forward_hooks.values()]
    return is_our_forward(vars(tower).get("forward")) and all(
        hook is redirect_shallow_copies or is_inert(hook) or fsdp.hooked_by_fsdp(hook) for hook in hooks
    )


SERVED: dict[str, Callable[[Model, ModelState, StockMethod, Arguments], Result]] = {
    "get_rope_index": _rope_index,
    "get_placeholder_mask": _placeholder_mask,
    "get_image_features": _features,
    "get_video_features": _features,
}
"""The methods that run on the host. Where a function returns None, `Method` calls stock's with the same arguments."""
_FEATURES = ("get_image_features", "get_video_features")
_PICTURES = ("pixel_values", "pixel_values_videos", "mm_encoder_outputs")


class BeforeForward:
    """Forward pre-hook: fetch small tensors in one transfer, before the tower fills the device's queue."""

    def __init__(self) -> None:
        # A decorator would import `torch._dynamo` in a second.
        self._before = torch.compiler.disable(_before, reason="positions are computed on the host")

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), ()

    def __call__(self, model: Model, args: tuple[object, ...], kwargs: Arguments) -> None:
        state = vars(model).get(STATE)  # None on a stock model that shares its hooks with a shallow copy
        if state is not None and (state.every_rank or not torch.compiler.is_compiling()):
            self._before(model, args, kwargs)


def after_forward(model: Model, args: object, output: object) -> None:
    """Drop what was kept for the forward; a forward hook."""
    state = vars(model).get(STATE)
    if state is not None and not torch.compiler.is_compiling():
        state.copies.clear()
        state.features.clear()
        in_model = tower_in(model) if state.every_rank else None
        if in_model is not None:
            state.features.tower_calls = calls_of(in_model[1])


def _before(model: Model, args: tuple[object, ...], kwargs: Arguments) -> None:
    state = _own_state(model)
    names = parameters_of(type(model).forward)
    if len(args) > len(names) or reasons_untraceable():
        return
    arguments: Arguments = dict(zip(names, args, strict=False)) | kwargs
    _refuse_bytes(model, arguments)
    has_pictures = any(arguments.get(name) is not None for name in _PICTURES)
    if has_pictures and isinstance(vars(model).get("get_rope_index"), Method):
        small = [arguments.get(name) for name in parameters_of(type(model).get_rope_index)]
        state.copies.fetch([tensor for tensor in small if isinstance(tensor, Tensor)])
    in_model = tower_in(model) if state.every_rank else None
    if state.every_rank and in_model is None:
        raise ValueError(f"every_rank found no supported tower in {type(model).__name__}; patch the model again")
    if in_model is not None and must_call_once(model._modules[in_model[0]], arguments.get(cache_name())):
        unknown = unknown_methods(model, _FEATURES)
        if unknown:
            raise ValueError(f"every_rank does not work with methods of its own on {type(model).__name__}: {unknown}")
        text = vars(model.language_model)
        text[FEATURES] = state.features
        if HOOKS not in text:
            text[HOOKS] = OurHooks(model.language_model.register_forward_pre_hook(add_dummy, with_kwargs=True))
        options = {name: value for name, value in kwargs.items() if name not in (*names, "return_dict")}
        encode_once(state.features, model, arguments, options)


def _refuse_bytes(model: Model, arguments: Arguments) -> None:
    """Raise ValueError for pixels in bytes that the tower would not normalise: models cast them before it sees them."""
    is_bytes = [getattr(arguments.get(name), "dtype", None) == torch.uint8 for name in _PICTURES]
    in_model = tower_in(model) if any(is_bytes) else None
    state = None if in_model is None else tower_state_of(in_model[1])
    if state is not None and state.settings.normalisation is None:
        raise ValueError(BYTES_UNKNOWN)


def _own_state(model: nn.Module) -> ModelState:
    """Return the state of a model. A shallow copy gets a state and methods of its own."""
    state: ModelState = vars(model)[STATE]
    methods = [method for method in vars(model).values() if isinstance(method, Method)]
    if any(method._module() is not model for method in methods):
        state = vars(model)[STATE] = ModelState(state.every_rank)
        for method in methods:
            vars(model)[method.__name__] = Method(model, method.__name__)
    return state
