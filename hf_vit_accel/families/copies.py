"""Towers of other classes, as remote code ships them, that a user wants served as a family.

`patch(model, like={"MyTower": "qwen2_5_vl"})` names the class and the family. The parts are matched here;
`tower/proof.py` then proves the results. A family is never guessed, but an error may suggest one.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import transformers
from torch import nn

from hf_vit_accel.families.base import Family, Parts, Tower
from hf_vit_accel.layout import Geometry


@dataclass(frozen=True, kw_only=True)
class CopyFamily(Family):
    """A family as it applies to one class of other code, which the user named."""

    copied: str = ""

    def trusted_classes(self, tower: nn.Module) -> frozenset[type]:
        """Return the classes of a copy's modules that its own package defines."""
        package = type(tower).__module__.partition(".")[0]
        kinds = {type(module) for module in tower.modules()}
        return frozenset(kind for kind in kinds if kind.__module__.partition(".")[0] == package)


def copy_family(tower: Tower, base: Family, copied: str) -> CopyFamily:
    """Return the family that serves a copy."""
    values = {item.name: getattr(base, item.name) for item in fields(Family)}
    return CopyFamily(copied=copied, **values | {"arguments": tuple(_arguments(tower)[:2])})


def class_in(names: Mapping[str, str], module: nn.Module) -> str | None:
    """Return the name that a module's class has, or a class that it inherits from; None for none of the names."""
    return next((kind.__name__ for kind in type(module).__mro__ if kind.__name__ in names), None)


def _arguments(tower: nn.Module) -> list[str]:
    """Return the parameters of the forward of a tower's class that need no name."""
    parameters = list(inspect.signature(type(tower).forward).parameters.values())[1:]
    kinds = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.POSITIONAL_ONLY
    return [parameter.name for parameter in parameters if parameter.kind in kinds]


def misfits(tower: Tower, family: Family) -> list[str]:
    """List the parts of a tower that are missing, or differ from a family's."""
    problems = []
    if not isinstance(getattr(tower, "config", None), transformers.PretrainedConfig):
        problems.append("it has no `config` of transformers")
    names = _arguments(tower)
    if names[1:2] != ["grid_thw"]:
        problems.append(f"its forward takes ({', '.join(names)}), and not pixels and grid_thw")
    try:
        parts = family.parts(tower)
    except (AttributeError, TypeError, ValueError, IndexError) as error:
        return [*problems, str(error)]
    if not parts.blocks:
        return [*problems, "missing: blocks"]
    try:
        geometry = family.geometry(tower)
    except (AttributeError, TypeError, ValueError) as error:
        return [*problems, str(error)]
    return problems + _differences(tower, family, parts, geometry)


def _differences(tower: Tower, family: Family, parts: Parts, geometry: Geometry) -> list[str]:
    """List the parts that a tower has beyond a family's, or lacks, where the family's code would raise no error."""
    has_window = parts.full_layers is not None
    has_deepstack = hasattr(tower, "deepstack_merger_list")
    pairs = [
        ("windows (fullatt_block_indexes)", has_window, family.windows),
        ("deepstack mergers (deepstack_merger_list)", has_deepstack, family.deepstack),
        ("a table of positions (pos_embed)", parts.table is not None, geometry.table is not None),
    ]
    problems = []
    for name, has_part, is_expected in pairs:
        if has_part != is_expected:
            problems.append(f"it has {name}" if has_part else f"missing: {name}")
    if not hasattr(parts.blocks[0].attention, "num_heads"):
        problems.append("missing: num_heads of the attention of block 0")
    return problems


def suggest_families(model: nn.Module, families: Sequence[Family]) -> list[str]:
    """Describe every module that looks like a tower of an unknown class, with the family that it resembles most."""
    sentences = []
    for path, module in model.named_modules():
        if not (hasattr(module, "patch_embed") and hasattr(module, "blocks")):
            continue
        problems = {family.name: misfits(module, family) for family in families}
        name = min(problems, key=lambda family_name: len(problems[family_name]))
        kind = type(module).__name__
        where = f"{path or 'the model itself'} is a {kind}"
        if problems[name]:
            sentences.append(f"{where}, which resembles {name}, but differs ({'; '.join(problems[name])})")
        else:
            line = f'hf_vit_accel.patch(model, like={{"{kind}": "{name}"}})'
            sentences.append(f"{where}, whose parts look like {name}; if it is a copy of that tower, call {line}")
    return sentences
