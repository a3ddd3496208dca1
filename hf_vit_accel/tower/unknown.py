"""Vision towers of an unknown class that were loaded by one of our names: a warning says that they stay stock.

A model with the config of a tower is a wrapper around one, or an unknown tower. While it is made there is nothing
inside: it is too early to say. So it is noted, and looked at when a stock tower attends by one of our names.
"""

from __future__ import annotations

import weakref

from hf_vit_accel.families import FAMILIES, FAMILIES_OF_COPIES, Model, find_towers
from hf_vit_accel.families.copies import suggest_families
from hf_vit_accel.tower.proof import NAMES, warn_once

_NOTED: weakref.WeakValueDictionary[int, Model] = weakref.WeakValueDictionary()


def note(model: Model) -> None:
    """Note a model that has the config of a tower, and is none of a known class."""
    _NOTED[id(model)] = model


def warn() -> None:
    """Warn once per class of noted models in which no known tower was made."""
    for key, model in list(_NOTED.items()):
        del _NOTED[key]
        if model.config._attn_implementation in NAMES and not any(find_towers(model)):
            name = type(model).__name__
            families = ", ".join(family.name for family in FAMILIES)
            warn_once(
                f"{name} stays stock, but for its attention: it has the config of a supported vision tower, but is of "
                f"an unknown class. Known are the classes of transformers for {families}."
                + "".join(f" {sentence}." for sentence in suggest_families(model, FAMILIES_OF_COPIES))
            )
