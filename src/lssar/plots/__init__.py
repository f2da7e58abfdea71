"""Every figure. Matplotlib is an extra: a clear error says so where it is missing."""

from lssar.plots.benchmark import plot_benchmark
from lssar.plots.experiments import plot_experiment
from lssar.plots.length import plot_length
from lssar.plots.newton import plot_forces, plot_inductive_bias, plot_law_errors, plot_orbits
from lssar.plots.retrieval import plot_retrieval
from lssar.plots.rows import plot_diagnostics, plot_dilution

__all__ = [
    "plot_benchmark",
    "plot_diagnostics",
    "plot_dilution",
    "plot_experiment",
    "plot_forces",
    "plot_inductive_bias",
    "plot_law_errors",
    "plot_length",
    "plot_orbits",
    "plot_retrieval",
]
