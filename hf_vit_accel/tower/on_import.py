"""Call a function once a module has been imported, without importing it.

`transformers.modeling_utils` takes two seconds to import. Programs that load no model never pay for it.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType


def after_import(name: str, act: Callable[[], None]) -> None:
    """Call `act` now if the module is imported, else right after its import."""
    finder = _Finder(name, act)
    sys.meta_path.insert(0, finder)
    if name in sys.modules:  # looked at last: another thread may import it meanwhile
        sys.meta_path.remove(finder)
        act()


class _Finder:
    """Finds one module by the finders of others, and lets its loader call `act` once the module has run."""

    def __init__(self, name: str, act: Callable[[], None]) -> None:
        self.name = name
        self.act = act
        self.is_searching = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of the module; None for all other modules, and where another finder asks all finders."""
        if fullname != self.name or self.is_searching:
            return None
        self.is_searching = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self.is_searching = False
        if spec is not None and spec.loader is not None:
            run_module = spec.loader.exec_module

            def run_and_act(module: ModuleType) -> None:
                run_module(module)  # after an error it may be imported again, so the finder stays
                if self in sys.meta_path:
                    sys.meta_path.remove(self)
                self.act()

            spec.loader.exec_module = run_and_act  # type: ignore[method-assign]
        return spec
