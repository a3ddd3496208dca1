"""What stands inside a tower right now: hooks, replaced modules, foreign forwards, dtypes.

The fast path computes what blocks and attention modules compute without calling them, so whatever hangs on a module
would be skipped. `Structure` reads the tower once and then tells, in about a tenth of a millisecond per forward,
whether anything changed and what stands against the fast path.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from itertools import chain
from operator import attrgetter, itemgetter
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module

from hf_vit_accel.contract import forward_of, helpers_of, is_upstream, tower_changes

__all__ = ["Structure", "is_plain"]

_HOOKS = itemgetter("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_DTYPE, _POINTER = attrgetter("dtype"), torch.Tensor.data_ptr  # twice as fast as a call by name
_GLOBAL_HOOKS = tuple(
    hooks for name, hooks in vars(torch_module).items() if name.startswith("_global_") and isinstance(hooks, dict)
)


def _place(module: nn.Module) -> Any:
    """The device to which accelerate's hook on a module brings inputs; None for no hook, or one that does more.

    With `device_map` such hooks stand on every module. One that does not move weights does nothing inside a tower that
    has them on one device.
    """
    hook: Any = vars(module).get("_hf_hook")
    known = (type(hook).__module__, type(hook).__name__) == ("accelerate.hooks", "AlignDevicesHook")
    return hook.execution_device if known and not hook.offload else None


def _own_forward(module: nn.Module) -> Any:
    """A forward that was set on an instance; None for none, or the class's (which removed accelerate hooks leave).

    Or the method that a convolution's forward calls, where people change its padding.
    """
    forward = vars(module).get("forward" if _place(module) is None else "_old_forward")
    function = getattr(forward, "__func__", None)
    if function is forward_of(type(module)) and getattr(forward, "__self__", None) is module:
        forward = None
    return forward or vars(module).get("_conv_forward")


def is_plain(module: Any, kind: type[nn.Module] | None = None) -> str | None:
    """None if a module does what its class in torch (`kind`) or transformers was written to do, else why not."""
    name = type(module).__name__
    if kind is not None and type(module) is not kind:
        return f"a {name} stands where a plain {kind.__name__} was"
    if _own_forward(module) is not None:
        return f"a {name} has a forward of its own"
    if not is_upstream(forward_of(type(module))):
        return f"the forward of {name} was replaced by another"
    if not is_upstream(type(module).__call__):
        return f"the __call__ of {name} was replaced by another"
    return None


class Structure:
    """One reading of a tower. `current` is False once a module or a forward was added, removed or replaced.

    attentions: the attributes of every attention module. broken: what of the tower is not built as the fast path (and
    the injection of metadata) knows it. foreign: a module inside whose code is not torch's or transformers', and which
    might act otherwise at every call. offloaded: accelerate's hooks stand on modules inside and move weights or inputs
    themselves.
    """

    def __init__(self, tower: nn.Module) -> None:
        modules = dict(tower.named_modules())
        below = {name: module for name, module in modules.items() if name}
        # A leaf that gains a child does nothing else until its class or forward changes, which is seen. (A container
        # that was empty would, but none of the known towers has one.)
        self._parents = [module._modules for module in modules.values() if module._modules]
        self._children = self._read_children()
        self._below = list(below.values())
        self._types = list(map(type, self._below))
        self._attributes = [vars(module) for module in self._below]
        kinds = {type(module) for module in below.values()}
        self._classes: list[Any] = [(kind, forward_of(kind), kind.__call__) for kind in kinds]
        self._names = list(below)
        self._parameters = [module._parameters for module in modules.values() if module._parameters]
        self._parameter_names = self._read_names()
        self._convolutions = [module for module in self._below if hasattr(module, "_conv_forward")]
        self._own = self._own_forwards()
        self._buffers = [module._buffers for module in modules.values() if module._buffers]
        self.attentions = [vars(m) for name, m in below.items() if _is_attention(name)]
        self.foreign = next(filter(None, map(is_plain, self._below)), None)
        self.broken = [*_against_tower(tower), *_against_blocks(tower), *tower_changes(tower)]
        self.offloaded = any("_hf_hook" in vars(module) for module in self._below)
        self._own_reasons = list(_against_instances(tower, below))
        self._count = len(self.parameters())
        self.nbytes = sum(parameter.nbytes for parameter in self.parameters())
        self._classes.append((type(tower), type(tower).forward, type(tower).__call__))
        self._tower, self._helpers = weakref.ref(tower), helpers_of(tower)

    def _read_children(self) -> list[tuple[nn.Module | None, ...]]:
        return [tuple(children.values()) for children in self._parents]

    def _own_forwards(self) -> list[Any]:
        found = [index for index, attributes in enumerate(self._attributes) if "forward" in attributes]
        return [*(_own_forward(self._below[index]) for index in found), *map(_own_forward, self._convolutions)]

    def _read_names(self) -> list[str]:
        return [name for parameters in self._parameters for name in parameters.keys()]  # noqa: SIM118  (torch.jit's)

    def current(self, parameters: list[nn.Parameter]) -> bool:
        """Whether the tower still holds the very modules and forwards that were read."""
        return (
            list(map(type, self._below)) == self._types
            and len(parameters) == self._count
            and self._read_names() == self._parameter_names
            and self._read_children() == self._children
            and all(forward_of(kind) is forward and kind.__call__ is call for kind, forward, call in self._classes)
            and self._own_forwards() == self._own
            and helpers_of(self._tower()) == self._helpers
        )

    def parameters(self) -> list[nn.Parameter]:
        """The tower's parameters as they are now, whatever replaced them. Read once a call, for the other methods.

        (Held between calls they would keep weights alive that the user has replaced.)
        """
        return [p for parameters in self._parameters for p in parameters.values() if p is not None]

    def pointers(self, parameters: list[nn.Parameter]) -> list[int]:
        """Where every parameter and buffer lies now: what a captured graph reads."""
        buffers = [b.data_ptr() for buffers in self._buffers for b in buffers.values() if b is not None]
        return buffers + list(map(_POINTER, parameters))

    def reasons(self, parameters: list[nn.Parameter]) -> list[str]:
        """Why the fast path would not do what the stock tower does; empty if it would."""
        reasons = [*self.broken, *self._own_reasons]
        if any(chain.from_iterable(map(_HOOKS, self._attributes))):
            hooked = next((name for name, hook in self._hooks() if not _inert(hook)), None)
            if hooked is not None:
                reasons.append(f"hooks on {hooked}")
        if any(_GLOBAL_HOOKS):
            reasons.append("global module hooks")
        dtypes, classes = set(map(_DTYPE, parameters)), set(map(type, parameters)) - {nn.Parameter}
        if len(dtypes) > 1:
            reasons.append(f"parameters of several dtypes ({', '.join(sorted(map(str, dtypes)))})")
        if classes:
            reasons.append(f"parameters of a class of their own ({', '.join(sorted(c.__name__ for c in classes))})")
        if self.offloaded and len({parameter.device for parameter in parameters}) > 1:
            reasons.append("parameters on several devices")
        return reasons

    def marks_outputs(self) -> bool:
        """Whether a hook of transformers makes what comes out of the tower require gradients, whatever is trained.

        (`enable_input_require_grads`, for checkpointing: what comes after a frozen tower is not trained otherwise.)
        """
        return any(_marks(hook) for _, hook in self._hooks())

    def _hooks(self) -> Iterator[tuple[str, Any]]:
        """Every hook inside, read from where it is now: people clear them by a new dict in the place of the old."""
        for name, attributes in zip(self._names, self._attributes, strict=True):
            for hooks in _HOOKS(attributes):
                yield from ((name, hook) for hook in hooks.values())


def _is_attention(name: str) -> bool:
    return name.startswith("blocks.") and name.endswith(".attn") and name.count(".") == 2


def _inert(hook: Callable[..., Any]) -> bool:
    """transformers' output-capturing hooks stay on after one use and do nothing until outputs are asked for again."""
    return getattr(hook, "__module__", None) == "transformers.utils.output_capturing" or _marks(hook)


