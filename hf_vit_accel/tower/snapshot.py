"""The reading of a tower: its modules and attributes now, and why they cannot take the fast path.

The fast path computes what blocks, norms and attention compute, without calling them: it would skip a hook on a module.
A `Snapshot` reads the tower once. Every call compares the tower with it. Reasons are lists of sentences, empty where
there is none. `checks` adds those of a call.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain
from operator import attrgetter, itemgetter, methodcaller
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from hf_vit_accel.backends import Request
from hf_vit_accel.engine.inputs import Expected
from hf_vit_accel.engine.route import Spec
from hf_vit_accel.families import Family, Parts, Tower
from hf_vit_accel.families.base import heads_of
from hf_vit_accel.families.copies import CopyFamily
from hf_vit_accel.layout import Geometry
from hf_vit_accel.machine import is_upstream
from hf_vit_accel.ops.base import accelerate_device, reasons_replaced
from hf_vit_accel.ops.rows import reasons_mixing
from hf_vit_accel.tower import copies, fsdp, proof
from hf_vit_accel.tower.code import names_of_method, watch_methods
from hf_vit_accel.tower.exchanged import exchanged_modules, row_wise_modules
from hf_vit_accel.tower.modules import WeightMemory, is_output_marker, parameter_dicts_of, watch_called
from hf_vit_accel.tower.wrappers import CHECKPOINTED, looked_through, module_inside
from hf_vit_accel.watch import Watch, attributes_of, chained

# Read from every module at every call: code that sets hooks aside may put another dict in their place.
HOOKS = tuple(map(itemgetter, ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")))
_POINTER = Tensor.data_ptr
_PLACE = attrgetter("device", "dtype")
_REQUIRES_GRAD = attrgetter("requires_grad")
# Only CUDA builds have it. `data_ptr` takes 25 us for 400 parameters, five times as long.
_SAME_POINTERS: Any = getattr(torch._C, "_tensors_data_ptrs_at_indices_equal", None)
# No tower has any of these: people add them to fine-tune. They behave otherwise in training, or at every call.
_RANDOM_OR_STATEFUL = nn.modules.dropout._DropoutNd, nn.modules.batchnorm._NormBase
_COMPUTE_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


class Snapshot:
    """One reading of a tower, with everything that is derived from it.

    Args:
        tower: The tower. It is held weakly: it holds this snapshot, and a reference back would delay freeing it.
        family: Its family.
        attention: The attention name that its config had before; None for none.

    Attributes:
        proof: What was proven of its class.
        is_copy: Whether the proof ran this very tower, a copy of a family's.
        reasons_stock: Why its own forward must run as it is, without metadata of ours (`plan.Way.STOCK`).
        reasons_slow: Why its blocks must be called, on our metadata (`plan.Way.METADATA`).
        parts, geometry, full_layers, heads, head_dim, scale: Set only where `reasons_stock` is empty.
        unpredictable: Why every call may compute something else (code of others inside, randomness); None otherwise.
        called_linears: The linears of third parties among them, which a trial may prove safe in CUDA graphs.
        unpredictable_others: Why every call may compute something else without these linears; None otherwise.
        mixing: Why all rows of a call must be encoded together.
        dropout: Whether training drops out attention weights.
        offloaded: Whether accelerate's hooks on modules inside move weights or inputs.
        parameter_dicts: The `_parameters` of modules, in the order of the parameters of `weights`.
        checkpoint_wrappers: The wrappers of blocks whose `checkpoint_fn` runs their layers, by the index of the layer.
        sharded_layers: The blocks whose weights FSDP2 gathers when they are called, by the index of their layer.
        callable_parts: The `id` of a part that can run by its own call, by that of the `vars` of modules inside it.
        callable_blocks: What stock calls for a layer, by its index; none where we cannot call it likewise.
        names_inside: The names of all modules but the tower itself.
        attributes_inside: Their attribute dictionaries.
        uses_fsdp: Whether FSDP2 gathers any weights.
        expected: What inputs have to fit; set by `weights`.
        module_attributes: The attributes of modules that this reading, and the operations built from it, depend on.
        specs: The decisions behind routes, by kind of call.
        output_class: The stock output class; None for a tower that returns bare tensors.
    """

    parts: Parts
    geometry: Geometry
    expected: Expected

    def __init__(self, tower: Tower, family: Family, attention: str | None = None) -> None:
        self.is_copy = isinstance(family, CopyFamily)
        exchanged: dict[str, list[nn.Module]] = {}
        if isinstance(family, CopyFamily):
            self.proof = copies.prove(tower, family)
        else:
            exchanged = exchanged_modules(tower)
            self.proof = proof.prove(tower, family, exchanged)
        self.trusted = self.proof.trusted.union(*(exchanged[place] for place in self.proof.replaced))
        self.module_attributes = Watch()
        self.specs: dict[Any, Spec] = {}
        self.output_class = self.proof.form
        self.dropout = False
        self._tower = weakref.ref(tower)
        self._weights = WeightMemory([], None, False)
        self._arguments = family.arguments
        self._pixel_dims = family.pixel_dims
        self.reasons_stock = self._read_parts(tower, family)
        self._read_modules(tower)
        others = [module for module in self._modules if reasons_replaced(module, trusted=self.trusted)]
        is_fast = not self.reasons_stock and self.proof.why_not_fast is None
        self.row_wise = row_wise_modules(others, self.parts) if is_fast and others else set()
        is_of_class = self.proof.is_verdict and self.proof.key.device_type == "cpu"
        self._is_proven_for_a_device = bool(exchanged or others) or not is_of_class
        self._read_parameters()
        self._read_attributes()
        self._find_reasons(tower)
        self._watches = [self.proof.code.watch, self._watch(tower, attention), self.module_attributes]

    def _read_modules(self, tower: Tower) -> None:
        modules = dict(tower.named_modules())
        complete = list(modules.values())
        self.names_inside = list(modules)[1:]  # the first is the tower itself
        self._modules = complete[1:]
        self.attributes_inside = [vars(module) for module in self._modules]

    def _read_parameters(self) -> None:
        """Note where modules hold parameters."""
        self._fsdp_modules = [module for module in self._modules if isinstance(module, fsdp.wrapper())]
        tower: Tower = self._tower()
        dicts = parameter_dicts_of([tower, *self._modules], self._fsdp_modules, self.proof.classes)
        self.parameter_dicts = [*dicts.complete, *dicts.partial, *dicts.adapters, *dicts.called]
        self._parameters = [parameters.values() for parameters in dicts.complete]
        self._partial = [parameters.values() for parameters in dicts.partial]
        self._others = [parameters.values() for parameters in (*dicts.adapters, *dicts.called)]
        self._called_ids = tuple(map(id, dicts.called))
        self._sharded_parameters = [parameters.values() for parameters in dicts.sharded]

    def _read_attributes(self) -> None:
        """Read the attributes of modules inside that a forward may read.

        An attribute that no code of their classes names, as a user's counter, is not compared.
        """
        for module in self._modules:
            kind = fsdp.class_of(module)
            if module in self.trusted:
                self.module_attributes.read_all(module)
            elif kind in self.proof.classes:
                attributes = vars(module)
                for name in (names_of_method(kind, "forward") & attributes.keys()) - _BASE_NAMES:
                    if not isinstance(attributes[name], Tensor):
                        self.module_attributes.read(module, name)
        self.module_attributes.remember()

    def _find_reasons(self, tower: Tower) -> None:
        """Derive from the modules what is unpredictable, offloaded, mixing or sharded, and what keeps them slow."""
        reasons_of_linears: list[str] = []
        reasons_of_others: list[str] = []
        self.called_linears: list[nn.Module] = []
        unwrapped = [module for module in self._modules if module_inside(module) is None]
        for module in unwrapped:
            reasons = reasons_replaced(module, trusted=self.trusted)
            if reasons and hasattr(module, "in_features") and not module._modules:
                self.called_linears.append(module)
                reasons_of_linears += reasons
            else:
                reasons_of_others += reasons
        random = [type(module).__name__ for module in self._modules if isinstance(module, _RANDOM_OR_STATEFUL)]
        reasons_of_others += [f"a {name} is inside" for name in random]
        self.unpredictable = next(iter(reasons_of_linears + reasons_of_others), None)
        self.unpredictable_others = next(iter(reasons_of_others), None)
        self._called_memory: Watch | None = None
        self.offloaded = any("_hf_hook" in attributes for attributes in self.attributes_inside)
        self.checkpoint_wrappers: dict[int, nn.Module] = {}
        self.sharded_layers: dict[int, nn.Module] = {}
        self.mixing: list[str] = []
        self.callable_blocks: dict[int, nn.Module] = {}
        if not self.reasons_stock:
            patches = self.parts.projection, self.parts.downsample
            self.mixing = reasons_mixing(
                unwrapped, self.proof.classes, patches, fsdp.class_of, self.trusted, self.row_wise
            )
            layers = {id(block.module): index for index, block in enumerate(self.parts.blocks)}
            for module in self._modules:  # a wrapper comes before what is inside
                index = layers.get(id(looked_through(module)), -1)
                is_checkpoint = CHECKPOINTED in module._modules
                if index >= 0 and self.proof.block_arguments is not None:
                    self.callable_blocks.setdefault(index, module)
                if index >= 0 and is_checkpoint:
                    self.checkpoint_wrappers.setdefault(index, module)
                if index >= 0 and module in self._fsdp_modules and (is_checkpoint or id(module) in layers):
                    self.sharded_layers.setdefault(index, module)
        if self.sharded_layers:
            self.callable_blocks = {}
        self._sharded_others = [module for module in self._fsdp_modules if module not in self.sharded_layers.values()]
        self.uses_fsdp = isinstance(tower, fsdp.wrapper()) or bool(self.sharded_layers)
        self.reasons_slow = [] if self.reasons_stock else list(self._find_reasons_slow(tower))
        parts = [] if self.reasons_stock or self.is_copy else [self.parts.patch_embed, *self.parts.mergers()]
        parts += self.callable_blocks.values()
        self.callable_parts = {id(vars(module)): id(part) for part in parts for module in part.modules()}

    def _watch(self, tower: Tower, attention: str | None) -> Watch:
        """Watch the modules of a tower, its attributes and its config. The tower itself is held weakly."""
        code = self.proof.code
        modules = [tower, *self._modules]
        own_forwards = [attributes for attributes in self.attributes_inside if "forward" in attributes]
        names = code.attributes_of_tower(tower).union(code.methods) - _BASE_NAMES - {"forward"}  # `checks` reads them
        # A tensor there is what a hook keeps of a call.
        names -= {name for name, value in vars(tower).items() if isinstance(value, Tensor)}
        config_of = partial(getattr, weakref.proxy(tower), "config")
        watch = Watch()
        watch.add("the tower's class", attrgetter("__class__"), [weakref.proxy(tower)])
        watch.add("the class of a module", type, self._modules)
        watch.add("a module inside", chained, [[module._modules.values() for module in modules if module._modules]])
        # A forward that is set on an instance is an attribute more.
        watch.add("the number of a module's attributes", len, self.attributes_inside)
        for name in ("forward", "_old_forward") if own_forwards else ():
            watch.add("the forward of a module inside", methodcaller("get", name), own_forwards)
        watch_methods(watch, {type(module) for module in modules} - code.classes)
        for parameters in self._parameters[:1] if self._is_proven_for_a_device else []:
            watch.add("the device or the dtype", _PLACE, parameters)
        functions = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS
        watch.add("the registered attention function", functions.get, [attention])
        watch.add("the tower's attribute", partial(attributes_of, weakref.ref(tower)), [names])
        watch.add("the config's field", partial(attributes_of, config_of), [frozenset(code.config_fields(tower))])
        watch.remember()
        return watch

    def current(self) -> bool:
        """Return whether the tower is as it was read."""
        return all(watch.unchanged() for watch in self._watches)

    def can_return(self) -> bool:
        """Return whether the tower may be as it was read again, after a switch was set back.

        It cannot where a module, a function or a tensor was replaced: this reading would keep that object alive.
        """
        if self._called_memory is not None:  # it holds the weights of called modules
            return False
        return all(watch.holds_same_objects() for watch in self._watches)

    def reason_changed(self) -> str | None:
        """Return what of the tower is not as it was read; None if nothing changed."""
        return next(filter(None, (watch.what_changed() for watch in self._watches)), None)

    def _read_parts(self, tower: Tower, family: Family) -> list[str]:
        """Read the tower's parts, geometry and heads. Return `reasons_stock`; parts may be unread if there are any."""
        reasons = []
        if not self.is_copy:  # the proof of a copy ran this very tower
            if not is_upstream(type(tower).forward):
                reasons.append(f"the forward of {type(tower).__name__} is not transformers' own")
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
        heads_of_layers = []
        for block in blocks:
            heads_of_layers.append(
                heads_of(self.parts, [self.module_attributes.read(block.attention, name) for name in _HEADS])
            )
            if self.module_attributes.read(block.attention, "attention_dropout", 0.0):
                self.dropout = True
        self.heads, self.head_dim, self.scale = heads_of_layers[0]
        self.has_varied_heads = any(heads != heads_of_layers[0] for heads in heads_of_layers)
        dims = 2 if isinstance(self.parts.projection, nn.Linear) else 4
        is_packed = not isinstance(weight, Tensor) or weight.dim() < dims or not weight.is_floating_point()
        self.width = None if is_packed else weight.shape[1:].numel()
        return reasons

    def _find_reasons_slow(self, tower: Tower) -> Iterator[str]:
        """Yield `reasons_slow`: what the fast path would miss, on modules that it never calls."""
        if self.proof.why_not_fast is not None:
            yield self.proof.why_not_fast
        if any(map(fsdp.is_version_1, self._modules)):
            yield fsdp.VERSION_1
            return
        if self.has_varied_heads:
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
            if index not in self.checkpoint_wrappers:
                wrappers = [module for module in block.module.modules() if CHECKPOINTED in module._modules]
                if wrappers:
                    yield f"a {type(wrappers[0]).__name__} is inside layer {index}"
                    break
        skipped = [("the tower", module) for module in self.parts.around]
        for index, block in enumerate(self.parts.blocks):
            skipped += [(f"layer {index}", block.module), (f"layer {index}", block.attention)]
        for where, module in skipped:
            if fsdp.class_of(module) not in self.proof.classes:
                yield f"{where} has a {type(module).__name__}, which this tower's class does not make"
                return
            reasons = reasons_replaced(module, trusted=self.trusted)
            if reasons:
                yield f"{where}: {reasons[0]}"
                return

    def weights(self) -> tuple[list[nn.Parameter], WeightMemory]:
        """Return the parameters as they are now, and their `WeightMemory`: the same object until an address changes.

        Parameters are not held between calls: that would keep weights alive that the user has replaced.
        """
        weights = self._weights
        parameters = list(chain.from_iterable(self._parameters))
        parameters += [value for value in chain.from_iterable(self._partial) if value is not None]
        parameters += [value for value in chain.from_iterable(self._others) if value is not None]
        pointers = weights.pointers
        try:
            comparable = _SAME_POINTERS is not None and pointers and len(parameters) == weights.count
            if not comparable or not _SAME_POINTERS(parameters, pointers, weights.indices):
                pointers = list(map(_POINTER, parameters))
            is_same = pointers == weights.pointers and parameters[0].dtype == weights.dtype
            if is_same and not [index for index in weights.transposable if not parameters[index].is_contiguous()]:
                return parameters, weights
        except (RuntimeError, TypeError):  # a tensor class without memory; a parameter that became None
            pass
        called_ids = self._called_ids
        self._read_parameters()  # a weight that was replaced may be None, or of another class
        if self._called_ids != called_ids:
            self._find_reasons(self._tower())
        parameters = [*chain.from_iterable(self._parameters), *chain.from_iterable(self._partial)]
        parameters = [parameter for parameter in parameters if parameter is not None]
        read = len(parameters)
        parameters += [value for value in chain.from_iterable(self._others) if value is not None]
        try:
            pointers = list(map(_POINTER, parameters))
        except RuntimeError:
            pointers = None
        self._weights = WeightMemory(parameters, pointers, self.offloaded, read, self._called_ids)
        self._read_weights()
        return parameters, self._weights

    def _read_weights(self) -> None:
        """Note which modules have buffers, and which inputs fit the weights."""
        modules = [*self.attributes_inside, vars(self._tower())]
        self._buffers = [attributes["_buffers"] for attributes in modules if attributes["_buffers"]]
        device = self.parts.projection.weight.device
        fits_any_device = self.offloaded or device.type == "meta"
        self.expected = Expected(
            merge=self.geometry.merge,
            width=self.width,
            device=None if fits_any_device else device,
            names=self._arguments,
            dims=self._pixel_dims,
        )

    def is_trained(self, parameters: Sequence[nn.Parameter]) -> bool:
        """Return whether any of the given parameters, or of a sharded layer's, requires a gradient."""
        if any(map(_REQUIRES_GRAD, parameters)):
            return True
        return any(value is not None and value.requires_grad for value in chain.from_iterable(self._sharded_parameters))

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
        weights = self._weights
        if weights.holds_plain_tensors is None:
            modules = [*self.attributes_inside, vars(self._tower())]
            values = chain.from_iterable(attributes.values() for attributes in modules)
            weights.holds_plain_tensors = any(isinstance(value, Tensor) for value in values)
        return weights.holds_plain_tensors

    def in_training_mode(self) -> bool:
        """Return whether a module inside is in training mode."""
        return any(attributes["training"] for attributes in self.attributes_inside)

    def outputs_require_grad(self) -> bool:
        """Return whether a hook of transformers makes the tower's outputs require gradients, whatever is trained.

        `enable_input_require_grads` sets it for checkpointing: modules after a frozen tower are not trained otherwise.
        """
        hooks_of_modules = [hooks for hooks in map(HOOKS[0], self.attributes_inside) if hooks]
        return any(is_output_marker(hook) for hooks in hooks_of_modules for hook in hooks.values())

    def request(self, device: torch.device, dtype: torch.dtype | None = None, **options: Any) -> Request:
        """Return what the layers ask of a backend.

        Args:
            dtype: That attention computes in, if it is known.
        """
        block = self.parts.blocks[0]
        dtype = dtype or getattr(getattr(block.qkv[0], "weight", None), "dtype", None)
        if dtype not in _COMPUTE_DTYPES:  # quantised: the norms keep the dtype that activations have
            dtype = block.norm1.weight.dtype
        assert isinstance(dtype, torch.dtype)
        sizes: dict[str, Any] = dict(heads=self.heads, head_dim=self.head_dim, scale=self.scale)
        return Request(device=device, dtype=dtype, **sizes, **options)


_HEADS = ("num_heads", "head_dim", "scaling")


_READ_AT_EVERY_CALL = {"gradient_checkpointing", "_gradient_checkpointing_func"}
"""Attributes that `checkpoints_of` reads at every call. Trainers switch them at every step."""
_BASE_NAMES = {
    *("config", "generation_config", "name_or_path", "warnings_issued", "_hf_vit_accel", "_hf_vit_accel_hooks"),
    *_READ_AT_EVERY_CALL,
    *vars(nn.Module()),
}
