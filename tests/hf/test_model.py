"""Our own model as an AutoModel: exported, loaded, generated from, trained and saved by transformers itself."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch

import lssar
from lssar.cli import main
from lssar.data.tokenizers import load_tokenizer
from lssar.layouts import parse_layout
from lssar.model import GPT, model_config
from lssar.runs import Run
from tests.hf.families import CACHES, padded, python, tokens

transformers = pytest.importorskip("transformers")
from lssar.hf.config import LssarConfig  # noqa: E402
from lssar.hf.export import _put  # noqa: E402
from lssar.hf.model import LssarForCausalLM  # noqa: E402

close = torch.testing.assert_close


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A short run on bytes, as `lssar train` makes it."""
    folder = tmp_path_factory.mktemp("runs") / "tiny"
    settings = ["--size", "tiny", "--length", "32", "--steps", "3", "--batch-tokens", "256", "--micro-batch", "8"]
    main(["train", "tiny-cpu", *settings, "--out", str(folder)])
    return folder


@pytest.fixture(scope="module")
def folder(run, tmp_path_factory):
    made = tmp_path_factory.mktemp("exported") / "model"
    main(["export", str(run), str(made)])
    return made


LOAD = """
import sys, torch
{imports}
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained({folder!r}{arguments})
tokenizer = AutoTokenizer.from_pretrained({folder!r}{arguments})
made = model.generate(**tokenizer(["def f(", "x"], return_tensors="pt", padding=True), max_new_tokens=4)
torch.save({{"logits": model(torch.load({ids!r})).logits, "ids": tokenizer("naïve\\n")["input_ids"],
            "text": tokenizer.decode(made[0])}}, {out!r})
"""


@pytest.mark.parametrize(
    "imports, arguments", [("import lssar.hf", ""), ("", ", trust_remote_code=True")], ids=["import", "remote code"]
)
def test_an_export_loads_in_a_new_process(imports, arguments, run, folder, tmp_path):
    """After `import lssar.hf`, or in a process that never imported lssar, through auto_map."""
    ids, out = tmp_path / "ids.pt", tmp_path / "out.pt"
    torch.save(tokens(2, 40), ids)
    code = LOAD.format(imports=imports, arguments=arguments, folder=str(folder), ids=str(ids), out=str(out))
    done = python(code, HF_MODULES_CACHE=str(tmp_path / "modules"))
    assert done.returncode == 0, done.stderr[-2000:]
    got = torch.load(out)
    ours = Run.open(run, "cpu").model()
    assert torch.equal(got["logits"], ours(tokens(2, 40)))  # beyond the trained length, too
    assert got["ids"] == load_tokenizer("bytes").encode("naïve\n").tolist()
    assert got["text"].startswith("def f(")


def test_a_pipeline_loads_an_export_without_importing_lssar(folder, tmp_path):
    code = f"""
from transformers import pipeline
made = pipeline("text-generation", model={str(folder)!r}, trust_remote_code=True)("def f(", max_new_tokens=4)
assert made[0]["generated_text"].startswith("def f(")
"""
    done = python(code, HF_MODULES_CACHE=str(tmp_path / "modules"))
    assert done.returncode == 0, done.stderr[-2000:]


def test_lm_eval_loads_an_export_without_importing_lssar(folder, tmp_path):
    pytest.importorskip("lm_eval")
    from lssar.hf.lm_eval import write_tasks
    from tests.evaluation.test_benchmarks import EXAMPLES

    tasks = write_tasks({"piqa": EXAMPLES["piqa"]}, tmp_path / "tasks")
    arguments = f"pretrained={folder},trust_remote_code=True,max_length=256"
    command = ["--model", "hf", "--model_args", arguments, "--tasks", "piqa", "--include_path", str(tasks)]
    command += ["--device", "cpu"]
    code = f"import sys; sys.argv[1:] = {command}; from lm_eval.__main__ import cli_evaluate; cli_evaluate()"
    done = python(code, HF_MODULES_CACHE=str(tmp_path / "modules"), HF_DATASETS_CACHE=str(tmp_path / "datasets"))
    assert done.returncode == 0, done.stderr[-2000:]
    assert "|piqa" in done.stdout