def _marks(hook: Callable[..., Any]) -> bool:
    known = "transformers.modeling_utils", "make_inputs_require_grads"
    return (getattr(hook, "__module__", None), getattr(hook, "__name__", None)) == known


def _against_instances(tower: nn.Module, modules: dict[str, nn.Module]) -> Iterator[str]:
    """What instances hold that the fast path would not see.

    Forwards on blocks and attention modules, which it never calls, or by accelerate; weights that are no parameters,
    whose gradients, dtypes and addresses nobody looks at.
    """
    place = _place(tower)
    for name, module in modules.items():
        if any(isinstance(vars(module).get(weight), torch.Tensor) for weight in ("weight", "bias")):
            yield f"a weight of {name} is not a parameter"
            break
    for name, module in modules.items():
        if "_hf_hook" in vars(module) and (place is None or _place(module) != place):
            yield f"accelerate hooks on {name}"
            return
        skipped = _is_attention(name) or (name.startswith("blocks.") and name.count(".") == 1)
        if skipped and _own_forward(module) is not None:
            yield f"{name} has a forward of its own"
            return


def _against_tower(tower: Any) -> Iterator[str]:
    """What of the tower itself is not what the fast path was written against."""
    if not is_upstream(type(tower).forward):
        yield f"the forward of {type(tower).__name__} is not transformers' own"
    if getattr(getattr(getattr(tower, "patch_embed", None), "proj", None), "weight", None) is None:
        yield "the tower has no patch_embed.proj with a weight"
    for name, function in helpers_of(tower).items():
        if not is_upstream(function):
            yield f"{name} was replaced by another"
    for name in ("rotary_pos_emb", "merger"):
        if not isinstance(getattr(tower, name, None), nn.Module):
            yield f"the tower has no module {name}"


def _against_blocks(tower: Any) -> Iterator[str]:
    """What of the blocks is not what the fast path was written against."""
    blocks = getattr(tower, "blocks", None)
    if not isinstance(blocks, nn.ModuleList) or not len(blocks):
        yield "the tower has no list of blocks"
        return
    for index, block in enumerate(blocks):
        attention = getattr(block, "attn", None)
        parts = [getattr(block, name, None) for name in ("norm1", "norm2", "mlp")]
        parts += [getattr(attention, name, None) for name in ("qkv", "proj")]
        if not all(isinstance(part, nn.Module) for part in parts):
            yield f"blocks.{index} is not norm1, attn (qkv, proj), norm2, mlp"
            return
    for modules in (list(blocks), [block.attn for block in blocks]):
        kind: Any = type(modules[0])
        if len({type(module) for module in modules}) > 1:
            yield f"blocks hold several classes beside {kind.__name__}"
        for name in ("forward", "__call__"):
            if not is_upstream(getattr(kind, name, None)):
                yield f"{kind.__name__}.{name} was replaced by another"
