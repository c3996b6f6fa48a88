"""`export slurm`: the script, and what is refused. tests/witness/test_slurm.py runs it with a real Slurm."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.harness import CommandLine, cannot
from support.jobstates import launch_node
from support.localsync import put

from cloudddp.cli.commands import export
from cloudddp.cli.main import main
from cloudddp.config.checks import RESERVED_ENVIRONMENT
from cloudddp.errors import UsageError
from cloudddp.job import ranks, slurm
from cloudddp.job.job_request import Script
from cloudddp.job.ranks import Placeholder, bind, template
from docs import reference

NASTY = [
    *["", " ", "two words", "it's", '"quoted"', "$HOME", "$$", "${local_rank}", "`id`", "$(id)", "a;b", "*"],
    *["~", "#SBATCH --nodes=9", "-x", "--", "\\", "\\n", "a\nb", "\n#SBATCH --nodes=9\n", "a\r\nb", "\t"],
    *["\x01\x7f", "'\n'", "!x", "%j", "ünï", "\u2028", "@@RANK@@", "EOF"],
]


@pytest.fixture
def line(line: CommandLine, tmp_path: Path) -> CommandLine:
    """The command line in a project of its own, without a simulator: nothing is called."""
    line.env["HOME"] = str(tmp_path)
    line.write("train.py", "")
    return line


def directives(script: str) -> list[str]:
    return [one.removeprefix("#SBATCH ") for one in script.splitlines() if one.startswith("#SBATCH")]


def test_script_for_two_nodes(line: CommandLine, tmp_path: Path) -> None:
    done = line("export", "slurm", "train.py", "--epochs", "3", AWS_ENDPOINT_URL="http://127.0.0.1:9")
    assert (done.returncode, done.stderr) == (0, "")
    expected = "job-name=train nodes=2 ntasks-per-node=1 gpus-per-node=1 exclusive mem=0 requeue"
    options = [*expected.split(), "open-mode=append", "signal=B:USR1@180"]
    assert directives(done.stdout) == [f"--{option}" for option in options]
    assert '    "$python" train.py --epochs 3\n' in done.stdout
    assert not re.search("@@|AWS|EC2|cloudddp-", done.stdout.replace("as on EC2", ""))
    assert [path.name for path in line.cwd.iterdir()] == ["train.py"]  # nothing is written
    assert not (tmp_path / "home").exists()


def test_options_become_directives(line: CommandLine) -> None:
    words = (
        "-n 4 --gpus-per-node a100:8 --cpus-per-task 96 --mem 900G --time 2-12:00:00 --partition gpu,gpu2 "
        "--account lab_1 --job-name my.job --save-minutes 5 --max-requeues 30 --sbatch --qos=high "
        "--sbatch=--constraint=a100&nvlink train.py"
    )
    script = line.ok("export", "slurm", *words.split())
    expected = (
        "job-name=my.job nodes=4 ntasks-per-node=1 gpus-per-node=a100:8 cpus-per-task=96 mem=900G "
        "time=2-12:00:00 partition=gpu,gpu2 account=lab_1 requeue open-mode=append signal=B:USR1@300 "
        "qos=high constraint=a100&nvlink"
    )
    assert directives(script) == [f"--{option}" for option in expected.split()]
    assert "ranks=8 # per node" in script and "--nproc-per-node=8 " in script
    assert "--cpu-bind=none --cpus-per-task=96 " in script
    assert "max_requeues=30" in script


def test_settings_of_the_project_are_used(line: CommandLine) -> None:
    line.write(
        "cloudddp.toml",
        '[cluster]\nnodes = 3\n[job]\nnproc_per_node = 4\npython = ".venv/bin/python"\n'
        'master_port = 29400\nmax_restarts = 2\nrendezvous = "static"\nsave_minutes = 0\n'
        'env = { A = "1 2", TOKEN = "from-the-file" }\n'
        "[setup]\nrun = [\"make 'data'\"]\n",
    )
    script = line.ok("export", "slurm", "-e", "TOKEN", "train.py", TOKEN="hunter2")
    assert "hunter2" not in script and "from-the-file" not in script
    assert {"--nodes=3", "--gpus-per-node=4"} <= set(directives(script))
    assert "--nproc-per-node=4 " in script
    assert not any(one.startswith("--signal") for one in directives(script))
    for text in (
        "python=.venv/bin/python\n",
        "port=29400\n",
        "--max-restarts=2",
        '"--node-rank=$node_rank"',
        '"--master-addr=$head"',
        "export A='1 2'\n",
        '[[ -v TOKEN ]] || fail "TOKEN is not set: export it before sbatch" 2',
        "(job_environment; exec bash -c 'make '\"'\"'data'\"'\"'') </dev/null || fail ",
    ):
        assert text in script
    assert "--rdzv" not in script


def test_module_and_script_in_a_folder(line: CommandLine) -> None:
    line.write("pkg/main.py", "")
    script = line.ok(*"export slurm --gpus-per-node 0 --nproc-per-node 2 -m pkg.main -x".split())
    assert "--nproc-per-node=2 " in script
    assert not [one for one in directives(script) if one.startswith("--gpus-per-node")]
    assert '"$python" -m pkg.main -x\n' in script
    assert directives(script)[0] == "--job-name=main"
    line.write("cloudddp.toml", "")
    (line.cwd / ".git").mkdir()
    line.cwd /= "pkg"
    script = line.ok("export", "slurm", "--config", "../pkg/../cloudddp.toml", "main.py")
    assert '"$python" pkg/main.py\n' in script
    assert "[[ -f pkg/main.py ]] || fail " in script
    done = line("export", "slurm", "-o", "job.sh", "main.py")
    assert f"next: cd {line.cwd.parent} && sbatch pkg/job.sh" in done.stderr.replace("\n", " ")


@pytest.mark.parametrize(
    "value", ["", " ", "-x", "--wrap=id", "a b", "a\n#SBATCH --nodes=9", "a\r", "a#b", 'a"b', "$(id)", "ä"]
)
@pytest.mark.parametrize("key", ["partition", "account", "job_name", "mem", "time", "gpus_per_node", "extra"])
def test_value_that_would_leave_its_directive_is_refused(key: str, value: str) -> None:
    with pytest.raises(slurm.UsageError) as refused:
        slurm.SlurmOptions(**{key: (value,) if key == "extra" else value})
    assert ("--sbatch" if key == "extra" else key.replace("_", "-")) in refused.value.message
    assert "\n" not in refused.value.message
    assert refused.value.hint


@pytest.mark.parametrize(
    ("words", "message", "hint"),
    [
        ("--partition 'a\nb'", r"--partition 'a\nb' is not allowed", "allowed: names of partitions"),
        ("--account -x", "--account '-x' is not allowed", "beginning with a letter"),
        ("--time soon", "--time 'soon' is not a time limit", "such as 2-12:00:00"),
        ("--time 3", "--time 3 (180 s) is not longer than job.save_minutes = 3", "give a longer --time"),
        ("--gpus-per-node 2 --nproc-per-node 4", "two ranks cannot share a GPU", "omit --nproc-per-node"),
        ("--nproc-per-node 2,4", "job.nproc_per_node is a list", "--nproc-per-node K"),
        ("--rendezvous direct", "starts ranks without torchrun", "--rendezvous c10d"),
        ("--sbatch --nodes=9", "the script sets --nodes itself", "give -n N instead"),
        ("--sbatch '-p gpu'", "is not an option of sbatch", "--sbatch --qos=high"),
        ("--save-minutes x", "--save-minutes: job.save_minutes = 'x' is not allowed", "allowed: a number"),
        ("-e RANK", "torchrun sets it", "remove it"),
        ("-e UID=5 -e nodes=7 -e MY=1", "uses UID and nodes itself", "choose another name"),
        ("--env-file names.env", "uses rank itself", "choose another name"),
        ("--config code.toml", "uses code itself", "choose another name"),
        ("--tiem 3", "export slurm has no option --tiem", "did you mean --time?"),
        ("missing.py", "script not found: missing.py", ""),
        ("../outside.py", "outside the project", ""),
        ("train.py --max-cost 5", "", "cloudddp export slurm -- train.py --max-cost 5"),
        ("train.py \udcff", "is not UTF-8", ""),
    ],
)
def test_bad_usage_says_what_to_type(
    project: Path, monkeypatch: pytest.MonkeyPatch, words: str, message: str, hint: str
) -> None:
    """In this process."""
    put(project, {"train.py": "", "names.env": "A=1\nrank=2\n", "../outside.py": ""})
    put(project, {"code.toml": '[job]\nenv = { code = "1" }\n'})
    monkeypatch.chdir(project)
    given = shlex.split(words) if ".py" in words else [*shlex.split(words), "train.py"]
    with pytest.raises((UsageError, click.UsageError)) as refused:
        main.main(["export", "slurm", *given], standalone_mode=False, prog_name="cloudddp")
    error = refused.value
    text = error.format_message() if isinstance(error, click.ClickException) else error.message
    assert message in text
    assert hint in (text if isinstance(error, click.ClickException) else error.hint)


def test_every_variable_of_the_template_is_refused_as_a_variable_of_the_ranks() -> None:
    """Those it reads as $NAME, those it assigns, and those it declares or compares without a `$`."""
    text = re.sub(r"^ *#.*|@@[A-Z_]+@@", "", slurm._TEMPLATE.read_text(), flags=re.MULTILINE)
    name = "[A-Za-z_][A-Za-z0-9_]*"
    found = set(re.findall(rf"\$\{{?[#!]?({name})", text))
    found |= set(re.findall(rf"(?<![\w$-])({name})(?:\[[^]]*\])?\+?=(?!=)", text))
    for words in re.findall(r"\b(?:local|declare -p|read -r|mapfile -t|for) ([^;<>()\n]*)", text):
        found |= set(re.findall(rf"(?:^| )({name})(?= |=|$)", words.partition(" in ")[0]))
    for expression in re.findall(r"\(\((.*?)\)\)", text):
        found |= set(re.findall(rf"(?<![\w$-])({name})", expression))
    # of programs that the script starts, and what torchrun sets
    found -= {"_", "nproc", "env", "u", "LC_ALL", "NodeAddr", "OMP_NUM_THREADS"} | RESERVED_ENVIRONMENT
    assert {"state", "route", "hosts", "failed", "max_requeues", "one"} <= found  # the patterns work
    assert {one for one in found if not slurm.is_own_variable(one)} == set()
    assert found >= slurm.SCRIPT_VARIABLES


def test_time_limits_are_those_of_sbatch() -> None:
    valid = {"10": 600, "10:30": 630, "1:02:03": 3723, "1-0": 86400, "1-2": 93600, "1-2:03": 93780, "0": 0}
    assert {limit: slurm._seconds(limit) for limit in valid} == valid
    assert slurm._seconds("1-2:03:04") == 93784
    for limit in ("", "-1", "1:2:3:4", "UNLIMITED", "1-", "1m", "1 ", "1\n", "1:234", "\u0661"):
        assert slurm._seconds(limit) is None, limit


def test_file_is_written_and_only_such_a_file_is_replaced(line: CommandLine) -> None:
    done = line("export", "slurm", "-o", "job.sh", "train.py")
    assert done.stdout == "wrote job.sh\n"
    assert done.stderr == "next: sbatch job.sh\n"
    path = line.cwd / "job.sh"
    assert stat.S_IMODE(path.stat().st_mode) == 0o755
    assert line.ok("export", "slurm", "-o", "job.sh", "-n", "3", "train.py")
    assert "--nodes=3" in directives(path.read_text())
    assert line.ok("export", "slurm", "-o", "job.sh", "-e", "TOKEN=secret", "train.py")
    assert stat.S_IMODE(path.stat().st_mode) == 0o700  # it has values of variables
    line.write("other.sh", "precious\n")
    assert "other.sh already exists" in line.fails(2, "export", "slurm", "-o", "other.sh", "train.py")
    assert (line.cwd / "other.sh").read_text() == "precious\n"
    os.mkfifo(line.cwd / "fifo")
    for output in ("no/job.sh", "train.py/x", "fifo", "/dev/zero", ".", "a\nb/c", "\udcff/x"):
        done = line("export", "slurm", "-o", output, "train.py")
        assert (done.returncode, done.stdout) == (2, ""), output


# -- through a real bash -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words",
    [
        ("-n", "1", "--rendezvous", "static", "--cpus-per-task", "4", "train.py", "--lr", "0.1"),
        ("-e", "A=it's", "-eB=$x", "-e", "C", "--setup=module load 'x'", "--setup=. a/b", "train.py", *NASTY),
    ],
)
def test_script_passes_shellcheck(line: CommandLine, words: tuple[str, ...]) -> None:
    if not shutil.which("shellcheck"):
        cannot("not installed: shellcheck (apt-get install shellcheck)")
    line.write("cloudddp.toml", '[setup]\nrun = ["echo \'x\' \\"$y\\""]\n')
    script = line.ok("export", "slurm", *words)
    done = subprocess.run(["shellcheck", "-"], input=script, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stdout
    assert (
        "# run of [setup] in cloudddp.toml: once per attempt, on the first node\n(job_environment; " in script
    )
    assert ("# --setup\neval 'module load" in script) == ("-eB=$x" in words)


def bash(text: str) -> str:
    return subprocess.run(["bash", "-c", text], capture_output=True, check=True).stdout.decode()


@settings(max_examples=5)
@given(st.lists(st.text(st.characters(exclude_characters="\0", codec="utf-8")), min_size=1, max_size=20))
@example(NASTY)
def test_any_text_survives_bash(words: list[str]) -> None:
    quoted = [slurm.quote(word) for word in words]
    assert all(len(one.splitlines()) <= 1 and "\r" not in one for one in quoted)
    function = f"f() {{ printf '%s\\0' {' '.join(quoted)}; }}; eval \"$(declare -f f)\"; f"
    assert bash(function).split("\0")[:-1] == words


SRUN = """\
#!/bin/bash
while [[ $1 == --* ]]; do shift; done
export SLURM_NODEID=0 SLURMD_NODENAME=here
exec "$@"
"""
SCONTROL = """\
#!/bin/bash
case $2 in
  hostnames) echo here ;;
  node) echo "NodeName=here NodeAddr=here" ;;
