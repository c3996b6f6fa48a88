"""State on this computer: keys, known host keys and a journal for each cluster, in one folder.

AWS tags are authoritative for what exists; nothing here is needed to find or terminate a cluster. Losing this
folder loses the private key, and with it SSH, but never the ability to stop the bill. This module depends on
files only, not on AWS, SSH or the command line.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from cloudddp.errors import CloudDDPError
from cloudddp.files import Folder, open_private, state_home
from cloudddp.tags import parse_cluster_id

USUAL_USER = "ubuntu"  # for clusters whose record names no login user
SSH_CONFIG = "ssh_config"
MOVING, MOVED = "moving", "moved"
_LOCK, _RESUME_LOCK = "lock", "resume-lock"


@dataclass(frozen=True, slots=True)
class ClusterRecord:
    """What `up` records about a cluster before its first AWS call that creates something."""

    id: str
    name: Annotated[str, Meta(pattern="^[a-z0-9][a-z0-9-]{0,39}$")]
    region: Annotated[str, Meta(pattern="^[a-z0-9-]{1,40}$")]
    endpoint: str  # "" for AWS itself, otherwise the simulator's address
    expires: str
    user: str = USUAL_USER  # the image's login user
    # The settings of that name, "" if not set: later commands need the same route to the nodes.
    connect: str = ""
    proxy_jump: str = ""
    proxy_command: str = ""
    # `expires` was moved by `extend`: MOVING until every node has confirmed it, then MOVED.
    extended: str = ""
    # For `cost`; "", 0 and None in records of earlier versions.
    project: str = ""  # the name of the project's folder
    created: str = ""
    nodes: Annotated[int, Meta(ge=0, le=10_000)] = 0
    node_hour: Annotated[float, Meta(ge=0, le=1e5)] | None = None  # USD for each node, as in its tag
    usd: Annotated[float, Meta(ge=0, le=1e9)] | None = (
        None  # what it has cost, once it is gone and AWS has said how long it ran
    )
    usd_is_at_most: bool = False
    spot: str = ""  # prefer: a node may be replaced by an on-demand one


def known_clusters() -> list[ClusterRecord]:
    """Return the clusters that were created on this computer and not yet removed, as far as known."""
    records = [folder.record() for folder in all_folders() if folder.private_key.exists()]
    return [record for record in records if record is not None]


def live_clusters() -> list[ClusterRecord]:
    """Return the known clusters whose deadline is ahead."""
    now = f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"
    return [record for record in known_clusters() if record.expires > now]


def history(endpoint: str) -> list[ClusterRecord]:
    """Return the clusters whose nodes were created on this computer, also those that are gone and those whose
    record is damaged."""
    found = []
    for folder in all_folders():
        with contextlib.suppress(OSError, CloudDDPError):  # an unreadable journal counts as empty
            record = folder.record() or ClusterRecord(folder.id, "unknown", "", endpoint, "")
            if record.endpoint == endpoint and folder.created_instances():
                found.append(record)
    return found


def folders_of(name: str, endpoint: str) -> list[ClusterFolder]:
    """Return the folders of all clusters of that name that were created on this computer, also of those that
    are gone."""
    records = [(folder, folder.record()) for folder in all_folders()]
    return [folder for folder, one in records if one and (one.name, one.endpoint) == (name, endpoint)]


def created_instances() -> frozenset[str]:
    """Return the ids of all instances that were created on this computer, according to its journals."""
    found: set[str] = set()
    for folder in all_folders():
        with contextlib.suppress(OSError, CloudDDPError):  # an unreadable journal counts as empty
            found.update(folder.created_instances())
    return frozenset(found)


def folder_of_job(job_id: str) -> ClusterFolder | None:
    """Return the cluster on which a job was launched from this computer."""
    return next((folder for folder in all_folders() if job_id in folder.jobs()), None)


def drop_ssh_configs(name: str, *, but: str) -> None:
    """Remove the hosts of other clusters of that name from OpenSSH's configuration."""
    for folder in all_folders():
        if folder.id != but and folder.ssh_config.exists():
            record = folder.record()
            if record is None or record.name == name:
                folder.remove(folder.ssh_config)


def openssh_names() -> list[str]:
    """Return the nodes' names in OpenSSH's configuration. A file that cannot be read counts as empty."""
    found = []
    for folder in sorted(all_folders(), key=lambda one: one.id):
        with contextlib.suppress(OSError, ValueError, CloudDDPError):
            lines = (folder.read(folder.ssh_config) or "").splitlines()
            found += [line[5:] for line in lines if line.startswith("Host ")]
    return found


def all_folders() -> list[ClusterFolder]:
    """Return the folders of all clusters of which this computer has a record, also of those that are gone."""
    paths = (state_home() / "clusters").glob("c-*")
    return [ClusterFolder(path.name) for path in paths if parse_cluster_id(path.name)]


