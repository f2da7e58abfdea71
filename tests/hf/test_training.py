"""Training transformers models with our mechanisms: by hand, at lower precision, by transformers' Trainer."""

import pytest
import torch

transformers = pytest.importorskip("transformers")
from tests.hf.families import make, padded, tokens  # noqa: E402


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "gpt2"])
@pytest.mark.parametrize("mechanism", ["lssar", "lssar_cosine_softmax"])
def test_loss_falls(family, mechanism):
    model = make(family, mechanism, torch.float32).train()
    torch.manual_seed(0)
    model.apply(model._init_weights)
    if family == "llama":
        model.gradient_checkpointing_enable()
    batch = padded([tokens(24, seed=1), tokens(17, seed=2)], "right")
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(25):
        loss = model(**batch, labels=labels).loss
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


def test_gradient_checkpointing_changes_nothing():
    batch = padded([tokens(13, seed=1), tokens(8, seed=2)], "left")
    gradients = []
    for checkpointing in (False, True):
        model = make("llama").train()
        if checkpointing:
            model.gradient_checkpointing_enable()
        model(**batch, labels=batch["input_ids"]).loss.backward()
        gradients.append([p.grad for p in model.parameters()])
    torch.testing.assert_close(gradients[0], gradients[1])


def test_bfloat16_weights_and_autocast():
    model = make("llama", dtype=torch.float32)
    batch = padded([tokens(13, seed=1), tokens(8, seed=2)], "left")
    real = batch["attention_mask"].bool()
    exact = model(**batch).logits[real]
    with torch.autocast("cpu", torch.bfloat16):
        mixed = model(**batch).logits[real]
    low = model.bfloat16()(**batch).logits[real]
    for got in (mixed, low):
        assert got.dtype == torch.bfloat16
        error = (got.float() - exact).norm() / exact.norm()
        assert 0 < error < 0.15


def test_trainer_drives_it(tmp_path, no_network):
    """transformers' own loop: padded batches, accumulation, evaluation, checkpoints, resumption."""
    pytest.importorskip("accelerate")
    rows = [tokens(int(n), seed=int(n)) for n in torch.randint(6, 20, (32,))]

    def collate(items):
        batch = padded([item["ids"] for item in items], "right")
        return batch | {"labels": batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)}

    def trainer(model, steps):
        settings = transformers.TrainingArguments(
            output_dir=str(tmp_path), max_steps=steps, per_device_train_batch_size=4, gradient_accumulation_steps=2,
            learning_rate=1e-2, lr_scheduler_type="constant", save_steps=10, logging_steps=5, report_to=[],
            use_cpu=True, remove_unused_columns=False, disable_tqdm=True, seed=0,
        )  # fmt: skip
        data = [{"ids": row} for row in rows]
        return transformers.Trainer(model, settings, train_dataset=data, eval_dataset=data, data_collator=collate)

    model = make("llama", dtype=torch.float32)
    torch.manual_seed(0)
    model.apply(model._init_weights)
    first = trainer(model, 20)
    before = first.evaluate()["eval_loss"]
    first.train()
    after = first.evaluate()["eval_loss"]
    assert after < 0.8 * before
    resumed = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-20")
    assert resumed.config._attn_implementation == "lssar"
    second = trainer(resumed, 24)
    second.train(resume_from_checkpoint=str(tmp_path / "checkpoint-20"))
    assert second.state.global_step == 24
    assert second.evaluate()["eval_loss"] < before
