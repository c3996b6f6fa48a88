"""What this laptop remembers: keys, known host keys and a journal per cluster, under one folder.

AWS tags are the truth about what exists; nothing here is needed to find or destroy a cluster. Losing this
folder loses the private key (so: no SSH), never the ability to stop the bill. This room knows files, not
AWS, SSH or the command line.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cloudddp import safe_files
from cloudddp.errors import CloudDDPError, UsageError
from cloudddp.safe_files import Folder
from cloudddp.tags import cluster_id as parsed_id


def home() -> Path:
    """Return the state folder: CLOUDDDP_HOME where set, else the platform's per-user state folder."""
    if chosen := os.environ.get("CLOUDDDP_HOME"):
        return Path(chosen).absolute()
    import platformdirs  # 10 ms that `--help` does not need

    # Without a home folder (no HOME, no account of that uid), platformdirs raises, or names one of the current folder's.
    with contextlib.suppress(RuntimeError):
        if (found := Path(platformdirs.user_state_dir("cloudddp"))).is_absolute():
            return found
    raise UsageError("there is no home folder for cloudddp's state", hint="set HOME, or CLOUDDDP_HOME")


def user_config() -> Path | None:
    """Return the user's own configuration file, whether or not it exists; None where there is no home folder."""
    import platformdirs

    with contextlib.suppress(RuntimeError):
        if (found := Path(platformdirs.user_config_dir("cloudddp"))).is_absolute():
            return found / "config.toml"
    return None


def check_home() -> None:
    """Raise UsageError where the state folder exists and is not this user's alone to write. Changes nothing."""
    safe_files.check(home())


def write_atomic(path: Path, data: bytes | str, mode: int = 0o600) -> None:
    """Replace `path` by `data` so that a reader, or a crash, sees the old file or the new one, never half.

    Its folder is made private, and in the state folder no link on the way is followed. Raises UsageError, OSError.
    """
    content = data.encode() if isinstance(data, str) else data
    with _private(path.parent) as folder:
        folder.replace(path.name, content, mode)


def _private(path: Path) -> Folder:
    root = home() if path.is_relative_to(home()) else path
    return safe_files.private(root, *path.relative_to(root).parts)


@dataclass(frozen=True, slots=True)
class ClusterRecord:
    """What `up` noted about a cluster before it called AWS for the first time."""

    id: str
    name: str
    region: str
    endpoint: str  # "" for AWS itself, the simulator's address otherwise
    user: str
    created: str
    expires: str


def remembered() -> list[ClusterRecord]:
    """Return the clusters that this laptop made and has not seen gone."""
    records = [folder.record() for folder in _folders() if folder.private_key.exists()]
    return [record for record in records if record is not None]


def instances_made() -> frozenset[str]:
    """Return the ids of all instances that this laptop's journals say it made."""
    found: set[str] = set()
    for folder in _folders():
        with contextlib.suppress(OSError, CloudDDPError):  # a journal that cannot be read knows nothing
            found.update(folder.instances_made())
    return frozenset(found)


def _folders() -> list[ClusterFolder]:
    paths = (home() / "clusters").glob("c-*")
    return [ClusterFolder(path.name) for path in paths if parsed_id(path.name)]


