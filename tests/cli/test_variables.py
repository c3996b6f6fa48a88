"""Variables of ranks: from the command line, this computer's environment and files. Their values stay
secret."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from support.exposed import command_lines, files_with
from support.harness import interrupt, lines_until
from support.jobs import direct, homes, lines_by_rank
from support.repositories import git

from cloudddp.config.spec import Config, SyncSpec
from cloudddp.job import project_files, unsent

SECRET = "hunter2-value"
SHOW = """
import json, os, sys, time
print(json.dumps({name: os.environ.get(name) for name in sys.argv[1:]}), flush=True)
if os.path.exists('stay'): time.sleep(600)
"""


def shown(text: str) -> dict[str, str | None]:
    (line,) = lines_by_rank(text)[0]
    found: dict[str, str | None] = json.loads(line)
    return found


def test_variables_reach_the_ranks(cli: Any) -> None:
    """A file that was given as environment is not sent."""
    direct(cli)
    cli.write("show.py", SHOW)
    cli.write("cloudddp.toml", '[job]\nenv = { A = "toml", B = "toml", C = "toml", D = "toml" }\n')
    cli.write("keys/vars.txt", "B=file\nC=file\nD=file\nE='two\nlines'\n")
    (cli.cwd / "link.txt").symlink_to("keys/vars.txt")
    words = ("-e", "C=flag", "-e", "D", "-e", "EMPTY", "--env-file", "link.txt", "show.py")
    done = cli.exits(0, "launch", *words, "A", "B", "C", "D", "E", "EMPTY", D="here\nand here", EMPTY="")
    assert "may hold secrets: keys/vars.txt, link.txt (" in done.stderr
    (home,) = homes(cli)
    sent = {path.name for path in (home / "project").iterdir()}
    assert "show.py" in sent
    assert not {"keys", "link.txt"} & sent
    assert shown(done.stdout) == {
        "A": "toml",
        "B": "file",
        "C": "flag",
        "D": "here\nand here",
        "E": "two\nlines",
        "EMPTY": "",
    }


def test_values_are_in_no_command_line_file_or_message(cli: Any, tmp_path: Path) -> None:
    """Of this computer and of the node, whose home folder is in the simulator's folder. test_dry_run.py has
    what a dry run prints."""
    direct(cli)
    cli.write("show.py", SHOW.replace("os.environ.get(name)", "len(os.environ.get(name))"))
    cli.write("stay", "")
    secrets = tmp_path / "secrets"
    secrets.write_text(f"FILED={SECRET}\n")
    process = cli.start(
        "launch", "-v", "-e", "TOKEN", "--env-file", str(secrets), "show.py", "TOKEN", "FILED", TOKEN=SECRET
    )
    lines_until(process.stdout, "TOKEN")
    lines = command_lines()
    assert any(b"show.py" in one for one in lines)
    assert not any(SECRET.encode() in one for one in lines)
    home = Path(cli.env["CLOUDDDP_HOME"])
    assert any(path.name == "state.json" for path in files_with("show.py", home))  # the node's are among them
    assert files_with(SECRET, cli.cwd, home) == []
    code, out, err = interrupt(process)
    assert (code, SECRET in out + err) == (130, False)
    assert SECRET not in cli.ok("jobs", "--json") + cli.ok("logs", "-v")
    assert files_with(SECRET, cli.cwd, home) == []


# -- .env files --------------------------------------------------------------------------------------------


def test_environment_file_of_a_submodule_is_sent_if_it_is_tracked_there(tmp_path: Path) -> None:
    inner = tmp_path / "inner"
    inner.mkdir()
    for name in (".env", ".env.secret", "a.py"):
        (inner / name).write_text("X=1\n")
    for folder in (tmp_path, inner):
        git(folder, "init", "-q")
    git(inner, "add", ".env", "a.py")
    git(inner, "commit", "-qm", "one")
    files = project_files.of_config(tmp_path, Config())
    assert set(files.manifest) == {"inner/.env", "inner/a.py"}
    assert "may hold secrets: inner/.env.secret (" in "".join(unsent.notes(files, Config()))
    quiet = Config(sync=SyncSpec(exclude=(".env.secret",)))
    assert list(unsent.notes(project_files.of_config(tmp_path, quiet), quiet)) == []
