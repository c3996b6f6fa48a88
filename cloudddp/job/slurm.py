"""JobSpec + Script + what a Slurm cluster needs to know -> an sbatch script: the second renderer of the
template in `ranks.py`, whose facts become shell variables. The parts that do not depend on the job are in
slurm.sh. Every text of the user is quoted, and what gets into an #SBATCH line, which Slurm parses by rules of
its own, is limited to characters that mean nothing there. Pure."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from cloudddp.config.spec import Config
from cloudddp.errors import UsageError
from cloudddp.job.job_request import Script
from cloudddp.job.ranks import Placeholder, Word, template
from cloudddp.text import one_line

MARK = "# Written by `cloudddp export slurm`."
MAX_REQUEUES = 10
_TEMPLATE = Path(__file__).with_name("slurm.sh")
_LONGEST_SIGNAL = 65535  # seconds of sbatch --signal
_UNSAFE = re.compile(r"[^\w@%+=:,./-]", re.ASCII)
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
# Variables of slurm.sh. The ranks' environment is set in the same shell, so their variables need other names.
SCRIPT_VARIABLES = frozenset(
    """
    BASHPID PWD address asked attempt cancelled child code ended failed first head host hosts interface
    is_head lost mark max_requeues node_rank nodes on_nodes one peer port program python rank ranks
    rendezvous route second state step stopping threads
    """.split()
)
# bash does not let anyone assign these.
_READ_ONLY = frozenset({"BASHOPTS", "BASH_VERSINFO", "EUID", "PPID", "SHELLOPTS", "UID"})
_TIME = re.compile(r"(?:(?P<days>\d{1,5})-)?(?P<fields>\d{1,7}(?::\d{1,2}){0,2})", re.ASCII)
# Slurm ignores the rest of a line after '#', splits it at spaces and removes quotes and backslashes.
_EXTRA = re.compile(r"--[a-z][a-z0-9-]*(?:=[A-Za-z0-9_.,:;@%+=/*&|()\[\]!~^<>-]+)?", re.ASCII)


_NAME = "1 to 100 letters, digits and _.@:+-, beginning with a letter, a digit or _"
# What a value in an #SBATCH line may be: its option, its pattern, and that in words.
_LIMITS = {
    "job_name": ("--job-name", r"\w[\w.@:+-]{0,99}", _NAME),
    "partition": (
        "--partition",
        r"\w[\w.@:+,-]{0,199}",
        "names of partitions, separated by commas, such as gpu,gpu-long",
    ),
    "account": ("--account", r"\w[\w.@:+-]{0,99}", _NAME),
    "gpus_per_node": (
        "--gpus-per-node",
        r"(\w[\w.-]{0,63}:)?\d{1,3}",
        "a number, or a type and a number such as a100:4",
    ),
    "mem": ("--mem", r"\d{1,9}[KMGT]?", "an amount per node such as 64G; 0 is all of the node's memory"),
}
# Options that the script itself sets: a second value would contradict what it does.
_OWN = {
    "nodes": "-n N",
    "gpus-per-node": "--gpus-per-node G",
    "cpus-per-task": "--cpus-per-task C",
    "mem": "--mem AMOUNT",
    "time": "--time LIMIT",
    "partition": "--partition NAME",
    "account": "--account NAME",
    "job-name": "--job-name NAME",
    "signal": "--save-minutes MIN",
    "requeue": "--max-requeues N",
    "no-requeue": "--max-requeues 0",
    **dict.fromkeys(("ntasks", "ntasks-per-node", "open-mode", "array", "export", "wrap"), ""),
}


@dataclass(frozen=True, slots=True)
class SlurmOptions:
    """What the cluster needs to know besides the job; None: its own default. `required`: variables that have
    to be set where the job is submitted. `setup`: commands that the script runs in its own shell before the
    ranks start. Raises UsageError for values that are not allowed in an #SBATCH line."""

    gpus_per_node: str | None = None
    cpus_per_task: int | None = None
    mem: str | None = None
    time: str | None = None
    partition: str | None = None
    account: str | None = None
    job_name: str | None = None
    max_requeues: int = MAX_REQUEUES
    required: tuple[str, ...] = ()
    setup: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, (option, pattern, allowed) in _LIMITS.items():
            value = getattr(self, name)
            if value is not None and not re.fullmatch(pattern, value, re.ASCII):
                shown = one_line(repr(value), 100)
                raise UsageError(f"{option} {shown} is not allowed", hint=f"allowed: {allowed}")
        if self.time is not None and _seconds(self.time) is None:
            raise UsageError(
                f"--time {one_line(repr(self.time), 100)} is not a time limit",
                hint="allowed: minutes, hours:minutes:seconds or days-hours:minutes:seconds, such as "
                "2-12:00:00",
            )
        for option in self.extra:
            _check_extra(option)


