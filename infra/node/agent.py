"""cloudddp's program on a node: looks at the machine, receives files, starts ranks, keeps their logs and ends.

One file, standard library only, Python 3.9 or newer. The laptop copies it over SSH and calls it once a step;
between calls nothing of it runs but one supervisor a job, so the laptop may go away and come back. What is
true of a job lies in JSON files that are replaced whole, under ~/.cloudddp/jobs/JOB/. It knows nothing of AWS,
and nothing of torch: it starts what it is told to.

    probe   look at the machine; say what a job must know of it
    apply   delete and write files of the project, from a stream on stdin
    setup   run the project's set-up commands, once per content
    start   start one job's processes on this node, detached
    follow  write a job's logs and states to stdout as they come, to the end
    kill    end every process of a job, and check that none is left
    jobs    list the jobs that this node knows
    new     name the files that jobs have written into the project and nobody has pulled
    pulled  remember what has been pulled
    pack    write files of the project to stdout, as a tar stream
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import errno
import hashlib
import json
import os
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path
from typing import Any, BinaryIO, Dict, Iterator, List, Optional, Sequence, Set, Tuple

ROOT = Path.home() / ".cloudddp"
TASK = "CLOUDDDP_TASK"  # marks every process of a job on this node; children inherit it
SETUP = "setup"  # the part of a job that comes before its ranks, and the state of a job that is in it
SETUP_FILE = "setup.json"  # in a job's folder while its set-up runs
RANK_WRAPPER = "@RANK@"
STATUS = "CLOUDDDP_STATUS_FILE"  # names the file in which rank 0 may tell where its training is
RESERVE = "reserve"  # a file in a job's folder whose room is for the records that are written when there is no other
BEGAN = "began"  # an empty file in a job's folder: its ctime is the job's start, by the file system's clock
CACHES = frozenset(
    ("__pycache__", ".pytest_cache", ".mypy_cache", ".ruff_cache", ".ipynb_checkpoints", ".git", ".venv", "venv")
)  # fmt: skip
SCAN_SECONDS = 10.0  # the longest that looking through the project may take
PLACES = 20  # folders and files that an answer names
ENDED = ("succeeded", "failed", "cancelled", "lost")


# -- files -------------------------------------------------------------------------------------------------


def write_json(path: Path, value: Any) -> None:
    """Replace a file whole, so that no reader sees half of it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write_private(temporary, json.dumps(value))
    except OSError:
        for folder in list(path.parents)[:2]:  # a full disk is when the end of a job must not go unsaid
            (folder / RESERVE).unlink(missing_ok=True)
        write_private(temporary, json.dumps(value))
    os.replace(temporary, path)


def write_private(path: Path, text: str) -> None:
    """Write a file that only this user may read."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(text)


def read_json(path: Path) -> Dict[str, Any]:
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def reply(value: Any) -> None:
    """Answer the laptop: one line of JSON on stdout, as cloudddp/protocol.py decodes it."""
    sys.stdout.buffer.write(wire(value) + b"\n")
    sys.stdout.buffer.flush()


def wire(value: Any) -> bytes:
    """Return JSON in UTF-8; what is not UTF-8 (a byte of a file's name in an error) becomes `?`."""
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "replace")


def project_folder(name: str) -> Path:
    """Return the project's folder in the home of the login user. `name` comes from the laptop: one plain word."""
    if not re.fullmatch(r"[A-Za-z0-9._-]+", name) or name in (".", ".."):
        raise SystemExit(f"not a project name: {name!r}")
    return Path.home() / name


# -- the machine -------------------------------------------------------------------------------------------


def interface_of(address: str) -> str:
    """Return the name of the interface that carries an IPv4 address, or ''.

    Asks the kernel (SIOCGIFADDR) instead of a program, so it needs no iproute2. The whole of a loopback
    interface's network belongs to it: 127.77.0.4 is `lo` though `lo` lists 127.0.0.1/8.
    """
    import fcntl

    wanted = struct.unpack("!I", socket.inet_aton(address))[0]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                own = struct.unpack("!I", fcntl.ioctl(probe, 0x8915, request)[20:24])[0]  # SIOCGIFADDR
                mask = struct.unpack("!I", fcntl.ioctl(probe, 0x891B, request)[20:24])[0]  # SIOCGIFNETMASK
            except OSError:
                continue  # an interface without an IPv4 address
            if own == wanted or (own >> 24 == 127 and own & mask == wanted & mask):
                return name
    return _secondary_interface_of(address)


def _secondary_interface_of(address: str) -> str:
    """SIOCGIFADDR tells the first address of an interface only; `ip` tells all."""
    listing = run_quietly(["ip", "-o", "-4", "addr", "show"])
    for line in listing.splitlines():
        words = line.split()
        if len(words) > 3 and words[3].split("/")[0] == address:
            return words[1]
    return ""


def run_quietly(argv: List[str], timeout: float = 20) -> str:
    """Return a program's stdout, or '' where it is missing, fails, or takes more than `timeout` seconds."""
    try:
        done = subprocess.run(
            argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=timeout, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.decode(errors="replace") if done.returncode == 0 else ""


def count_gpus(awaited: int) -> int:
    """Return how many GPUs `nvidia-smi -L` lists; where the program lists fewer than awaited, ask again for a minute.

    The first call on a cold node loads the driver and may take seconds for each GPU.
    """
    deadline = time.monotonic() + 60
    while True:
        count = sum(line.startswith("GPU ") for line in run_quietly(["nvidia-smi", "-L"], 120).splitlines())
        if count >= awaited or shutil.which("nvidia-smi") is None or time.monotonic() > deadline:
            return count
        time.sleep(2)


def find_python(wanted: str, folder: Path) -> str:
    """Return the Python that ranks run with: as told, or the Deep Learning AMI's, or the one on PATH."""
    if wanted:
        return shutil.which(program(wanted, folder)) or ""
    image = "/opt/pytorch/bin/python"
    return image if os.access(image, os.X_OK) else (shutil.which("python3") or "")


def program(word: str, folder: Path) -> str:
    """Return a program's path: `~` is the home, and a relative path begins in the project."""
    return os.path.join(folder, os.path.expanduser(word)) if "/" in word else word


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("", 0))
        return int(listener.getsockname()[1])


