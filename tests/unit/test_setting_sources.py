"""Which source of a setting wins; files of variables; and what is used of a broken configuration."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import settings as limits
from hypothesis import strategies as st

from cloudddp.agent import protocol
from cloudddp.config import schema, settings, timing, tolerant
from cloudddp.config.cluster_spec import ClusterSpec
from cloudddp.config.command_line import MAX_ENV_FILE, parse_env_file, read_env_file, variable_flags
from cloudddp.config.settings import Layer
from cloudddp.errors import UsageError


def test_file_with_a_byte_order_mark_is_read(tmp_path: Path) -> None:
    path = tmp_path / "cloudddp.toml"
    path.write_bytes(b"\xef\xbb\xbf[cluster]\nnodes = 3\n")
    assert settings.resolve([settings.read_toml(path)]).cluster.nodes == 3


def test_source_with_the_highest_precedence_wins() -> None:
    flag = Layer("--nodes", {"cluster": {"nodes": "5"}}, textual=True)
    environment = settings.environment_layers({"CLOUDDDP_NODES": "4", "CLOUDDDP_DISK_GB": "400"})
    file = Layer("cloudddp.toml", {"cluster": {"nodes": 3, "disk_gb": 300, "zones": ["us-east-1c"]}})
    user = Layer(
        "config.toml", {"cluster": {"nodes": 2, "disk_gb": 200, "zones": "us-east-1b", "user": "ec2-user"}}
    )
    chosen = settings.resolve([flag, *environment, file, user]).cluster
    assert (chosen.nodes, chosen.disk_gb, chosen.zones, chosen.user) == (5, 400, ("us-east-1c",), "ec2-user")
    assert chosen.instance_type == ClusterSpec().instance_type


def test_bad_value_is_refused_even_if_overridden() -> None:
    with pytest.raises(UsageError, match=r"config\.toml"):
        settings.resolve(
            [Layer("flag", {"cluster": {"nodes": 1}}), Layer("config.toml", {"cluster": {"nodes": 0}})]
        )


def test_env_tables_merge_by_name() -> None:
    flag = Layer("--env", {"job": {"env": {"A": "flag"}}}, textual=True)
    file = Layer("file", {"job": {"env": {"A": "file", "B": "file"}}})
    user = Layer("user", {"job": {"env": {"B": "user", "C": "user"}}})
    assert settings.resolve([flag, file, user]).job.env == {"A": "flag", "B": "file", "C": "user"}


def test_every_setting_except_tables_has_a_variable() -> None:
    sections = [section for section in schema.SECTIONS if section not in schema.LISTS]
    names = [settings.variable_of(section, key) for section in sections for key in schema.fields(section)]
    named = [name for name in names if name]
    assert len(named) == len(set(named)) == len(names) - len(settings.TABLES)
    assert not {name.removeprefix("CLOUDDDP_") for name in named} & settings.OTHER_VARIABLES


def test_variables_that_are_not_settings_are_ignored_and_misspelt_ones_refused() -> None:
    """A rank may call cloudddp, too."""
    others = [
        "PATH",
        "CLOUDDDP_HOME",
        "CLOUDDDP_JOB_ID",
        "CLOUDDDPX",
        timing.VARIABLE,
        protocol.TASK_VARIABLE,
    ]
    others += [protocol.ATTEMPT_VARIABLE, protocol.STATUS_VARIABLE, protocol.STEP_VARIABLE]
    assert settings.environment_layers(dict.fromkeys(others, "x")) == []
    with pytest.raises(UsageError, match="CLOUDDDP_MAXCOST") as caught:
        settings.environment_layers({"CLOUDDDP_MAXCOST": "10"})
    assert "'CLOUDDDP_MAX_COST'" in caught.value.hint


def test_error_in_a_variable_names_the_variable() -> None:
    layers = settings.environment_layers({"CLOUDDDP_MAX_HOURS": "forever"})
    with pytest.raises(UsageError) as caught:
        settings.resolve(layers)
    assert not [part for part in ("CLOUDDDP_MAX_HOURS", "'forever'") if part not in caught.value.message]
    assert "at most 336" in caught.value.hint
    with pytest.raises(UsageError, match="CLOUDDDP_OUTPUTS"):
        settings.resolve(settings.environment_layers({"CLOUDDDP_OUTPUTS": "runs,\udcff"}))


# -- files of environment variables --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("\n  \n# comment\n", {}),
        ("A=1\r\nB=2\r\n", {"A": "1", "B": "2"}),
        ("  export A = two words  \n", {"A": "two words"}),
        ("A=\nB= # empty\nC=#hash", {"A": "", "B": "", "C": "#hash"}),
        ("A=b=c==", {"A": "b=c=="}),
        ("A='$x \\n # \"q\"' # c", {"A": '$x \\n # "q"'}),
        ('A="line\\nnext \\"q\\" \\$x \\\\ \\d"', {"A": 'line\nnext "q" $x \\ \\d'}),
        ('KEY="-----BEGIN-----\nabc=\n---\n"\nB=2', {"KEY": "-----BEGIN-----\nabc=\n---\n", "B": "2"}),
        ("A=1\nA=2", {"A": "2"}),
        ("A=$HOME ${B}", {"A": "$HOME ${B}"}),
    ],
)
def test_syntax(text: str, found: dict[str, str]) -> None:
    assert parse_env_file(text, "x") == found


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("A=1\nhunter2\n", "line 2: no '='"),
        ("1A=hunter2", "line 1: what is before '=' is not the name"),
        ("A='x'\nB='hunter2", "line 2: the quote is not closed"),
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


@limits(max_examples=40)
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


# -- broken configurations: for `down` and the verbs that only look, the name has to be certain --------------


def name(environ: dict[str, str], files: tuple[Path, ...]) -> str:
    """Return the name of the cluster, where at least one error was reported."""
    errors: list[UsageError] = []
    default = Layer("folder", {"cluster": {"name": "default"}})
    found = tolerant.resolve([], environ, files, errors.append, named=True, default=default)
    assert errors
    return found.cluster.name


@pytest.mark.parametrize(
    "broken",
    [
        *("max_huors = 2", "[clutser]\nnodes = 2", 'nodes = "many"', "nodes = ", "# \udcff"),
        'proxy_jump = "a@b"\nproxy_command = "nc %h %p"',
    ],
)
def test_name_in_a_file_that_is_broken_elsewhere_is_used(tmp_path: Path, broken: str) -> None:
    path = tmp_path / "cloudddp.toml"
    path.write_bytes(f'[cluster]\nname = "mine"\n{broken}\n'.encode(errors="surrogateescape"))
    assert name({}, (path,)) == "mine"


@pytest.mark.parametrize(
    "before",
    [
        "nodes = \n",
        "[cluster]\nnodes = \n",
        "[clutser]\n",
        "[job]\n",
        "[cluster.main]\n",
        "[cluster]\nnmae = 1\nx",
    ],
)
def test_name_is_not_guessed_from_a_file(tmp_path: Path, before: str) -> None:
    path = tmp_path / "cloudddp.toml"
    path.write_text(f'{before}name = "mine"')
    with pytest.raises(UsageError):
        name({}, (path,))


def test_name_is_not_guessed_from_a_variable_or_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    """A broken variable that cannot name the cluster is ignored."""
    missing, nothing = (tmp_path / "missing.toml",), dict[str, str]()
    for environ, files in (
        ({"CLOUDDDP_CLUSTR": "mine"}, ()),
        ({"CLOUDDDP_NAME": "mine"}, ()),
        (nothing, missing),
    ):
        with pytest.raises(UsageError):
            name(environ, files)
    for variable, value in (("CLOUDDDP_NODES", "many"), ("CLOUDDDP_MAX_HUORS", "2")):
        assert name({variable: value}, ()) == "default"
