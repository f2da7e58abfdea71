"""Train a Hugging Face model with LSSAR on several GPUs, sharded by FSDP2 through accelerate.

    torchrun --nproc-per-node 8 examples/accelerate_fsdp2.py [MODEL] [OUT]

MODEL is a name or folder for `from_pretrained`; without one, a tiny Llama is made, so that nothing is downloaded. OUT
gets the trained model, which loads with its mechanism. The text stands for your own: bytes of Python source.
"""

import inspect
import os
import sys

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.utils import set_seed
from transformers import AutoModelForCausalLM, LlamaConfig

import lssar.hf  # noqa: F401 (registers the mechanisms with transformers)

LENGTH, BATCH = 64, 8


def make_model(name=None):
    if name is not None:
        return AutoModelForCausalLM.from_pretrained(name, attn_implementation="lssar")
    config = LlamaConfig(
        vocab_size=257, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, bos_token_id=256, eos_token_id=256, pad_token_id=256,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config, attn_implementation="lssar")


def make_accelerator():
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",  # each decoder layer is a unit: gathered, used and freed in turn
        reshard_after_forward=True,
        activation_checkpointing=False,  # True saves memory at long contexts, for a second forward pass of each layer
    )
    # mixed_precision="bf16": weights and optimiser stay float32, and layers compute in bfloat16.
    accelerator = Accelerator(fsdp_plugin=plugin, mixed_precision="bf16" if torch.cuda.is_available() else "no")
    if int(os.environ.get("WORLD_SIZE", 1)) > 1 and not accelerator.is_fsdp2:
        raise SystemExit("accelerate shards models on GPUs only, and there are none here: start one process")
    return accelerator


def main(name=None, out=None, steps=60):
    set_seed(0)
    accelerator = make_accelerator()
    text = torch.tensor(list(inspect.getsource(inspect).encode()))
    windows = [text[start : start + LENGTH] for start in range(0, len(text) - LENGTH, LENGTH)]
    order = torch.utils.data.RandomSampler(windows, generator=torch.Generator().manual_seed(0))
    batches = torch.utils.data.DataLoader(windows, BATCH // accelerator.num_processes, sampler=order, drop_last=True)
    model = make_model(name)
    optimiser = torch.optim.AdamW(model.parameters(), lr=2e-3)
    model, optimiser, batches = accelerator.prepare(model, optimiser, batches)

    losses = []
    while len(losses) < steps:
        for ids in batches:
            loss = model(input_ids=ids, labels=ids).loss
            optimiser.zero_grad()
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimiser.step()
            losses.append(accelerator.reduce(loss.detach(), "mean").item())
            if len(losses) == steps:
                break
    accelerator.print(f"loss {losses[0]:.3f} at the start, {sum(losses[-5:]) / len(losses[-5:]):.3f} at the end")

    if out is not None:
        weights = accelerator.get_state_dict(model)  # gathered in process 0, in CPU memory
        if accelerator.is_main_process:
            accelerator.unwrap_model(model).save_pretrained(out, state_dict=weights)
    accelerator.wait_for_everyone()
    accelerator.end_training()
    return losses


if __name__ == "__main__":
    main(*sys.argv[1:3])
