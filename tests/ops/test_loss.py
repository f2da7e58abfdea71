"""The fused loss against cross-entropy in float64: in Triton's interpreter, on a GPU at full size."""

import pytest
import torch
import torch.nn.functional as F

import lssar.ops.loss
from lssar.model import GPT, model_config
from lssar.ops.loss import IGNORE, next_token_loss, next_token_losses

pytest.importorskip("triton")
from lssar.ops.fused.loss import BLOCK, loss_op
from tests.helpers import CUDA, DEVICE, seeded

EPS = {torch.bfloat16: 2.0**-8 if CUDA else 2.0**-7, torch.float16: 2.0**-11}  # the interpreter cuts bfloat16 off
SMALLEST = {torch.bfloat16: 0.0, torch.float16: 2.0**-24}


def case(rows, vocab, width, dtype=torch.float16, scale=3.0, seed=0):
    generator = seeded(seed)
    logits = (scale * torch.randn(rows, width, generator=generator)).to(dtype).to(DEVICE)
    targets = torch.randint(vocab, (rows,), generator=generator).to(DEVICE)
    return logits.requires_grad_(), targets


def check(logits, targets, vocab):
    wide = logits.detach().double().requires_grad_()
    exact = F.cross_entropy(wide[:, :vocab], targets, ignore_index=IGNORE, reduction="none")
    weights = torch.rand_like(exact)  # a gradient of its own for every row
    (want,) = torch.autograd.grad(exact, wide, weights)
    losses, _ = loss_op(logits, targets, vocab)
    (got,) = torch.autograd.grad(losses, logits, weights.float())
    torch.testing.assert_close(losses.double(), exact, rtol=1e-6, atol=1e-5)
    assert got.dtype == logits.dtype
    assert not got[:, vocab:].any()
    # In float32 a probability 2^(x - norm) is off by the roundings of x and norm, and 1 is subtracted of the target's.
    x = wide.detach()[:, :vocab]
    probability, largest = x.softmax(-1), x.abs().nan_to_num(posinf=0.0).amax(-1, keepdim=True)
    size = largest + exact.detach().abs()[:, None] + 4
    before = F.pad(weights[:, None] * (probability * 4 * size + 1) * 2.0**-24, (0, logits.shape[1] - vocab))
    allowed = EPS[logits.dtype] * (want.abs() + before) + before + SMALLEST[logits.dtype]
    assert ((got - want).abs() <= allowed).all()


@pytest.mark.parametrize(
    ("rows", "vocab", "width"),
    [
        (1, 1, 1),
        (5, 2, 128),
        (3, 61, 61),
        (3, 257, 384),
        (2, BLOCK, BLOCK),
        (2, BLOCK + 1, BLOCK + 128),
        (2, 9000, 9001),
    ],
)
def test_loss_and_gradient(rows, vocab, width):
    for dtype in EPS:
        check(*case(rows, vocab, width, dtype), vocab)


def test_what_lies_beyond_the_vocabulary_and_targets_that_do_not_count():
    logits, targets = case(6, 300, 384)
    with torch.no_grad():
        logits[:, 300:] = torch.inf
        logits[1] *= 1e4  # of which float16 keeps infinities
        logits[1].clamp_(-6e4, 6e4)
        logits[2, :299] = -torch.inf
    targets[2] = 299
    targets[3] = IGNORE
    check(logits, targets, 300)
    (grad,) = torch.autograd.grad(loss_op(logits, targets, 300)[0].sum(), logits)
    assert not grad[3].any()
    targets[0], targets[4] = 300, -1
    losses, _ = loss_op(logits, targets, 300)
    assert losses.isnan().tolist() == [True, False, False, False, True, False]
    (grad,) = torch.autograd.grad(losses.sum(), logits)
    assert not grad[[0, 4]].any()


def test_strides_and_no_rows():
    logits, targets = case(4, 100, 128)
    apart = torch.empty(4, 256, dtype=logits.dtype, device=DEVICE)[:, :128].copy_(logits.detach()).requires_grad_()
    turned = logits.detach().T.contiguous().T.requires_grad_()
    for x in (apart, turned):
        check(x, torch.stack([targets, targets], 1)[:, 0], 100)
    losses, _ = loss_op(logits[:0], targets[:0], 100)
    assert losses.shape == (0,)
    (grad,) = torch.autograd.grad(losses.sum(), logits)
    assert not grad.any()


def test_the_operator_is_what_pytorch_expects():
    logits, targets = case(3, 100, 128)
    torch.library.opcheck(loss_op, (logits, targets, 100))
    (grad,) = torch.autograd.grad(loss_op(logits, targets, 100)[0].sum(), logits, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        grad.sum().backward()


def test_without_kernels_it_is_cross_entropy():
    logits, targets = case(5, 61, 64, torch.float32)
    targets[1] = IGNORE
    exact = F.cross_entropy(logits[:, :61], targets)
    (want,) = torch.autograd.grad(exact, logits)
    loss = next_token_loss(logits, targets, 61)
    torch.testing.assert_close(loss, exact)
    torch.testing.assert_close(torch.autograd.grad(loss, logits)[0], want)
    each = next_token_losses(logits, targets, 61)
    assert each[1] == 0
    torch.testing.assert_close(each.sum() / 4, exact)


def test_a_step_of_a_model(monkeypatch):
    """Through the kernels, plain and as a graph, and without them."""
    torch.compiler.reset()
    torch.manual_seed(0)
    model = GPT(model_config("tiny", vocab_size=257)).to(DEVICE)
    ids = torch.randint(257, (2, 17), device=DEVICE)
    targets = ids[:, 1:].clone()
    targets[0, :5] = IGNORE

    def step(run):
        with torch.autocast(DEVICE, torch.bfloat16):
            loss = run(ids[:, :-1], targets=targets)
        return loss.detach(), *torch.autograd.grad(loss, model.embed.weight)

    monkeypatch.setattr(lssar.ops.loss, "_fused", lambda logits: False)
    want = step(model)
    monkeypatch.setattr(lssar.ops.loss, "_fused", lambda logits: logits.dtype == torch.bfloat16)
    for run in (model, torch.compile(model, backend="aot_eager", fullgraph=True)):
        got = step(run)
        torch.testing.assert_close(got[0], want[0], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(got[1], want[1], rtol=0.02, atol=0.02 * float(want[1].abs().max()))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", EPS, ids=str)
def test_gpu_with_the_vocabulary_of_gpt2(dtype):
    logits, targets = case(333, 50257, 50304, dtype)
    targets[::7] = IGNORE
    check(logits, targets, 50257)
    assert lssar.ops.loss._fused(logits)
    with torch.no_grad():
        both = next_token_loss(logits, targets, 50257), F.cross_entropy(logits[:, :50257].float(), targets)
        each = next_token_losses(logits, targets, 50257)
    torch.testing.assert_close(*both, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(each.sum() / (targets != IGNORE).sum(), both[0])
    compiled = torch.compile(next_token_loss, fullgraph=True)(logits, targets, 50257)
    torch.testing.assert_close(compiled, both[0])
    (grad,) = torch.autograd.grad(compiled, logits)
    assert torch.equal(grad, torch.autograd.grad(next_token_loss(logits, targets, 50257), logits)[0])