esac
"""


def run_script(line: CommandLine, script: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run the script with bash as on a cluster of one node, this computer, with programs in the place of
    Slurm's."""
    programs = line.cwd.parent / "programs"
    programs.mkdir(exist_ok=True)
    for name, text in {"srun": SRUN, "scontrol": SCONTROL, "squeue": "#!/bin/sh\necho RUNNING\n"}.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    path = line.write("job.sh", script)
    path_of_job = f"{programs}:{Path(sys.executable).parent}:{line.env['PATH']}"
    slurm_job = {"SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_ID": "12", "SLURM_JOB_NODELIST": "here"}
    own = {**line.env, **slurm_job, "PATH": path_of_job, **env}
    return subprocess.run(
        ["bash", str(path)], env=own, cwd=line.cwd, capture_output=True, text=True, timeout=300, check=False
    )


SHOW = """\
import json, os, sys, time
names = [name for name in os.environ if name.startswith(("MY_", "TOKEN", "OMP_", "GLOO_", "MASTER_", "RANK"))]
with open("partial-" + os.environ["RANK"], "w") as file:
    json.dump([sys.argv[1:], {name: os.environ[name] for name in names}], file)
os.rename(file.name, "shown-" + os.environ["RANK"])
while not os.path.exists("shown-0"):
    time.sleep(0.05)
sys.exit(int(os.environ.get("MY_CODE", "0")) * (os.environ["RANK"] == "1"))
"""


