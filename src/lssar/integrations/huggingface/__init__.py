"""lssar in Hugging Face transformers: any model with any of our mechanisms, and our own model as an AutoModel.

import lssar                                                       # is enough: transformers is told as it loads
model = AutoModelForCausalLM.from_pretrained(NAME, attn_implementation="lssar")

`register()` does the same by hand, and says what is wrong if it cannot be done.
"""

from __future__ import annotations

import functools
from typing import Any

from lssar.specs import spec, specs

LEAST_VERSION = (5, 17)


def mechanisms() -> tuple[str, ...]:
    """The names that `attn_implementation` takes: every spec but those that would add weights to a model."""
    return tuple(name for name in specs() if spec(name).head_scale is None)


def register() -> tuple[str, ...]:
    """Make `attn_implementation="lssar"`, `"lssa"`, ... and our own model known to transformers; returns the names.

    May be called any number of times. A model's own settings go into its config, where they are saved with it:
    `config.lssar = {"p": 3}` changes fields of the mechanism (see `lssar.AttentionSpec`).
    """
    check_version()
    register_attention()
    register_config()
    register_model()
    return mechanisms()


def check_version() -> None:
    try:
        import transformers
    except ImportError as error:
        raise ImportError("the Hugging Face integration needs transformers: pip install 'lssar[hf]'") from error
    version = transformers.__version__
    if tuple(int(part) for part in version.split(".")[:2] if part.isdigit()) < LEAST_VERSION:
        raise ImportError(f"lssar needs transformers {'.'.join(map(str, LEAST_VERSION))} or newer; found {version}")


def register_attention() -> None:
    """Both halves of each mechanism: without the mask half transformers would pass no mask and say nothing."""
    check_version()
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    from lssar.integrations.huggingface.attention import attention_function
    from lssar.integrations.huggingface.masks import visible_keys

    for name in mechanisms():
        AttentionInterface.register(name, attention_function(name))
        AttentionMaskInterface.register(name, visible_keys)
    _keep_mechanism_in_saved_configs()


def register_config() -> None:
    check_version()
    from transformers.models.auto.configuration_auto import AutoConfig

    from lssar.integrations.huggingface.config import LssarConfig

    AutoConfig.register(LssarConfig.model_type, LssarConfig, exist_ok=True)


def register_model() -> None:
    check_version()
    from transformers.models.auto.modeling_auto import AutoModelForCausalLM

    from lssar.integrations.huggingface.config import LssarConfig
    from lssar.integrations.huggingface.model import LssarForCausalLM

    AutoModelForCausalLM.register(LssarConfig, LssarForCausalLM, exist_ok=True)


def _keep_mechanism_in_saved_configs() -> None:
    """Write `attn_implementation` into config.json when it is one of ours.

    transformers leaves it out, so that a reload would run softmax over weights that were trained with something else,
    without a word. It does read the field: a reload then has the same mechanism, or, where lssar was not imported, an
    error that names it.
    """
    from transformers.configuration_utils import PreTrainedConfig

    plain = PreTrainedConfig.to_dict
    if getattr(plain, "keeps_mechanism", False):
        return

    @functools.wraps(plain)
    def to_dict(self: Any) -> dict[str, Any]:
        fields = plain(self)
        if (name := getattr(self, "_attn_implementation", None)) in mechanisms():
            fields["attn_implementation"] = name
        return fields

    to_dict.keeps_mechanism = True  # type: ignore[attr-defined]
    PreTrainedConfig.to_dict = to_dict  # type: ignore[method-assign]