def wait_for_boot(seconds: float) -> None:
    """Wait until cloud-init has done all of the user data: SSH answers before the deadline is armed."""
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        subprocess.run(
            ["cloud-init", "status", "--wait"], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL, timeout=seconds, check=False,
        )  # fmt: skip


def probe(options: argparse.Namespace) -> None:
    """Everything the laptop asks before a job, in one answer."""
    folder = project_folder(options.project)
    ROOT.mkdir(mode=0o700, exist_ok=True)
    if options.wait_boot:
        wait_for_boot(options.wait_boot)
    shown = run_quietly(
        ["systemctl", "show", "cloudddp-deadline.timer", "-p", "ActiveState,NextElapseUSecRealtime"]
    )
    timer = dict(line.split("=", 1) for line in shown.splitlines() if "=" in line)
    answer = {
        "hostname": socket.gethostname(),
        "interface": interface_of(options.private_ip),
        "gpus": count_gpus(options.await_gpus),
        "cpus": len(os.sched_getaffinity(0)),
        "python": find_python(options.python, folder),
        "free_port": free_port(),
        "time": time.time(),
        "disk_free": shutil.disk_usage(str(Path.home())).free,
        "timer_state": timer.get("ActiveState", ""),
        "timer_next": timer.get("NextElapseUSecRealtime", ""),
        "running": running_jobs(),
    }
    if options.manifest:
        mine = current_manifest(folder)
        same = digest(mine) == options.manifest
        answer["manifest"] = None if same else {path_on_wire(k): on_wire(v) for k, v in mine.items()}
    reply(answer)


# -- files of the project ----------------------------------------------------------------------------------
# A manifest is {path: [kind, mode, size, mtime_ns, link target]}, kind "f" or "l", as cloudddp/sync.py makes it.


def manifest_file(folder: Path) -> Path:
    return ROOT / f"manifest-{folder.name}.json"


def current_manifest(folder: Path) -> Dict[str, List[Any]]:
    """Return what the last sync wrote and is still there, unchanged by size, time and mode."""
    known = read_json(manifest_file(folder))
    return {path: entry for path, entry in known.items() if describe(folder / path) == entry}


def describe(path: Path) -> Optional[List[Any]]:
    try:
        info = os.lstat(path)
        if (info.st_mode & 0o170000) == 0o120000:
            return ["l", 0, 0, 0, os.readlink(path)]
    except OSError:
        return None
    if (info.st_mode & 0o170000) != 0o100000:
        return None
    return ["f", 0o755 if info.st_mode & 0o111 else 0o644, info.st_size, info.st_mtime_ns, ""]


def path_on_wire(path: str) -> str:
    """Return a path with one character for each of its bytes: it need not be UTF-8."""
    return os.fsencode(path).decode("latin-1")


def on_wire(entry: List[Any]) -> List[Any]:
    return [*entry[:4], path_on_wire(entry[4])]


