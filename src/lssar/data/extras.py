"""Packages that only some sources and tokenizers need, imported when they are."""

from __future__ import annotations

import importlib
from typing import Any


def need(module: str, purpose: str) -> Any:
    """The module, or an ImportError that says what it is wanted for and how to get it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.split(".")[0]
        raise ImportError(f"{purpose} needs the package {package}: pip install 'lssar[data]' ({error})") from error
