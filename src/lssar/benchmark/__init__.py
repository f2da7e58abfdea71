"""Speed and memory of attention implementations against their peers, each checked before it is timed."""

from lssar.benchmark.contestants import Case, contestant_names
from lssar.benchmark.run import run_benchmark

__all__ = ["Case", "contestant_names", "run_benchmark"]
