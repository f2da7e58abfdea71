"""Training steps, compiled and as a graph, against one operation after another."""

import contextlib
import functools
import json

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import lssar.nn.layers
from lssar.experiments.newton import steps
from lssar.experiments.newton.model import OrbitModel, orbit_model_config
from lssar.experiments.newton.orbits import WORLDS
from lssar.experiments.newton.steps import Execution
from lssar.experiments.newton.training import (
    Optimisation,
    finetune,
    labelled_systems,
    minimise,
    optimiser_of,
    orbit_batches,
    random_stream,
)
from lssar.specs import parse_spec

SETTINGS = Optimisation(steps=9, batch=4, lr=2e-3, warmup=2)
MECHANISMS = ["lssar", "softmax", "lssa", "lssar,p=3", "cosine_softmax"]


@pytest.fixture(autouse=True)
def _nothing_given_up(monkeypatch):
    monkeypatch.setattr(steps, "given_up", set())


def new_model(mechanism, world="wellposed", seed=0, size="ci", tokens=14):
    torch.manual_seed(seed)
    config = orbit_model_config(size, parse_spec(mechanism), WORLDS[world], tokens)
    return OrbitModel(config, WORLDS[world])


def pretrained(how, mechanism="lssar", world="wellposed", device="cpu", settings=SETTINGS, **shape):
    """Losses of all steps, and the model."""
    model = new_model(mechanism, world, **shape).to(device)
    optimiser = optimiser_of(model, settings)
    batches = orbit_batches(model.world, settings.batch, model.gpt.config.train_length, 0, device)
    take, losses = steps.Steps.__call__, []

    def noted(self, rate, batch):
        losses.append(float(take(self, rate, batch)))
        return torch.tensor(losses[-1])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(steps.Steps, "__call__", noted)
        minimise(model, optimiser, model.next_loss, lambda _: next(batches), settings, how)
    assert all(block._compiled_call_impl is None for block in model.gpt.layers())
    json.dumps(optimiser.state_dict()["param_groups"])  # what a checkpoint does: no tensors among the settings
    last = settings.rate(settings.steps - 1)
    assert [group["lr"] for group in optimiser.param_groups] == pytest.approx([last] * 2)
    return losses, model


def assert_same(one, other, tolerance):
    (losses, model), (other_losses, other_model) = one, other
    assert losses == pytest.approx(other_losses, rel=tolerance)
    for a, b in zip(model.parameters(), other_model.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=tolerance, rtol=tolerance)


# Compiled blocks.


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_is_the_same_and_is_compiled_once(backend, dtype, monkeypatch):
    from torch._dynamo.utils import counters

    monkeypatch.setattr(steps, "BACKEND", backend)
    torch.compiler.reset()
    counters.clear()
    for mechanism in MECHANISMS:
        before = counters["stats"]["unique_graphs"]
        eager = pretrained(Execution(dtype), mechanism)
        assert_same(pretrained(Execution(dtype, compile=True), mechanism), eager, 1e-4 if dtype == "float32" else 1e-2)
        assert counters["stats"]["unique_graphs"] == before + 1  # one for all layers
        pretrained(Execution(dtype, compile=True), mechanism, seed=1)
        assert counters["stats"]["unique_graphs"] == before + 1  # and for all models
    assert not counters["graph_break"]


def test_a_process_may_compile_every_mechanism_in_every_shape(monkeypatch):
    """Beyond its limit of recompilations dynamo runs uncompiled code without a warning."""
    from torch._dynamo.utils import counters

    monkeypatch.setattr(steps, "BACKEND", "eager")
    monkeypatch.setattr(steps, "WORTH_COMPILING", 0)
    torch.compiler.reset()
    counters.clear()
    data = labelled_systems(WORLDS["wellposed"], 8, 14, 6, random_stream("labels", 0))
    settings = Optimisation(steps=1, batch=8, lr=1e-3)
    for mechanism in MECHANISMS:
        for labels in (4, 6, 8):
            finetune(new_model(mechanism), data, data.log_force[:labels], settings, 0, Execution(compile=True))
    assert counters["stats"]["unique_graphs"] == len(MECHANISMS) * 3