@pytest.mark.torch
def test_arguments_and_variables_reach_the_ranks_through_torchrun(line: CommandLine) -> None:
    """bash, torchrun and the rank's own bash each read the text once."""
    pytest.importorskip("torch")
    line.write("it's $a script.py", SHOW)
    values = {f"MY_{number}": text for number, text in enumerate(NASTY)}
    variables = [word for name, text in values.items() for word in ("--env", f"{name}={text}")]
    words = "export slurm -n 1 --nproc-per-node 2 --gpus-per-node 0 -e TOKEN --setup".split()
    setup = ("export MY_SETUP='from setup'", "--setup", "export MY_CODE=7")
    script = line.ok(*words, *setup, *variables, "it's $a script.py", "--", *NASTY)
    done = run_script(line, script, TOKEN="hunter2")
    assert done.returncode == 7, done.stderr
    assert "sbatch script: rank 1 failed first, with exit code 7" in done.stderr
    shown = [json.loads((line.cwd / f"shown-{rank}").read_text()) for rank in range(2)]
    for words, env in shown:
        assert words == ["--", *NASTY]
        assert {name: env.get(name) for name in values} == values
        assert (env["TOKEN"], env["MY_SETUP"], env["GLOO_SOCKET_IFNAME"]) == ("hunter2", "from setup", "lo")
        assert (env["MASTER_ADDR"], env["MASTER_PORT"]) != ("", "")
    assert list(line.cwd.glob("*.state")) == []


