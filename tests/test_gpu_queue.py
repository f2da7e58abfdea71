"""benchmarks/gpu.py: finished jobs are not repeated, others say why they are not finished."""

import dataclasses
import sys

import pytest
from benchmarks import gpu


def test_what_is_done_is_not_run_again(tmp_path, monkeypatch, capsys):
    good = gpu.Job("good", "-c \"open('OUT/CARD-y', 'a').write('x'); print('said')\"", 60)
    bad = gpu.Job("bad", "-c 'raise SystemExit(3)'", 60)
    slow = gpu.Job("slow", "-c 'import time; time.sleep(60)'", 1)
    large = gpu.Job("large", "-c 'pass'", 1000)
    monkeypatch.setattr(gpu, "card", lambda: "abacus")
    monkeypatch.setattr(sys, "argv", ["gpu.py", str(tmp_path), "--limit", "500"])
    assert gpu.main((good, bad, slow, large)) == 1
    said = capsys.readouterr().out
    assert "job 1 of 4: good" in said and "bad: failed with 3, see bad.txt" in said
    assert "slow: cut off after 1 s" in said and "large would take 1000 s" in said
    assert (tmp_path / "good.txt").read_text() == "said\n"
    assert gpu.main((good, dataclasses.replace(bad, words="-c pass"))) == 0
    assert (tmp_path / "abacus-y").read_text() == "x"  # once
    assert "good" not in capsys.readouterr().out


def test_without_a_gpu_it_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu.py", str(tmp_path / "out")])
    with pytest.raises(SystemExit, match="no CUDA device"):
        gpu.main()
    assert not (tmp_path / "out").exists()
