"""The examples run, and do what they say."""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"


def load(name: str):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def mean(values):
    return sum(values) / len(values)


def test_tiny_gpt_learns():
    losses = load("tiny_gpt").main(steps=60)
    assert mean(losses[-10:]) < 0.6 * losses[0]


def test_finetuning_to_lssar_recovers_the_loss():
    pytest.importorskip("transformers")
    before, after = load("finetune_huggingface").main(steps=30)
    assert after[0] < before[0]  # the weights are those of the trained model
    assert mean(after[-5:]) < after[0]


def test_long_retrieval_finds_the_key_beyond_the_training_length():
    pytest.importorskip("transformers")
    example = load("long_retrieval")
    assert example.main(multiple=4) and example.main(multiple=8)
    assert not example.main(multiple=8, name="tiny-softmax")


def test_the_notebook_has_no_outputs_and_compiles():
    nbformat = pytest.importorskip("nbformat")
    notebook = nbformat.read(EXAMPLES / "tour.ipynb", as_version=4)
    nbformat.validate(notebook)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            assert not cell.outputs
            compile(cell.source, "tour.ipynb", "exec")


@pytest.mark.slow
def test_the_notebook_runs():
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    notebook = nbformat.read(EXAMPLES / "tour.ipynb", as_version=4)
    nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(ROOT)}}).execute()
    said = "".join(o.get("text", "") for cell in notebook.cells if cell.cell_type == "code" for o in cell.outputs)
    assert "16x: long reader ' 48213" in said
