"""Which folders are projects, and which of their files stay here: refused or named before anything is
called."""

from __future__ import annotations

import os
import pwd
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.harness import TIMEOUT
from support.jobs import direct, homes
from support.localsync import LocalCluster, put
from support.repositories import git

from cloudddp.config import project
from cloudddp.config.spec import Config, DataSpec, SyncSpec
from cloudddp.errors import UsageError
from cloudddp.job import launch, project_files, sync, unsent
from cloudddp.job.job_request import Script


def refused(cli: Any, faults: Any, *words: str, **env: str) -> str:
    """Run a command that has to be refused before anything is called; return what it says."""
    err = cli.fails(2, *words, **env)
    assert faults.calls == []
    return str(err)


# -- folders that are no project -----------------------------------------------------------------------------


def test_home_is_no_project(tmp_path: Path, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for home, what in (
        ("here", "is your home folder, so"),
        ("here/people/ann", "is above your home folder, so"),
    ):
        monkeypatch.setenv("HOME", str(tmp_path / home))
        with pytest.raises(UsageError, match=what):
            project.require(here)


@pytest.mark.parametrize(
    ("kind", "home"), [("link", "here"), ("no HOME", ""), ("tmp", ""), ("system", "here")]
)
def test_folders_that_hold_more_than_a_project_are_refused(
    tmp_path: Path, here: Path, monkeypatch: pytest.MonkeyPatch, kind: str, home: str
) -> None:
    (tmp_path / "link").symlink_to(here)
    monkeypatch.setenv("HOME", home and str(tmp_path / home))
    if kind == "tmp":
        monkeypatch.setattr(tempfile, "tempdir", str(here))
    folders = {
        "link": tmp_path / "link",
        "no HOME": Path(pwd.getpwuid(os.getuid()).pw_dir),
        "system": Path("/var"),
    }
    with pytest.raises(UsageError, match="not a project"):
        project.require(folders.get(kind, here))


SECRETS = (
    "n\nl/id_rsa",
    "n\nl/k/.env",
    *"""
        id_ed25519 sub/server.pem deploy.key .ssh/config .aws/credentials a/.netrc .bash_history
        .kube/config .docker/config.json .cache/huggingface/token keys/service-account-1.json .env ID_RSA
        Server.PEM sub/.ENV.prod .envrc prod.env id_rsa_work
    """.split(),
)
SENT = ("id_ed25519.pub", "ca.pem", ".docker/other", "history.py", "token", "train.py")


@pytest.mark.parametrize("kind", ["folder", "untracked", "tracked"])
def test_files_that_hold_secrets_are_withheld_unless_git_tracks_them(tmp_path: Path, kind: str) -> None:
    put(
        tmp_path,
        {**dict.fromkeys((*SECRETS, *SENT), "-----BEGIN RSA PRIVATE KEY-----"), "ca.pem": "CERTIFICATE"},
    )
    if kind != "folder":
        git(tmp_path, "init", "-q")
    if kind == "tracked":
        git(tmp_path, "add", "-f", ".")
    files = project_files.of_config(tmp_path, Config())
    expected = {*SENT, *(SECRETS if kind == "tracked" else ())}
    assert set(files.manifest) == expected
    assert len(files.withheld) == (0 if kind == "tracked" else len(SECRETS))
    named = "".join(unsent.notes(files, Config()))
    assert (".aws, .bash_history" in named) == (kind != "tracked")


# -- git -----------------------------------------------------------------------------------------------------


# What git says -> how that comes about, in a repository.
UNREADABLE: dict[str, Callable[[Path, pytest.MonkeyPatch], object]] = {
    "bad config": lambda root, _: (root / ".git/config").write_text("[broken"),
    "git was not found": lambda root, patch: patch.setenv("PATH", str(root)),
    # git's own switch
    "--add safe.directory": lambda _, patch: patch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1"),
    "not a git repository: /nowhere": lambda root, _: (
        (root / ".git").rename(root / "moved"),
        (root / ".git").write_text("gitdir: /nowhere/worktrees/x\n"),
    ),
    "not a git repository": lambda root, _: (root / ".git/HEAD").unlink(),
}


@pytest.mark.parametrize("text", UNREADABLE)
def test_repository_that_git_cannot_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    git(tmp_path, "init", "-q")
    (tmp_path / "sub").mkdir()
    UNREADABLE[text](tmp_path, monkeypatch)
    for folder in (tmp_path, tmp_path / "sub"):
        with pytest.raises(UsageError) as caught:
            project_files.of_config(folder, Config())
        assert text in caught.value.message + caught.value.hint


# -- one project, one cluster --------------------------------------------------------------------------------


def test_cluster_has_the_name_of_the_project_folder(cli: Any, tmp_path: Path) -> None:
    del cli.env["CLOUDDDP_CLUSTER"]
    cli.env["CLOUDDDP_HOME"] = str(tmp_path / "state")  # without the clusters of other tests
    cli.cwd = tmp_path / "My Net_2"
    (cli.cwd / "sub").mkdir(parents=True)
    cli.write("cloudddp.toml", "[cluster]\nnodes = 1\n")
    cli.cwd = cli.cwd / "sub"
    assert (
        "no cluster 'my-net-2'"
        in cli("--config", "../cloudddp.toml", "--region", "us-east-1", "status").stderr
    )


def test_nodes_with_the_files_of_another_project_are_not_overwritten_unasked(
    cli: Any, tmp_path: Path, terminal: Any
) -> None:
    direct(cli)
    cli.write("train.py", "print('one')\n")
    cli.write("data.txt", "kept")
    assert "one" in cli.ok("launch", "train.py")
    cli.cwd = tmp_path / "other" / "project"
    cli.cwd.mkdir(parents=True)
    cli.write("train.py", "print('two')\n")
    first = tmp_path / "project" / "train.py"
    os.utime(cli.cwd / "train.py", ns=(first.stat().st_atime_ns, first.stat().st_mtime_ns))
    err = cli.fails(1, "sync", CLOUDDDP_YES="")
    assert "has the files of another project" in err
    assert "sync --yes" in err
    data = homes(cli)[0] / "project/data.txt"
    assert data.read_text() == "kept"
    asked = terminal("launch", "train.py")
    asked.read_until(b"Replace them")
    os.write(asked.ours, b"y\n")
    asked.read_until(b"two")  # though its size and time are those of the other project's file
    assert asked.process.wait(TIMEOUT) == 0
    assert not data.exists()
    cli.cwd = tmp_path / "project"
    cli.ok("sync", "--yes")
    assert data.read_text() == "kept"


# -- files that the nodes would lack -------------------------------------------------------------------------


def warnings(root: Path, config: Config | None = None) -> str:
    files = project_files.of_config(root, config or Config())
    return "\n".join(unsent.notes(files, config or Config()))


def write(root: Path, *names: str) -> None:
    put(root, dict.fromkeys(names, ""))


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("outside/train.py", "outside is a link to /"),
        # A link to the project itself, which is elsewhere on the nodes.
        ("inner/abs.py", "inner/abs.py is a link to /"),
        ("runs/train.py", "job.outputs is empty, and runs/ is for results"),
        ("results/train.py", "results/ is where `pull` puts results"),
        ("venv/train.py", "venv/ is never sent"),
        ("cut/train.py", "sync.exclude names it"),
        ("data/train.py", "it is ignored by git"),
        (".aws/train.py", "it may hold secrets"),
        ("-m link.train", ""),
        ("chain.py", ""),
        ("direct.py", "direct.py is a link to ../elsewhere/train.py, outside the project"),
    ],
)
def test_script_that_would_not_arrive_is_refused_with_the_reason(
    tmp_path: Path, script: str, reason: str
) -> None:
    root = tmp_path / "here"
    folders = ("runs", "results", "venv", "cut", "data", ".aws", "inner", "../elsewhere")
    write(root, *(f"{folder}/train.py" for folder in folders), "a.py")
    (root / ".gitignore").write_text("data/\n")
    (root / "outside").symlink_to(tmp_path / "elsewhere")
    (root / "link").symlink_to("inner")
    (root / "direct.py").symlink_to("../elsewhere/train.py")
    (root / "chain.py").symlink_to("link/../inner/train.py")
    (root / "inner" / "abs.py").symlink_to(root / "a.py")
    git(root, "init", "-q")
    git(root, "add", "-f", "runs", "results", "venv")
    config = Config(sync=SyncSpec(exclude=("cut/",)))
    wanted = Script(script.removeprefix("-m "), (), script.startswith("-m"))
    if not reason:
        launch.prepare(root, root, wanted, config)
        return
    with pytest.raises(UsageError) as caught:
        launch.prepare(root, root, wanted, config)
    assert reason in str(caught.value)


