"""Count the work of a process, and show it as a bar."""

from __future__ import annotations

import sys
import time
from collections import Counter

import torch
from tqdm import tqdm

_BAR = "{percentage:3.0f}%|{bar}| [{elapsed}<{remaining}{postfix}]"


class Progress:
    """Count the work of this process. The bar is one of vision tokens, since large items come first."""

    def __init__(self, items: int, tokens: int, *, begin: float, is_shown: bool) -> None:
        self.items = items
        self.counts: Counter[str] = Counter()
        self.waited = 0.0  # seconds in which the model waited for pictures
        self.seconds = 1e-9  # until the last batch; never zero
        self._begin = begin  # of the work on pictures, by `time.perf_counter`: headers are read first
        pause = 1 if sys.stderr.isatty() else 30  # seconds; a log file needs few lines
        self._bar = tqdm(total=tokens, disable=not is_shown, bar_format=_BAR, mininterval=pause)

    def add(self, items: int, tokens: int, **counts: int) -> None:
        self.counts.update(items=items, **counts)
        self.seconds = time.perf_counter() - self._begin
        self._bar.set_postfix_str(f"{self.counts['items']} of {self.items} items", refresh=False)
        self._bar.update(tokens)

    def summary(self) -> str:
        self._bar.close()
        rates = {name: self.counts[name] / self.seconds for name in ("items", "vision", "text")}
        parts = [
            f"{self.counts['items']} of {self.items} items in {self.seconds:.1f} s",
            f"{rates['items']:.2f} items/s, {rates['vision']:.0f} vision tokens/s, {rates['text']:.0f} text tokens/s",
            f"the model waited for pictures {self.waited / self.seconds:.0%} of the time",
            f"{self.counts['failed']} records failed",
        ]
        if torch.cuda.is_initialized():
            parts.append(f"at most {torch.cuda.max_memory_allocated() / 1e9:.1f} GB of the GPU's memory in use")
        if self.counts["halved"]:
            parts.append(f"{self.counts['halved']} batches halved")
        return "; ".join(parts)