def digest(manifest: Dict[str, List[Any]]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def inside(folder: Path, name: str) -> Path:
    """Return folder/name, refusing a name that would leave the folder."""
    parts = name.split("/")
    if not name or name.startswith("/") or ".." in parts or "" in parts:
        raise SystemExit(f"refused a name outside the project: {name!r}")
    return folder / name


def cleared(folder: Path, name: str) -> Path:
    """Return folder/name for writing: a link on the way, which may lead out of the folder, is removed."""
    target = inside(folder, name)
    path = folder
    for part in name.split("/")[:-1]:
        path = path / part
        if path.is_symlink() or (path.exists() and not path.is_dir()):
            path.unlink()  # a folder now, a link or a file before
    return target


def apply(options: argparse.Namespace) -> None:
    """Read {delete, send, manifest} and a tar stream from stdin; leave the project as the laptop has it.

    The new manifest is written last; until then one that knows the old files and the new, so that after a
    broken stream the next sync sends again what is missing, and deletes what came and is wanted no more.
    """
    stdin = sys.stdin.buffer
    (length,) = struct.unpack("!Q", stdin.read(8))
    header = json.loads(stdin.read(length))
    folder = project_folder(options.project)
    folder.mkdir(exist_ok=True)
    ROOT.mkdir(mode=0o700, exist_ok=True)
    write_json(manifest_file(folder), {**current_manifest(folder), **header["manifest"]})
    for name in header["delete"]:
        remove(folder, name)
    written = 0
    with tarfile.open(fileobj=stdin, mode="r|", errors="surrogateescape", encoding="utf-8") as stream:
        for member in stream:
            write_member(stream, member, folder, header["manifest"][member.name])
            written += 1
    if written < header["send"]:  # cut between two files, which tar takes for its end
        raise SystemExit(f"the stream ended after {written} of {header['send']} files")
    write_json(manifest_file(folder), header["manifest"])
    reply({"written": written, "deleted": len(header["delete"])})


def remove(folder: Path, name: str) -> None:
    path = cleared(folder, name)
    with contextlib.suppress(OSError):
        path.unlink()
    for parent in path.parents:
        if parent == folder:
            return
        try:
            parent.rmdir()  # only while empty: what a job wrote stays
        except OSError:
            return


def write_member(stream: tarfile.TarFile, member: tarfile.TarInfo, folder: Path, entry: List[Any]) -> None:
    path = cleared(folder, member.name)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    if entry[0] == "l":
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
        os.symlink(entry[4], path)
        return
    temporary = path.with_name(f".{os.getpid()}.cloudddp-tmp")
    source = stream.extractfile(member)
    if source is None:
        raise SystemExit(f"not a regular file in the stream: {member.name!r}")
    try:
        with open(temporary, "wb") as target:
            shutil.copyfileobj(source, target, 1 << 20)
        os.chmod(temporary, entry[1])
        os.utime(temporary, ns=(entry[3], entry[3]))
        os.replace(temporary, path)
    finally:
        with contextlib.suppress(OSError):  # there only where the stream broke
            temporary.unlink()


class Notes:
    """What is left out, one line each on stderr: the first thousand, then how many more there are."""

    def __init__(self) -> None:
        self.count = 0

    def left_out(self, name: str, why: str) -> None:
        self.count += 1
        if self.count <= 1000:
            sys.stderr.write(f"left out {on_one_line(name)}: {on_one_line(why)}\n")

    def close(self) -> None:
        if self.count > 1000:
            sys.stderr.write(f"left out {self.count - 1000} more\n")


def on_one_line(text: str) -> str:
    """Return a name with line breaks and control characters escaped; bytes that are not UTF-8 become visible."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def pack(options: argparse.Namespace) -> None:
    """Write the asked-for files and folders of the project, those that exist, to stdout as a tar stream.

    What cannot be sent (a pipe, a socket, a link to what was not asked for, a file that is gone or unreadable) is
    named on stderr and left out; the other files are still sent. The stream holds files, folders and
    symbolic links alone, which is all that cloudddp/untar.py takes.
    """
    folder = project_folder(options.project)
    roots = [os.path.normpath(name) for name in options.path]
    notes = Notes()
    with tarfile.open(
        fileobj=sys.stdout.buffer,
        mode="w|",
        format=tarfile.GNU_FORMAT,
        encoding="utf-8",
        errors="surrogateescape",
    ) as stream:
        for root in roots:
            if os.path.lexists(folder / root):
                for path in below(folder / root, folder, notes):
                    add(stream, path, os.path.normpath(str(path.relative_to(folder))), folder, roots, notes)
            else:
                sys.stderr.write(f"missing {on_one_line(root)}\n")
    notes.close()


def below(path: Path, folder: Path, notes: Notes) -> Iterator[Path]:
    """Yield a path and, where it is a folder, everything below it but repositories' own folders."""
    yield path
    if not path.is_dir() or path.is_symlink():
        return

    def unreadable(error: OSError) -> None:
        notes.left_out(os.path.relpath(str(error.filename), str(folder)), error.strerror or "cannot be read")

    for root, folders, files in os.walk(str(path), onerror=unreadable):
        if ".git" in folders:  # the laptop would not take it
            folders.remove(".git")
            notes.left_out(
                os.path.relpath(os.path.join(root, ".git"), str(folder)), "the folder of a repository"
            )
        yield from (Path(root) / name for name in sorted(folders + files))


def add(stream: tarfile.TarFile, path: Path, name: str, folder: Path, roots: List[str], notes: Notes) -> None:
    stream.inodes = {}  # type: ignore[attr-defined]  # hard links are sent as separate files
    try:
        member = stream.gettarinfo(str(path), arcname=name)
        if member is None or not (member.isreg() or member.isdir() or member.issym()):
            notes.left_out(name, "not a file")
        elif member.issym():
            add_link(stream, member, path, folder, roots, notes)
        elif member.isdir():
            stream.addfile(member)
        else:
            # The name may be something else by now: opening a pipe would block, and a link may lead anywhere.
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            with open(descriptor, "rb") as source:
                stream.addfile(member, Steady(source, member.size))  # type: ignore[arg-type]
    except OSError as error:
        notes.left_out(name, error.strerror or "cannot be read")


def add_link(
    stream: tarfile.TarFile, member: tarfile.TarInfo, path: Path, folder: Path, roots: List[str], notes: Notes
) -> None:
    """Send a link that leads to something that was asked for. An absolute one into the project becomes relative."""
    target = member.linkname
    if os.path.isabs(target) and str(folder) in (target, *map(str, Path(target).parents)):
        member.linkname = os.path.relpath(target, str(path.parent))
    if link_leads_to(member.name, member.linkname, roots):
        stream.addfile(member)
    else:
        notes.left_out(member.name, f"a link to {target}")


def link_leads_to(name: str, target: str, roots: List[str]) -> bool:
    """Return whether a link ends at or below one of `roots`, by its text: as link_end in cloudddp/safe_names.py."""
    words = [word for word in target.split("/") if word not in ("", ".")]
    up = 0
    while up < len(words) and words[up] == "..":
        up += 1
    above = name.split("/")[:-1]
    if not target or target.startswith("/") or ".." in words[up:] or up > len(above):
        return False
    end = "/".join([*above[: len(above) - up], *words[up:]])
    return any(root == "." or end == root or end.startswith(root + "/") for root in roots)


class Steady:
    """A file of the size that was announced, whatever happens to it while it is read."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self.file, self.left = file, size

    def read(self, count: int) -> bytes:
        data = self.file.read(min(count, self.left))
        if not data and self.left:
            data = b"\0" * min(count, self.left)
        self.left -= len(data)
        return data


def setup(options: argparse.Namespace) -> None:
    """Run the commands on stdin in the project's folder unless the same content ran here before.

    They belong to the job that is being launched: until they have ended the job is listed as `setup`, and `kill`
    ends them. What they leave in the background afterwards belongs to no job.
    """
    wanted = json.load(sys.stdin)
    folder = project_folder(options.project)
    content = hashlib.sha256(json.dumps(wanted["commands"]).encode())
    for name in wanted["inputs"]:
        with contextlib.suppress(OSError):
            data = inside(folder, name).read_bytes()
            content.update(f"\n{name} {len(data)}\n".encode(errors="surrogateescape") + data)
    stamp = ROOT / f"setup-{folder.name}-{content.hexdigest()[:16]}"
    with locked("setup"):  # two laptops may launch at the same moment
        answer = {"ran": False, "exit_code": 0, "command": "", "output": ""}
        if not stamp.exists():
            answer = set_up(wanted, folder, stamp)
    reply(answer)


def set_up(wanted: Dict[str, Any], folder: Path, stamp: Path) -> Dict[str, Any]:
    about = job_folder(wanted["job"])
    about.mkdir(parents=True, exist_ok=True, mode=0o700)
    task = {"job": wanted["job"], "node": wanted["node"], "part": SETUP}
    known = {
        "started": time.time(),
        "script": wanted["script"],
        "pid": os.getpid(),
        "born": born(os.getpid()),
    }
    # Orphans come to this process, not to pid 1: also those that have cleaned their environment are found.
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
    env = {**os.environ, **wanted["env"], TASK: task_of(task)}
    write_json(about / SETUP_FILE, {**task, **known})
    try:
        for command in wanted["commands"]:
            code, tail = run_command(command, folder, env, about)
            if is_stopping(about):
                end_task(task, grace=1.0)
                return {"ran": True, "exit_code": 130, "command": command, "output": "", "cancelled": True}
            if code:
                return {"ran": True, "exit_code": code, "command": command, "output": tail}
    finally:
        (about / SETUP_FILE).unlink()
    stamp.write_text("done\n")
    return {"ran": True, "exit_code": 0, "command": "", "output": ""}


def run_command(command: str, folder: Path, env: Dict[str, str], about: Path) -> Tuple[int, str]:
    """Run a set-up command, unless the job has been cancelled; return its exit code and the end of its output."""
    with (
        tempfile.TemporaryFile() as output
    ):  # a pipe would wait for what the command leaves in the background
        with locked("jobs"):  # `kill` either finds the process or comes first
            if is_stopping(about):
                return 130, ""
            child = subprocess.Popen(
                ["bash", "-c", command], cwd=folder, env=env, stdin=subprocess.DEVNULL, stdout=output,
                stderr=subprocess.STDOUT,
            )  # fmt: skip
        code = child.wait()
        output.seek(0, os.SEEK_END)  # the offset is shared, but a command may have opened the file anew
        output.seek(max(output.tell() - 20000, 0))
        return code, output.read().decode(errors="replace")


def setup_of(folder: Path) -> Dict[str, Any]:
    """Return what is known of a job's set-up while any process of it runs, else {}."""
    known = read_json(folder / SETUP_FILE)
    alive = known and (born(known["pid"]) == known["born"] or task_processes(known))
    return known if alive else {}


# -- jobs --------------------------------------------------------------------------------------------------


def job_folder(job: str) -> Path:
    if not re.fullmatch(r"[A-Za-z0-9-]+", job):
        raise SystemExit(f"not a job id: {job!r}")
    return ROOT / "jobs" / job


def start(_: argparse.Namespace) -> None:
    """Write what stdin says of the job, start its supervisor detached, and answer when that is alive."""
    job = json.load(sys.stdin)
    folder = job_folder(job["job"])
    with locked("jobs"):  # two laptops may launch at the same moment
        busy = running_jobs()
        if busy:
            raise SystemExit(f"job {busy[0]} is still running on this node")
        if is_stopping(folder):
            raise SystemExit(f"job {job['job']} was cancelled before it started")
        (folder / "ranks").mkdir(parents=True, exist_ok=False)
        os.chmod(folder, 0o700)
        begin(job, folder)


def begin(job: Dict[str, Any], folder: Path) -> None:
    """Start the supervisor. The environment may hold the user's secrets: it goes by a pipe, never to the disk."""
    environment = json.dumps(job.pop("env")).encode()
    (folder / RESERVE).write_bytes(bytes(1 << 16))
    write_json(folder / "job.json", job)
    (folder / BEGAN).touch()
    write_json(
        folder / "state.json", {"job": job["job"], "node": job["node"], "state": "starting", "ended": None}
    )
    with open(folder / "supervisor.log", "ab") as log:
        supervisor = subprocess.Popen(
            [sys.executable, "-I", "-X", "utf8", os.path.abspath(__file__), "supervise", "--job", job["job"]],
            stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True, close_fds=True, cwd="/",
        )  # fmt: skip
    if supervisor.stdin is not None:
        with (
            contextlib.suppress(BrokenPipeError),
            supervisor.stdin,
        ):  # a supervisor that died is reported below
            supervisor.stdin.write(environment)
    while read_json(folder / "state.json")["state"] == "starting":
        if supervisor.poll() is not None:
            raise SystemExit("the job's supervisor died: " + (folder / "supervisor.log").read_text()[-2000:])
        time.sleep(0.01)
    reply({"pid": supervisor.pid})


def supervise(options: argparse.Namespace) -> None:
    """Start the job's processes, wait for them, leave none behind, and write how it ended. stdin: their environment."""
    folder = job_folder(options.job)
    job = {**read_json(folder / "job.json"), "env": json.load(sys.stdin)}
    state: Dict[str, Any] = {
        "job": job["job"], "node": job["node"], "state": "running", "started": time.time(), "ended": None,
        "exit_code": None, "error": "", "pid": os.getpid(), "born": born(os.getpid()), "script": job["script"],
        "expected": job["ranks"], "restarts": job.get("max_restarts", 0),
    }  # fmt: skip
    write_json(folder / "state.json", state)
    # Orphans come to this process, not to pid 1: also those that have cleaned their environment are found.
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
    children: List["subprocess.Popen[bytes]"] = []
    try:
        children.extend(
            launch(folder, job, process) for process in job["processes"] if not is_stopping(folder)
        )
        codes = wait_for(children, job)
    except OSError as error:
        state["error"] = f"{error.filename or 'process'}: {error.strerror}"
        codes = [127]
    end_task(job, grace=job["stop_grace"], children=children)
    state.update(outcome(folder, job, codes), ended=time.time())
    write_json(folder / "state.json", state)


def launch(folder: Path, job: Dict[str, Any], process: Dict[str, Any]) -> "subprocess.Popen[bytes]":
    project = project_folder(job["project"])
    wrapper = [
        sys.executable,
        "-I",
        "-X",
        "utf8",
        os.path.abspath(__file__),
        "rank",
        "--job",
        job["job"],
        "--",
    ]
    argv = list(process["argv"])
    if RANK_WRAPPER in argv:
        at = argv.index(RANK_WRAPPER)  # the first one: the user's own arguments come later
        argv[at : at + 2] = [*wrapper, *(program(word, project) for word in argv[at + 1 : at + 2])]
    argv[0] = program(argv[0], project)
    env = {**os.environ, **job["env"], **process["env"], TASK: task_of(job)}
    with open(folder / "launcher.log", "ab") as log:
        return subprocess.Popen(
            argv, cwd=str(project), env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            start_new_session=True,
        )  # fmt: skip


def wait_for(children: List["subprocess.Popen[bytes]"], job: Dict[str, Any]) -> List[int]:
    """Wait for all; once one has failed, stop the others (without torchrun nobody else would)."""
    while True:
        codes = [child.poll() for child in children]
        if all(code is not None for code in codes):
            return [int(code or 0) for code in codes]
        if any(codes):
            end_task(job, grace=job["stop_grace"], children=children)
        collect_orphans(children)
        time.sleep(0.05)


def collect_orphans(children: List["subprocess.Popen[bytes]"]) -> None:
    """Take leave of orphans that have ended; a child that Popen waits for is left to it."""
    known = {child.pid for child in children}
    with contextlib.suppress(ChildProcessError):
        while True:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is None or ended.si_pid in known:
                return
            os.waitpid(ended.si_pid, os.WNOHANG)


def outcome(folder: Path, job: Dict[str, Any], codes: List[int]) -> Dict[str, Any]:
    """Return state and exit code of the job on this node, from what its ranks did.

    torchrun may exit 1 although every rank finished (a race at its own exit barrier), so ranks decide.
    """
    settle(folder)
    ranks = rank_records(folder)
    failed = sorted((r for r in ranks if r["exit_code"]), key=lambda r: float(r["ended"]))
    if (folder / "cancel").exists():
        return {"state": "cancelled", "exit_code": 130}
    if failed:
        return {"state": "failed", "exit_code": failed[0]["exit_code"]}
    if len(ranks) == job["ranks"] and all(r["exit_code"] == 0 for r in ranks):
        return {"state": "succeeded", "exit_code": 0}
    worst = next((code for code in codes if code), 1)
    return {"state": "failed", "exit_code": 128 - worst if worst < 0 else worst}


def settle(folder: Path) -> None:
    """Give an end to ranks whose wrapper was killed with them, now that no process of the job is left."""
    for path in (folder / "ranks").glob("*.json"):
        record = read_json(path)
        if record and record["exit_code"] is None:
            write_json(
                path, {**record, "ended": time.time(), "exit_code": 137, "signal": int(signal.SIGKILL)}
            )


def rank_records(folder: Path) -> List[Dict[str, Any]]:
    records = [read_json(path) for path in sorted((folder / "ranks").glob("*.json"))]
    return [record for record in records if record]


def standing(folder: Path) -> Optional[Dict[str, Any]]:
    """Return what rank 0 last told of its training: the known keys of its status file, and when it was written.

    Whatever a script writes there must not harm: no key that is not known, no text but the four states, no number
    that JSON or a float cannot hold, no more than a few KiB.
    """
    path = folder / "status.json"
    try:
        with open(path, "rb") as file:
            told = json.loads(file.read(1 << 14))
            written = os.fstat(file.fileno()).st_mtime
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(told, dict):
        return None
    found: Dict[str, Any] = {}
    if told.get("state") in ("running", "finished", "failed", "preempted"):
        found["state"] = told["state"]
    for key, kinds in (("step", (int,)), ("steps", (int,)), ("best_accuracy", (int, float))):
        value = told.get(key)
        if isinstance(value, kinds) and not isinstance(value, bool) and -(2**53) < value < 2**53:
            found[key] = value
    return {**found, "told": written} if found else None


def rank(options: argparse.Namespace) -> int:
    """Run one rank: its output into a file named by its global rank, its end noted with the time.

    torchrun signals this process alone or its group, by version; the rank is in a group of its own and gets
    each signal once, from here, so that its data-loader workers do not die of it before it has saved.
    """
    folder = job_folder(options.job)
    number = int(os.environ.get("RANK", "0"))
    record: Dict[str, Any] = {
        "rank": number, "local_rank": int(os.environ.get("LOCAL_RANK", "0")), "started": time.time(), "ended": None,
        "exit_code": None, "signal": None, "attempt": int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
    }  # fmt: skip
    path = folder / "ranks" / f"{number}.json"
    libc = ctypes.CDLL(None)
    told_in = {STATUS: str(folder / "status.json")} if number == 0 else {}

    def die_with_parent() -> None:
        libc.prctl(1, int(signal.SIGKILL))  # PR_SET_PDEATHSIG: a killed wrapper leaves no rank behind

    with open(folder / "ranks" / f"{number}.log", "ab") as log:
        try:
            child = subprocess.Popen(
                options.argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                preexec_fn=die_with_parent, start_new_session=True, env={**os.environ, **told_in},
            )  # fmt: skip
        except OSError as error:
            log.write(f"cannot start {options.argv[0]}: {error.strerror}\n".encode())
            record.update(ended=time.time(), exit_code=127)
            write_json(path, record)
            return 127
    record["pid"] = child.pid
    told: Set[int] = set()

    def forward_once(received: int, _: Any) -> None:
        if received not in told:
            told.add(received)
            child.send_signal(received)

    for number_of in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number_of, forward_once)
    write_json(path, record)
    code = child.wait()
    record.update(
        ended=time.time(), exit_code=128 - code if code < 0 else code, signal=-code if code < 0 else None
    )
    write_json(path, record)
    if code < 0:  # end the same way, so that torchrun reports what really happened
        signal.signal(-code, signal.SIG_DFL) if -code not in (signal.SIGKILL, signal.SIGSTOP) else None
        os.kill(os.getpid(), -code)
    return code


