"""Ten thousand rows made to break things, in float16, bfloat16 and float32: finite and right, forward and backward."""

import itertools
import math

import pytest
import torch

import lssar
from tests.helpers import assert_within_twice_eager, eager, eager_runs, pairwise, seeded, with_gradients

ROWS = 10_000
NORMS = {  # what the dtype can hold
    torch.float16: (1e-4, 1.0, 1e4),
    torch.bfloat16: (1e-30, 1.0, 1e30),
    torch.float32: (1e-30, 1.0, 1e30),
}
EPS = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8, torch.float32: 2.0**-24}


def keys_with_cosines(u: torch.Tensor, cosines: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Unit keys (n, d) that make the given angles with the unit vector u."""
    side = torch.randn(len(cosines), len(u), generator=generator, dtype=torch.float64)
    side = side - (side @ u)[:, None] * u
    side = side / side.norm(dim=-1, keepdim=True)
    return cosines[:, None] * u + (1 - cosines**2).clamp_min(0).sqrt()[:, None] * side


def scene(kind: str, n: int, d: int, generator: torch.Generator):
    u = torch.randn(d, generator=generator, dtype=torch.float64)
    u = u / u.norm()
    if kind == "needle":
        cosines = torch.rand(n, generator=generator, dtype=torch.float64) * 1.3 - 1
        k = keys_with_cosines(u, cosines, generator)
        k[int(torch.randint(n, (1,), generator=generator))] = u
    elif kind == "equal":
        k = torch.randn(d, generator=generator, dtype=torch.float64).expand(n, d)
    elif kind == "anti-aligned":
        k = -u.expand(n, d)
    elif kind == "nearly anti-aligned":
        k = keys_with_cosines(u, -1 + 0.1 * torch.rand(n, generator=generator, dtype=torch.float64), generator)
    else:
        k = torch.randn(n, d, generator=generator, dtype=torch.float64)
    return u, k


def batches(rows: int):
    """(kind, keys, queries, p): many short contexts, some of 64K; queries are the last rows, so n differs by row."""
    generator = seeded(0)
    kinds = itertools.cycle(["needle", "equal", "anti-aligned", "nearly anti-aligned", "random"])
    powers = itertools.cycle([1, 15, 1.5, 3, 64, 7, 31])
    sizes = itertools.cycle([4, 1024, 64, 4096, 33, 1024, 2048, 5, 257, 1024, 1, 16384])
    done = 0
    while done < rows:
        n = next(sizes)
        if done == 0 or done > rows - 64:
            n = 65536
        queries = min(n, {65536: 2, 16384: 16}.get(n, 64)) if n > 5 else n
        repeats = 64 // n if n <= 5 else 1  # short contexts: many of them in one batch
        yield next(kinds), n, queries, repeats, next(powers), generator
        done += queries * repeats


@pytest.mark.parametrize("dtype", NORMS, ids=str)
def test_adversarial_rows(dtype):
    count = 0
    norms = itertools.cycle(itertools.product(NORMS[dtype], NORMS[dtype]))
    for kind, n, queries, repeats, p, generator in batches(ROWS):
        d = 16 if n > 10_000 else 32
        scenes = [scene(kind, n, d, generator) for _ in range(repeats)]
        q_norm, k_norm = next(norms)
        wobble = 0.05 * torch.randn(repeats, 1, queries, d, generator=generator, dtype=torch.float64)
        wobble[:, :, : queries // 2] = 0
        q = torch.stack([u for u, _ in scenes])[:, None, None] + wobble
        k = torch.stack([k for _, k in scenes])[:, None]
        v = torch.randn(repeats, 1, n, 8, generator=generator, dtype=torch.float64)
        q, k, v = (q * q_norm).to(dtype), (k * k_norm).to(dtype), v.to(dtype)
        do = torch.randn(repeats, 1, queries, 8, generator=generator).to(dtype)
        spec = lssar.spec("lssar", p=p)
        note = f"{kind}, {n} keys, {queries} queries, p {p}, norms {q_norm:g} {k_norm:g}, {dtype}"

        ours = with_gradients(lambda *x: lssar.attention(*x, spec, impl="tiled"), (q, k, v), do)  # noqa: B023
        exact = with_gradients(lambda *x: eager(*x, spec, torch.float64), (q, k, v), do)  # noqa: B023
        limit = torch.finfo(dtype).max
        exact = [x.clamp(-limit, limit) for x in exact]
        low = itertools.chain.from_iterable(eager_runs((q, k, v), do, spec, t, exact) for t in {dtype, torch.float32})
        # Where gradients cancel to nothing (a needle has all the weight) float32 leaves roundings of what cancels.
        steepness = p * math.log(d) * math.log(max(n, 2))
        cancels = 8 * EPS[torch.float32] * steepness * float(do.abs().max()) * float(v.abs().max())
        floor = (0.0, cancels / q_norm, cancels / k_norm, 0.0)
        assert_within_twice_eager(ours, low, exact, EPS[dtype], note, floor)
        count += queries * repeats
    assert count >= ROWS


@pytest.mark.parametrize(
    ("name", "dtype", "impl"), pairwise(lssar.specs(), [*NORMS, torch.float64], ["reference", "tiled"]), ids=str
)
def test_every_spec_stays_finite_at_the_ends_of_the_range(name, dtype, impl):
    """Largest and smallest magnitudes of the dtype in q, k and v, with signs that make inf - inf of a plain product."""
    info = torch.finfo(dtype)
    sizes = [0.0, info.tiny, 1.0, info.max]
    signs = torch.sign(torch.randn(3, 1, 2, 6, 4, generator=seeded(3), dtype=torch.float64))
    for sq, sk, sv in itertools.product(sizes, sizes, sizes):
        q, k, v = ((s * size).to(dtype) for s, size in zip(signs, (sq, sk, sv)))
        for do in (1.0, info.max) if impl == "tiled" else (1.0,):  # the reference's backward is plain autograd
            grad = torch.full((1, 2, 6, 4), do, dtype=dtype)
            outputs = with_gradients(lambda *x: lssar.attention(*x, name, impl=impl), (q, k, v), grad)
            assert all(x.isfinite().all() for x in outputs), (sq, sk, sv, do)
        assert lssar.attention(q, k, v, name, impl=impl, return_weights=True)[1].isfinite().all(), (sq, sk, sv)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("name", ["sigmoid_n_l1", "l1_softplus", "l1_gelu"])
def test_gradients_are_finite_where_all_activations_of_a_row_vanish(name, dtype):
    """Activations fall as exp(s): the derivative of a share of their sum, 1 / sum, must not overflow."""
    q = torch.tensor([-8.0, -30, -60, -80, -90, -300, -600, -700], dtype=dtype)[None, None, :, None]
    k, v = torch.tensor([[[[1.0], [1.01]]]], dtype=dtype), torch.tensor([[[[1000.0], [-500]]]], dtype=dtype)
    for impl in ("reference", "tiled"):
        inputs = [x.clone().requires_grad_() for x in (q, k, v)]
        o = lssar.attention(*inputs, name, causal=False, impl=impl)
        grads = torch.autograd.grad(o.sum(), inputs)
        assert all(x.isfinite().all() for x in (o, *grads)), impl
