import pytest
import torch

from lssar.evaluation.overflow import model_overflow, synthetic_overflow
from lssar.layouts import parse_layout
from lssar.model import GPT, ModelConfig


def overflow_of(layout: str) -> dict:
    config = ModelConfig(layers=4, width=64, heads=4, vocab_size=50, pattern=parse_layout(layout))
    return model_overflow(GPT(config), torch.randint(50, (2, 64)))


def test_rows_of_re_weighted_heads_are_counted():
    assert overflow_of("softmax@8*3 lssa+lssar,head_scale=1/none")["rows"] == 2 * 2
    found = overflow_of("softmax@8 lssar/none")
    assert found["rows"] == 2 * 2 * 4
    assert not any(found["stable"].values())
    with pytest.raises(ValueError, match=r"softmax@8\) has no re-weighting"):
        overflow_of("softmax@8")


def test_the_textbook_form_overflows_where_the_stable_one_does_not():
    rows = synthetic_overflow((31.0,), lengths=(256,), rows=4)
    assert sum(row["textbook"]["float16"] for row in rows) > 0
    assert not any(count for row in rows for count in row["stable"].values())