# -- processes ---------------------------------------------------------------------------------------------


def task_of(job: Dict[str, Any]) -> str:
    part = f"/{job['part']}" if "part" in job else ""
    return f"{job['job']}/{job['node']}{part}"


def task_processes(job: Dict[str, Any]) -> List[int]:
    """Return the processes of a job on this node: all that carry its mark or descend from one that does.

    Neither process groups nor parents alone tell: torchrun's ranks have sessions of their own, and when torchrun
    and the supervisor are killed they go on under pid 1 and keep training. What has cleaned its environment is
    found by descent, from a marked process or from the supervisor, to which orphans come.
    """
    mark = f"{TASK}={task_of(job)}".encode()
    state = read_json(job_folder(job["job"]) / (SETUP_FILE if job.get("part") == SETUP else "state.json"))
    parents: Dict[int, int] = {}
    marked = set()
    for entry in os.listdir("/proc"):
        fields = stat_fields(int(entry)) if entry.isdigit() else []
        if len(fields) > 1 and fields[0] not in ("Z", "X"):
            parents[int(entry)] = int(fields[1])
            with contextlib.suppress(OSError), open(f"/proc/{entry}/environ", "rb") as environ:
                if mark in environ.read().split(b"\0"):
                    marked.add(int(entry))
    supervisor = int(state.get("pid") or 0)
    roots = set(marked)
    if supervisor and born(supervisor) == state.get("born"):
        roots.add(supervisor)
    found = set(marked)
    fresh = roots
    while fresh:
        fresh = {pid for pid, parent_pid in parents.items() if parent_pid in fresh and pid not in found}
        found |= fresh
    return sorted(found - {supervisor, os.getpid()})


