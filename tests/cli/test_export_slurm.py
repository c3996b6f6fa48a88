"""`export slurm`: what the script contains, what is refused, and that every text reaches the ranks unchanged
through a real bash.

tests/witness/test_slurm.py runs the script with a real Slurm.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.harness import CommandLine, cannot, clean_environment

from cloudddp.cli import reference
from cloudddp.cli.commands import export
from cloudddp.config.settings import RESERVED_ENVIRONMENT
from cloudddp.job import ranks, slurm
from cloudddp.job.job_request import Script
from cloudddp.job.ranks import Fact, bind, template

TORCHRUN = "torch.distributed.run"
NASTY = [
    "",
    " ",
    "two words",
    "it's",
    '"quoted"',
    "$HOME",
    "$$",
    "${local_rank}",
    "$local_rank",
    "`id`",
    "$(id)",
    "a;b",
    "*",
    "~",
    "#SBATCH --nodes=9",
    "-x",
    "--",
    "\\",
    "\\n",
    "a\nb",
    "\n#SBATCH --nodes=9\n",
    "a\r\nb",
    "\t",
    "\x01\x7f",
    "'\n'",
    "!x",
    "%j",
    "ünï",
    "日本",
    "\u2028",
    "@@RANK@@",
    "EOF",
]


@pytest.fixture
def line(project: Path, tmp_path: Path) -> CommandLine:
    """The command line in a project of its own, without a simulator: nothing is called."""
    home = tmp_path / "home"
    home.mkdir()
    found = CommandLine(project, "none", clean_environment(HOME=str(home), CLOUDDDP_HOME=str(home / "state")))
    found.write("train.py", "")
    return found


def directives(script: str) -> list[str]:
    return [one.removeprefix("#SBATCH ") for one in script.splitlines() if one.startswith("#SBATCH")]


def test_script_for_two_nodes(line: CommandLine) -> None:
    script = line.ok("export", "slurm", "train.py", "--epochs", "3")
    assert directives(script) == [
        "--job-name=train",
        "--nodes=2",
        "--ntasks-per-node=1",
        "--gpus-per-node=1",
        "--exclusive",
        "--mem=0",
        "--requeue",
        "--open-mode=append",
        "--signal=B:USR1@180",
    ]
    assert '    "$python" train.py --epochs 3\n' in script
    assert not re.search("@@|AWS|EC2|cloudddp-", script.replace("as on EC2", ""))


def test_nothing_is_written_or_called(line: CommandLine, tmp_path: Path) -> None:
    done = line("export", "slurm", "train.py", AWS_ENDPOINT_URL="http://127.0.0.1:9")
    assert (done.returncode, done.stderr) == (0, "")
    assert [path.name for path in line.cwd.iterdir()] == ["train.py"]
    assert not (tmp_path / "home" / "state").exists()


def test_options_become_directives(line: CommandLine) -> None:
    script = line.ok(
        "export",
        "slurm",
        "-n",
        "4",
        "--gpus-per-node",
        "a100:8",
        "--cpus-per-task",
        "96",
        "--mem",
        "900G",
        "--time",
        "2-12:00:00",
        "--partition",
        "gpu,gpu-long",
        "--account",
        "lab_1",
        "--job-name",
        "my.job",
        "--save-minutes",
        "5",
        "--max-requeues",
        "30",
        "--sbatch",
        "--qos=high",
        "--sbatch=--constraint=a100&nvlink",
        "train.py",
    )
    assert directives(script) == [
        "--job-name=my.job",
        "--nodes=4",
        "--ntasks-per-node=1",
        "--gpus-per-node=a100:8",
        "--cpus-per-task=96",
        "--mem=900G",
        "--time=2-12:00:00",
        "--partition=gpu,gpu-long",
        "--account=lab_1",
        "--requeue",
        "--open-mode=append",
        "--signal=B:USR1@300",
        "--qos=high",
        "--constraint=a100&nvlink",
    ]
    assert "ranks=8 # per node" in script and "--nproc-per-node=8 " in script
    assert "--cpu-bind=none --cpus-per-task=96 " in script
    assert "max_requeues=30" in script


def test_settings_of_the_project_are_used(line: CommandLine) -> None:
    line.write(
        "cloudddp.toml",
        '[cluster]\nnodes = 3\n[job]\nnproc_per_node = 4\npython = ".venv/bin/python"\nmaster_port = 29400\n'
        'max_restarts = 2\nrendezvous = "static"\nsave_minutes = 0\nenv = { A = "1 2" }\n[setup]\nrun = '
        "[\"make 'data'\"]\n",
    )
    script = line.ok("export", "slurm", "train.py")
    assert {"--nodes=3", "--gpus-per-node=4"} <= set(directives(script))
    assert not any(one.startswith("--signal") for one in directives(script))
    for text in (
        "python=.venv/bin/python\n",
        "port=29400\n",
        "--max-restarts=2",
        '"--node-rank=$node_rank"',
        '"--master-addr=$head"',
        "export A='1 2'\n",
        "(job_environment; exec bash -c 'make '\"'\"'data'\"'\"'') </dev/null || fail ",
    ):
        assert text in script
    assert "--rdzv" not in script


def test_module_and_script_in_a_folder(line: CommandLine) -> None:
    line.write("pkg/main.py", "")
    script = line.ok("export", "slurm", "-m", "pkg.main", "-x")
    assert '"$python" -m pkg.main -x\n' in script
    assert directives(script)[0] == "--job-name=main"
    line.write("cloudddp.toml", "")
    (line.cwd / ".git").mkdir()
    line.cwd /= "pkg"
    script = line.ok("export", "slurm", "main.py")
    assert '"$python" pkg/main.py\n' in script
    assert "[[ -f pkg/main.py ]] || fail " in script
    done = line("export", "slurm", "-o", "job.sh", "main.py")
    assert f"next: cd {line.cwd.parent} && sbatch pkg/job.sh" in done.stderr.replace("\n", " ")


@pytest.mark.parametrize(
    ("words", "ranks_per_node", "gpus"),
    [
        ((), 1, "1"),
        (("--nproc-per-node", "4"), 4, "4"),
        (("--gpus-per-node", "8"), 8, "8"),
        (("--gpus-per-node", "8", "--nproc-per-node", "2"), 2, "8"),
        (("--gpus-per-node", "0"), 1, None),
        (("--gpus-per-node", "0", "--nproc-per-node", "2"), 2, None),
        (("--gpus-per-node", "h100:4"), 4, "h100:4"),
    ],
)
def test_ranks_and_gpus(
    line: CommandLine, words: tuple[str, ...], ranks_per_node: int, gpus: str | None
) -> None:
    script = line.ok("export", "slurm", *words, "train.py")
    assert f"--nproc-per-node={ranks_per_node} " in script
    given = [one.partition("=")[2] for one in directives(script) if one.startswith("--gpus-per-node")]
    assert given == ([] if gpus is None else [gpus])


BREAKOUTS = [
    "",
    " ",
    "-x",
    "--wrap=id",
    "a b",
    "a\n#SBATCH --nodes=9",
    "a\nid",
    "a\r",
    "a#b",
    "a'b",
    'a"b',
    "a\\",
    "$(id)",
    "a;b",
    "ä",
]


@pytest.mark.parametrize("value", BREAKOUTS)
@pytest.mark.parametrize(
    "option", ["--partition", "--account", "--job-name", "--mem", "--time", "--gpus-per-node", "--sbatch"]
)
def test_value_that_would_leave_its_directive_is_refused(option: str, value: str) -> None:
    key = "extra" if option == "--sbatch" else option[2:].replace("-", "_")
    with pytest.raises(slurm.UsageError) as refused:
        slurm.SlurmOptions(**{key: (value,) if key == "extra" else value})
    assert option in refused.value.message
    assert "\n" not in refused.value.message
    assert refused.value.hint


@pytest.mark.parametrize(
    ("words", "message", "hint"),
    [
        (("--partition", "a\nb"), r"--partition 'a\\nb' is not allowed", "allowed: names of partitions"),
        (("--account", "-x"), "--account '-x' is not allowed", "beginning with a letter"),
        (("--time", "soon"), "--time 'soon' is not a time limit", "such as 2-12:00:00"),
        (("--time", "0"), "--time 0 is no time limit", "omit --time"),
        (("--time", "3"), "--time 3 (180 s) is not longer than job.save_minutes = 3", "give a longer --time"),
        (("--time", "0:02:59"), "(179 s)", "fewer --save-minutes"),
        (
            ("--gpus-per-node", "2", "--nproc-per-node", "4"),
            "two ranks cannot share a GPU",
            "omit --nproc-per-node",
        ),
        (("--nproc-per-node", "2,4"), "job.nproc_per_node is a list", "--nproc-per-node K"),
        (("--rendezvous", "direct"), "starts ranks without torchrun", "--rendezvous c10d"),
        (("--sbatch", "--nodes=9"), "the script sets --nodes itself", "give -n N instead"),
        (("--sbatch", "--array=1-9"), "the script sets --array itself", "remove it"),
        (("--sbatch", "-p gpu"), "is not an option of sbatch", "--sbatch --qos=high"),
        (("--cpus-per-task", "0"), "--cpus-per-task", ""),
        (("--max-requeues", "-1"), "--max-requeues", ""),
        (
            ("--save-minutes", "x"),
            "--save-minutes: job.save_minutes = 'x' is not allowed",
            "allowed: a number",
        ),
        (("-n", "0"), "cluster.nodes = '0' is not allowed", "allowed:"),
        (("-e", "RANK"), "torchrun sets it", "remove it"),
        (("-e", "1x"), "is not the name of a variable", "allowed: letters"),
        (("-e", "state=CA", "-e", "MY=1"), "uses state itself", "choose another name"),
        (("-e", "python"), "uses python itself", "choose another name"),
        (("-e", "UID=5", "-e", "nodes=7"), "uses UID and nodes itself", "choose another name"),
        (("-e", "SLURMD_NODENAME=a"), "uses SLURMD_NODENAME itself", "choose another name"),
        (("--env-file", "names.env"), "uses rank itself", "choose another name"),
        (("--tiem", "3"), "export slurm has no option --tiem", "did you mean --time?"),
        (
            ("--spot",),
            "--spot is an option of doctor, run and up, not of export slurm",
            "export slurm --help",
        ),
    ],
)
def test_bad_usage_exits_2_and_says_what_to_type(
    line: CommandLine, words: tuple[str, ...], message: str, hint: str
) -> None:
    line.write("names.env", "A=1\nrank=2\n")
    done = line("export", "slurm", *words, "train.py")
    assert (done.returncode, done.stdout) == (2, ""), done
    text = " ".join(done.stderr.split())
    assert message.replace("\\\\", "\\") in text
    assert hint in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("missing.py",), "script not found: missing.py"),
        (("torchrun", "train.py"), "starts the ranks itself, without `torchrun`"),
        (("-m", "missing"), "no module 'missing'"),
        (("../outside.py",), "outside the project"),
        (("train.py", "--max-cost", "5"), "cloudddp export slurm -- train.py --max-cost 5"),
        ((), "Missing argument 'SCRIPT'"),
    ],
)
def test_bad_script_exits_2(line: CommandLine, words: tuple[str, ...], message: str) -> None:
    (line.cwd.parent / "outside.py").write_text("")
    done = line("export", "slurm", *words)
    assert (done.returncode, done.stdout) == (2, ""), done
    assert message in done.stderr


def test_variables_of_the_script_are_refused_in_the_project_settings(line: CommandLine) -> None:
    line.write("cloudddp.toml", '[job]\nenv = { code = "1" }\n')
    done = line("export", "slurm", "train.py")
    assert (done.returncode, done.stdout) == (2, ""), done
    assert "uses code itself" in " ".join(done.stderr.split())


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


def test_argument_that_is_not_utf8_is_refused(line: CommandLine) -> None:
    done = line("export", "slurm", "train.py", "\udcff")
    assert done.returncode == 2
    assert "is not UTF-8" in done.stderr


@pytest.mark.parametrize(
    ("limit", "seconds"),
    [
        ("10", 600),
        ("10:30", 630),
        ("1:02:03", 3723),
        ("1-0", 86400),
        ("1-2", 93600),
        ("1-2:03", 93780),
        ("1-2:03:04", 93784),
        ("0", 0),
        ("", None),
        ("-1", None),
        ("1:2:3:4", None),
        ("UNLIMITED", None),
        ("1-", None),
        ("1m", None),
        ("1 ", None),
        ("1\n", None),
        ("1:234", None),
        ("\u0661", None),
    ],
)
def test_time_limits_are_those_of_sbatch(limit: str, seconds: int | None) -> None:
    assert slurm._seconds(limit) == seconds


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
    done = line("export", "slurm", "-o", "other.sh", "train.py")
    assert done.returncode == 2
    assert "other.sh already exists" in done.stderr
    assert (line.cwd / "other.sh").read_text() == "precious\n"
    os.mkfifo(line.cwd / "fifo")
    for output in ("no/job.sh", "train.py/x", "fifo", "/dev/zero", ".", "a\nb/c", "\udcff/x"):
        done = line("export", "slurm", "-o", output, "train.py")
        assert (done.returncode, done.stdout) == (2, ""), output


def test_value_of_a_named_variable_is_not_in_the_script(line: CommandLine) -> None:
    line.write("cloudddp.toml", '[job]\nenv = { TOKEN = "from-the-file" }\n')
    script = line.ok("export", "slurm", "-e", "TOKEN", "train.py", TOKEN="hunter2")
    assert "hunter2" not in script and "from-the-file" not in script
    assert '[[ -v TOKEN ]] || fail "TOKEN is not set: export it before sbatch" 2' in script


# -- through a real bash -------------------------------------------------------------------------------------


def shellcheck(script: str) -> None:
    program = shutil.which("shellcheck")
    if program is None:
        cannot("not installed: shellcheck (apt-get install shellcheck)")
    done = subprocess.run([program, "-"], input=script, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    "words",
    [
        ("train.py",),
        ("-n", "1", "--rendezvous", "static", "--cpus-per-task", "4", "train.py", "--lr", "0.1"),
        (
            "-e",
            "A=it's",
            "-e",
            "B=$x",
            "-e",
            "C",
            "--setup",
            "module load 'x'",
            "--setup",
            ". a/b",
            "train.py",
            *NASTY,
        ),
    ],
)
def test_script_passes_shellcheck(line: CommandLine, words: tuple[str, ...]) -> None:
    line.write("cloudddp.toml", '[setup]\nrun = ["echo \'x\' \\"$y\\""]\n')
    script = line.ok("export", "slurm", *words)
    shellcheck(script)
    assert (
        "# run of [setup] in cloudddp.toml: once per attempt, on the first node\n(job_environment; " in script
    )
    assert ("# --setup\neval 'module load" in script) == ("--setup" in words)


def bash(text: str, *arguments: str) -> str:
    return subprocess.run(["bash", "-c", text, *arguments], capture_output=True, check=True).stdout.decode()


@pytest.mark.parametrize("text", NASTY)
def test_quoted_text_is_one_word_on_one_line(text: str) -> None:
    quoted = slurm.quote(text)
    assert len(quoted.splitlines()) <= 1 and "\r" not in quoted
    assert bash(f"printf '%s|' {quoted}") == f"{text}|"


@settings(max_examples=60)
@given(st.lists(st.text(st.characters(exclude_characters="\0", codec="utf-8")), min_size=1, max_size=20))
def test_any_text_survives_bash(words: list[str]) -> None:
    quoted = " ".join(map(slurm.quote, words))
    assert "\n" not in quoted
    assert bash(f"f() {{ printf '%s\\0' {quoted}; }}; eval \"$(declare -f f)\"; f").split("\0")[:-1] == words


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
    own = {
        **line.env,
        "PATH": f"{programs}:{Path(sys.executable).parent}:{line.env['PATH']}",
        "SLURM_JOB_NUM_NODES": "1",
        "SLURM_JOB_ID": "12",
        "SLURM_JOB_NODELIST": "here",
        **env,
    }
    return subprocess.run(
        ["bash", str(path)], env=own, cwd=line.cwd, capture_output=True, text=True, timeout=120, check=False
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
    script = line.ok(
        "export",
        "slurm",
        "-n",
        "1",
        "--nproc-per-node",
        "2",
        "--gpus-per-node",
        "0",
        *variables,
        "-e",
        "TOKEN",
        "--setup",
        "export MY_SETUP='from setup'",
        "--setup",
        "export MY_CODE=7",
        "it's $a script.py",
        "--",
        *NASTY,
    )
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
        (("--setup", "false"), {}, 1, "this --setup command failed: false"),
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
    hosts = [ranks.Host(k, f"10.0.0.{k + 1}", f"ens{k}", 2, 8, "/py") for k in range(2)]
    on_ec2 = ranks.plan(job, hosts, script, job_id="7-0", cluster="c")[1]
    planned = template(job, script, ranks=2)
    facts = {
        Fact.PYTHON: "/py",
        Fact.NODES: "2",
        Fact.NODE_RANK: "1",
        Fact.ADDRESS: "10.0.0.2",
        Fact.INTERFACE: "ens1",
        Fact.HEAD: "10.0.0.1",
        Fact.IS_HEAD: "false",
        Fact.PORT: "29400",
        Fact.RENDEZVOUS: "7-0",
        Fact.THREADS: "4",
    }
    assert set(facts) == set(Fact)
    shell = "; ".join(f"{fact}={value}" for fact, value in facts.items())
    words = " ".join(map(slurm._shell, (*planned.launcher, *planned.rank)))
    rendered = bash(f"{shell}; printf '%s\\0' {words}").split("\0")[:-1]
    assert rendered == [*on_ec2.processes[0].launcher, *on_ec2.processes[0].rank]
    for name, word in planned.env.items():
        assert bash(f"{shell}; printf %s {slurm._shell(word)}") == on_ec2.env[name] == bind(word, facts)


def test_default_number_of_requeues_is_that_of_the_renderer() -> None:
    (option,) = (one for one in export.slurm.params if one.name == "max_requeues")
    assert isinstance(option, click.Option)
    assert option.default == slurm.MAX_REQUEUES
    assert (option.help or "").endswith(f"[default: {slurm.MAX_REQUEUES}]")


def test_generated_example_is_the_output_of_the_command(line: CommandLine) -> None:
    assert reference.example_sbatch_script() == line.ok("export", "slurm", "train.py")