def test_short_runs_are_not_compiled(monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("compiled")

    monkeypatch.setattr(torch.nn.Module, "compile", refuse)
    data = labelled_systems(WORLDS["wellposed"], 8, 14, 6, random_stream("labels", 0))
    finetune(new_model("softmax"), data, data.log_force, SETTINGS, 0, Execution(compile=True))
    with pytest.raises(AssertionError, match="compiled"):
        pretrained(Execution(compile=True))


def test_steps_run_without_a_compiler(monkeypatch):
    def no_compiler(*_):
        raise RuntimeError("no compiler here")

    monkeypatch.setattr(steps, "BACKEND", no_compiler)
    torch.compiler.reset()
    eager = pretrained(Execution())
    with pytest.warns(UserWarning, match="training continues without compile: .*no compiler here"):
        assert_same(pretrained(Execution(compile=True)), eager, 0)
    monkeypatch.setattr(torch.nn.Module, "compile", None)  # is not tried again
    assert_same(pretrained(Execution(compile=True)), eager, 0)


# Graphs, without a GPU.


class Tape(TorchDispatchMode):
    """What a CUDA graph keeps of a step: which operations on which memory, and nothing of the Python around them."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("operation not permitted when stream is capturing")
        result = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, result))
        return result

    def replay(self):
        with torch.no_grad():
            for func, args, kwargs, kept in self.calls:
                for old, new in zip(tree_leaves(kept), tree_leaves(func(*args, **kwargs)), strict=True):
                    if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                        old.copy_(new)


@pytest.fixture
def taped(monkeypatch):
    """Steps make a tape where they would make a graph; the tape of the last step made."""
    made = []

    @contextlib.contextmanager
    def capture(tape, stream, capture_error_mode):
        (maker,) = (m for m in made if isinstance(m, steps.Steps))
        state = [*maker.model.parameters(), *(x for kept in maker.optimiser.state.values() for x in kept.values())]
        before = [x.detach().clone() for x in state]
        with tape:
            yield
        maker._restore(state, before)  # a capture runs nothing

    def noting(self, batch, make=steps.Steps._make_graph):
        made[:] = [self]
        make(self, batch)
        made.append(self.graph)

    monkeypatch.setattr(steps.Steps, "_make_graph", noting)
    monkeypatch.setattr(steps, "has_graphs", lambda device: True)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Tape)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    stream = type("Stream", (), {"wait_stream": lambda self, other: None})()
    monkeypatch.setattr(torch.cuda, "Stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    for name in ("synchronize", "empty_cache", "set_stream"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    # as on a GPU: the fused operators, and no look at values
    monkeypatch.setattr(lssar.nn.layers, "attention", functools.partial(lssar.attention, impl="fused"))
    return made


@pytest.mark.parametrize("world", ["wellposed", "wellposed-bins"])
@pytest.mark.parametrize("mechanism", ["softmax", "cosine_softmax"])  # our kernels, interpreted, would take minutes
def test_a_graph_of_a_step_holds_all_of_it(mechanism, world, taped):
    """Batches, rates and moments are read from memory; were one a Python number, the tape would repeat its first."""
    got = pretrained(Execution(graph=True), mechanism, world)
    assert taped[1] is not None, "no graph was made"
    assert len(taped[1].calls) > 100
    assert_same(got, pretrained(Execution(), mechanism, world), 1e-4)


def test_a_graph_with_autocast_and_compiled_blocks(taped, monkeypatch):
    monkeypatch.setattr(steps, "BACKEND", "aot_eager")
    got = pretrained(Execution("bfloat16", compile=True, graph=True), "softmax")
    assert taped[1] is not None, "no graph was made"
    assert got[0] == pytest.approx(pretrained(Execution("bfloat16"), "softmax")[0], rel=1e-2)


@pytest.mark.parametrize("weighted", [False, True], ids=["every-step", "chosen-steps"])
def test_a_graph_of_finetuning(weighted, taped):
    data = labelled_systems(WORLDS["wellposed"], 8, 14, 6, random_stream("labels", 0))
    chosen = torch.rand(data.log_force.shape) < 0.5 if weighted else None
    models = [new_model("softmax") for _ in range(2)]
    scales = [
        finetune(model, data, data.log_force, SETTINGS, 0, how, chosen=chosen)
        for model, how in zip(models, (Execution(graph=True), Execution()), strict=True)
    ]
    assert taped[1] is not None, "no graph was made"
    assert_same((list(scales[0]), models[0]), (list(scales[1]), models[1]), 1e-4)


def test_a_capture_that_fails_leaves_no_trace(taped, monkeypatch):
    eager = pretrained(Execution(), "softmax")

    def synchronising(self, *batch, plain=OrbitModel.next_loss):
        loss = plain(self, *batch)
        return loss * (1 if float(loss.detach()) > 0 else 2)  # a look at a value, which no graph can have

    with pytest.MonkeyPatch.context() as patch, pytest.warns(UserWarning, match="without graph: .*not permitted when"):
        patch.setattr(OrbitModel, "next_loss", synchronising)
        got = pretrained(Execution(graph=True), "softmax")
    assert taped[1] is None
    assert_same(got, eager, 1e-4)
    taped.clear()
    assert_same(pretrained(Execution(graph=True), "softmax"), eager, 0)
    assert not taped  # not tried again


@pytest.mark.parametrize("wrong", ["losses", "weights"])
def test_a_graph_that_does_something_else_is_not_used(wrong, taped, monkeypatch):
    eager = pretrained(Execution(), "softmax")

    def replay(self, plain=Tape.replay):
        plain(self)
        taped[0].loss.mul_(1.1) if wrong == "losses" else taped[0].model.say.weight.data.add_(0.1)

    monkeypatch.setattr(Tape, "replay", replay)
    with pytest.warns(UserWarning, match=r"without graph: RuntimeError: losses are off by .* changes of weights by"):
        got = pretrained(Execution(graph=True), "softmax")
    assert_same(got, eager, 1e-4)


# Graphs.


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize(
    ("mechanism", "world"), [*((m, "wellposed") for m in MECHANISMS), ("softmax", "wellposed-bins")]
)
def test_graphs_on_a_gpu(mechanism, world, compiled, recwarn):
    settings = Optimisation(steps=12, batch=16, lr=1e-3, warmup=2)
    about = {"settings": settings, "device": "cuda", "size": "10m", "tokens": 64}
    wanted = pretrained(Execution("bfloat16"), mechanism, world, **about)[0]
    got = pretrained(Execution("bfloat16", compile=compiled, graph=True), mechanism, world, **about)[0]
    assert got == pytest.approx(wanted, rel=0.05)
    assert not steps.given_up, [str(warning.message) for warning in recwarn]