def test_files_that_the_nodes_lack_are_named(tmp_path: Path) -> None:
    root = tmp_path / "here"
    names = "a.py results/base.json venv/x runs/old data/x meta.pkl a.egg-info/x wide/data/y"
    write(root, *names.split())
    write(tmp_path, "elsewhere/x")
    (root / ".gitignore").write_text("data/\n*.pkl\n*.egg-info\n")
    git(root, "init", "-q")
    git(root, "add", "-f", "results", "venv", "runs", "a.py")
    (root / "data2").symlink_to("../elsewhere")
    (root / "to-data").symlink_to("data")
    (root / "latest").symlink_to("runs/old")
    (root / "broken").symlink_to("nowhere")
    (root / "self").symlink_to(".")
    shown = warnings(root)
    assert (
        "results/base.json (results/ is where `pull` puts results), runs/old (job.outputs is empty, and "
        "runs/ is for results), venv/x (venv/" in shown
    )
    assert "do not have them: data2 -> ../elsewhere, to-data -> data;" in shown
    assert "not sent, since git's ignore rules name them: data/, meta.pkl, wide/ (" in shown
    included = Config(sync=SyncSpec(include=("/data/", "meta.pkl"), exclude=("wide/", "data2")))
    assert {"data/x", "meta.pkl"} < set(project_files.of_config(root, included).manifest)
    assert "ignore rules" not in warnings(root, included)
    assert "links" not in warnings(root, included)