class ClusterFolder:
    """The folder of one cluster id: cluster.json, id_ed25519, host_key.pub, host_keys.json, known_hosts and
    journal.jsonl."""

    def __init__(self, cluster_id: str, *, root: Path | None = None) -> None:
        """Raises ValueError for what is not a cluster id: the id comes from a tag, and becomes part of a path."""
        if parsed_id(cluster_id) is None:
            raise ValueError(f"not a cluster id: {cluster_id!r}")
        self.id = cluster_id
        self.root = root or home()
        self.path = self.root / "clusters" / cluster_id

    def _open(self, *, make: bool = True) -> Folder:
        """Return the folder, open, with none of the way to it being a link. Raises UsageError, OSError."""
        return safe_files.private(self.root, "clusters", self.id, make=make)

    def _read(self, path: Path) -> str:
        """Return the text of one of its files. Raises OSError, also for a link; ValueError; UsageError."""
        with self._open(make=False) as folder:
            return folder.read(path.name).decode()

    def read(self, path: Path) -> str | None:
        """Return the text of one of its files, or None where there is none. Raises as _read does."""
        try:
            return self._read(path)
        except FileNotFoundError:
            return None

    def _has(self, path: Path) -> bool:
        """Return whether it is one of the files here, and no link. Raises UsageError."""
        try:
            with self._open(make=False) as folder:
                return stat.S_ISREG(folder.kind(path.name))
        except FileNotFoundError:
            return False

    def write(self, path: Path, text: str) -> None:
        """Replace one of its files, whole and on the disk. Raises OSError, UsageError."""
        with self._open() as folder:
            folder.replace(path.name, text.encode())

    @property
    def exists(self) -> bool:
        """Whether this laptop has a folder of the cluster; without one there is no journal to write to."""
        return self.path.is_dir()

    @property
    def private_key(self) -> Path:
        return self.path / "id_ed25519"

    @property
    def host_key(self) -> Path:
        """The public host key that the nodes boot with, as `ssh-ed25519 AAAA...`; gone when each has its own."""
        return self.path / "host_key.pub"

    @property
    def host_keys(self) -> Path:
        """The nodes' own host keys: see host_keys.py."""
        return self.path / "host_keys.json"

    @property
    def known_hosts(self) -> Path:
        """The nodes' host keys by address, for OpenSSH clients (`cloudddp ssh`)."""
        return self.path / "known_hosts"

    def create(self, record: ClusterRecord, *, private_key: str, host_public: str) -> None:
        """Write everything that must exist before the first AWS call."""
        with self._open() as folder:
            folder.replace(self.private_key.name, private_key.encode())
            folder.replace(self.host_key.name, f"{host_public}\n".encode(), 0o644)
            folder.replace("cluster.json", f"{json.dumps(asdict(record), indent=2)}\n".encode())

    def record(self) -> ClusterRecord | None:
        """Return what `create` wrote, or None where this laptop never knew the cluster."""
        try:
            return ClusterRecord(**json.loads(self._read(self.path / "cluster.json")))
        except (OSError, ValueError, TypeError):
            return None

    def login_key(self) -> Path:
        """Return the path of the private login key, or say why there is no SSH from this laptop."""
        if not (self._has(self.private_key) and (self._has(self.host_key) or self._has(self.host_keys))):
            raise CloudDDPError(
                f"this computer has no key for cluster {self.id}: it was made elsewhere, or its state was lost",
                hint="use the computer that ran `cloudddp up`, or stop the bill with `cloudddp down`",
            )
        return self.private_key

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Mark the cluster as being made by this process. The mark ends with the process, however it ends."""
        with self._open() as folder:
            descriptor = folder.append(self._lock.name)
        try:
            with contextlib.suppress(OSError):  # no locks on this file system: is_held() then returns True
                fcntl.flock(descriptor, fcntl.LOCK_EX)  # waits only for another process's `is_held`
            yield
        finally:
            os.close(descriptor)

    def is_held(self) -> bool:
        """Return whether a process of this computer may be making the cluster right now."""
        try:
            descriptor = os.open(self._lock, os.O_RDWR | os.O_NOFOLLOW)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
        finally:
            os.close(descriptor)
        return False

    @property
    def _lock(self) -> Path:
        return self.path / "lock"

    def note(self, event: str, **fields: Any) -> None:
        """Append one line to the journal and fsync it: called before each act that creates or destroys."""
        line = json.dumps(
            {"time": datetime.now(UTC).isoformat(timespec="milliseconds"), "event": event, **fields}
        )
        with self._open() as folder:
            descriptor = folder.append("journal.jsonl")
        try:
            os.write(descriptor, line.encode() + b"\n")
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def instances_made(self) -> frozenset[str]:
        """Return the ids of the instances that AWS returned to `up`; empty if no answer arrived."""
        lines = (self.read(self.path / "journal.jsonl") or "").splitlines()
        ids: set[str] = set()
        for line in lines:  # the last one may have been cut off
            with contextlib.suppress(ValueError, TypeError, LookupError, AttributeError, RecursionError):
                noted = json.loads(line)
                if noted.get("event") == "made":
                    ids.update(one for one in noted["instances"] if isinstance(one, str))
        return frozenset(ids)

    @contextlib.contextmanager
    def alone(self, waiting: Callable[[], None]) -> Iterator[None]:
        """Keep other commands on this laptop out of the body. `waiting` is called where one of them is in it."""
        with self._open(make=False) as folder:
            try:
                fcntl.flock(folder.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                waiting()
                fcntl.flock(folder.descriptor, fcntl.LOCK_EX)
            except OSError as error:  # some network file systems have no locks
                raise OSError(error.errno, f"cannot be locked: {error.strerror}", str(self.path)) from None
            yield

    def forget(self) -> None:
        """Remove the keys of a cluster that is gone; the journal and the record stay as history."""
        with contextlib.suppress(FileNotFoundError), self._open(make=False) as folder:
            for path in (self.private_key, self.host_key, self.host_keys, self.known_hosts, self._lock):
                folder.remove(path.name)
