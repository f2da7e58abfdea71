"""On a GPU: the fused kernels are reached, and give what a CPU gives in float64."""

import copy

import pytest
import torch

from tests.hf.families import make, padded, tokens

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.gpu
DEVICE = "cuda"
WIDE = dict(hidden_size=128, num_attention_heads=4, num_key_value_heads=2, head_dim=32)


@pytest.fixture
def fused(monkeypatch):
    """Names of the fused kernels that were called."""
    from lssar.ops import fused

    called = []

    def counting(name):
        plain = getattr(fused, name)
        return lambda *a, **b: called.append(name) or plain(*a, **b)

    for name in ("fused_attention", "fused_decode"):
        monkeypatch.setattr(fused, name, counting(name))
    return called


def pair(family="llama"):
    """The same model in float64 on the CPU and in float32 on the GPU."""
    exact = make(family, **WIDE)
    return exact, copy.deepcopy(exact).float().to(DEVICE)


def on_device(batch):
    return {key: value.to(DEVICE) for key, value in batch.items()}


@pytest.mark.parametrize("how", ["plain", "left", "right", "packed"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_values_and_gradients(family, how, compiled, fused):
    exact, model = pair(family)
    rows = [tokens(150, seed=1), tokens(150 if how == "plain" else 97, seed=2)]
    if how == "packed":
        batch = {
            "input_ids": torch.cat(rows)[None],
            "position_ids": torch.cat([torch.arange(len(r)) for r in rows])[None],
        }
        real = torch.ones_like(batch["input_ids"], dtype=torch.bool)
    else:
        batch = padded(rows, "right" if how == "plain" else how)
        real = batch["attention_mask"].bool()
    if compiled:
        torch._dynamo.reset()
    run = torch.compile(model, fullgraph=True) if compiled else model
    outputs = []
    for net, inputs, seen in ((exact, batch, real), (run, on_device(batch), real.to(DEVICE))):
        logits = net(**inputs, use_cache=False).logits[seen]
        logits.logsumexp(-1).mean().backward()
        outputs.append(logits.detach().double().cpu())
    assert "fused_attention" in fused
    assert (outputs[1] - outputs[0]).norm() < 2e-3 * outputs[0].norm()
    for a, b in zip(model.parameters(), exact.parameters()):
        assert (a.grad.double().cpu() - b.grad).norm() <= 2e-2 * b.grad.norm() + 1e-6


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("lengths", [(40, 40), (40, 23)], ids=["full", "left-padded"])
def test_generation(cache, lengths, fused):
    """`generate` compiles the steps with a static cache by itself here; left padding goes through the strips."""
    exact, model = pair()
    batch = padded([tokens(n, seed=i) for i, n in enumerate(lengths)], "left")
    del batch["position_ids"]
    settings = dict(max_new_tokens=12, min_new_tokens=12, do_sample=False, output_logits=True)
    settings |= dict(return_dict_in_generate=True)
    expected = exact.generate(**batch, **settings)
    if cache == "static":
        torch._dynamo.reset()
        settings["cache_implementation"] = "static"
    made = model.generate(**on_device(batch), **settings)
    assert "fused_attention" in fused
    if lengths[0] == lengths[1] and cache == "dynamic":
        assert "fused_decode" in fused
    same = (made.sequences.cpu() == expected.sequences).all(0).long().cumprod(0).bool()[lengths[0] :]
    assert same.sum() >= 6  # float32 may turn a near tie, after which the texts part
    for step in range(int(same.sum())):
        close = (made.logits[step].double().cpu() - expected.logits[step]).abs().max()
        assert close < 1e-2 * expected.logits[step].abs().max()


def test_trainer_on_bfloat16(tmp_path, fused):
    pytest.importorskip("accelerate")
    model = make("llama", dtype=torch.float32, **WIDE)
    torch.manual_seed(0)
    model.apply(model._init_weights)
    data = [{"input_ids": tokens(int(n), seed=int(n)).tolist()} for n in torch.randint(20, 90, (32,))]
    settings = transformers.TrainingArguments(
        output_dir=str(tmp_path), max_steps=20, per_device_train_batch_size=8, learning_rate=1e-2, bf16=True,
        lr_scheduler_type="constant", report_to=[], disable_tqdm=True, save_strategy="no", gradient_checkpointing=True,
    )  # fmt: skip
    collate = transformers.DataCollatorWithFlattening()
    trainer = transformers.Trainer(model, settings, train_dataset=data, eval_dataset=data, data_collator=collate)
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < 0.8 * before
    assert "fused_attention" in fused