@pytest.mark.parametrize("source", ["../sets/view", "view"])  # the second is itself a link
def test_links_in_data_are_named_where_the_nodes_lack_their_targets(tmp_path: Path, source: str) -> None:
    root, sets = tmp_path / "here", tmp_path / "sets"
    write(root, "a.py", "other/x")
    write(sets, "view/sub/x", "real/x", "other/x", "blobs/b", "s3/x")
    if source == "view":
        (root / "view").symlink_to("../sets/view")
    # Of these, ../other/x is another file on the nodes, of the project; `a` is the first of the links.
    named = ["../real/x", "../real", "../other/x", "..", "a", str(sets / "view" / "sub" / "x")]
    links = dict(zip("abcdefghijk", [*named, "../blobs/b", "../s3/x", "sub", "k", "nowhere"], strict=True))
    for name, target in links.items():
        (sets / "view" / name).symlink_to(target)
    sources = (DataSpec(source=source), DataSpec(source="../sets/blobs"), DataSpec(source="s3://bucket/s3"))
    shown = ", ".join(f"view/{name} -> {links[name]}" for name in "abcde")
    assert f"do not have them: {shown} and 1 more;" in warnings(root, Config(data=sources))
    explained = [name for name in links if unsent.reason(root, Config(data=sources), f"view/{name}")]
    assert explained == [*"abcdef"]
    assert "links" not in warnings(root, Config(data=sources, sync=SyncSpec(exclude=("view/?",))))


@pytest.mark.parametrize(
    ("text", "args", "named"),
    [
        ('open("data/train.bin")', (), "data/"),
        ("pass", ("--data=data/a",), "data/"),
        ("pass", ("--data", "sets/one"), "sets/"),
        ('"the data/set"; "database"', ("--sets",), ""),
        ("not python (", (), ""),
    ],
)
def test_ignored_folder_that_a_script_names_is_named(
    tmp_path: Path, text: str, args: tuple[str, ...], named: str
) -> None:
    write(tmp_path, "a.py", "data/x", "sets/one/x")
    (tmp_path / "a.py").write_text(text)
    (tmp_path / ".gitignore").write_text("data/\nsets/\n")
    files = project_files.of_config(tmp_path, Config())
    found = list(unsent.notes(files, Config(), "a.py", args))
    assert [one.partition(" is not sent")[0] for one in found if "[[data]]" in one] == [named] * bool(named)
    if named:
        assert f'source = "{named.rstrip("/")}"' in found[0]
    data = Config(data=(DataSpec(source="data"), DataSpec(source="sets")))
    assert list(unsent.notes(project_files.of_config(tmp_path, data), data, "a.py", args)) == []


