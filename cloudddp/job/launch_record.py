"""What a job was launched with, recorded on this computer: `resume` starts it again from that, and `pull`
finds its results in Amazon S3. Values of variables and job.notify may be secret and are never recorded: they
come from where they came from, and one of the command line has to be given again."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from cloudddp.agent.protocol.codec import has_job_id_format, is_job_id
from cloudddp.agent.protocol.copies import Destination
from cloudddp.config import settings, timing
from cloudddp.config.command_line import Flag, variable_flags
from cloudddp.config.spec import Config, JobSpec
from cloudddp.errors import CloudDDPError, UsageError, q
from cloudddp.files import project_id
from cloudddp.job.job_request import KEEP_MINUTES, NewJob, Script
from cloudddp.local_state import ClusterFolder, all_folders
from cloudddp.text import one_line

_Text = Annotated[str, Meta(max_length=1 << 20)]
_Texts = Annotated[tuple[_Text, ...], Meta(max_length=1 << 16)]


@dataclass(frozen=True, kw_only=True)
class LaunchContext:
    """What only the report of the job needs. `nodes`: rank, id, type and zone; `hour`: USD of one node;
    `changed`: lines of `git status`."""

    nodes: Annotated[tuple[tuple[int, _Text, _Text, _Text], ...], Meta(max_length=1 << 16)]
    hour: float | None = None
    spot: bool = False
    commit: _Text = ""  # '' outside a git repository
    changed: _Texts = ()
    diff: _Text = ""


@dataclass(frozen=True, kw_only=True)
class LaunchRecord:
    """A job as it was launched. `config` has no value of a variable; `names` are those of all variables,
    `given` those whose values were on the command line, `passed` those that came from the environment."""

    job: _Text
    root: _Text
    target: _Text
    args: _Texts = ()
    module: bool = False
    config: Config
    files: _Texts = ()  # configuration files, by precedence
    names: _Texts = ()
    given: _Texts = ()
    passed: _Texts = ()
    env_files: _Texts = ()
    nodes: _Texts = ()  # ids of the instances
    poweroff: Annotated[float, Meta(ge=0, le=1e6)] | None = None  # minutes without a use: `launch --down`
    keep: Annotated[float, Meta(ge=0, le=1e6)] = KEEP_MINUTES  # minutes after a stall: on_stall = "down"
    resumed_from: _Text = ""
    continues: _Texts = ()  # the jobs whose results were on the nodes, the oldest first
    facts: LaunchContext | None = None

    @property
    def script(self) -> Script:
        return Script(self.target, self.args, self.module)


def of_launch(
    job: NewJob,
    config: Config,
    *,
    root: Path,
    files: Sequence[Path],
    variables: Sequence[str],
    env_files: Sequence[str],
    nodes: tuple[str, ...],
    facts: LaunchContext | None = None,
    continues: tuple[str, ...] = (),
) -> LaunchRecord:
    """Return the record of a job that is about to be launched. `variables` are the values of -e."""
    without = replace(config, job=replace(config.job, env={}, notify=None))
    names = [(name, bool(equals)) for name, equals, _ in (variable.partition("=") for variable in variables)]
    return LaunchRecord(
        job=job.id,
        root=str(root),
        target=job.script.target,
        args=tuple(job.script.args),
        module=job.script.module,
        config=without,
        files=tuple(str(path.absolute()) for path in files),
        names=tuple(config.job.env),
        given=tuple(dict.fromkeys(name for name, has_value in names if has_value)),
        passed=tuple(dict.fromkeys(name for name, has_value in names if not has_value)),
        env_files=tuple(str(Path(name).absolute()) for name in env_files),
        poweroff=job.poweroff,
        keep=job.keep,
        resumed_from=job.resumed_from,
        nodes=nodes,
        facts=facts,
        continues=continues,
    )


def keep(folder: ClusterFolder, record: LaunchRecord) -> None:
    """Write the record of a new job. Raises CloudDDPError where another one has its id; OSError,
    UsageError."""
    try:
        # msgspec's encoder refuses bytes that are not UTF-8, which a path and an argument may have.
        folder.write_new(folder.job(record.job), json.dumps(msgspec.to_builtins(record)))
    except FileExistsError:
        raise CloudDDPError(
            f"another launch began at the same moment and has the id {record.job}; nothing was started",
            hint="repeat the command",
        ) from None


def find(folder: ClusterFolder, wanted: str | None) -> LaunchRecord:
    """Return the job as `choose` does, from its record. Raises CloudDDPError if there is none."""
    if not (ids := [job for job in folder.jobs() if has_job_id_format(job)]):
        raise CloudDDPError(
            "no job of this cluster was launched from this computer, so none can be resumed here",
            hint="start one: `cloudddp launch SCRIPT`",
        )
    return _read(folder, choose(ids, wanted, "has not started, or was launched from another computer"))


def choose(ids: Sequence[str], wanted: str | None, unknown: str) -> str:
    """Return the id that is `wanted`, or the only one that begins so; without `wanted` the last. Raises
    CloudDDPError; `unknown` says why there may be none."""
    matching = [ids[-1]] if wanted is None else [one for one in ids if one.startswith(wanted)]
    found = [one for one in matching if one == wanted] or matching
    if len(found) != 1:
        what = one_line(repr(wanted), 80)
        raise CloudDDPError(
            f"job id {what} is ambiguous" if found else f"job {what} {unknown}",
            hint="jobs: " + ", ".join(found or ids[-10:]),
        )
    return found[0]


def in_s3(folders: Iterable[ClusterFolder], wanted: str | None) -> LaunchRecord | None:
    """Return the job of that id (or of its unique beginning), or the newest, whose nodes were told to copy
    its results to S3; None if there is none. Records that cannot be read are skipped."""
    found = {record.job: record for record in _records(folders) if record.job.startswith(wanted or "")}
    if wanted is not None and len(found) > 1 and wanted not in found:
        return None
    copied = {job_id: one for job_id, one in found.items() if one.config.job.results_s3 is not None}
    return copied.get(wanted or "") or copied.get(max(copied, default=""))


def note_put_back(folder: ClusterFolder, root: Path, jobs: Iterable[str]) -> None:
    """Record that results of these jobs of a project were put on the nodes. Raises OSError, UsageError."""
    folder.write(folder.restored, "\n".join((project_id(root), *jobs)))


def continued_on(folder: ClusterFolder, root: Path) -> tuple[str, ...]:
    """Return the jobs whose results were put on the nodes, and those that ran there, of the same project."""
    project, *put_back = (folder.read(folder.restored) or "\n").splitlines()
    return tuple(sorted({*(put_back if project == project_id(root) else ()), *jobs_of(folder, root)}))


def jobs_of(folder: ClusterFolder, root: Path) -> list[str]:
    """Return the jobs of a project that were launched on a cluster from this computer, the newest last."""
    return [record.job for record in _records([folder]) if record.root == str(root)]


def chain_of(job_id: str) -> tuple[list[str], list[str]]:
    """Return the jobs that a job continued and itself, the oldest first; and those known that continued
    it."""
    found = {record.job: record for record in _records(all_folders())}
    before = found[job_id].continues if job_id in found else ()
    later = [one.job for one in found.values() if job_id in one.continues]
    return [*filter(is_job_id, before), job_id], later


def _records(folders: Iterable[ClusterFolder]) -> Iterator[LaunchRecord]:
    """Yield the records of jobs, without those that cannot be read."""
    for folder in folders:
        for job_id in folder.jobs():
            if has_job_id_format(job_id):
                with contextlib.suppress(CloudDDPError, OSError):
                    yield _read(folder, job_id)


def _read(folder: ClusterFolder, job_id: str) -> LaunchRecord:
    path = folder.job(job_id)
    try:
        return msgspec.convert(json.loads(folder.read(path) or ""), LaunchRecord)
    except (ValueError, RecursionError) as error:  # msgspec's and json's own errors are ValueErrors
        raise CloudDDPError(
            f"{path}: cannot read what job {job_id} was launched with: {one_line(str(error), 200)}",
            hint="start it again with `cloudddp launch SCRIPT`",
        ) from None


def job_again(
    record: LaunchRecord, variables: Sequence[str], env_files: Sequence[str], environ: Mapping[str, str]
) -> JobSpec:
    """Return the settings of a job, with its variables and its notify as they are now where they came from;
    `variables` and `env_files` override that. Raises UsageError for a variable that no longer has a value."""
    now = {variable.partition("=")[0] for variable in variables}
    if lost := [name for name in record.given if name not in now]:
        raise _unknown(record, lost, "was given on the command line, and values are not recorded")
    again = [name for name in record.passed if name not in now]
    flags: list[Flag] = variable_flags([*again, *variables], env_files or record.env_files, environ)
    files = [settings.read_toml(Path(one)) for one in record.files]
    found = settings.resolve([settings.from_flags(flags), *settings.environment_layers(environ), *files]).job
    if lost := [name for name in record.names if name not in found.env]:
        raise _unknown(record, lost, "is no longer in the configuration, nor in a file of variables")
    return replace(record.config.job, env=found.env, notify=found.notify)


def _unknown(record: LaunchRecord, names: Sequence[str], why: str) -> UsageError:
    listed = ", ".join(one_line(name, 80) for name in names)
    verb = ("resume", record.job, *(word for name in names for word in ("-e", f"{one_line(name, 80)}=VALUE")))
    return UsageError(
        f"the value of {listed} for job {record.job} {why}", hint=f"give it again: `cloudddp {q(*verb)}`"
    )


def s3_destination_of(config: Config, job_id: str) -> Destination | None:
    """Return where the nodes copy a job's results to, or None."""
    if config.job.results_s3 is None:
        return None
    bucket, _, prefix = config.job.results_s3.removeprefix("s3://").partition("/")
    limits = timing.current()
    return Destination(
        bucket,
        "/".join(filter(None, (prefix.strip("/"), config.cluster.name, job_id))),
        tuple(config.job.outputs),
        limit=limits.copy,
        patience=limits.copy_stalled,
        scratch=tuple(config.job.scratch),
    )
