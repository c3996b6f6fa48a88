"""Numbers of the command line that are none, or are endless."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.mark.parametrize("text", ["nan", "inf", "-inf"])
@pytest.mark.parametrize(
    "words",
    [
        ("launch", "-d", "--down", "--keep", "{}", "script.py"),
        ("launch", "--stall-minutes", "{}", "script.py"),
        ("up", "--max-hours", "{}"),
        ("up", "--idle-minutes", "{}"),
        ("sim", "start", "--booting-seconds", "{}"),
    ],
    ids=lambda words: words[-2] if words[-1] == "{}" else words[-3],
)
def test_number_that_is_none_is_refused(cli: Any, words: tuple[str, ...], text: str) -> None:
    cli.write("script.py", "pass\n")
    done = cli(*(word.format(text) for word in words))
    assert done.returncode == 2, done.stderr
    assert text in done.stderr