@pytest.mark.parametrize("repository", [False, True])
def test_include_sends_ignored_files_but_no_secrets_except_by_their_path(
    tmp_path: Path, repository: bool
) -> None:
    names = "a.py data/train.bin data/.env data/server.key data/__pycache__/x data/.git/x"
    write(tmp_path, *names.split())
    (tmp_path / "data" / "link").symlink_to(".")
    (tmp_path / ".gitignore").write_text("data/\n")
    if repository:
        git(tmp_path, "init", "-q")
    config = Config(sync=SyncSpec(include=("data/", "data/server.key")))
    sent = set(project_files.of_config(tmp_path, config).manifest)
    assert sent == {"a.py", ".gitignore", "data/train.bin", "data/server.key", "data/link"}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("data/x", '[[data]] and source = "data"'),
        ("venv/x", "venv/ is never sent"),
        (".env", "may hold secrets"),
        ("a.py", ""),
        ("../outside", ""),
        ("a\0b", ""),
        ("/home/ubuntu/project/data/x", '[[data]] and source = "data"'),
        ("to-data/x", "data/x is on this computer"),
        ("away/x", "away/x leads through a link to /"),
        ("empty", "empty has no files here"),
    ],
)
def test_file_that_a_rank_did_not_find_is_explained(tmp_path: Path, name: str, expected: str) -> None:
    names = "a.py data/x b.pkl venv/x .env sub/y s3/x ../outside ../elsewhere/x"
    write(here := tmp_path / "here", *names.split())
    (here / "empty").mkdir()
    for link, target in (("to-data", "data"), ("away", "../elsewhere"), ("to-a", "a.py")):
        (here / link).symlink_to(target)
    (here / ".gitignore").write_text("data/\n*.pkl\ns3/\n")
    found = unsent.reason(here, Config(data=(DataSpec(source="s3://bucket/s3", path="s3"),)), name)
    assert expected in found
    assert bool(found) == bool(expected)


def test_interrupted_replacement_of_another_project_is_asked_about_again(tmp_path: Path) -> None:
    here = tmp_path / "here"
    asked: list[int] = []
    write(here, "a.py")
    nodes = LocalCluster(tmp_path / "nodes", 1)
    files = project_files.of_config(here, Config())

    def send() -> None:
        own = sync.ProjectIdentity("a1", asked.extend)
        sync.sync(nodes.runner, nodes.cluster, Config(), files=files, progress=lambda _: None, origin=own)

    send()
    (node,) = nodes.nodes
    send()
    assert asked == []
    origin = node.home / ".cloudddp" / "origin-project"
    assert origin.read_text() == "a1"
    origin.write_text("mixed")
    send()
    assert asked == [0]
    assert origin.read_text() == "a1"


def test_excluding_a_negated_pattern_names_include(cli: Any, faults: Any) -> None:
    cli.write("train.py", "")
    cli.write("cloudddp.toml", '[sync]\nexclude = ["!data/"]\n')
    assert 'include = ["data/"]' in refused(cli, faults, "launch", "train.py")


# -- bytes that are not UTF-8 --------------------------------------------------------------------------------

RAW = "bad\udcff"  # as Python decodes b"bad\xff"


def test_bytes_that_are_not_utf_8_are_carried(cli: Any, tmp_path: Path) -> None:
    """In arguments, the script's name, the names of other files and the path of the project."""
    direct(cli)
    cli.cwd = tmp_path / RAW
    cli.cwd.mkdir()
    cli.write(
        f"{RAW}.py",
        "import os, sys; print(list(map(os.fsencode, sys.argv)), os.listdir(b'.'))"
        "; os.mkdir('runs'); open(b'runs/out\\xff', 'w')",
    )
    assert r"[b'bad\xff.py', b'bad\xff'] [b'bad\xff.py']" in cli.ok("launch", f"{RAW}.py", RAW)
    for words in (["jobs"], ["pull"]):
        cli.ok(*words)
