"""The command, as the tests of this folder give it."""

import pytest

from lssar.cli import main


def reproduce(*words: str) -> int:
    """Its exit status."""
    with pytest.raises(SystemExit) as ended:
        main(["reproduce", *words])
    return int(ended.value.code or 0)
