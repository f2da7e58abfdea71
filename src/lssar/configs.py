"""Validates the fields of dataclasses that are read from JSON."""

from __future__ import annotations

import dataclasses
from typing import Any


def check_fields(kind: Any, fields: dict[str, Any]) -> None:
    """ValueError for a name that is no field of the dataclass `kind`; a typing error must not pass in silence."""
    known = [field.name for field in dataclasses.fields(kind)]
    if unknown := sorted(set(fields) - set(known)):
        raise ValueError(f"unknown field {', '.join(map(repr, unknown))}; {kind.__name__} has {', '.join(known)}")
