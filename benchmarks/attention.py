"""`lssar bench` from a source tree: see `--help`, and src/lssar/benchmark/ for how things are measured."""

import sys

from lssar.cli import main

if __name__ == "__main__":
    main(["bench", *sys.argv[1:]])
