"""lssar in Hugging Face transformers. Importing this module registers everything; `import lssar` registers nothing.

    import lssar.hf
    model = AutoModelForCausalLM.from_pretrained(NAME, attn_implementation="lssar")

`attn_implementation` takes `"lssar"`, `"lssa"`, and `"lssar_NAME"` for every other name of `lssar.specs()`. The import
also registers our own model with `AutoConfig` and `AutoModelForCausalLM`, and makes transformers write the mechanism
into config.json (see `_save_mechanism_with_configs`).
"""

from __future__ import annotations

import functools
from typing import Any

from lssar.specs import spec, specs

LEAST_VERSION = (5, 17)
PREFIX = "lssar_"
"""transformers has one namespace of attention functions for everybody: generic names such as "softmax" get a prefix."""
UNPREFIXED = ("lssar", "lssa")


def mechanisms() -> dict[str, str]:
    """`attn_implementation` name -> spec name, for every spec but those that would add weights to a model."""
    plain = [name for name in specs() if not spec(name).learns]
    return {name if name in UNPREFIXED else PREFIX + name: name for name in plain}


def check_version() -> None:
    """Raise ImportError unless transformers is installed and recent enough."""
    try:
        import transformers
    except ImportError as error:
        raise ImportError("the Hugging Face integration needs transformers: pip install 'lssar[hf]'") from error
    version = transformers.__version__
    if tuple(int(part) for part in version.split(".")[:2] if part.isdigit()) < LEAST_VERSION:
        raise ImportError(f"lssar needs transformers {'.'.join(map(str, LEAST_VERSION))} or newer; found {version}")


def _register() -> None:
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    from lssar.hf.attention import attention_function
    from lssar.hf.config import LssarConfig
    from lssar.hf.masks import visible_keys
    from lssar.hf.model import LssarForCausalLM

    for name, spec_name in mechanisms().items():
        # Both halves: without a mask function transformers would pass no mask, and padding would be visible.
        AttentionInterface.register(name, attention_function(name, spec_name))
        AttentionMaskInterface.register(name, visible_keys)
    AutoConfig.register(LssarConfig.model_type, LssarConfig, exist_ok=True)
    AutoModelForCausalLM.register(LssarConfig, LssarForCausalLM, exist_ok=True)
    _save_mechanism_with_configs()
    _hand_changes_to_text_configs()


def _save_mechanism_with_configs() -> None:
    """Make configs write `attn_implementation` into config.json when it is one of ours.

    transformers reads this field but does not write it. Without it a reloaded model would silently run softmax on
    weights that were trained with another mechanism. With it a reload uses the same mechanism or, in a process without
    `import lssar.hf`, fails with an error that names it. A field set on single configs would not survive a reload
    followed by a save, so the method is wrapped.
    """
    from transformers.configuration_utils import PreTrainedConfig

    original = PreTrainedConfig.to_dict
    if hasattr(original, "writes_lssar_mechanism"):
        return
    names = frozenset(mechanisms())

    @functools.wraps(original)
    def to_dict(self: Any) -> dict[str, Any]:
        fields = original(self)
        if (name := getattr(self, "_attn_implementation", None)) in names:
            fields["attn_implementation"] = name
        return fields

    to_dict.writes_lssar_mechanism = True  # type: ignore[attr-defined]
    PreTrainedConfig.to_dict = to_dict  # type: ignore[method-assign]


def _hand_changes_to_text_configs() -> None:
    """Make `lssar` of a composite config, such as one of text and vision, that of its text config.

    Layers know their own config only, and transformers drops the composite one where it loads the text model alone:
    what was set there would be ignored. Configs without parts keep `lssar` among their fields, as before.
    """
    from transformers.configuration_utils import PreTrainedConfig

    def get(self: Any) -> Any:
        if "lssar" in (fields := vars(self)):
            return fields["lssar"]
        try:
            text = self.get_text_config()
        except ValueError:  # several texts
            text = self
        if text is self:
            raise AttributeError(f"{type(self).__name__} has no lssar")
        return text.lssar

    def set_(self: Any, changes: Any) -> None:
        if (text := self.get_text_config()) is self:
            vars(self)["lssar"] = changes
        else:
            text.lssar = changes

    PreTrainedConfig.lssar = property(get, set_)  # type: ignore[attr-defined]


check_version()
_register()
