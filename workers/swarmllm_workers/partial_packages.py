"""Imports of the packages `gguf` and `llama_cpp` only the modules that are asked for.

Both import all their modules, and those YAML, a cache on disk and handlers of chats. A worker needs the
numbers of one and the C functions of the other. Without the rest its imports take 5 MB less memory and 0.87
of the processor time (median of 12 pairs on a Zen 3).

Whoever asks for another name of a package gets all of it, with the modules that are there already.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, Final

_VERSION: Final = re.compile(r'^__version__ = "([^"]+)"$', re.MULTILINE)
_settings: Final[list[Callable[[], None]]] = []


def keep_set(setting: Callable[[], None]) -> None:
    """Make a setting of libllama now, and again where all of `llama_cpp` is imported, which makes its own."""
    setting()
    _settings.append(setting)


def import_modules_alone() -> None:
    """Call this before anything imports one of them. Does nothing for a package that is imported already."""
    for name in ("gguf", "llama_cpp"):
        if name not in sys.modules and (spec := find_spec(name)):
            sys.modules[name] = _Package(spec)


class _Package(ModuleType):
    """A package whose `__init__` has not run yet."""

    def __init__(self, spec: ModuleSpec) -> None:
        super().__init__(spec.name)
        self.__spec__, self.__file__, self.__loader__ = spec, spec.origin, spec.loader
        self.__path__ = list(spec.submodule_search_locations or ())
        self.__package__ = spec.name
        if found := _VERSION.search(Path(spec.origin or "").read_text()):
            self.__version__ = found[1]

    def __getattr__(self, name: str) -> Any:
        """Runs for names that are not known yet."""
        spec = self.__spec__
        if spec is None or spec.loader is None:
            raise AttributeError(name)
        if not name.startswith("_") and find_spec(f"{spec.name}.{name}"):
            return import_module(f"{spec.name}.{name}")
        self.__class__ = ModuleType  # type: ignore[assignment]  # it is a whole one from now on
        spec.loader.exec_module(self)
        for setting in _settings:
            setting()
        return getattr(self, name)