def render(config: Config, script: Script, options: SlurmOptions) -> str:
    """Return the sbatch script. Raises UsageError for settings that it cannot have."""
    job = config.job
    if job.container is not None:
        raise UsageError(
            "job.container is set, and the Slurm script starts ranks without a container",
            hint="remove it, and give your site's option for containers with --sbatch",
        )
    ranks, gpus = _ranks_and_gpus(config, options)
    _check_time(options.time, job.save_minutes)
    for word in (*script.argv, job.python, *config.setup.run, *options.setup):
        if re.search("[\ud800-\udfff]", word):
            raise UsageError(
                f"{one_line(repr(word), 100)} is not UTF-8, so it cannot be written to the script",
                hint="rename the file, or pass the value in a file",
            )
    # They would change those of the script.
    if own := [name for name in dict.fromkeys((*job.env, *options.required)) if is_own_variable(name)]:
        raise UsageError(
            f"--env {own[0]}: the Slurm script uses {' and '.join(own)} itself",
            hint="choose another name in --env, --env-file or [job] env, and in the training script",
        )
    planned = template(job, script, ranks=ranks)
    quoted_env = {name: quote(value) for name, value in job.env.items()}
    parts = {
        "DIRECTIVES": "\n".join(
            f"#SBATCH {directive}" for directive in _directives(config, script, options, gpus)
        ),
        "PYTHON": quote(job.python or "python3"),
        "RANKS": str(ranks),
        "MAX_REQUEUES": str(options.max_requeues),
        # Two jobs on one node need two ports; ports from 32768 may be in use by any connection.
        "PORT": str(job.master_port) if job.master_port else "$((20000 + SLURM_JOB_ID % 10000))",
        "CHECKS": "\n".join(_checks(script, options.required)),
        "SETUP": "".join(f"{line}\n" for line in _setup(config.setup.run, options.setup)),
        "ENVIRONMENT": "\n".join(f"  export {name}={_shell(word)}" for name, word in planned.env.items()),
        "JOB_ENVIRONMENT": "\n".join(f"  export {name}={value}" for name, value in quoted_env.items())
        or "  :",
        "LAUNCHER": " \\\n    ".join(_shell(word) for word in planned.launcher),
        "RANK": " ".join(_shell(word) for word in planned.rank),
        "SRUN": "" if options.cpus_per_task is None else f" --cpus-per-task={options.cpus_per_task}",
    }
    return re.sub(r"@@([A-Z_]+)@@", lambda found: parts[found[1]], _TEMPLATE.read_text())


def quote(text: str) -> str:
    r"""Return the text as one word of bash. Control characters become escapes of $'...': a line break in an
    argument must not begin a line of the script, and sbatch refuses scripts with \r\n."""
    if not _CONTROL.search(text):
        return shlex.quote(text)
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    octal = _CONTROL.sub(lambda found: "".join(f"\\{byte:03o}" for byte in found[0].encode()), escaped)
    return f"$'{octal}'"


def _shell(word: Word) -> str:
    literals = [part for part in word if not isinstance(part, Placeholder)]
    if len(literals) == len(word):
        return quote("".join(literals))
    if any(_UNSAFE.search(part) for part in literals):
        return "".join(f'"${part}"' if isinstance(part, Placeholder) else quote(part) for part in word)
    return '"' + "".join(f"${part}" if isinstance(part, Placeholder) else part for part in word) + '"'


def _ranks_and_gpus(config: Config, options: SlurmOptions) -> tuple[int, str]:
    """Return the number of ranks of each node, and the value of --gpus-per-node, "0" for none."""
    wanted = config.job.nproc_per_node
    if config.job.rendezvous == "direct":
        raise UsageError(
            'job.rendezvous = "direct" starts ranks without torchrun, and the Slurm script starts torchrun',
            hint="give --rendezvous c10d or --rendezvous static",
        )
    if isinstance(wanted, tuple):
        raise UsageError(
            "job.nproc_per_node is a list, and the Slurm script starts the same number of ranks on every "
            "node",
            hint="give one number: --nproc-per-node K",
        )
    given = options.gpus_per_node
    gpus = int(given.rpartition(":")[2]) if given is not None else 1 if wanted == "gpu" else wanted
    ranks = max(1, gpus) if wanted == "gpu" else wanted
    if 0 < gpus < ranks:
        raise UsageError(
            f"--gpus-per-node {given} is fewer than the {ranks} ranks of job.nproc_per_node, and two ranks "
            "cannot share a GPU",
            hint="omit --nproc-per-node for one rank per GPU; --gpus-per-node 0 runs the ranks on CPUs",
        )
    return ranks, "0" if gpus == 0 else given or str(gpus)