class StateLost(CloudDDPError):
    """The state folder, or a key in it, was removed while a command was using it."""

    def __init__(self, gone: Path) -> None:
        super().__init__(
            f"{gone} no longer exists: without it the nodes cannot be used; they may be running and billed",
            hint="`cloudddp down` removes them",
        )
        self.gone = gone


class ClusterFolder:
    """The folder of one cluster id, with a record (cluster.json), a journal, and a file for each job."""

    def __init__(self, cluster_id: str, *, root: Path | None = None) -> None:
        """Raises ValueError for an invalid cluster id: the id comes from a tag and becomes part of a path."""
        if parse_cluster_id(cluster_id) is None:
            raise ValueError(f"not a cluster id: {cluster_id!r}")
        self.id = cluster_id
        self.root = root or state_home()
        self.path = self.root / "clusters" / cluster_id
        self.launch = self.path / "launch.json"  # how the nodes were launched: see plan.py
        self.private_key = self.path / "id_ed25519"
        # The public host key that the nodes boot with, as `ssh-ed25519 AAAA...`, until each has its own.
        self.host_key = self.path / "host_key.pub"
        self.host_keys = self.path / "host_keys.json"  # the nodes' own: see host_keys.py
        self.known_hosts = self.path / "known_hosts"  # the nodes' host keys by address, for OpenSSH
        self.ssh_config = self.path / SSH_CONFIG  # the nodes as hosts of OpenSSH: see ssh/openssh.py
        self.grace = self.path / "grace.json"  # what ends unused nodes: see cluster/nodes_end.py
        self.restored = self.path / "restored"  # by launch_record.note_put_back

    def _open(self, *, make: bool = True) -> Folder:
        """Return the open folder; no part of its path is a symbolic link. Raises UsageError, OSError."""
        return open_private(self.root, "clusters", self.id, make=make)

    def read(self, path: Path) -> str | None:
        """Return the text of one of its files, or None if it does not exist. Raises OSError, also for a
        symbolic link; ValueError; UsageError."""
        with contextlib.suppress(FileNotFoundError), self._open(make=False) as folder:
            return folder.read(path.name).decode()
        return None

    def write(self, path: Path, text: str) -> None:
        """Replace one of its files atomically and durably. Raises OSError, UsageError."""
        with self._open() as folder:
            folder.replace(path.name, text.encode())

    def write_new(self, path: Path, text: str) -> None:
        """Write one of its files that must not exist. Raises FileExistsError where another process was first;
        OSError, UsageError."""
        with self._open() as folder:
            os.close(folder.create(path.name, 0o600))
            try:
                folder.replace(path.name, text.encode())
            except BaseException:
                folder.remove(path.name)
                raise

    @property
    def exists(self) -> bool:
        """Whether this computer has a folder for the cluster; if not, there is no journal to write to."""
        return self.path.is_dir()

    def job(self, job_id: str) -> Path:
        """What was launched as a job of that id, which has to be valid: see job/launch_record.py."""
        return self.path / f"job-{job_id}.json"

    def jobs(self) -> list[str]:
        """Return the ids of the jobs with such a file, unchecked, newest last."""
        return sorted(path.stem.removeprefix("job-") for path in self.path.glob("job-*.json"))

    def remove(self, path: Path) -> None:
        """Delete one of the cluster's files, if it exists. Raises OSError."""
        with contextlib.suppress(FileNotFoundError), self._open(make=False) as folder:
            folder.remove(path.name)

    def create(self, record: ClusterRecord, *, private_key: str, host_public: str) -> None:
        """Write everything that must exist before the first AWS call: the record first, by which `down` finds
        the key."""
        with self._open() as folder:
            folder.replace("cluster.json", _json(record).encode())
            folder.replace(self.private_key.name, private_key.encode())
            folder.replace(self.host_key.name, f"{host_public}\n".encode(), 0o644)

    def missing(self) -> Path | None:
        """Return what is missing of what `create` wrote, the outermost folder or a key; None where the nodes
        can be reached."""
        for needed in (self.root, self.path, self.private_key):
            if not needed.exists():
                return needed
        return None if self.host_key.exists() or self.host_keys.exists() else self.host_key

    def check_present(self) -> None:
        """Raise StateLost if a file without which the nodes cannot be reached no longer exists."""
        if (gone := self.missing()) is not None:
            raise StateLost(gone)

    def login_key_text(self) -> str:
        """Return the private login key. Raises CloudDDPError if this computer does not have it."""
        return self.read(self.login_key()) or ""

    def record(self) -> ClusterRecord | None:
        """Return what `create` wrote; None if it is damaged or the cluster was not created on this computer.

        Unknown keys are ignored: other versions of cloudddp write more or fewer of them.
        """
        try:
            found = msgspec.json.decode(self.read(self.path / "cluster.json") or "", type=ClusterRecord)
            return found if found.id == self.id else None
        except (OSError, ValueError, RecursionError):  # msgspec's own errors are ValueErrors
            return None

    def changed(self) -> float:
        """Return when the record was last written, in seconds since the epoch; 0 if there is none."""
        try:
            return (self.path / "cluster.json").stat().st_mtime
        except OSError:
            return 0.0

    def login_key(self) -> Path:
        """Return the path of the private login key. Raises CloudDDPError if this computer does not have
        it."""
        found: set[Path] = set()
        with contextlib.suppress(FileNotFoundError), self._open(make=False) as folder:
            keys = (self.private_key, self.host_key, self.host_keys)
            found.update(path for path in keys if stat.S_ISREG(folder.kind(path.name)))  # no symbolic links
        if self.private_key not in found or len(found) == 1:
            raise CloudDDPError(
                f"this computer has no key for cluster {self.id}: it was created elsewhere, or the key was "
                "lost",
                hint="use the computer that ran `cloudddp up`, or stop the bill with `cloudddp down`",
            )
        return self.private_key

    def update(self, **fields: Any) -> None:
        """Change fields of the record, if there is one. Raises OSError, UsageError."""
        record = self.record()
        if record is not None:
            self.write(self.path / "cluster.json", _json(replace(record, **fields)))

    @contextlib.contextmanager
    def being_created(self) -> Iterator[None]:
        """Mark the cluster as being created by this process. The mark ends with the process, also if it is
        killed."""
        with self._open() as folder:
            lock = os.fdopen(folder.append(_LOCK), "ab")
        with lock:
            # File systems without locks: is_being_created() then returns True.
            with contextlib.suppress(OSError):
                fcntl.flock(lock, fcntl.LOCK_EX)  # waits only for another process's is_being_created()
            yield

    def is_being_created(self) -> bool:
        """Return whether a process of this computer may be creating the cluster right now."""
        try:
            descriptor = os.open(self.path / _LOCK, os.O_RDWR | os.O_NOFOLLOW)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
        finally:
            os.close(descriptor)
        return False

    @contextlib.contextmanager
    def resuming(self) -> Iterator[bool]:
        """Let one command of this computer at a time resume jobs of the cluster; yield False while another
        one does."""
        with self._open(make=False) as folder:
            lock = os.fdopen(folder.append(_RESUME_LOCK), "ab")
        with lock:
            free = True
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                free = False
            yield free

    def journal(self, event: str, **fields: Any) -> None:
        """Append one line to the journal and fsync it: called before each call that creates or deletes
        something."""
        line = json.dumps(
            {"time": datetime.now(UTC).isoformat(timespec="milliseconds"), "event": event, **fields}
        )
        with self._open() as folder:
            file = os.fdopen(folder.append("journal.jsonl"), "ab", buffering=0)
        with file:
            file.write(line.encode() + b"\n")
            os.fsync(file.fileno())

    def journal_created(self, instances: list[str]) -> None:
        """Record the instances that RunInstances returned."""
        self.journal(_CREATED, step="nodes", instances=instances)

    def events(self) -> list[dict[str, Any]]:
        """Return the lines of the journal that can be read: the last one may be incomplete. Raises OSError,
        UsageError."""
        found = []
        for line in (self.read(self.path / "journal.jsonl") or "").splitlines():
            with contextlib.suppress(ValueError, RecursionError):
                event = json.loads(line)
                if isinstance(event, dict):
                    found.append(event)
        return found

    def created_instances(self) -> frozenset[str]:
        """Return the ids of the instances that AWS returned to `up`; empty if no answer arrived."""
        ids: set[str] = set()
        for event in self.events():
            listed = event.get("instances")
            if event.get("event") == _CREATED and isinstance(listed, list):
                ids.update(one for one in listed if isinstance(one, str))
        return frozenset(ids)

    @contextlib.contextmanager
    def exclusive(self, on_wait: Callable[[], None]) -> Iterator[None]:
        """Let one cloudddp command of this computer at a time run the body; `on_wait` is called if it has to
        wait."""
        with self._open(make=False) as folder:
            try:
                fcntl.flock(folder.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                on_wait()
                fcntl.flock(folder.descriptor, fcntl.LOCK_EX)
            except OSError as error:  # some network file systems have no locks
                raise OSError(error.errno, f"cannot be locked: {error.strerror}", str(self.path)) from None
            yield

    def forget(self) -> None:
        """Remove the keys of a cluster that is gone; the journal and the record stay as history."""
        with contextlib.suppress(FileNotFoundError), self._open(make=False) as folder:
            keys = (self.private_key, self.host_key, self.host_keys, self.known_hosts, self.ssh_config)
            for name in (*(path.name for path in keys), _LOCK, _RESUME_LOCK):
                folder.remove(name)


def _json(record: ClusterRecord) -> str:
    return f"{json.dumps(asdict(record), indent=2)}\n"


LAUNCH = "launch"  # an event for each step of the launch of a `job`
_CREATED = "made"  # the event name in the journals of all versions