@pytest.mark.parametrize(
    ("words", "env", "code", "message"),
    [
        (("-e", "TOKEN"), {}, 2, "TOKEN is not set: export it before sbatch"),
        (("--setup", "'"), {}, 1, "this --setup command failed: '"),
        ((), {"SLURM_RESTART_COUNT": "11"}, 1, "requeued 11 times: max_requeues is 10"),
        ((), {"CLOUDDDP_SETUP_RUN": "true"}, 2, "no train.py here: submit the job in the project's folder"),
    ],
)
def test_script_stops_before_ranks_start(
    line: CommandLine, words: tuple[str, ...], env: dict[str, str], code: int, message: str
) -> None:
    script = line.ok("export", "slurm", *words, "train.py")
    if "no train.py" in message:
        (line.cwd / "train.py").unlink()
    done = run_script(line, script, **env)
    assert done.returncode == code, done
    assert message in done.stderr


def test_failing_setup_command_of_the_project_ends_the_job(line: CommandLine) -> None:
    line.write("cloudddp.toml", '[setup]\nrun = ["echo $MY > made", "exit 3"]\n[job]\nenv = { MY = "x y" }\n')
    done = run_script(line, line.ok("export", "slurm", "-n", "1", "train.py"))
    assert done.returncode == 1
    assert "this command of [setup] run failed: exit 3" in done.stderr
    assert (line.cwd / "made").read_text() == "x y\n"


