"""Run a module as if some packages were not installed, to time a plain install on a machine that has them all.

    python benchmarks/without.py flash_attn,flash_attn_interface,flashinfer,quack hf_vit_accel bench

The arguments of the module follow its name.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class Without:
    """Wrap an import finder so that it does not find the hidden packages."""

    def __init__(self, finder: Any, hidden: frozenset[str]) -> None:
        self.finder = finder
        self.hidden = hidden

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the wrapped finder's spec, or None for a hidden package."""
        if name.partition(".")[0] in self.hidden:
            return None
        spec: ModuleSpec | None = self.finder.find_spec(name, path, target)
        return spec

    def __getattr__(self, name: str) -> Any:
        return getattr(self.finder, name)


if __name__ == "__main__":
    if not sys.argv[1:] or sys.argv[1] in ("-h", "--help"):
        print(__doc__)
        raise SystemExit
    _, names, module, *arguments = sys.argv
    sys.meta_path[:] = [Without(finder, frozenset(names.split(","))) for finder in sys.meta_path]
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