def stat_fields(pid: int) -> List[str]:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat", "rb") as stat:
        # A name may be cut in the middle of a character; only what follows it is of interest.
        return stat.read().rsplit(b")", 1)[1].decode().split()
    return []


def born(pid: int) -> str:
    """Return the start time of a process in clock ticks since boot: with it a reused pid is not mistaken.

    '' where it has ended, also where nobody has collected it yet (a container without an init).
    """
    fields = stat_fields(pid)
    return fields[19] if len(fields) > 19 and fields[0] not in ("Z", "X") else ""


def end_task(
    job: Dict[str, Any], grace: float, children: Sequence["subprocess.Popen[bytes]"] = ()
) -> Tuple[int, int]:
    """SIGTERM, wait up to `grace` seconds, SIGKILL until none is left. Return (ended, left)."""
    ended: Set[int] = set()
    asked: Set[int] = set()
    deadline = time.monotonic() + grace
    while True:
        pids = task_processes(job)
        if not pids or time.monotonic() > deadline + 10:
            return len(ended), len(pids)
        ended.update(pids)
        if time.monotonic() > deadline:
            send(pids, signal.SIGKILL)
        else:
            # Only to those nobody else would tell: torchrun tells its ranks, a rank's wrapper its rank.
            roots = [pid for pid in pids if parent(pid) not in pids and pid not in asked]
            send(roots, signal.SIGTERM)
            asked.update(roots)
        for child in children:
            child.poll()
        time.sleep(0.05)


