"""What a tower holds right now, and why it cannot be served fast; `checks` says what of a call stands against it.

The fast path computes what blocks, norms and attention compute without calling them, so whatever hangs on a module
would be skipped. A `Snapshot` reads the tower once; at every call it is told, in 0.1 to 0.2 milliseconds of the host,
whether anything changed. All reasons are lists of sentences, empty where nothing stands against.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from itertools import chain
from operator import attrgetter, itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from hf_vit_accel.backends import Request
from hf_vit_accel.engine.facts import TowerFacts
from hf_vit_accel.engine.inputs import Expected
from hf_vit_accel.engine.route import Spec
from hf_vit_accel.families import Family
from hf_vit_accel.machine import is_upstream
from hf_vit_accel.ops.base import Reads, copied, placed_by_accelerate, reasons_replaced
from hf_vit_accel.ops.rows import reasons_mixing
from hf_vit_accel.tower import fsdp as sharding
from hf_vit_accel.tower import proof as upstream

# Of each module at each call: whoever sets hooks aside, or takes them away, may put another dict there.
_HOOKS = tuple(map(itemgetter, ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")))
_VALUES, _POINTER, _DTYPE, _REQUIRES_GRAD = (
    dict.values,
    Tensor.data_ptr,
    attrgetter("dtype"),
    attrgetter("requires_grad"),
)
_SAME_POINTERS: Any = getattr(torch._C, "_tensors_data_ptrs_at_indices_equal", None)  # of CUDA builds: 5 times as fast
_GLOBAL_HOOKS = tuple(
    hooks for name, hooks in vars(torch_module).items() if name.startswith("_global_") and isinstance(hooks, dict)
)
_MOODY = nn.modules.dropout._DropoutNd, nn.modules.batchnorm._NormBase  # no tower has any: who fine-tunes adds them
_COMPUTE_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


class Weights:
    """The parameters of a tower as they lie in memory now, adapters' last. reasons: why kernels cannot read them.

    pointers: where each lies, if all do. contiguous, nbytes, count: of all. kinds: count, adapters' dtypes
    """

    def __init__(
        self, parameters: list[nn.Parameter], pointers: list[int] | None, offloaded: bool, adapters: int = 0
    ) -> None:
        self.indices = list(range(len(parameters)))
        self.pointers, self.dtype = pointers, parameters[0].dtype if parameters else torch.float32
        self.contiguous = all(map(Tensor.is_contiguous, parameters))
        self.count, self.nbytes = len(parameters), sum(parameter.nbytes for parameter in parameters)
        self.loose: bool | None = None  # of `Snapshot.loose`, asked once for these
        self.reasons: list[str] = []
        own = len(parameters) - adapters  # an adapter's dtype is its own business: PEFT casts what it takes and gives
        dtypes, self.kinds = set(map(_DTYPE, parameters[:own])), (self.count, *map(_DTYPE, parameters[own:]))
        classes = set(map(type, parameters)) - {nn.Parameter}
        if len(dtypes) > 1:
            self.reasons.append(f"parameters of several dtypes ({', '.join(sorted(map(str, dtypes)))})")
        if classes:
            self.reasons.append(
                f"parameters of a class of their own ({', '.join(sorted(c.__name__ for c in classes))})"
            )
        if offloaded and len({parameter.device for parameter in parameters}) > 1:
            self.reasons.append("parameters on several devices")


class Snapshot:
    """One reading of a tower.

    stock: why its own forward must run as it is, without metadata of ours. slow: why its blocks must be called.
    parts, geometry, heads, head_dim, scale: known where `stock` is empty. foreign: a module inside whose code is
    neither torch's nor transformers', or a Dropout, and which might act otherwise at every call. mixing: why all rows
    of a call must be encoded at once. dropout: whether training drops out attention weights. offloaded: accelerate's
    hooks stand on modules inside and move weights or inputs themselves. places: what modules hold the parameters of
    `weights` in, in this order. sharded: by index, layers whose weights FSDP2 brings when their block is called;
    brought: whether it brings any. expected: what inputs have to fit, known once `weights` was asked. reads: the
    attributes that all of this, and the operations built of it, were made of. specs: those operations, by kind of call:
    what is made of a reading goes with it.
    """

    dropout = False

    def __init__(self, tower: Any, family: Family) -> None:
        self.proof = upstream.prove(tower, family)
        modules = dict(tower.named_modules())
        # The tower itself is held weakly: it holds this, and would not be freed at once.
        self._tower, (_, *self._names), (_, *below) = weakref.ref(tower), modules, modules.values()
        self._modules, self._below = below, list(map(vars, below))
        # A tensor there is what somebody's hook keeps of a call.
        kept = (name for name, value in vars(tower).items() if not isinstance(value, Tensor))
        self._own_names = list({*kept} - _BARE | {*self.proof.code.methods})
        self._children = [module._modules.values() for module in modules.values() if module._modules]
        self._kinds: list[Any] = list(set(map(type, modules.values())))
        wrapped = [module for module in below if isinstance(module, sharding.wrapper())]
        elsewhere = {id(each) for module in wrapped for each in module.modules()}
        self._sharded = [module._parameters.values() for module in modules.values() if id(module) in elsewhere]
        adapters = {id(each) for module in below for each in _adapters(module)} - elsewhere
        added = [each._parameters for each in modules.values() if id(each) in adapters]
        elsewhere |= adapters
        named = [each._parameters for each in modules.values() if each._parameters and id(each) not in elsewhere]
        partial = [each for each in named if any(value is None for value in each.values())]
        whole = [each for each in named if all(value is not None for value in each.values())]
        self.places = [*whole, *partial, *added]
        self._parameters, self._partial, self._adapters = (list(map(_VALUES, at)) for at in (whole, partial, added))
        self._own = [attributes for attributes in self._below if "forward" in attributes]
        self._read = self._now()
        self._read[-1][:] = copied(self._read[-1])
        self.reads, self._weights = Reads(), Weights([], None, False)
        self.specs: dict[Any, Spec] = {}
        self._arguments, self._pixel_dims = family.arguments, family.pixel_dims
        replaced = chain.from_iterable(map(reasons_replaced, below))
        replaced = chain(replaced, (f"a {type(each).__name__} is inside" for each in below if isinstance(each, _MOODY)))
        self.foreign = next(replaced, None)
        self.offloaded = any("_hf_hook" in vars(module) for module in below)
        self.stock, self.sharded = list(self._reasons_stock(tower, family)), {}
        self.mixing: list[str] = []
        if not self.stock:
            patches = self.parts.projection, self.parts.downsample
            self.mixing = reasons_mixing(below, self.proof.classes, patches, sharding.class_of)
            blocks = enumerate(block.module for block in self.parts.blocks)
            self.sharded = {index: block for index, block in blocks if block in wrapped}
        self._alone = [module for module in wrapped if module not in self.sharded.values()]
        self.brought = isinstance(tower, sharding.wrapper()) or bool(self.sharded)
        self.slow = [] if self.stock else list(self._reasons_slow(tower))
        if not self.stock:
            self.facts = TowerFacts(
                parts=self.parts,
                geometry=self.geometry,
                full_layers=self.full_layers,
                sharded_layers=self.sharded,
                third_party=self.foreign,
                mixing=self.mixing,
                parameter_homes=self.places,
            )
        self.reads.seal()

    def _now(self) -> tuple[list[Any], ...]:
        """All that `current` compares."""
        tower = self._tower()
        return (
            [type(tower), *map(type, self._modules)],
            list(chain.from_iterable(self._children)),
            list(map(len, self._below)),  # a forward that is set on an instance is an attribute more
            [(attributes.get("forward"), attributes.get("_old_forward")) for attributes in self._own],
            [kind.forward for kind in self._kinds],
            list(map(self.proof.code.home.get, self.proof.code.names)),
            list(map(vars(tower).get, self._own_names)),
        )

    def current(self) -> bool:
        """Whether the tower still holds the very modules, forwards and attributes that were read."""
        if self.proof.backoff is not None and upstream.is_outdated(self.proof):
            return False
        try:
            return self._now() == self._read and self.reads.unchanged()
        except RuntimeError:  # of tensors that are compared
            return False

    def _reasons_stock(self, tower: Any, family: Family) -> Iterator[str]:
        if not is_upstream(type(tower).forward):
            yield f"the forward of {type(tower).__name__} is not transformers' own"
        yield from self.proof.code.reasons_overridden(tower)
        if self.proof.injected is not None:
            yield self.proof.injected
            return
        try:
            self.parts, self.geometry = family.parts(tower), family.geometry(tower)
            width = self.parts.projection.weight
        except (AttributeError, TypeError, ValueError) as error:
            yield f"the tower is not built as {family.name} is known: {error}"
            return
        found = [
            [self.reads.read(block.attention, name) for name in ("num_heads", "head_dim", "scaling")]
            for block in self.parts.blocks
        ]
        dropouts = [self.reads.read(block.attention, "attention_dropout", 0.0) for block in self.parts.blocks]
        self.full_layers = tuple(map(self.parts.full, range(len(self.parts.blocks))))
        self.dropout, self.varied = any(dropouts), len(set(map(tuple, found))) > 1
        of_all: Any = found[0] if found else (1, 1, 1.0)
        self.heads, self.head_dim, self.scale = of_all
        dims = 2 if isinstance(self.parts.projection, nn.Linear) else 4
        packed = not isinstance(width, Tensor) or width.dim() < dims or not width.is_floating_point()
        self.width = None if packed else width.shape[1:].numel()
        if not found:
            yield "the tower has no blocks"

    def _reasons_slow(self, tower: Any) -> Iterator[str]:
        """What the fast path would not see, on modules that it never calls."""
        if self.proof.fast is not None:
            yield self.proof.fast
        if self.varied:
            yield "layers have different heads, or scale attention differently"
        below, place = list(zip(self._names, self._modules, strict=True)), placed_by_accelerate(tower)
        for name, module in below:
            if any(isinstance(vars(module).get(weight), Tensor) for weight in ("weight", "bias")):
                yield f"a weight of {name} is not a parameter"
                break
        for name, module in below:
            if "_hf_hook" in vars(module) and (place is None or placed_by_accelerate(module) != place):
                yield f"accelerate hooks on {name}"
                break
        if self._alone:
            yield f"FSDP2 shards a {type(self._alone[0]).__name__}, which is no layer, by itself"
        stepped = [("the tower", module) for module in self.parts.around]
        for index, block in enumerate(self.parts.blocks):
            stepped += [(f"layer {index}", block.module), (f"layer {index}", block.attention)]
        for where, module in stepped:
            if sharding.class_of(module) not in self.proof.classes:
                yield f"{where} has a {type(module).__name__}, which this tower's class does not make"
                return
            if reasons := reasons_replaced(module):
                yield f"{where}: {reasons[0]}"
                return

    def weights(self) -> tuple[list[nn.Parameter], Weights]:
        """The parameters as they are now, whatever replaced them, and what was found of them when they last moved.

        (Parameters held between calls would keep weights alive that the user has replaced.)
        """
        parameters, known = list(chain.from_iterable(self._parameters)), self._weights
        parameters += [value for value in chain.from_iterable(self._partial) if value is not None]
        own = len(parameters)
        parameters += [value for value in chain.from_iterable(self._adapters) if value is not None]
        pointers: list[int] | None = None
        try:
            still = _SAME_POINTERS is not None and known.pointers and len(parameters) == known.count
            still = still and _SAME_POINTERS(parameters, known.pointers, known.indices)
            if still and parameters[0].dtype == known.dtype:
                return parameters, known
            pointers = list(map(_POINTER, parameters))
        except (RuntimeError, TypeError):  # of a tensor class without memory; a parameter that became None
            parameters = [parameter for parameter in parameters if parameter is not None]
        if pointers is None or pointers != known.pointers or parameters[0].dtype != known.dtype:
            self._weights = known = Weights(parameters, pointers, self.offloaded, len(parameters) - own)
            inside = *self._below, vars(self._tower())
            self._buffers = [each["_buffers"] for each in inside if each["_buffers"]]  # a weight may be one now
            at = self.parts.projection.weight.device
            anywhere = self.offloaded or at.type == "meta"
            self.expected = Expected(
                merge=self.geometry.merge,
                width=self.width,
                device=None if anywhere else at,
                names=self._arguments,
                dims=self._pixel_dims,
            )
        return parameters, known

    def trained(self, parameters: list[nn.Parameter]) -> bool:
        """Whether any parameter requires a gradient: of those given, or of a sharded layer's."""
        if any(map(_REQUIRES_GRAD, parameters)):
            return True
        return any(value is not None and value.requires_grad for value in chain.from_iterable(self._sharded))

    def buffers(self) -> list[Tensor]:
        """Every buffer as it is now."""
        return [buffer for named in self._buffers for buffer in named.values() if buffer is not None]

    def loose(self) -> bool:
        """Return whether a module holds a tensor as an attribute that is neither parameter nor buffer."""
        weights = self._weights
        if weights.loose is None:
            modules = [*self._below, vars(self._tower())]
            weights.loose = any(isinstance(value, Tensor) for own in modules for value in own.values())
        return weights.loose

    def training(self) -> bool:
        """Whether a module inside is in training mode."""
        return any(own["training"] for own in self._below)

    def reasons_hooked(self, *, grad: bool) -> list[str]:
        """Hooks on modules inside that somebody waits for."""
        reasons = ["global module hooks"] if any(_GLOBAL_HOOKS) else []
        through = {id(vars(block)) for block in self.sharded.values()}
        for hooks_of in _HOOKS if grad else _HOOKS[:2]:
            named = zip(self._names, self._below, strict=True) if any(map(hooks_of, self._below)) else ()
            found = ((name, id(own) in through, hook) for name, own in named for hook in hooks_of(own).values())
            for name, brought, hook in found:
                if not (_inert(hook) or (brought and sharding.hooked_by_fsdp(hook))):
                    return [*reasons, f"hooks on {name}"]
        return reasons

    def marks_outputs(self) -> bool:
        """Whether a hook of transformers makes what comes out of the tower require gradients, whatever is trained.

        (`enable_input_require_grads`, for checkpointing: what comes after a frozen tower is not trained otherwise.)
        """
        hooked = map(_HOOKS[0], self._below)  # few are, if any
        return any(_marks(hook) for hooks in filter(None, hooked) for hook in hooks.values())

    def request(self, device: torch.device, dtype: torch.dtype | None = None, **options: Any) -> Request:
        """What the layers ask of a backend: heads, scale, and the dtype that attention computes in, if it is known."""
        block = self.parts.blocks[0]
        dtype = dtype or getattr(getattr(block.qkv[0], "weight", None), "dtype", None)
        if dtype not in _COMPUTE_DTYPES:  # quantised: the norms keep the dtype that activations have
            dtype = block.norm1.weight.dtype
        assert isinstance(dtype, torch.dtype)
        return Request(
            device=device, dtype=dtype, heads=self.heads, head_dim=self.head_dim, scale=self.scale, **options
        )


def _adapters(module: nn.Module) -> Iterator[nn.Module]:
    """What PEFT has put beside the layer that a module of its own wraps; not copies, around which it casts nothing."""
    names = getattr(module, "adapter_layer_names", ()) if "base_layer" in module._modules else ()
    return (each for part in map(module._modules.get, names) if part is not None for each in part.modules())


_BARE = vars(nn.Module()).keys() | {"config", "generation_config", "name_or_path", "warnings_issued", "_hf_vit_accel"}


def _inert(hook: Callable[..., Any]) -> bool:
    """transformers' output-capturing hooks stay on after one use and do nothing until outputs are asked for again."""
    return getattr(hook, "__module__", None) == "transformers.utils.output_capturing" or _marks(hook)


def _marks(hook: Callable[..., Any]) -> bool:
    known = "transformers.modeling_utils", "make_inputs_require_grads"
    return (getattr(hook, "__module__", None), getattr(hook, "__name__", None)) == known
