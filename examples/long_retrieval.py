"""Hide a key in a long text and ask a released model for it, through Hugging Face's `generate`.

    python examples/long_retrieval.py [MULTIPLE] [MODEL]

The model was trained on windows of 128 bytes; the text is MULTIPLE times as long (16, if not given).
"""

import inspect
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import lssar.hf  # noqa: F401 (registers the model with transformers)

MODELS = Path(__file__).parent.parent / "models"
KEY = "48213"
FACT = f"\nThe pass key is {KEY}. Remember it. {KEY} is the pass key.\n"
QUESTION = "\nWhat is the pass key? The pass key is"


def main(multiple=16, name="tiny-long"):
    model = AutoModelForCausalLM.from_pretrained(MODELS / name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(MODELS / name)
    length = multiple * model.config.gpt.train_length
    source = inspect.getsource(inspect) * (1 + length // 100_000)
    room = length - len(FACT) - len(QUESTION) - 8
    text = tokenizer.bos_token + source[: room // 3] + FACT + source[room // 3 : room] + QUESTION
    prompt = tokenizer(text, return_tensors="pt")
    made = model.generate(**prompt, max_new_tokens=6, do_sample=False)
    answer = tokenizer.decode(made[0, prompt["input_ids"].shape[1] :]).strip()
    found = answer.startswith(KEY)
    print(
        f"{name}, {prompt['input_ids'].shape[1]:,} bytes ({multiple}x): {answer!r}, {'found' if found else 'not found'}"
    )
    return found


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 16, *sys.argv[2:3])
