"""Tuning keeps the fastest tile that gives the same results, and later processes find it."""

import json

import pytest
import torch

from lssar import switches

pytest.importorskip("triton")


@pytest.fixture
def tiles(tmp_path, monkeypatch):
    from lssar.ops.fused import tiles

    monkeypatch.setattr(switches, "CACHE", tmp_path)
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


def test_what_is_timed_is_the_kernel_itself(tiles, monkeypatch):
    """Not the launch after it, which repairs what a dO that is not finite has broken and otherwise does nothing."""
    from lssar.ops.fused import op, tune

    launched = []
    monkeypatch.setattr(op, "start_kernel", lambda kernel, programs, arguments, constants: launched.append(constants))
    q, k, v, do = (torch.randn(1, 1, 40, 32) for _ in range(4))
    recorded = tune.record(q, k, v, do)
    assert set(recorded) == {"forward", "query_gradient", "key_gradient"}
    launched.clear()
    recorded["key_gradient"]()
    assert [constants["REPAIR"] for constants in launched] == [False]


def test_a_broken_file_is_reported_and_left_alone(tiles):
    path = tiles.stored_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text('{"forward/64/2": {"size": 1}}')
    with pytest.warns(UserWarning, match="is not used"):
        tiles.tile_for("forward", 64, 2)
    assert path.exists()


def test_candidates_fit_the_warps():
    from lssar.ops.fused import tiles, tune

    parts = ("forward", "query_gradient", "key_gradient")
    for kernel in (f"{part}{suffix}" for part in parts for suffix in ("", "_hopper")):
        every = list(tune.candidates(kernel, tiles.HOPPER[(kernel, 128, 2)]))
        assert len(every) == len(set(every)) > 2
        if kernel.endswith("_hopper"):  # a warp group of four for 64 rows of the product, which are keys for dk and dv
            assert all((t.n if kernel.startswith("key") else t.m) == 16 * t.warps for t in every)
        elif kernel == "key_gradient":  # see overwritten in compile_for_hopper.py
            assert not any(t.m < 64 <= t.n for t in every)


def test_a_card_with_less_shared_memory_gets_smaller_tiles(tiles, monkeypatch):
    """The launch goes down until one fits, remembers it, and gives up with the driver's own words if none does."""
    from triton.runtime.errors import OutOfResources

    monkeypatch.setattr(tiles, "tile_for", lambda *key: tiles.CHOSEN.get(key[:1], tiles.Tile(128, 128, 8, 4, n1=128)))
    tried = []

    def run(room):
        def launch(tile, constants):
            tried.append(tile)
            if tile.m * tile.n * tile.stages > room:
                raise OutOfResources(tile.m * tile.n * tile.stages, room, "shared memory")

        return launch

    tiles.launch("forward", 64, 2, False, run(64 * 32 * 2))
    assert tried[-1].m * tried[-1].n * tried[-1].stages <= 64 * 32 * 2 and len(tried) > 1
    assert tiles.CHOSEN[("forward", 64, 2)] == tried[-1]
    sizes = [max(t.m, t.n) * t.stages for t in tried]
    assert sizes == sorted(sizes, reverse=True)
    with pytest.raises(OutOfResources):
        tiles.launch("forward", 64, 2, False, run(1))
