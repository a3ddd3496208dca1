"""The reading of a tower: its modules and attributes now, and why they cannot take the fast path.

The fast path computes what blocks, norms and attention compute, without calling them: it would skip a hook on a module.
A `Snapshot` reads the tower once. Every call compares the tower with it. Reasons are lists of sentences, empty where
there is none. `forward.reasons_of` adds those of a call.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Hashable, Iterator, Sequence
from functools import partial
from itertools import chain
from operator import attrgetter, itemgetter, methodcaller
from types import MappingProxyType

import torch
from torch import Tensor, nn

from hf_vit_accel.backends import Request
from hf_vit_accel.engine.call import WeightMemory
from hf_vit_accel.engine.encoder import Checkpoint, Checkpoints
from hf_vit_accel.engine.route import Spec
from hf_vit_accel.families import Family, Parts, Tower
from hf_vit_accel.families.base import Part, heads_of
from hf_vit_accel.families.copies import CopyFamily
from hf_vit_accel.families.interface import Expected
from hf_vit_accel.layout import Geometry
from hf_vit_accel.ops.base import accelerate_device, class_of_own_weight, reasons_replaced
from hf_vit_accel.ops.rows import reasons_mixing
from hf_vit_accel.tower import fsdp, proof
from hf_vit_accel.tower.code import names_of_method, reasons_foreign_forward, watch_methods
from hf_vit_accel.tower.exchanged import exchanged_modules, row_wise_modules
from hf_vit_accel.tower.wrappers import CHECKPOINTED, looked_through, module_inside
from hf_vit_accel.versions import is_output_marker
from hf_vit_accel.watch import Watch, watch_called

# Read from every module at every call: code that sets hooks aside may put another dict in their place.
HOOKS = tuple(map(itemgetter, ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")))
_PLACE = attrgetter("device", "dtype")
_REQUIRES_GRAD = attrgetter("requires_grad")
# No tower has any of these: people add them to fine-tune. They behave otherwise in training, or at every call.
_RANDOM_OR_STATEFUL = nn.modules.dropout._DropoutNd, nn.modules.batchnorm._NormBase
_COMPUTE_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def _is_called(module: nn.Module, known: Collection[type]) -> bool:
    """Return whether a module is called as it is: of a third party's class, or with weights of a class of its own."""
    kind = fsdp.class_of(module)
    is_known = kind in known or kind.__module__.startswith("torch.nn.")
    return not is_known or class_of_own_weight(module) is not None


def _adapters_of(module: nn.Module) -> Iterator[nn.Module]:
    """Yield PEFT's modules beside the layer that a module of its own wraps. PEFT casts their inputs and outputs.

    Copies of whole modules are left out: PEFT casts nothing around them.
    """
    names = getattr(module, "adapter_layer_names", ()) if "base_layer" in module._modules else ()
    for name in names:
        part = module._modules.get(name)
        if part is not None:
            yield from part.modules()