def test_exported_folder(run, folder):
    names = {path.name for path in folder.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "generation_config.json", "export.json"} <= names
    assert not any(name.endswith((".bin", ".pt", ".pkl")) for name in names)
    config = json.loads((folder / "config.json").read_text())
    assert config["model"]["attention"] == lssar.spec("lssar", train_length=32).to_dict()
    record = json.loads((folder / "export.json").read_text())
    assert (record["run"], record["step"]) == ("tiny", 3)
    assert record["environment"]["torch"] == torch.__version__
    card = (folder / "README.md").read_text()
    assert "| data | stdlib |" in card and "| licence | other |" in card and "768 in 3 steps" in card
    assert re.search(r"validation loss, nats a token \| \d\.\d{3} ", card)


@pytest.mark.parametrize("name", ["bytes", "gpt2-like", "json"])
def test_tokenizers_are_the_same_token_for_token(name, tmp_path, monkeypatch):
    from lssar.hf.tokenizer import to_transformers

    text = "naïve  café\t\n\n 你好 🙂 it's I'll 12ab\u2028x  \r\n\x00 end "
    if name == "bytes":
        ours = load_tokenizer("bytes")
    elif name == "gpt2-like":  # GPT-2's own ranks need a download; these are made the same way, from bytes up
        from lssar.data import tokenizers

        ranks = {bytes([b]): b for b in range(256)}
        for token in (b"it", b" c", b"ve", b"na", b"caf", b" caf", b"12", b"  "):
            parts = [token[:i] for i in range(2, len(token) + 1)]
            for part in parts:
                ranks.setdefault(part, len(ranks))
        monkeypatch.setattr(tokenizers, "GPT2_RANKS", len(ranks))
        monkeypatch.setattr(tokenizers.Gpt2Tokenizer, "eot", len(ranks))
        monkeypatch.setattr(tokenizers.Gpt2Tokenizer, "vocab_size", len(ranks) + 1)
        import base64

        lines = (f"{base64.b64encode(token).decode()} {rank}" for token, rank in ranks.items())
        (tmp_path / "ranks.tiktoken").write_text("\n".join(lines))
        ours = load_tokenizer(tmp_path / "ranks.tiktoken")
    else:
        to_transformers(load_tokenizer("bytes")).save_pretrained(tmp_path)
        ours = load_tokenizer(tmp_path / "tokenizer.json")
    theirs = to_transformers(ours)
    theirs.save_pretrained(tmp_path / "saved")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert theirs(text)["input_ids"] == ours.encode(text).tolist()
    assert theirs.decode(ours.encode(text).tolist()) == text
    assert theirs.eos_token_id == theirs.pad_token_id == ours.eot


def wrap(gpt: GPT) -> LssarForCausalLM:
    model = LssarForCausalLM(LssarConfig(model=gpt.config.to_dict(), pad_token_id=0, bos_token_id=1, eos_token_id=2))
    model.to(next(gpt.parameters()).dtype).gpt.load_state_dict(gpt.state_dict())
    return model.eval()


KINDS = {
    "lssar": {},
    "grouped": {"key_heads": 2},
    "softmax, alibi": {"attention": lssar.spec("softmax"), "position": "alibi"},
    "ssmax": {"attention": lssar.spec("ssmax")},
    "window": {"window": 5},
    "tpa": {"projection": "tpa"},
    "one a layer": {"attention": (lssar.spec("lssar", p=3), lssar.spec("cosine_softmax"))},
    "mixed": {"pattern": parse_layout("softmax@5 lssa+lssar/none")},
}


def gpt_of(kind: str) -> GPT:
    torch.manual_seed(0)
    gpt = GPT(model_config("tiny", vocab_size=97, train_length=16, **KINDS[kind])).double()
    with torch.no_grad():
        for weight in gpt.parameters():
            if weight.dim() == 2:
                weight.mul_(6)
    return gpt.eval()


@pytest.mark.parametrize("kind", KINDS)
def test_same_logits_and_same_tokens_with_every_cache(kind, tmp_path):
    gpt = gpt_of(kind)
    model = wrap(gpt)
    ids = tokens(2, 19)
    assert torch.equal(model(ids).logits, gpt(ids))
    rows = [tokens(9, seed=1), tokens(5, seed=2)]
    batch = {key: value for key, value in padded(rows, "left").items() if key != "position_ids"}
    alone = [torch.stack(list(gpt.generate(row[None], 7, temperature=0)), 1)[0].tolist() for row in rows]
    for name, settings in CACHES.items():
        made = model.generate(**batch, max_new_tokens=7, min_new_tokens=7, do_sample=False, **settings)
        assert made[:, 9:].tolist() == alone, name
    model.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    assert all(torch.equal(again.gpt.state_dict()[name], x) for name, x in gpt.state_dict().items())
    close(again(ids).logits, gpt(ids))  # loaded weights may lie otherwise in memory, and sums round otherwise


