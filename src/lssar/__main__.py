"""`python -m lssar`, the same as the `lssar` command."""

from lssar_cli import main

if __name__ == "__main__":
    main()