class Snapshot:
    """One reading of a tower, with everything that is derived from it. It holds the tower weakly.

    Attributes:
        proof: What was proven of its class, or of this very tower, a copy of a family's.
        watch: Notices that the tower is not as it was read.
        reasons_stock: Why its own forward must run as it is, without metadata of ours (`stock_way.Way.STOCK`).
        reasons_metadata: Why its blocks must be called, on our metadata (`stock_way.Way.METADATA`).
        defaults: What the config says of options that a call may leave out. Calls do not ask it: it runs Python code
            whenever a field is read.
        parts, geometry, full_layers, heads, head_dim, scale: Set only where `reasons_stock` is empty.
        trusted: The classes of a copy's own code, and modules of others that the proof ran.
        unpredictable: Why every call may compute something else (code of others inside, randomness); None otherwise.
        called_linears: The linears of third parties among them, which a trial may prove safe in CUDA graphs.
        unpredictable_others: Why every call may compute something else without these linears; None otherwise.
        mixing: Why all rows of a call must be encoded together.
        offloaded: Whether accelerate's hooks on modules inside move weights or inputs.
        parameter_dicts: The `_parameters` of modules, in the order of the parameters of `weights`.
        checkpoint_wrappers: The wrappers whose `checkpoint_fn` runs a block or merger, by that module.
        sharded_layers: The blocks whose weights FSDP2 gathers when they are called, by the index of their layer.
        callable_parts: The `id` of a part that can run by its own call, by that of the `vars` of modules inside it.
        callable_blocks: What stock calls for a layer, by its index; none where we cannot call it likewise.
    """

    parts: Parts
    geometry: Geometry
    expected: Expected

    def __init__(self, tower: Tower, family: Family) -> None:
        exchanged: dict[str, list[nn.Module]] = {}
        if isinstance(family, CopyFamily):
            self.proof = proof.prove_copy(tower, family)
        else:
            exchanged = exchanged_modules(tower)
            self.proof = proof.prove(tower, family, exchanged)
        self.is_copy = isinstance(family, CopyFamily)
        self.trusted = self.proof.trusted.union(*(exchanged[place] for place in self.proof.replaced))
        self.watch = Watch(self.proof.code.watch)
        self.specs: dict[Hashable, Spec] = {}
        self._tower = weakref.ref(tower)
        self._weights: WeightMemory | None = None
        options = "return_dict", "output_hidden_states", "output_attentions"
        self.defaults = {name: getattr(tower.config, name, None) for name in options}
        self._arguments = family.arguments
        self._pixel_dims = family.pixel_dims
        modules = dict(tower.named_modules())
        self.names_inside = list(modules)[1:]  # the first is the tower itself
        self._modules = list(modules.values())[1:]
        self.attributes_inside = [vars(module) for module in self._modules]
        self.reasons_stock = self._read_parts(tower, family)
        self._read_parameters()
        self._read_layers()
        self._find_unpredictable()
        self.reasons_metadata = [] if self.reasons_stock else list(self._find_reasons_metadata(tower))
        self._watch_attributes()
        self._watch_modules(tower, is_of_device=bool(exchanged or self.unpredictable))

    def _read_parts(self, tower: Tower, family: Family) -> list[str]:
        """Read the tower's parts, geometry and heads. Return `reasons_stock`; parts may be unread if there are any."""
        reasons = []
        if not self.is_copy:  # the proof of a copy ran this very tower
            reasons += reasons_foreign_forward(tower)
            reasons += self.proof.code.reasons_overridden(tower)
        if self.proof.why_not_metadata is not None:
            return [*reasons, self.proof.why_not_metadata]
        try:
            self.parts = looked_through(family.parts(tower))
            self.geometry = family.geometry(tower)
            weight = self.parts.projection.weight
        except (AttributeError, TypeError, ValueError) as error:
            return [*reasons, f"the tower is not built as {family.name} is known: {error}"]
        blocks = self.parts.blocks
        if not blocks:
            return [*reasons, "the tower has no blocks"]
        if not {*tower.modules()}.issuperset(self.parts.modules()):  # hooks and weights of the others would go unseen
            return [*reasons, "parts of the tower are in a plain list: torch does not know these modules"]
        self.full_layers = tuple(self.parts.full(index) for index in range(len(blocks)))
        attentions = [block.attention for block in blocks]
        heads_of_layers = [
            heads_of(self.parts, [self.watch.read(attention, name) for name in _HEADS]) for attention in attentions
        ]
        self.heads, self.head_dim, self.scale = heads_of_layers[0]
        self._has_varied_heads = any(heads != heads_of_layers[0] for heads in heads_of_layers)
        dropouts = [self.watch.read(attention, "attention_dropout", 0.0) for attention in attentions]
        self.dropout = any(dropouts)
        dims = 2 if isinstance(self.parts.projection, nn.Linear) else 4
        is_packed = not isinstance(weight, Tensor) or weight.dim() < dims or not weight.is_floating_point()
        self.width = None if is_packed else weight.shape[1:].numel()
        return reasons

    def _read_parameters(self) -> None:
        """Note where modules hold parameters: those that our operations read, those of others, and sharded ones."""
        self._fsdp_modules = [module for module in self._modules if isinstance(module, fsdp.wrapper())]
        modules: list[nn.Module] = [self._tower(), *self._modules]  # type: ignore[list-item]
        sharded_ids = {id(inner) for module in self._fsdp_modules for inner in module.modules()}
        adapter_ids = {id(adapter) for module in modules for adapter in _adapters_of(module)}
        own, others, sharded = [], [], []
        for module in modules:
            parameters = module._parameters
            if id(module) in sharded_ids:
                sharded.append(parameters)
            elif parameters and (id(module) in adapter_ids or _is_called(module, self.proof.code.classes)):
                others.append(parameters)
            elif parameters:
                own.append(parameters)
        self.parameter_dicts = [*own, *others]
        self._called_ids = tuple(map(id, others))
        self._own = [parameters.values() for parameters in own]
        self._others = [parameters.values() for parameters in others]
        self._sharded = [parameters.values() for parameters in sharded]

    def _read_layers(self) -> None:
        """Find the wrappers of checkpointing and FSDP2 around layers and mergers, and what a layer's place can call."""
        self.checkpoint_wrappers: dict[nn.Module, Part] = {}
        self.sharded_layers: dict[int, nn.Module] = {}
        self.callable_blocks: dict[int, nn.Module] = {}
        blocks = () if self.reasons_stock else self.parts.blocks
        layers = {id(block.module): index for index, block in enumerate(blocks)}
        mergers = () if self.reasons_stock else self.parts.mergers()
        for module in self._modules:  # a wrapper comes before what is inside
            inside = looked_through(module)
            index = layers.get(id(inside))
            is_checkpoint = CHECKPOINTED in module._modules
            if is_checkpoint and inside is not module and (index is not None or inside in mergers):
                self.checkpoint_wrappers.setdefault(inside, module)
            if index is None:
                continue
            self.callable_blocks.setdefault(index, module)
            if module in self._fsdp_modules and (is_checkpoint or id(module) in layers):
                self.sharded_layers.setdefault(index, module)
        if self.sharded_layers or self.proof.block_arguments is None:
            self.callable_blocks = {}
        self._sharded_others = [module for module in self._fsdp_modules if module not in self.sharded_layers.values()]
        self.uses_fsdp = isinstance(self._tower(), fsdp.wrapper()) or bool(self.sharded_layers)
        self.offloaded = any("_hf_hook" in attributes for attributes in self.attributes_inside)
        parts = [] if self.reasons_stock or self.is_copy else [self.parts.patch_embed, *self.parts.mergers()]
        parts += self.callable_blocks.values()
        self.callable_parts = {id(vars(module)): id(part) for part in parts for module in part.modules()}

    def _find_unpredictable(self) -> None:
        """Find modules of others: what each call may compute otherwise, and what mixes the rows of a call."""
        unwrapped = [module for module in self._modules if module_inside(module) is None]
        reasons = {}
        for module in unwrapped:
            for reason in reasons_replaced(module, trusted=self.trusted)[:1]:
                reasons[module] = reason
        others = list(reasons)
        linears = [module for module in others if hasattr(module, "in_features") and not module._modules]
        self.called_linears = tuple(linears)
        for module in self._modules:
            if isinstance(module, _RANDOM_OR_STATEFUL):
                reasons.setdefault(module, f"a {type(module).__name__} is inside")
        of_linears = [reasons[module] for module in self.called_linears]
        of_others = [reasons[module] for module in reasons if module not in self.called_linears]
        self.unpredictable: str | None = next(iter(of_linears + of_others), None)
        self.unpredictable_others: str | None = next(iter(of_others), None)
        self._called_memory: Watch | None = None
        self.mixing: list[str] = []
        if not self.reasons_stock:
            is_fast = self.proof.why_not_fast is None and bool(others)
            row_wise = row_wise_modules(others, self.parts) if is_fast else set()
            patches = self.parts.projection, self.parts.downsample
            classes = self.proof.code.classes
            self.mixing = reasons_mixing(unwrapped, classes, patches, fsdp.class_of, self.trusted, row_wise)

    def _find_reasons_metadata(self, tower: Tower) -> Iterator[str]:
        """Yield `reasons_metadata`: what the fast path would miss, on modules that it never calls."""
        if self.proof.why_not_fast is not None:
            yield self.proof.why_not_fast
        if any(map(fsdp.is_version_1, self._modules)):
            yield fsdp.VERSION_1
            return
        if self._has_varied_heads:
            yield "layers have different heads, or scale attention differently"
        device = accelerate_device(tower)
        named_modules = list(zip(self.names_inside, self._modules, strict=True))
        for name, module in named_modules:
            if any(isinstance(vars(module).get(weight), Tensor) for weight in ("weight", "bias")):
                yield f"a weight of {name} is not a parameter"
                break
        for name, module in named_modules:
            if "_hf_hook" in vars(module) and (device is None or accelerate_device(module) != device):
                yield f"accelerate hooks on {name}"
                break
        if self._sharded_others:
            yield f"FSDP2 shards a {type(self._sharded_others[0]).__name__}, which is no layer, by itself"
        for index, block in enumerate(self.parts.blocks):
            if block.module not in self.checkpoint_wrappers:
                inside = list(block.module.modules())[1:]
                wrappers = [module for module in inside if CHECKPOINTED in module._modules]
                if wrappers:
                    yield f"a {type(wrappers[0]).__name__} is inside layer {index}"
                    break
        skipped = [("the tower", module) for module in self.parts.around]
        for index, block in enumerate(self.parts.blocks):
            skipped += [(f"layer {index}", block.module), (f"layer {index}", block.attention)]
        for where, module in skipped:
            if fsdp.class_of(module) not in self.proof.code.classes:
                yield f"{where} has a {type(module).__name__}, which this tower's class does not make"
                return
            reasons = reasons_replaced(module, trusted=self.trusted)
            if reasons:
                yield f"{where}: {reasons[0]}"
                return

    def _watch_attributes(self) -> None:
        """Watch the attributes of modules inside that a forward may read.

        An attribute that no code of their classes names, as a user's counter, is not compared.
        """
        for module in self._modules:
            kind = fsdp.class_of(module)
            if module in self.trusted:
                self.watch.read_all(module)
            elif kind in self.proof.code.classes:
                attributes = vars(module)
                for name in (names_of_method(kind, "forward") & attributes.keys()) - _BASE_NAMES:
                    if not isinstance(attributes[name], Tensor):
                        self.watch.read(module, name)

    def _watch_modules(self, tower: Tower, *, is_of_device: bool) -> None:
        """Watch the modules of a tower, its attributes and its config. The tower itself is held weakly."""
        watch = self.watch
        modules = [tower, *self._modules]
        own_forwards = [attributes for attributes in self.attributes_inside if "forward" in attributes]
        names = (
            names_of_method(fsdp.class_of(tower), "forward").union(self.proof.code.methods) - _BASE_NAMES - {"forward"}
        )
        # A tensor there is what a hook keeps of a call.
        names -= {name for name, value in vars(tower).items() if isinstance(value, Tensor)}
        fields = vars(tower.config).keys() | self.defaults.keys()
        fields -= {"_attn_implementation", "_attn_implementation_internal"}  # every call reads its name anew
        config_of = partial(getattr, weakref.proxy(tower), "config")
        watch.add("the tower's class", attrgetter("__class__"), [weakref.proxy(tower)])
        watch.add("the class of a module", type, self._modules)
        watch.add("a module inside", list, [module._modules.values() for module in modules if module._modules])
        # A forward that is set on an instance is an attribute more.
        watch.add("the number of a module's attributes", len, self.attributes_inside)
        for name in ("forward", "_old_forward") if own_forwards else ():
            watch.add("the forward of a module inside", methodcaller("get", name), own_forwards)
        watch_methods(watch, {type(module) for module in modules} - self.proof.code.classes)
        # Modules of others, which a trial ran, may compute otherwise on another device.
        if is_of_device or self.proof.key.device_type != "cpu" or not self.proof.is_verdict:
            complete = [parameters for parameters in self._own if all(value is not None for value in parameters)]
            watch.add("the device or the dtype", _PLACE, next(iter(complete), ()))
        watch.add_attributes("the tower's attribute", weakref.ref(tower), names)
        watch.add_attributes("the config's field", config_of, fields)
        watch.remember()

    def can_return(self) -> bool:
        """Return whether at most switches changed, which may be set back: adapters, at every step of GRPO.

        Else this reading would keep modules or functions alive that were replaced, or the weights of called modules.
        """
        what_changed = self.watch.what_changed()
        return self._called_memory is None and (what_changed is None or what_changed.startswith(_SWITCHES))

    def weights(self) -> tuple[tuple[nn.Parameter, ...], WeightMemory]:
        """Return the parameters as they are now, and their `WeightMemory`: the same object until an address changes.

        Parameters are not held between calls: that would keep weights alive that the user has replaced.
        """
        weights = self._weights
        parameters = [value for value in chain.from_iterable(self._own) if value is not None]
        count = len(parameters)
        parameters += [value for value in chain.from_iterable(self._others) if value is not None]
        if weights is not None and weights.is_of(parameters):
            return tuple(parameters), weights
        called_ids = self._called_ids
        self._read_parameters()  # a weight that was replaced may be of another class
        if self._called_ids != called_ids:
            self._find_unpredictable()
            return self.weights()
        weights = WeightMemory(parameters[:count], parameters[count:], self._called_ids, self.offloaded)
        modules = [*self.attributes_inside, vars(self._tower())]
        self._buffers = [attributes["_buffers"] for attributes in modules if attributes["_buffers"]]
        self._has_plain_tensors: bool | None = None
        device = self.parts.projection.weight.device
        self.expected = Expected(
            merge=self.geometry.merge,
            width=self.width,
            device=None if self.offloaded or device.type == "meta" else device,
            names=self._arguments,
            dims=self._pixel_dims,
        )
        self._weights = weights  # last, since a first call of another thread reads the rest as soon as this is there
        return tuple(parameters), weights

    def is_trained(self, parameters: Sequence[nn.Parameter]) -> bool:
        """Return whether any of the given parameters, or of a sharded layer's, requires a gradient."""
        if any(map(_REQUIRES_GRAD, parameters)):
            return True
        return any(value is not None and value.requires_grad for value in chain.from_iterable(self._sharded))

    def buffers(self) -> list[Tensor]:
        """Return every buffer as it is now. `weights` must have run before."""
        return [buffer for buffers in self._buffers for buffer in buffers.values() if buffer is not None]

    def called_memory(self) -> Watch:
        """Return what third-party linears hold: the same object until they hold another tensor."""
        if self._called_memory is None or not self._called_memory.unchanged():
            self._called_memory = watch_called(self.called_linears)
        return self._called_memory

    def holds_plain_tensors(self) -> bool:
        """Return whether a module holds a tensor as an attribute that is neither parameter nor buffer."""
        if self._has_plain_tensors is None:
            modules = [*self.attributes_inside, vars(self._tower())]
            values = chain.from_iterable(attributes.values() for attributes in modules)
            self._has_plain_tensors = any(isinstance(value, Tensor) for value in values)
        return self._has_plain_tensors

    def in_training_mode(self) -> bool:
        """Return whether a module inside is in training mode."""
        return any(attributes["training"] for attributes in self.attributes_inside)

    def checkpoints(self) -> Checkpoints:
        """Return how blocks and mergers run again in the backward: by their wrappers, or as blocks are set now."""
        checkpoints: dict[nn.Module, Checkpoint] = {}
        for module, wrapper in self.checkpoint_wrappers.items():
            checkpoints[module] = Checkpoint(wrapper.checkpoint_fn, module)
        for block in self.parts.blocks:
            module = block.module
            if module not in checkpoints and module.training and getattr(module, "gradient_checkpointing", False):
                checkpoints[module] = Checkpoint(module._gradient_checkpointing_func, module)
        return MappingProxyType(checkpoints)

    def outputs_require_grad(self) -> bool:
        """Return whether a hook of transformers makes the tower's outputs require gradients, whatever is trained.

        `enable_input_require_grads` sets it for checkpointing: modules after a frozen tower are not trained otherwise.
        """
        hooks_of_modules = [hooks for hooks in map(HOOKS[0], self.attributes_inside) if hooks]
        return any(is_output_marker(hook) for hooks in hooks_of_modules for hook in hooks.values())

    def request(self, device: torch.device, dtype: torch.dtype | None = None) -> Request:
        """Return what the layers ask of a backend."""
        block = self.parts.blocks[0]
        dtype = dtype or getattr(getattr(block.qkv[0], "weight", None), "dtype", None)
        if dtype not in _COMPUTE_DTYPES:  # quantised: the norms keep the dtype that activations have
            dtype = block.norm1.weight.dtype
        assert isinstance(dtype, torch.dtype)
        return Request(device=device, dtype=dtype, heads=self.heads, head_dim=self.head_dim, scale=self.scale)


_HEADS = ("num_heads", "head_dim", "scaling")
_SWITCHES = "an attribute of a module inside", "the tower's attribute", "the config's field"
"""What a watch says of values that may be set back."""


_READ_AT_EVERY_CALL = {"gradient_checkpointing", "_gradient_checkpointing_func"}
"""Attributes that `Snapshot.checkpoints` reads at every call. Trainers switch them at every step."""
_BASE_NAMES = {
    *("config", "generation_config", "name_or_path", "warnings_issued", "_hf_vit_accel", "_hf_vit_accel_hooks"),
    *_READ_AT_EVERY_CALL,
    *vars(nn.Module()),
}
