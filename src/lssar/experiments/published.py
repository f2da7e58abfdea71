"""Every number that the paper publishes (arXiv 2501.13428), by table and row: 124M, FineWeb-10B, trained at 1024.

Losses are on held-out text at 1x, 2x, 4x and 8x the training length. Kept apart from anything measured here.
"""

from __future__ import annotations

LOSSES: dict[str, dict[str, dict[int, float]]] = {
    "table1": {
        "softmax": {1: 3.1911},
        "inverse": {1: 3.1915},
        "re-centred": {1: 3.2008},
        "re-centred + l1": {1: 3.1954},
    },
    "table2": {"I": {1: 3.4138}, "II": {1: 3.247}, "III": {1: 3.3297}, "IV": {1: 3.1911}},
    "table3": {
        "ReLU": {1: 3.2006},
        "ReLU^2": {1: 3.2494},
        "ReLU6": {1: 3.2039},
        "GeLU": {1: 3.2051},
        "sigmoid": {1: 3.2000},
        "softplus": {1: 3.1901},
        "Mish": {1: 3.2001},
        "exp": {1: 3.1911},
    },
    "table4": {
        "softmax": {1: 3.1911, 2: 4.1662, 4: 5.4513, 8: 6.2823},
        "sigmoid (Ramapuram)": {1: 3.1935, 2: 7.4554, 4: 11.8355, 8: 14.4995},
        "sigmoid (Ramapuram, changed b)": {1: 3.1930, 2: 6.5830, 4: 8.4679, 8: 9.5939},
        "sigmoid (Ramapuram, + l1)": {1: 3.1849, 2: 4.3470, 4: 5.5544, 8: 6.1846},
        "sigmoid (Eq. 3)": {1: 3.2000, 2: 4.3811, 4: 5.8465, 8: 6.5701},
        "ReLU (Wortsman)": {1: 3.2143, 2: 6.2662, 4: 8.4982, 8: 10.3460},
        "ReLU (Li)": {1: 3.2006, 2: 4.5192, 4: 5.6924, 8: 6.4561},
        "ReLU (Shen)": {1: 3.2155, 2: 6.5573, 4: 8.9072, 8: 10.7266},
        "LSSA": {1: 3.1905, 2: 4.1301, 4: 5.2960, 8: 5.9403},
        "softmax, p = 3": {1: 3.1879, 2: 4.0277, 4: 5.2842, 8: 6.2339},
        "sigmoid + l1, p = 3": {1: 3.1841, 2: 3.7387, 4: 4.9286, 8: 5.7450},
        "LSSAR, p = 3": {1: 3.1782, 2: 4.2383, 4: 5.4056, 8: 6.3007},
        "softmax, p = 15": {1: 5.3878, 2: 5.9491, 4: 6.5276, 8: 7.0183},
        "sigmoid + l1, p = 15": {1: 3.2171, 2: 3.3499, 4: 3.6108, 8: 3.8587},
        "LSSAR, p = 15": {1: 3.1905, 2: 3.1930, 4: 3.2291, 8: 3.3171},
    },
}

PASSKEY: dict[str, dict[str, float | str]] = {
    "softmax": {"1": 0.64, "1.5": 0.0, "4": 0.0, "8": 0.0},
    "LSSAR": {"1": 0.86, "1.5": 0.45, "4": 0.20, "8": "above 0"},
}
"""Later versions of the paper: share of passkeys found, by multiple of the training length."""

DOWNSTREAM: dict[str, dict[str, float]] = {
    "softmax": {"arc_easy": 0.3977, "hellaswag": 0.3242, "piqa": 0.6409, "sciq": 0.606},
    "LSSAR": {"arc_easy": 0.4057, "hellaswag": 0.3303, "piqa": 0.6534, "sciq": 0.621},
}
"""Later versions of the paper: zero-shot accuracy; which of lm-eval's two it is they do not say."""