def send(pids: List[int], number: signal.Signals) -> None:
    denied = []
    for pid in pids:
        try:
            os.kill(pid, number)
        except PermissionError:  # another user's: set-up commands often use sudo
            denied.append(str(pid))
        except OSError:
            pass  # gone
    if denied:  # where sudo asks for a password they are counted as left
        run_quietly(["sudo", "-n", "kill", f"-{int(number)}", *denied])


def parent(pid: int) -> int:
    fields = stat_fields(pid)
    return int(fields[1]) if len(fields) > 1 else 0


def kill(options: argparse.Namespace) -> None:
    """End every process of a job on this node; `--finished` keeps the outcome that its ranks had.

    A job that is not known yet may be about to start (another connection brings it): it is forbidden to.
    """
    folder = job_folder(options.job)
    with locked("jobs"):  # not in the middle of a start
        job = read_json(folder / "job.json")
        if not job:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not options.finished and current_state(folder)["state"] not in (
            "succeeded",
            "failed",
            "cancelled",
        ):
            mark = folder / ("cancel" if options.cancel else "stopped")
            if not mark.exists():  # its mtime is the time of the first cancel
                mark.touch()
    if not job:
        reply(end_setup(folder, options.grace))
        return
    ranks = sum(r["exit_code"] is None and bool(born(r.get("pid") or 0)) for r in rank_records(folder))
    ended, left = end_task(job, options.grace)
    for _ in range(100):  # the supervisor notices within 50 ms, and writes the end
        state = current_state(folder)
        if state["state"] in ENDED:
            break
        time.sleep(0.05)
        late, left = end_task(job, 0)  # what it was about to start when this began
        ended += late
    if state["state"] == "lost" and not left:
        settle(folder)
        write_json(folder / "state.json", {**state, **outcome(folder, job, [137]), "ended": time.time()})
    state = current_state(folder)
    answer = {"known": True, "ended": ended, "ranks": ranks, "left": left}
    reply({**answer, "state": state["state"], "standing": standing(folder)})


def end_setup(folder: Path, grace: float) -> Dict[str, Any]:
    """End a job's set-up, if it is at work; return the answer once the next one may begin."""
    task = setup_of(folder)
    if not task:
        return {"known": False, "ended": 0, "left": 0}
    ended, left = end_task(task, grace)
    for _ in range(100):  # the step itself notices that its command has ended
        if not setup_of(folder):
            break
        time.sleep(0.05)
    return {"known": True, "ended": ended, "left": left, "state": SETUP}


def current_state(folder: Path) -> Dict[str, Any]:
    """Return a job's state; `lost` where its supervisor is gone without having written the end.

    `stopping` says that somebody is ending it, so that a watcher does not take that for a failure.
    """
    state = read_json(folder / "state.json")
    if alive_but_gone(folder, state):
        again = read_json(folder / "state.json")  # it may have ended between the two looks
        state = {**state, "state": "lost", "exit_code": 1} if again.get("state") == state["state"] else again
    preparing = {} if state else setup_of(folder)
    if preparing:
        state = {key: preparing[key] for key in ("job", "node", "started", "script")}
        return {**state, "state": SETUP, "ended": None, "stopping": is_stopping(folder)}
    if not state:
        return {"job": folder.name, "state": "lost", "exit_code": 1, "ended": None}
    return {**state, "stopping": is_stopping(folder)}


