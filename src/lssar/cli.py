"""`python -m lssar.cli` and `lssar.cli.main`: the `lssar` command, which is in `lssar_cli`."""

from lssar_cli import main

__all__ = ["main"]

if __name__ == "__main__":
    main()
