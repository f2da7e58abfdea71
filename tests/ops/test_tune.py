"""Tuning keeps the fastest tile that gives the same results, and later processes find it."""

import json

import pytest
import torch

pytest.importorskip("triton")


@pytest.fixture
def tiles(tmp_path, monkeypatch):
    from lssar.ops.fused import tiles

    monkeypatch.setenv("LSSAR_CACHE", str(tmp_path))
    monkeypatch.setattr(tiles, "CHOSEN", {})
    tiles._load_stored.cache_clear()
    yield tiles
    tiles._load_stored.cache_clear()


@pytest.mark.skipif(torch.cuda.is_available(), reason="candidates are for the interpreter here")
def test_the_fastest_tile_is_kept_and_found_again(tiles, monkeypatch):
    from lssar.ops.fused import tune

    small = tiles.Tile(16, 16, 1, 1, tma=True)
    monkeypatch.setattr(tune, "candidates", lambda kernel, now: iter((now, small)))
    times = iter([2.0, 1.0, 1.0, 2.0, 1.0, 2.0])
    found = tune.tune(32, torch.float32, length=40, heads=1, time=lambda run: run() or next(times))
    key = ("forward", 64, 4)
    assert found[key] == small and tiles.tile_for("forward", 32, 4) == small
    path = tune.store(found)
    assert json.loads(path.read_text())["forward/64/4"]["m"] == 16
    tiles.CHOSEN.clear()
    tiles._load_stored.cache_clear()
    assert tiles.tile_for("forward", 32, 4) == small


def test_a_broken_file_is_said_and_left_alone(tiles):
    path = tiles.stored_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text('{"forward/64/2": {"size": 1}}')
    with pytest.warns(UserWarning, match="is not used"):
        tiles.tile_for("forward", 64, 2)
    assert path.exists()


def test_candidates_fit_the_warps():
    from lssar.ops.fused import tiles, tune

    for kernel, d in (("forward", 64), ("query_gradient", 128), ("key_gradient_hopper", 128)):
        every = list(tune.candidates(kernel, tiles.HOPPER[(kernel, d, 2)]))
        assert len(every) == len(set(every)) > 2