def is_stopping(folder: Path) -> bool:
    return (folder / "cancel").exists() or (folder / "stopped").exists()


def alive_but_gone(folder: Path, state: Dict[str, Any]) -> bool:
    if state.get("state") == "running":
        return bool(born(state["pid"]) != state["born"])
    if state.get("state") == "starting":  # it takes the supervisor milliseconds to write the next word
        return time.time() - (folder / "job.json").stat().st_mtime > 30
    return False


def running_jobs() -> List[str]:
    """Return the jobs that occupy this node: also those whose supervisor is gone while ranks go on."""
    found = []
    for job in list_jobs()[-20:]:
        known = read_json(job_folder(job["job"]) / "job.json")
        if job["state"] not in ENDED or (job["state"] == "lost" and known and task_processes(known)):
            found.append(job["job"])
    return found


@contextlib.contextmanager
def locked(name: str) -> Iterator[None]:
    """Hold a lock of this node."""
    import fcntl

    ROOT.mkdir(mode=0o700, exist_ok=True)
    with open(ROOT / f"{name}.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def list_jobs() -> List[Dict[str, Any]]:
    folders = [f for f in sorted((ROOT / "jobs").glob("*")) if (f / "job.json").exists() or setup_of(f)]
    return [told_of(folder, current_state(folder)) for folder in folders]


def told_of(folder: Path, state: Dict[str, Any]) -> Dict[str, Any]:
    told = {"ranks": rank_records(folder), "standing": standing(folder), "cancelled": cancelled_at(folder)}
    return {**state, **told}


def cancelled_at(folder: Path) -> Optional[float]:
    try:
        return (folder / "cancel").stat().st_mtime
    except OSError:
        return None


def jobs(_: argparse.Namespace) -> None:
    reply(list_jobs())


# -- new files ---------------------------------------------------------------------------------------------
# A new file is recognised by its ctime, which neither the job nor a tool that preserves times can set. It is compared
# with the ctime of a file of ours: both come from the file system's clock, which may lag behind time.time().


def ctime(path: Path) -> int:
    try:
        return os.lstat(path).st_ctime_ns
    except OSError:
        return 0


def began_at(folder: Path) -> int:
    return ctime(folder / BEGAN) or ctime(folder / "job.json")


def file_clock() -> int:
    """Return the present by the file system's clock, in ns since the epoch."""
    path = ROOT / f".clock-{os.getpid()}"
    try:
        path.touch()
        return ctime(path)
    except OSError:  # the disk is full
        return time.time_ns() - 100_000_000
    finally:
        with contextlib.suppress(OSError):
            path.unlink()


def pulled_file(folder: Path) -> Path:
    return ROOT / f"pulled-{folder.name}.json"


def new(options: argparse.Namespace) -> None:
    """Name what jobs have written into the project and nobody has pulled, below the outputs on stdin and elsewhere.

    Of one job, or of all. Files below `scratch` on stdin and caches are not counted.
    """
    asked = json.load(sys.stdin)
    folder = project_folder(options.project)
    ROOT.mkdir(mode=0o700, exist_ok=True)
    at = file_clock()
    folders = [f for f in (ROOT / "jobs").glob("*") if (f / "job.json").exists()]
    begins = sorted((began_at(f), f.name) for f in folders if options.job in ("", f.name))
    found: Dict[str, Dict[str, Any]] = {}
    complete = True
    if begins:
        scan = Scan(folder, asked["outputs"], asked["scratch"], begins[0][0])
        for written, kind, place, size in scan:
            job = [name for began, name in begins if began <= written][-1]
            entry = found.setdefault(job, {"outputs": {}, "others": {}})[kind].setdefault(place, [0, 0])
            entry[0] += 1
            entry[1] += size
        complete = not scan.late
    listed = [
        {"job": job, "outputs": summary(kinds["outputs"]), "others": summary(kinds["others"])}
        for job, kinds in sorted(found.items())
    ]
    running = [job for job in running_jobs() if options.job in ("", job)]
    rank_zero = [f.name for f in folders if (f / "ranks" / "0.json").exists() and options.job in ("", f.name)]
    answer = {"at": at, "complete": complete, "running": running[-PLACES:], "jobs": listed[-PLACES:]}
    reply({**answer, "rank_zero": bool(rank_zero)})


def summary(places: Dict[str, List[int]]) -> Dict[str, Any]:
    largest = sorted(places.items(), key=lambda item: -item[1][1])[:PLACES]
    return {
        "files": sum(count for count, _ in places.values()),
        "size": sum(size for _, size in places.values()),
        "places": [{"name": name, "files": count, "size": size} for name, (count, size) in largest],
    }


class Scan:
    """Yields (ctime, kind, place, size) of each new file of a project; `late` says that the time limit was reached.

    The place of a file is the output that contains it, or the topmost of its parent folders that no sync created.
    """

    def __init__(self, folder: Path, outputs: Sequence[str], scratch: Sequence[str], since: int) -> None:
        self.folder, self.since = folder, since
        self.outputs = [os.path.normpath(name) for name in outputs]
        self.scratch = frozenset(os.path.normpath(name) for name in scratch)
        self.manifest = read_json(manifest_file(folder))
        self.synced = {str(parent) for name in self.manifest for parent in Path(name).parents}
        self.pulled = read_json(pulled_file(folder))
        self.late = False

    def __iter__(self) -> Iterator[Tuple[int, str, str, int]]:
        deadline = time.monotonic() + SCAN_SECONDS
        waiting = [""]
        while waiting and not self.late:
            below = waiting.pop()
            with contextlib.suppress(OSError), os.scandir(str(self.folder / below)) as entries:
                for entry in entries:
                    name = f"{below}/{entry.name}" if below else entry.name
                    self.late = self.late or time.monotonic() > deadline
                    if entry.name in CACHES or entry.name.endswith(".pyc") or name in self.scratch:
                        continue
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(name)
                    elif entry.is_file(follow_symlinks=False) or entry.is_symlink():
                        with contextlib.suppress(OSError):
                            yield from self.if_new(name, entry.stat(follow_symlinks=False))

    def if_new(self, name: str, info: os.stat_result) -> Iterator[Tuple[int, str, str, int]]:
        written = info.st_ctime_ns
        parents = [name, *map(str, Path(name).parents)]  # the last is "."
        if written < self.since or any(written < int(self.pulled.get(p, 0)) for p in parents):
            return
        if name in self.manifest and describe(self.folder / name) == self.manifest[name]:
            return  # a sync has brought it
        output = next((out for out in self.outputs if out in parents), None)
        if output is not None:
            yield written, "outputs", output, info.st_size
            return
        unsynced = [p for p in parents[1:] if p not in self.synced and p != "."]
        yield written, "others", f"{unsynced[-1]}/" if unsynced else name, info.st_size


def pulled(options: argparse.Namespace) -> None:
    """Remember that the names on stdin were pulled as they were at a moment of the file system's clock."""
    names = json.load(sys.stdin)["names"]
    path = pulled_file(project_folder(options.project))
    with locked("pulled"):
        known = read_json(path)
        known.update({os.path.normpath(name): options.at for name in names})
        write_json(path, dict(sorted(known.items(), key=lambda item: -int(item[1]))[:1000]))
    reply({"marked": len(names)})


# -- logs --------------------------------------------------------------------------------------------------


def follow(options: argparse.Namespace) -> None:
    """Write frames to stdout until the job has ended and every byte of its logs was written.

    A frame is a line `log RANK OFFSET LENGTH` and LENGTH bytes, a line `state JSON`, a line `beat` every few
    seconds (silence means a dead node, however silent the job), or the last line `end`.
    RANK -1 is the launcher's own output. --offsets continues where an earlier connection broke.
    """
    folder = job_folder(options.job)
    if not (folder / "job.json").exists():
        raise SystemExit(f"no job {options.job} on this node")
    out = sys.stdout.buffer
    offsets = {int(k): int(v) for k, v in json.loads(options.offsets).items()}
    told = b""
    beat = time.monotonic()
    while True:
        if time.monotonic() - beat > 5:
            beat = time.monotonic()
            out.write(b"beat\n")
        state = current_state(folder)  # before the logs: what was written until now is read below
        ended = state["state"] in ENDED
        for number, path in log_files(folder):
            for offset, data in new_bytes(path, offsets.get(number, 0)):
                out.write(f"log {number} {offset} {len(data)}\n".encode() + data)
                offsets[number] = offset + len(data)
        summary = wire(told_of(folder, state))
        if summary != told:
            told = summary
            out.write(b"state " + summary + b"\n")
        if ended or not options.wait:
            out.write(b"end\n")
            out.flush()
            return
        out.flush()
        time.sleep(0.1)


def log_files(folder: Path) -> List[Tuple[int, Path]]:
    logs = [(int(path.stem), path) for path in (folder / "ranks").glob("*.log")]
    return [(-1, folder / "launcher.log"), *sorted(logs)]


def new_bytes(path: Path, offset: int) -> Iterator[Tuple[int, bytes]]:
    """Yield (offset, data) of what was added, in pieces; lines are put together at the other end."""
    try:
        file: BinaryIO = open(path, "rb")  # noqa: SIM115
    except OSError:
        return
    with file:
        file.seek(offset)
        while True:
            data = file.read(1 << 16)
            if not data:
                return
            yield offset, data
            offset += len(data)


# -- the command line --------------------------------------------------------------------------------------


def parser() -> argparse.ArgumentParser:
    main_parser = argparse.ArgumentParser(prog="agent.py")
    verbs = main_parser.add_subparsers(dest="verb", required=True)

    def verb(name: str, function: Any) -> argparse.ArgumentParser:
        made = verbs.add_parser(name)
        made.set_defaults(function=function)
        return made

    probing = verb("probe", probe)
    probing.add_argument("--private-ip", required=True)
    probing.add_argument("--manifest", default="")
    probing.add_argument("--wait-boot", type=float, default=0.0)
    probing.add_argument("--await-gpus", type=int, default=0)
    probing.add_argument("--python", default="")
    packing = verb("pack", pack)
    packing.add_argument("path", nargs="+")
    looking = verb("new", new)
    looking.add_argument("--job", default="")
    marking = verb("pulled", pulled)
    marking.add_argument("--at", type=int, required=True)
    for made in (probing, packing, looking, marking, verb("apply", apply), verb("setup", setup)):
        made.add_argument("--project", required=True)
    verb("start", start)
    verb("jobs", jobs)
    killing = verb("kill", kill)
    killing.add_argument("--grace", type=float, default=10.0)
    killing.add_argument("--cancel", action="store_true")
    killing.add_argument("--finished", action="store_true")
    following = verb("follow", follow)
    following.add_argument("--offsets", default="{}")
    following.add_argument("--wait", action="store_true")
    ranking = verb("rank", rank)
    ranking.add_argument("argv", nargs=argparse.REMAINDER)
    for made in (killing, following, ranking, verb("supervise", supervise)):
        made.add_argument("--job", required=True)
    return main_parser


def main() -> int:
    words = sys.argv[1:]
    rest: List[str] = []
    if "--" in words:  # argparse would eat a second `--` of the user's own
        cut = words.index("--")
        words, rest = words[:cut], words[cut + 1 :]
    options = parser().parse_args(words)
    if rest:
        options.argv = rest
    try:
        return int(options.function(options) or 0)
    except BrokenPipeError:  # the laptop went away: the job does not care
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        text = "no space is left on this node's disk: `df -h` and `du -xh` there tell what fills it"
        raise SystemExit(text) from None


if __name__ == "__main__":
    raise SystemExit(main())
