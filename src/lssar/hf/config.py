"""Our model's settings as transformers keeps them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from transformers.configuration_utils import PreTrainedConfig

from lssar.model import ModelConfig, model_config

REMOTE_MODULE = "modeling_lssar"
REMOTE_CODE = '''"""Loads this model in a process that has not imported lssar.hf (trust_remote_code=True)."""

import lssar.hf  # pip install 'lssar[hf]'
from lssar.hf.config import LssarConfig
from lssar.hf.model import LssarForCausalLM

__all__ = ["LssarConfig", "LssarForCausalLM"]
'''
AUTO_MAP = {
    "AutoConfig": f"{REMOTE_MODULE}.LssarConfig",
    "AutoModelForCausalLM": f"{REMOTE_MODULE}.LssarForCausalLM",
}


class LssarConfig(PreTrainedConfig):
    """`model` holds every field of `lssar.model.ModelConfig`, the mechanism among them; the rest is transformers'."""

    model_type = "lssar"
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values"]

    model: dict | None = None
    ntk_factor: float = 1.0
    """Context as a multiple of the trained one for which the rotary base is scaled (NTK-aware); 1: as trained."""
    layer_types: list | None = None
    """Names that transformers uses; derived from `model`, as is the next."""
    sliding_window: int | None = None
    use_cache: bool = True
    tie_word_embeddings: bool = True
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    pad_token_id: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        gpt = ModelConfig.from_dict(self.model) if self.model else model_config("124m")
        if len(windows := {layer.window for layer in gpt.layer_configs if layer.window is not None}) > 1:
            raise ValueError(
                f"transformers has one window for all sliding layers; {gpt.layout!r} has {sorted(windows)}"
            )
        if 1 in windows:
            raise ValueError(
                f"transformers caches window - 1 tokens, but all where that is 0; {gpt.layout!r} has a window of 1"
            )
        self.model = gpt.to_dict()
        self.layer_types = ["sliding_attention" if layer.window else "full_attention" for layer in gpt.layer_configs]
        self.sliding_window = next(iter(windows), None)
        super().__post_init__(**kwargs)

    def to_dict(self) -> dict[str, Any]:
        fields = super().to_dict()
        fields.pop("attn_implementation", None)  # the mechanism is in `model`, and no other may be asked for
        return {**fields, "auto_map": AUTO_MAP}

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        """Saves as transformers does, with the module that `auto_map` names."""
        super().save_pretrained(save_directory, *args, **kwargs)
        (Path(save_directory) / f"{REMOTE_MODULE}.py").write_text(REMOTE_CODE)

    @property
    def gpt(self) -> ModelConfig:
        return ModelConfig.from_dict(self.model or {})

    # The names under which transformers, its caches and lm-eval look for the same facts.
    vocab_size = property(lambda self: self.model["vocab_size"])
    hidden_size = property(lambda self: self.model["width"])
    num_hidden_layers = property(lambda self: self.model["layers"])
    num_attention_heads = property(lambda self: self.model["heads"])
    num_key_value_heads = property(lambda self: self.model["key_heads"] or self.model["heads"])
    head_dim = property(lambda self: self.model["width"] // self.model["heads"])
    max_position_embeddings = property(lambda self: self.model["train_length"])
