"""Runs a module as if some packages were not installed: a plain install, timed where everything is there.

    python examples/benchmark/without.py flash_attn,flash_attn_interface,flashinfer,quack hf_vit_accel bench

The module's arguments follow its name.
"""

from __future__ import annotations

import runpy
import sys
from importlib.machinery import ModuleSpec
from typing import Any


class Without:
    """A finder that does not find some packages."""

    def __init__(self, finder: Any, hidden: frozenset[str]) -> None:
        self.finder, self.hidden = finder, hidden

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """What the finder finds, but for what is hidden."""
        found: ModuleSpec | None = None
        if name.partition(".")[0] not in self.hidden:
            found = self.finder.find_spec(name, path, target)
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self.finder, name)


if __name__ == "__main__":
    _, names, module, *arguments = sys.argv
    sys.meta_path[:] = [Without(finder, frozenset(names.split(","))) for finder in sys.meta_path]
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