def _directives(config: Config, script: Script, options: SlurmOptions, gpus: str) -> Iterable[str]:
    stem = script.target.rpartition(".")[2] if script.module else PurePosixPath(script.target).stem
    name = re.sub(r"[^\w.-]", "_", stem, flags=re.ASCII).lstrip(".-")[:100]
    yield f"--job-name={options.job_name or name or 'train'}"
    yield f"--nodes={config.cluster.nodes}"
    yield "--ntasks-per-node=1"
    if gpus != "0":
        yield f"--gpus-per-node={gpus}"
    if options.cpus_per_task is not None:
        yield f"--cpus-per-task={options.cpus_per_task}"
    else:  # the default is one CPU for the task, and so for all ranks of the node
        yield "--exclusive"
    if options.mem is not None or options.cpus_per_task is None:
        yield f"--mem={options.mem or '0'}"
    for key in ("time", "partition", "account"):
        if (value := getattr(options, key)) is not None:
            yield f"--{key}={value}"
    yield "--requeue" if options.max_requeues else "--no-requeue"
    yield "--open-mode=append"  # each attempt continues the log
    if seconds := _grace(config.job.save_minutes):
        yield f"--signal=B:USR1@{seconds}"
    yield from options.extra


def _grace(minutes: float) -> int:
    return min(math.ceil(60 * minutes), _LONGEST_SIGNAL)


def _seconds(limit: str) -> int | None:
    """Return a time limit of sbatch in seconds; None if it is not one."""
    found = _TIME.fullmatch(limit)
    if found is None:
        return None
    fields = [int(number) for number in found["fields"].split(":")]
    if found["days"] is None and len(fields) < 3:  # minutes come first
        fields = [0, *fields]
    hours, minutes, seconds = (*fields, 0, 0)[:3]
    return ((int(found["days"] or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


def _check_time(limit: str | None, save_minutes: float) -> None:
    if limit is None or (seconds := _seconds(limit)) is None:
        return
    if seconds == 0:
        raise UsageError("--time 0 is no time limit", hint="omit --time for that of the partition")
    if seconds <= _grace(save_minutes):
        raise UsageError(
            f"--time {limit} ({seconds} s) is not longer than job.save_minutes = {save_minutes:g}, so the "
            "ranks would be asked to stop as soon as they start",
            hint="give a longer --time, or fewer --save-minutes",
        )


def _check_extra(option: str) -> None:
    shown = one_line(repr(option), 100)
    if not _EXTRA.fullmatch(option):
        raise UsageError(
            f"--sbatch {shown} is not an option of sbatch",
            hint="give it as --sbatch --qos=high: one long option, without spaces, quotes, backslashes and "
            "'#'",
        )
    name = option[2:].partition("=")[0]
    if (own := _OWN.get(name)) is not None:
        hint = f"give {own} instead" if own else "remove it"
        raise UsageError(f"--sbatch {shown}: the script sets --{name} itself", hint=hint)


def is_own_variable(name: str) -> bool:
    """Whether the ranks cannot have a variable of this name, because the script, Slurm or bash uses it."""
    return name in SCRIPT_VARIABLES | _READ_ONLY or name.startswith(("SLURM_", "SLURMD_"))


def _checks(script: Script, required: Sequence[str]) -> Iterable[str]:
    if not script.module:
        message = f"no {script.target} here: submit the job in the project's folder"
        yield f"[[ -f {quote(script.target)} ]] || fail {quote(message)} 2"
    for name in required:
        yield f'[[ -v {name} ]] || fail "{name} is not set: export it before sbatch" 2'


def _setup(commands: Sequence[str], shell: Sequence[str]) -> Iterable[str]:
    """Yield what prepares the job: `module load` and the like in the script's own shell; and [setup] run."""
    if shell:
        yield "# --setup"
    for command in shell:
        message = f"this --setup command failed: {one_line(command, 200)}"
        yield f"eval {quote(command)} || fail {quote(message)}"
    if commands:
        yield "# run of [setup] in cloudddp.toml: once per attempt, on the first node"
    for command in commands:
        message = f"this command of [setup] run failed: {one_line(command, 200)}"
        yield f"(job_environment; exec bash -c {quote(command)}) </dev/null || fail {quote(message)}"