@pytest.mark.parametrize(
    ("layout", "words"),
    [("softmax@1 lssar/none", "has a window of 1"), ("softmax@5 lssar@7", r"one window for all.*\[5, 7\]")],
)
def test_windows_that_transformers_cannot_cache_are_refused(layout, words):
    with pytest.raises(ValueError, match=words):
        LssarConfig(model=model_config("tiny", pattern=parse_layout(layout)).to_dict())


def test_padded_and_packed_equal_alone():
    gpt = gpt_of("grouped")
    model = wrap(gpt)
    rows = [tokens(12, seed=1), tokens(7, seed=2)]
    for side in ("left", "right"):
        logits = model(**padded(rows, side)).logits
        for i, row in enumerate(rows):
            place = slice(12 - len(row), None) if side == "left" else slice(0, len(row))
            close(logits[i, place], gpt(row[None])[0])
    positions = torch.cat([torch.arange(len(row)) for row in rows])[None]
    for use_cache in (False, True):
        packed = model(torch.cat(rows)[None], position_ids=positions, use_cache=use_cache).logits
        close(packed, torch.cat([gpt(row[None]) for row in rows], 1))


def test_pipelines_and_beams(folder, no_network):
    write = transformers.pipeline("text-generation", model=str(folder))
    out = write(["def f(", "x"], max_new_tokens=5, do_sample=False, batch_size=2)
    assert [len(texts) for texts in out] == [1, 1]
    assert out[0][0]["generated_text"].startswith("def f(")
    model = wrap(gpt_of("grouped"))
    ids = tokens(2, 6)
    beams = [model.generate(ids, num_beams=3, max_new_tokens=6, do_sample=False, **cache) for cache in CACHES.values()]
    assert beams[0].tolist() == beams[1].tolist() == beams[2].tolist()


def test_lm_eval_scores_the_export_as_the_run(run, folder, no_network):
    """lm-eval's own Hugging Face model over the export, ours over the run: the same likelihoods and the same text."""
    huggingface = pytest.importorskip("lm_eval.models.huggingface")
    from lm_eval.api.instance import Instance

    from lssar.hf.lm_eval import LssarLM

    models = [huggingface.HFLM(pretrained=str(folder), device="cpu", max_length=64, batch_size=4)]
    models += [LssarLM(run, max_length=64, device="cpu")]
    pairs = [("def f", "(x):"), ("import os\nimport", " sys"), ("", "hello"), ("a" * 100, " b")]
    asked = [Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(pairs)]
    theirs, ours = ([value for value, _ in model.loglikelihood(asked)] for model in models)
    assert theirs == pytest.approx(ours, abs=1e-4)
    until = {"until": ["\n\n"], "max_gen_toks": 8, "do_sample": False}
    asked = [Instance("generate_until", {}, (text, until), i) for i, text in enumerate(["def f(", "import os\nx = "])]
    theirs, ours = (model.generate_until(asked) for model in models)
    assert theirs == ours


def test_ntk_factor_is_kept_and_used(tmp_path):
    gpt = gpt_of("lssar")
    model = wrap(gpt)
    model.config.ntk_factor = 4.0
    gpt.ntk = 4.0
    ids = tokens(1, 30)
    assert torch.equal(model(ids).logits, gpt(ids))
    model.save_pretrained(tmp_path)
    assert transformers.AutoConfig.from_pretrained(tmp_path).ntk_factor == 4.0


def test_its_mechanism_cannot_be_taken_away(folder):
    for implementation in ("sdpa", "eager", "lssa"):
        with pytest.raises(ValueError, match="has its mechanism in its config"):
            transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation=implementation)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    with pytest.raises(ValueError, match="has its mechanism in its config"):
        model.set_attn_implementation("sdpa")
    with pytest.raises(NotImplementedError, match="vocabulary is fixed"):
        model.resize_token_embeddings(300)
    with pytest.raises(ValueError, match="output_attentions is not supported"):
        model(tokens(1, 4), output_attentions=True)


