"""Which source of a setting wins; files of variables; and what is used of a broken configuration."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloudddp.agent import protocol
from cloudddp.config import schema, settings, spec, timing, tolerant
from cloudddp.config.command_line import MAX_ENV_FILE, parse_env_file, read_env_file, variable_flags
from cloudddp.config.settings import Layer
from cloudddp.config.spec import Config
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
    assert chosen.instance_type == spec.ClusterSpec().instance_type


def test_bad_value_is_refused_even_if_overridden() -> None:
    with pytest.raises(UsageError, match=r"config\.toml"):
        settings.resolve(
            [Layer("flag", {"cluster": {"nodes": 1}}), Layer("config.toml", {"cluster": {"nodes": 0}})]
        )


def test_no_source_gives_the_defaults() -> None:
    assert settings.resolve([]) == Config()


def test_env_tables_merge_by_name() -> None:
    flag = Layer("--env", {"job": {"env": {"A": "flag"}}}, textual=True)
    file = Layer("file", {"job": {"env": {"A": "file", "B": "file"}}})
    user = Layer("user", {"job": {"env": {"B": "user", "C": "user"}}})
    assert settings.resolve([flag, file, user]).job.env == {"A": "flag", "B": "file", "C": "user"}


def test_lists_are_replaced_not_merged() -> None:
    stronger, weaker = (
        Layer("a", {"sync": {"exclude": ["x"]}}),
        Layer("b", {"sync": {"exclude": ["y", "z"]}}),
    )
    assert settings.resolve([stronger, weaker]).sync.exclude == ("x",)


def test_every_setting_except_tables_has_a_variable() -> None:
    names = [
        settings.variable_of(section, key)
        for section in schema.SECTIONS
        if section not in schema.LISTS
        for key in schema.fields(section)
    ]
    named = [name for name in names if name]
    assert len(named) == len(set(named)) == len(names) - len(settings.TABLES)
    assert not {name.removeprefix("CLOUDDDP_") for name in named} & settings.OTHER_VARIABLES


def test_variables_that_are_not_settings_are_ignored() -> None:
    environ = {
        "PATH": "/bin",
        "CLOUDDDP_HOME": "x",
        "CLOUDDDP_JOB_ID": "y",
        "CLOUDDDPX": "z",
        timing.VARIABLE: "1",
    }
    assert settings.environment_layers(environ) == []


def test_misspelt_variable_is_refused_with_a_suggestion() -> None:
    with pytest.raises(UsageError, match="CLOUDDDP_MAXCOST") as caught:
        settings.environment_layers({"CLOUDDDP_MAXCOST": "10"})
    assert "'CLOUDDDP_MAX_COST'" in caught.value.hint


def test_error_in_a_variable_names_the_variable() -> None:
    layers = settings.environment_layers({"CLOUDDDP_MAX_HOURS": "forever"})
    with pytest.raises(UsageError) as caught:
        settings.resolve(layers)
    assert "CLOUDDDP_MAX_HOURS" in caught.value.message
    assert "'forever'" in caught.value.message
    assert "at most 336" in caught.value.hint
    with pytest.raises(UsageError, match="CLOUDDDP_OUTPUTS"):
        settings.resolve(settings.environment_layers({"CLOUDDDP_OUTPUTS": "runs,\udcff"}))


def test_variables_of_ranks_are_no_misspelt_settings() -> None:
    """A rank may call cloudddp."""
    of_ranks = {
        protocol.TASK_VARIABLE,
        protocol.ATTEMPT_VARIABLE,
        protocol.STATUS_VARIABLE,
        protocol.STEP_VARIABLE,
    }
    assert {name.removeprefix("CLOUDDDP_") for name in of_ranks} <= settings.OTHER_VARIABLES


# -- files of environment variables --------------------------------------------------------------------------


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


# -- broken configurations: for `down` and the verbs that only look, the name has to be certain --------------


NO_FILE: tuple[Path, ...] = ()


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
        "max_huors = 2",
        "[clutser]\nnodes = 2",
        'nodes = "many"',
        'proxy_jump = "a@b"\nproxy_command = "nc %h %p"',
        "nodes = ",
        "# \udcff",
    ],
)
def test_name_in_a_file_that_is_broken_elsewhere_is_used(tmp_path: Path, broken: str) -> None:
    path = tmp_path / "cloudddp.toml"
    path.write_bytes(f'[cluster]\nname = "mine"\n{broken}\n'.encode(errors="surrogateescape"))
    assert name({}, (path,)) == "mine"


@pytest.mark.parametrize(
    "text",
    [
        'nodes = \nname = "mine"',
        '[cluster]\nnodes = \nname = "mine"',
        '[cluster]\nnmae = "mine"',
        '[cluster]\nname = "No Name"',
        '[clutser]\nname = "mine"',
        'name = "mine"',
        '[job]\nname = "mine"',
        '[cluster]\nNAME = "mine"',
        '[cluster.main]\nname = "mine"',
        '[tool.cloudddp.cluster]\nname = "mine"',
    ],
)
def test_name_is_not_guessed_from_a_file(tmp_path: Path, text: str) -> None:
    path = tmp_path / "cloudddp.toml"
    path.write_text(text)
    with pytest.raises(UsageError):
        name({}, (path,))


def test_name_is_not_guessed_from_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        name({}, (tmp_path / "missing.toml",))


@pytest.mark.parametrize("variable", ["CLOUDDDP_CLUSTR", "CLOUDDDP_NAME"])
def test_name_is_not_guessed_from_a_variable(variable: str) -> None:
    with pytest.raises(UsageError):
        name({variable: "mine"}, NO_FILE)


@pytest.mark.parametrize(("variable", "value"), [("CLOUDDDP_NODES", "many"), ("CLOUDDDP_MAX_HUORS", "2")])
def test_broken_variable_that_cannot_name_the_cluster_is_ignored(variable: str, value: str) -> None:
    assert name({variable: value}, NO_FILE) == "default"
