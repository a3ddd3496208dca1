"""Settings that users pass by object, checked when they are made."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["GraphConfig"]


@dataclass(frozen=True, kw_only=True)
class GraphConfig:
    """How a tower is captured in CUDA graphs; see `hf_vit_accel.patch`.

    max_tokens: merged tokens of the largest budget (1280, Qwen's own example of `max_pixels`, are 5120 patches). Larger
    images run eagerly unless their very shape comes again and again: from about 4,000 patches on the launches hide
    behind the work.
    budgets: merged tokens of every budget, instead of the ladder up to `max_tokens`.
    exact_after: a shape that came this often is captured as it is, without padding; 0 for never.
    max_graphs, max_bytes: the least recently used graphs go when there are more, or when they hold more device memory.

    Raises ValueError for values that make no sense.
    """

    max_tokens: int = 1280
    budgets: tuple[int, ...] | None = None
    exact_after: int = 3
    max_graphs: int = 192
    max_bytes: int = 2 << 30

    def __post_init__(self) -> None:
        for name, least in (("max_tokens", 1), ("exact_after", 0), ("max_graphs", 1), ("max_bytes", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"expected {name} to be an integer of at least {least}, got {value!r}")
        if self.budgets is None:
            return
        budgets = tuple(self.budgets) if isinstance(self.budgets, Iterable) else ()
        positive = all(isinstance(budget, int) and not isinstance(budget, bool) and budget > 0 for budget in budgets)
        if not budgets or not positive or list(budgets) != sorted(set(budgets)):
            raise ValueError(f"expected budgets as increasing positive integers (merged tokens), got {self.budgets!r}")
        object.__setattr__(self, "budgets", budgets)
