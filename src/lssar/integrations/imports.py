"""Run something when a module is imported by somebody else, so that `import lssar` itself imports nothing heavy."""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
import warnings
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def when_imported(module: str, action: Callable[[], Any]) -> None:
    """Call `action` right after `module` is imported, or now if it is already. What it raises becomes a warning."""
    if _is_whole(sys.modules.get(module)):
        _try(module, action)
        return
    if _WATCHER not in sys.meta_path:
        sys.meta_path.insert(0, _WATCHER)
    _WATCHER.waiting.setdefault(module, []).append(action)


def _is_whole(module: ModuleType | None) -> bool:
    return module is not None and not getattr(getattr(module, "__spec__", None), "_initializing", False)


def _try(module: str, action: Callable[[], Any]) -> None:
    try:
        action()
    except Exception as error:  # somebody else's import must not fail for us
        warnings.warn(f"lssar could not be joined to {module.partition('.')[0]}: {error}", stacklevel=2)


class _Watcher(importlib.abc.MetaPathFinder):
    def __init__(self) -> None:
        self.waiting: dict[str, list[Callable[[], Any]]] = {}
        self.finding: set[str] = set()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self.waiting or fullname in self.finding:
            return None
        self.finding.add(fullname)
        try:
            spec = importlib.util.find_spec(fullname)  # by the other finders
        finally:
            self.finding.discard(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _ThenLoader(spec.loader, fullname)
        return spec


class _ThenLoader(importlib.abc.Loader):
    """The module's own loader, and afterwards the actions."""

    def __init__(self, loader: Any, name: str) -> None:
        self.loader, self.name = loader, name

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self.loader  # nobody need know that we were here
        if module.__spec__ is not None:
            module.__spec__.loader = self.loader
        self.loader.exec_module(module)
        for action in _WATCHER.waiting.pop(self.name, []):
            _try(self.name, action)


_WATCHER = _Watcher()
