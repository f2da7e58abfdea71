"""lssar inside other libraries. Nothing of theirs is imported before somebody else imports it."""

from __future__ import annotations

from functools import partial
from importlib import import_module

from lssar.integrations.imports import when_imported


def watch() -> None:
    """Where transformers is used beside lssar, let it know our mechanisms and our model, part by part as it loads."""
    for module, part in (
        ("transformers.modeling_utils", "register_attention"),
        ("transformers.models.auto.configuration_auto", "register_config"),
        ("transformers.models.auto.modeling_auto", "register_model"),
    ):
        when_imported(module, partial(_register, part))


def _register(part: str) -> None:
    getattr(import_module("lssar.integrations.huggingface"), part)()
