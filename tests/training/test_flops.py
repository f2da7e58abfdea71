import pytest

from lssar.model import GPT
from lssar.training.metrics import flops_per_token, mean_visible
from lssar.training.recipes import recipe


@pytest.mark.parametrize(("length", "window"), [(1, None), (7, None), (7, 1), (7, 3), (7, 7), (7, 20), (128, 32)])
def test_mean_visible_counts_the_keys_of_each_row(length, window):
    rows = [min(row + 1, window or length) for row in range(length)]
    assert mean_visible(length, window) == pytest.approx(sum(rows) / length)


def test_local_layers_cost_less():
    mixed, uniform = (GPT(recipe("long-tiny", layout=layout).model()) for layout in ("mixed@32", "uniform"))
    seen = [3 * mean_visible(128, 32) + mean_visible(128, None), 4 * mean_visible(128, None)]
    for model, keys in zip((mixed, uniform), seen):
        assert flops_per_token(model, 128) == pytest.approx(6 * model.parameter_count() + 12 * 128 * keys)
