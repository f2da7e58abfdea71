"""Our GPT as a transformers model: its caches, masks, loss and `generate` around `lssar.model.GPT`, same arithmetic."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicCache
from transformers.generation import GenerationMixin
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.modeling_utils import PreTrainedModel

from lssar.hf.attention import masked_attention
from lssar.hf.config import LssarConfig
from lssar.model import GPT
from lssar.nn import LayerCache, Positions

IMPLEMENTATION = "lssar"
"""The name by which transformers finds the mask function. The mechanism itself is part of the model's config."""


class LssarForCausalLM(PreTrainedModel, GenerationMixin):
    """A run of `lssar train` in transformers; made by `lssar export`, loaded by `AutoModelForCausalLM`."""

    config_class = LssarConfig
    base_model_prefix = "gpt"
    supports_gradient_checkpointing = True
    _no_split_modules = {"Block"}  # noqa: RUF012 (as transformers types it)
    _can_compile_fullgraph = True
    _supports_attention_backend = True

    def __init__(self, config: LssarConfig) -> None:
        super().__init__(config)
        self.gpt = GPT(config.gpt)
        self.gradient_checkpointing = False
        self.post_init()

    def _check_and_adjust_attn_implementation(self, attn_implementation: str | None, *_: Any, **__: Any) -> str:
        if attn_implementation not in (None, IMPLEMENTATION):
            raise ValueError(
                f"this model has its mechanism in its config ({self.config.gpt.layout!r}, trained in); "
                f"attn_implementation={attn_implementation!r} would run other arithmetic over its weights"
            )
        return IMPLEMENTATION

    def _init_weights(self, module: nn.Module) -> None:
        self.gpt.initialise(module)

    def get_input_embeddings(self) -> nn.Module:
        return self.gpt.embed

    def set_input_embeddings(self, value: nn.Module) -> None:
        assert isinstance(value, nn.Embedding)
        self.gpt.embed = value

    def get_output_embeddings(self) -> None:
        """None of its own: the head is the embedding."""

    def resize_token_embeddings(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError("the vocabulary is fixed when the model is made: config.model['vocab_size']")

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | dict[str, Tensor | None] | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast | tuple:
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds")
        for wanted in ("output_attentions", "output_hidden_states"):
            if kwargs.get(wanted) or getattr(self.config, wanted, False):
                raise ValueError(f"{wanted} is not supported; `lssar diagnose` shows attention rows")
        x = self.gpt.embed(input_ids) if inputs_embeds is None else inputs_embeds
        recompute = self._gradient_checkpointing_func if self.gradient_checkpointing and self.training else None
        use_cache = (self.config.use_cache if use_cache is None else use_cache) and recompute is None
        positions = self._positions(x, attention_mask, position_ids, past_key_values, kwargs.get("cu_seq_lens_q"))
        if use_cache and past_key_values is None and not self.training:  # after the mask, which for packs wants none
            past_key_values = DynamicCache(config=self.config)
        caches = None
        if past_key_values is not None:
            caches = [_TransformersCache(past_key_values, layer) for layer in range(self.gpt.config.layers)]
        hidden = self.gpt.through(x, positions, caches, recompute)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.gpt.logits(hidden[:, kept])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.gpt.config.vocab_size, **kwargs)
        cache: Any = past_key_values  # transformers' own annotations of it differ between versions
        output = CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=cache)
        return output if (self.config.return_dict if return_dict is None else return_dict) else output.to_tuple()

    def _positions(
        self, x: Tensor, mask: Tensor | dict | None, position_ids: Tensor | None, cache: Cache | None,
        cu_seqlens: Tensor | None,
    ) -> Positions:  # fmt: skip
        if position_ids is None:
            seen = cache.get_seq_length() if cache is not None else 0
            position_ids = (torch.arange(x.shape[1], device=x.device) + seen)[None]
        masks = mask if isinstance(mask, dict) else self._masks(x, mask, position_ids, cache)  # generate makes a dict

        def attend(q: Tensor, k: Tensor, v: Tensor, mechanism: Any, window: int | None, **learned: Any) -> Tensor:
            seen = masks["full_attention" if window is None else "sliding_attention"]
            return masked_attention(q, k, v, mechanism, mask=seen, cu_seqlens=cu_seqlens, **learned)[0]

        return self.gpt.positions(position_ids[:, None], self.config.ntk_factor, attend=attend)

    def _masks(self, x: Tensor, mask: Tensor | None, position_ids: Tensor, cache: Cache | None) -> dict[str, Any]:
        """A mask for each type of layer that the model has."""
        arguments: dict[str, Any] = dict(
            config=self.config, inputs_embeds=x, attention_mask=mask, past_key_values=cache, position_ids=position_ids
        )
        makers = {"full_attention": create_causal_mask, "sliding_attention": create_sliding_window_causal_mask}
        return {kind: makers[kind](**arguments) for kind in dict.fromkeys(self.config.layer_types or [])}


class _TransformersCache(LayerCache):
    """One layer of a transformers cache, which keeps two tensors a layer: ours are stored in two halves."""

    def __init__(self, cache: Cache, layer: int) -> None:
        super().__init__(room=0)  # the transformers cache decides how much fits
        self.cache, self.layer = cache, layer

    def append(self, *new: Tensor) -> tuple[Tensor, ...]:
        half = len(new) // 2
        parts = new[:half], new[half:]
        keys, values = self.cache.update(torch.cat(parts[0], -1), torch.cat(parts[1], -1), self.layer)
        return tuple(
            piece
            for whole, part in zip((keys, values), parts)
            for piece in whole.split([x.shape[-1] for x in part], -1)
        )
