"""The names that transformers knows us by, and how they are routed.

`flashinfer_cudnn` and `flash_vit_auto` are registered with the attention and mask interfaces. Two functions of
transformers are wrapped, for these names only: `lazy_import_flash_attention` would look for a Hub kernel for any name
that contains "flash" (there is no opt-out), and `PreTrainedModel.get_correct_attn_implementation` is where
each model of a composite learns its attention: a known tower is patched, a text decoder gets its own default.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from difflib import get_close_matches
from functools import partial, wraps
from typing import Any

import transformers
from torch import nn

from hf_vit_accel.backends import require
from hf_vit_accel.config import Settings
from hf_vit_accel.families import FAMILIES, Config, Family, Model, Tower, family_of, find_towers
from hf_vit_accel.tower.attention import note_unknown, vision_attention
from hf_vit_accel.tower.install import install, uninstall
from hf_vit_accel.tower.proof import NAMES
from hf_vit_accel.tower.state import TowerState, state_of


def is_ours(name: object) -> bool:
    """Return whether an attention implementation is one of the registered names; a dict or None is not."""
    return isinstance(name, str) and name in NAMES


Follow = Callable[[nn.Module, bool], None]
"""Is called with a model of a composite, also under construction, and whether its tower is to be fast."""


def register(follow: Follow) -> None:
    """Register the names and wrap the two routing functions."""
    modeling = transformers.modeling_utils
    masks = transformers.masking_utils
    _wrap(modeling, "lazy_import_flash_attention", _wrap_lazy_import)
    _wrap(modeling.PreTrainedModel, "get_correct_attn_implementation", partial(_wrap_routing, follow))
    for name in NAMES:
        modeling.AttentionInterface.register(name, vision_attention)
        masks.AttentionMaskInterface.register(name, masks.sdpa_mask)


def _wrap(owner: object, name: str, make: Callable[[Callable[..., Any]], Callable[..., object]]) -> None:
    """Put a wrapper around a function of transformers; none where a later version lacks it."""
    original = getattr(owner, name, None)
    if original is not None:
        setattr(owner, name, wraps(original)(make(original)))


def _wrap_lazy_import(original: Callable[..., object]) -> Callable[..., object]:
    """Wrap `lazy_import_flash_attention`: look for no Hub kernel of one of our names."""

    def lazy_import_flash_attention(implementation: str | None, *args: object, **kwargs: object) -> object:
        return None if is_ours(implementation) else original(implementation, *args, **kwargs)

    return lazy_import_flash_attention


def _wrap_routing(follow: Follow, original: Callable[..., str | None]) -> Callable[..., str | None]:
    """Wrap `get_correct_attn_implementation`: every model of a composite learns its attention there."""

    def get_correct_attn_implementation(
        self: Model, requested_attention: str | None, *args: object, **kwargs: object
    ) -> str | None:
        if not is_ours(requested_attention):
            if is_ours(getattr(getattr(self.config, "vision_config", None), "_attn_implementation", None)):
                follow(self, True)
            is_other = requested_attention != self.config._attn_implementation  # or only the text gets another
            applicable = _resolve(requested_attention, partial(original, self, requested_attention, *args, **kwargs))
            if is_other:
                for tower in (self, *_wrapped(self)):
                    uninstall(tower)
                follow(self, False)
            return applicable
        assert requested_attention is not None
        family = family_of(self)
        if family is not None:
            _patch_tower(self, family, requested_attention)
        elif _is_of_tower(self.config):
            _patch_wrapper(self, requested_attention, args, kwargs)
        elif any(map(_is_of_tower, _sub_configs(self.config))):
            require(NAMES[requested_attention])
            _release_text_configs(self.config)
            follow(self, True)
        elif type(self.config) in _TEXT_CONFIGS:
            name = self.config._attn_implementation  # a model without a tower keeps its own attention
            return original(self, None if is_ours(name) else name, *args, **kwargs)
        else:
            supported = ", ".join(family.name for family in FAMILIES)
            raise ValueError(
                f"attn_implementation={requested_attention!r} accelerates the vision towers of {supported}; "
                f"{type(self.config).__name__} has none. Use another attn_implementation for this model. If remote "
                "code ships a copy of such a tower, load it with another name, and call "
                "hf_vit_accel.patch(model, like=...)."
            )
        return requested_attention

    return get_correct_attn_implementation


def _resolve(name: str | None, original: Callable[[], str | None]) -> str | None:
    """Let transformers resolve a name that is not ours. Its error about an unknown one lists its own names alone."""
    try:
        return original()
    except ValueError as error:
        similar = get_close_matches(str(name), NAMES, n=1, cutoff=0.7)
        if similar:
            error.add_note(f"Did you mean {similar[0]!r}, of hf_vit_accel?")
        raise


def _patch_tower(tower: Tower, family: Family, name: str) -> None:
    """Patch a tower that is given one of our names, unless it has that name already."""
    attention = NAMES[name]
    require(attention)
    state = state_of(tower)
    former_name = tower.config._attn_implementation
    if state is not None and former_name == name:
        return
    if state is not None:
        former_name = state.former_name
    if is_ours(former_name):
        former_name = None
    install(tower, TowerState(family, Settings(attention=attention), former_name=former_name))


def _patch_wrapper(wrapper: Model, name: str, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
    """Patch the towers inside a model that shares the config of its tower.

    While it is made there is none inside yet: a tower takes the name from the config itself.
    """
    towers = _wrapped(wrapper)
    for tower in towers:
        tower.get_correct_attn_implementation(name, *args, **kwargs)
    if not towers:
        note_unknown(wrapper)


def _wrapped(model: Model) -> list[Tower]:
    """Return the towers inside a model that share its config, which transformers leaves out for that reason."""
    if not vars(model).get("_modules"):  # it is under construction
        return []
    towers = [tower for _, tower, _ in find_towers(model)]
    return [tower for tower in towers if tower is not model and tower.config is model.config]


_TEXT_CONFIGS: set[type] = set()
"""Classes of sub-configs without a tower, of composites that were given one of our names.

They keep attentions of their own, in copies of a model, too: a copy is given a name without its composite.
"""


def _release_text_configs(config: Config) -> None:
    """Give sub-models without a tower the attention back that transformers gives them."""
    for sub_config in _sub_configs(config):
        if not any(_is_of_tower(part) for part in (sub_config, *_sub_configs(sub_config))):
            _TEXT_CONFIGS.add(type(sub_config))
            if is_ours(sub_config._attn_implementation):
                sub_config._attn_implementation_internal = None


def _is_of_tower(config: Config) -> bool:
    """Return whether a config is that of a supported tower, or a subclass of it."""
    modules = {module.replace(".modeling_", ".configuration_") for family in FAMILIES for module, _ in family.towers}
    return not config.sub_configs and any(
        kind.__module__ in modules and "Vision" in kind.__name__ for kind in type(config).__mro__
    )


def _sub_configs(config: Config) -> Iterator[Config]:
    """Yield the configs inside a config, at any depth."""
    for key in getattr(config, "sub_configs", None) or ():
        sub_config = getattr(config, key, None)
        if sub_config is not None:
            yield sub_config
            yield from _sub_configs(sub_config)


def restore_name(model: nn.Module, former_name: str | None) -> None:
    """Replace one of our attention names in a model's config."""
    config: Config = getattr(model, "config", None)
    if isinstance(model, transformers.modeling_utils.PreTrainedModel) and is_ours(config._attn_implementation):
        if former_name is None:
            text = config.get_text_config()._attn_implementation
            former_name = model.get_correct_attn_implementation(None if is_ours(text) else text)
        config._attn_implementation_internal = former_name