# -- one plan for both renderers -----------------------------------------------------------------------------


@pytest.mark.parametrize("rendezvous", ["c10d", "static"])
def test_torchrun_gets_the_same_words_as_on_ec2(rendezvous: Any) -> None:
    job = ranks.JobSpec(nproc_per_node=2, rendezvous=rendezvous, master_port=29400)
    script = Script("train.py", ("--lr", "$x"))
    hosts = [launch_node(k, interface=f"ens{k}", gpus=2, python="/py") for k in range(2)]
    on_ec2 = ranks.plan(job, hosts, script, job_id="7-0", cluster="c")[1]
    planned = template(job, script, ranks=2)
    facts = {
        Placeholder.PYTHON: "/py",
        Placeholder.NODES: "2",
        Placeholder.NODE_RANK: "1",
        Placeholder.ADDRESS: "10.0.0.2",
    }
    facts |= {
        Placeholder.INTERFACE: "ens1",
        Placeholder.HEAD: "10.0.0.1",
        Placeholder.IS_HEAD: "false",
        Placeholder.PORT: "29400",
    }
    facts |= {Placeholder.RENDEZVOUS: "7-0", Placeholder.THREADS: "4"}
    assert set(facts) == set(Placeholder)
    shell = "; ".join(f"{fact}={value}" for fact, value in facts.items())
    words = " ".join(map(slurm._shell, (*planned.launcher, *planned.rank)))
    rendered = bash(f"{shell}; printf '%s\\0' {words}").split("\0")[:-1]
    assert rendered == [*on_ec2.processes[0].launcher, *on_ec2.processes[0].rank]
    for name, word in planned.env.items():
        assert bash(f"{shell}; printf %s {slurm._shell(word)}") == on_ec2.env[name] == bind(word, facts)


def test_command_and_renderer_agree(line: CommandLine) -> None:
    assert reference.example_sbatch_script() == line.ok("export", "slurm", "train.py")
    (option,) = (one for one in export.slurm.params if one.name == "max_requeues")
    assert option.default == slurm.MAX_REQUEUES
