"""Switch a Hugging Face model from softmax to LSSAR and fine-tune it.

    python examples/finetune_huggingface.py [STEPS]

The model here is a tiny Llama that is first trained with softmax for a few steps, so that nothing is downloaded; with
your own, write `AutoModelForCausalLM.from_pretrained(NAME, attn_implementation="lssar")` and fine-tune that. The
weights are the same before and after the switch; what they lose at first, fine-tuning brings back.
"""

import inspect
import sys
import tempfile

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import lssar.hf  # noqa: F401 (registers the mechanisms with transformers)

LENGTH, BATCH = 64, 8


def train(model, text, steps, name):
    optimiser = torch.optim.AdamW(model.parameters(), lr=2e-3)
    losses = []
    for _ in range(steps):
        starts = torch.randint(len(text) - LENGTH, (BATCH,))
        ids = torch.stack([text[start : start + LENGTH] for start in starts])
        loss = model(input_ids=ids, labels=ids).loss
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    print(f"{name}: loss {losses[0]:.3f} at the start, {sum(losses[-5:]) / len(losses[-5:]):.3f} at the end")
    return losses


def main(steps=60):
    torch.manual_seed(0)
    text = torch.tensor(list(inspect.getsource(inspect).encode()))
    config = LlamaConfig(
        vocab_size=257, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        bos_token_id=256, eos_token_id=256, pad_token_id=256,
    )  # fmt: skip
    softmax = AutoModelForCausalLM.from_config(config)
    before = train(softmax, text, steps, "softmax")
    with tempfile.TemporaryDirectory() as folder:
        softmax.save_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="lssar")
    after = train(model, text, steps, "the same weights with LSSAR, fine-tuned")
    return before, after


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 60)