def test_trainer_drives_it(folder, tmp_path, no_network):
    pytest.importorskip("accelerate")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    lines = [f"def f{n}(x):\n    return x + {n}\n" for n in range(24)]
    data = [tokenizer(line) for line in lines]
    settings = transformers.TrainingArguments(
        output_dir=str(tmp_path), max_steps=25, per_device_train_batch_size=8, learning_rate=3e-3, save_steps=25,
        lr_scheduler_type="constant", report_to=[], use_cpu=True, disable_tqdm=True, gradient_checkpointing=True,
        logging_steps=5, seed=0,
    )  # fmt: skip
    collator = transformers.DataCollatorForLanguageModeling(tokenizer, mlm=False)
    trainer = transformers.Trainer(
        model, settings, train_dataset=data, eval_dataset=data, data_collator=collator, processing_class=tokenizer
    )
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < 0.7 * before
    saved = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-25")
    ids = tokens(1, 12)
    close(saved(ids).logits, model.eval()(ids).logits)


def test_compiles_without_graph_breaks():
    torch._dynamo.reset()
    model = wrap(gpt_of("lssar"))
    ids = tokens(2, 11)
    close(torch.compile(model, backend="aot_eager", fullgraph=True)(ids, use_cache=False).logits, model(ids).logits)


def test_a_folder_that_cannot_be_renamed_leaves_nothing_behind(tmp_path, monkeypatch):
    def refuse(source, target):
        raise OSError("busy")

    for name in ("new", "folder"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr("lssar.hf.export.os.replace", refuse)
    with pytest.raises(OSError, match="busy"):
        _put(tmp_path / "new", tmp_path / "folder")
    assert {path.name for path in tmp_path.iterdir()} == {"new", "folder"}


def test_an_export_is_evaluated_but_not_exported_again(run, folder, tmp_path, capsys):
    words = ["--data", str(run / "data"), "--multiples", "1", "--pieces", "1", "--out", str(tmp_path / "length")]
    main(["eval", "length", str(folder), *words])
    (curve,) = json.loads((tmp_path / "length.json").read_text())["curves"]
    assert curve["step"] == 3 and "training" not in curve
    with pytest.raises(SystemExit, match="1"):
        main(["export", str(folder), str(tmp_path / "again")])
    assert f"{folder} is an export itself" in capsys.readouterr().err
    assert not (tmp_path / "again").exists()


def test_a_damaged_export_is_one_error(folder, tmp_path, capsys):
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    record = json.loads((copy / "export.json").read_text())
    for change, words in [
        ({"step": None}, "no step in it"),
        ({"recipe": record["recipe"] | {"size": "0.8m"}}, "do not fit"),
    ]:
        (copy / "export.json").write_text(json.dumps(record | change))
        with pytest.raises(SystemExit, match="1"):
            main(["generate", str(copy), "--tokens", "1"])
        assert words in capsys.readouterr().err


def test_export_loses_nothing(run, tmp_path, capsys):
    folder = tmp_path / "mine"
    main(["export", str(run), str(folder)])
    before = (folder / "model.safetensors").read_bytes()
    with pytest.raises(SystemExit, match=r"[12]"):
        main(["export", str(run), str(folder)])
    assert "exists" in capsys.readouterr().err
    home = tmp_path / "home"
    home.mkdir()
    (home / "thesis.txt").write_text("years of work")
    with pytest.raises(SystemExit, match=r"[12]"):
        main(["export", str(run), str(home), "--overwrite"])
    assert "left alone" in capsys.readouterr().err
    assert (home / "thesis.txt").read_text() == "years of work"
    with pytest.raises(SystemExit, match="1"):
        main(["export", str(tmp_path / "no run"), str(tmp_path / "new")])
    assert not (tmp_path / "new").exists()
    for content, words in [("[]", "expected a JSON object"), ("null", "expected a JSON"), ("{", "not valid JSON")]:
        (home / "config.json").write_text(content)
        with pytest.raises(SystemExit, match=r"[12]"):
            main(["export", str(run), str(home), "--overwrite"])
        assert f"error: {home / 'config.json'}: {words}" in capsys.readouterr().err
    assert (home / "thesis.txt").read_text() == "years of work"
    link = tmp_path / "link"
    for target in (folder, tmp_path / "nowhere"):
        link.symlink_to(target)
        with pytest.raises(SystemExit, match=r"[12]"):
            main(["export", str(run), str(link), "--overwrite"])
        assert f"{link} is a link to {target}" in capsys.readouterr().err
        link.unlink()
    assert (folder / "model.safetensors").read_bytes() == before
    main(["export", str(run), str(folder), "--overwrite", "--dtype", "bfloat16"])
    assert len((folder / "model.safetensors").read_bytes()) < 0.6 * len(before)
    assert not [path.name for path in folder.parent.iterdir() if path.name.startswith(".")]
