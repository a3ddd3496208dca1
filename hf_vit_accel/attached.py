"""What we attach to the modules of a model: hooks, and callables in the place of their methods."""

from __future__ import annotations

import weakref
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle


class OurMethod:
    """A callable in the place of a method of a module. It holds the module weakly: a deleted model is freed at once.

    A copy of the module gets one of its own. One that is copied or pickled alone, as a data loader does for its
    workers, holds its copy of the module.
    """

    __slots__ = ("__weakref__", "_copied", "_module")
    __name__: str

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)

    def _reduced(self, *settings: object) -> tuple[object, ...]:
        """Return the result of `__reduce__`, from the arguments of the constructor after the module."""
        return type(self).__new__, (type(self),), (self.__self__, *settings)

    def __setstate__(self, arguments: tuple[Any, ...]) -> None:
        self.__init__(*arguments)  # type: ignore[misc]
        module = arguments[0]
        if vars(module):  # a module that is copied with its method gets its attributes after it
            self._copied = module

    @property
    def __self__(self) -> Any:
        module = self._module()
        if module is None:
            raise ReferenceError(f"the model of this {self.__name__} was deleted; keep the model, and call it")
        return module


class OurHooks:
    """The handles of hooks of ours on a module.

    Shallow copies share this object, as they share dictionaries of hooks. Hooks go with the last of them: a dictionary
    stays the one that handles of others remove from.
    """

    def __init__(self, *handles: RemovableHandle) -> None:
        self._handles = handles

    def __del__(self) -> None:
        for handle in self._handles:
            handle.remove()
