"""Files of environment variables, and variables of this computer's environment."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloudddp.config.command_line import MAX_ENV_FILE, parse_env_file, read_env_file, variable_flags
from cloudddp.errors import UsageError


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", {}),
        ("\n  \n# comment\n", {}),
        ("A=1", {"A": "1"}),
        ("A=1\r\nB=2\r\n", {"A": "1", "B": "2"}),
        ("  export A = two words  \n", {"A": "two words"}),
        ("A=\nB= # empty\nC=#hash", {"A": "", "B": "", "C": "#hash"}),
        ("A=x#y # comment", {"A": "x#y"}),
        ("A=b=c==", {"A": "b=c=="}),
        ("A='$x \\n # \"q\"' # c", {"A": '$x \\n # "q"'}),
        ('A="line\\nnext \\"q\\" \\$x \\\\ \\d"', {"A": 'line\nnext "q" $x \\ \\d'}),
        (
            'KEY="-----BEGIN-----\nabc=\n-----END-----\n"\nB=2',
            {"KEY": "-----BEGIN-----\nabc=\n-----END-----\n", "B": "2"},
        ),
        ("KEY='a\n# not a comment\nb'\nB=2", {"KEY": "a\n# not a comment\nb", "B": "2"}),
        ("A=1\nA=2", {"A": "2"}),
        ("A=$HOME ${B}", {"A": "$HOME ${B}"}),
        ("A=it's", {"A": "it's"}),
        ("export=1", {"export": "1"}),
        ('A=""', {"A": ""}),
    ],
)
def test_syntax(text: str, found: dict[str, str]) -> None:
    assert parse_env_file(text, "x") == found


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("A=1\nhunter2\n", "line 2: no '='"),
        ("\n\nhunter2 x=1", "line 3: what is before '=' is not the name of a variable"),
        ("1A=hunter2", "line 1: what is before '=' is not the name"),
        ("=hunter2", "line 1: what is before '=' is not the name"),
        ("A='x'\nB='hunter2", "line 2: the quote is not closed"),
        ('B="hunter2\\"', "line 1: the quote is not closed"),
        ("A='x\ny'\nB='x'hunter2", "line 3: text follows the closing quote"),
        ("A=hunter2\0", "line 1: the value contains a NUL"),
    ],
)
def test_errors_name_the_line_and_show_none_of_it(text: str, reason: str) -> None:
    with pytest.raises(UsageError) as error:
        parse_env_file(text, "--env-file f")
    assert reason in error.value.message
    assert error.value.message.startswith("--env-file f, line ")
    assert "hunter2" not in f"{error.value.message} {error.value.hint}"


@given(st.text(max_size=60))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        found = parse_env_file(text, "x")
    except UsageError:
        return
    assert all(name.isidentifier() for name in found)


@given(st.dictionaries(st.from_regex(r"[A-Z_][A-Z0-9_]{0,5}", fullmatch=True), st.text(max_size=20)))
def test_double_quotes_can_hold_every_value(values: dict[str, str]) -> None:
    values = {name: value.replace("\0", "").replace("\r", "") for name, value in values.items()}
    escaped = {n: v.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") for n, v in values.items()}
    text = "".join(f'{name}="{value}"\n' for name, value in escaped.items())
    assert parse_env_file(text, "x") == values


def test_options_override_files_and_the_last_one_wins(tmp_path: Path) -> None:
    file = tmp_path / "f"
    file.write_bytes("\ufeffA=file\nB=file\nC=file".encode())
    found = variable_flags(["A=flag", "B", "B"], [str(file)], {"B": "here\nline 2"})
    merged: dict[str, str] = {}
    for flag in found:
        merged |= flag.value
    assert merged == {"A": "flag", "B": "here\nline 2", "C": "file"}


def test_pipe_is_read_to_its_end(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_text, args=("A=from a command\n",))
    writer.start()
    assert read_env_file(str(pipe)) == {"A": "from a command"}
    writer.join()


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (None, "No such file"),
        (b"A=1\nB=\xff\n", "line 2: not UTF-8"),
        (b"#" * (MAX_ENV_FILE + 1), "larger than 1 MiB"),
    ],
)
def test_unreadable_file_is_named(tmp_path: Path, data: bytes | None, reason: str) -> None:
    file = tmp_path / "f"
    if data is not None:
        file.write_bytes(data)
    with pytest.raises(UsageError) as error:
        read_env_file(str(file))
    assert str(file) in error.value.message
    assert reason in error.value.message
    with pytest.raises(UsageError, match="Is a directory"):
        read_env_file(str(tmp_path))
