"""What this laptop remembers: keys, known host keys and a journal per cluster, under one folder.

AWS tags are the truth about what exists; nothing here is needed to find or destroy a cluster. Losing this
folder loses the private key (so: no SSH), never the ability to stop the bill. This room knows files, not
AWS, SSH or the command line.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cloudddp.errors import CloudDDPError


def home() -> Path:
    """Return the state folder: CLOUDDDP_HOME where set, else the platform's per-user state folder."""
    if chosen := os.environ.get("CLOUDDDP_HOME"):
        return Path(chosen).absolute()
    import platformdirs  # 10 ms that `--help` does not need

    return Path(platformdirs.user_state_dir("cloudddp"))


def write_atomic(path: Path, data: bytes | str, mode: int = 0o600) -> None:
    """Replace `path` by `data` so that a reader, or a crash, sees the old file or the new one, never half."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    content = data.encode() if isinstance(data, str) else data
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _fsync_folder(path.parent)


def _fsync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


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
    folders = [ClusterFolder(path.name) for path in (home() / "clusters").glob("*")]
    records = [folder.record() for folder in folders if folder.private_key.exists()]
    return [record for record in records if record is not None]


class ClusterFolder:
    """The folder of one cluster id: cluster.json, id_ed25519, known_hosts and journal.jsonl."""

    def __init__(self, cluster_id: str, *, root: Path | None = None) -> None:
        self.id = cluster_id
        self.path = (root or home()) / "clusters" / cluster_id

    @property
    def private_key(self) -> Path:
        return self.path / "id_ed25519"

    @property
    def host_key(self) -> Path:
        """The public host key that every node of the cluster must show, as `ssh-ed25519 AAAA...`."""
        return self.path / "host_key.pub"

    @property
    def known_hosts(self) -> Path:
        """The same key by address, for OpenSSH clients (`cloudddp ssh`)."""
        return self.path / "known_hosts"

    def create(self, record: ClusterRecord, *, private_key: str, host_public: str) -> None:
        """Write everything that must exist before the first AWS call."""
        self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_atomic(self.private_key, private_key)
        write_atomic(self.host_key, host_public + "\n", 0o644)
        write_atomic(self.path / "cluster.json", json.dumps(asdict(record), indent=2) + "\n")

    def record(self) -> ClusterRecord | None:
        """Return what `create` wrote, or None where this laptop never knew the cluster."""
        try:
            return ClusterRecord(**json.loads((self.path / "cluster.json").read_text()))
        except (OSError, ValueError, TypeError):
            return None

    def keys(self) -> tuple[Path, str]:
        """Return (path of the private key, public host key) or say why there is no SSH from this laptop."""
        try:
            host = self.host_key.read_text().strip()
        except OSError:
            host = ""
        if not host or not self.private_key.exists():
            raise CloudDDPError(
                f"this computer has no key for cluster {self.id}: it was made elsewhere, or its state was lost",
                hint="use the computer that ran `cloudddp up`, or stop the bill with `cloudddp down`",
            )
        return self.private_key, host

    def note(self, event: str, **fields: Any) -> None:
        """Append one line to the journal and fsync it: called before each act that creates or destroys."""
        self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
        line = json.dumps(
            {"time": datetime.now(UTC).isoformat(timespec="milliseconds"), "event": event, **fields}
        )
        descriptor = os.open(self.path / "journal.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(descriptor, line.encode() + b"\n")
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def forget(self) -> None:
        """Remove the keys of a cluster that is gone; the journal and the record stay as history."""
        for path in (self.private_key, self.host_key, self.known_hosts):
            path.unlink(missing_ok=True)
