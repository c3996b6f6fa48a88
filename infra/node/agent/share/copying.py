"""Files from one node of a job to another: what was offered, and nothing else (node/serving.py)."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path

from agent.node import serving, store
from agent.node.link import REFUSED, Link, LinkError
from agent.share import offers
from cloudddp.agent.protocol.manifest import FILE, Entry
from cloudddp.agent.protocol.receiving import Receiver
from cloudddp.agent.protocol.sharing import Offered
from cloudddp.agent.protocol.transfer import FileHead, Wants
from cloudddp.agent.protocol.writing import FileWriter, Incoming


@dataclass(frozen=True)
class Exchange:
    """What a job's nodes give each other, under its secret. `begun` names a folder for files that are not
    complete; `durable`: those that are complete are on the disk."""

    secret: str
    project: Path
    begun: str
    durable: bool

    def give(self, link: Link, files: Sequence[Offered]) -> None:
        """Send what a node asks for of these files. One that is damaged, or not as it was offered, is said to
        be missing. Raises what REFUSED names, and EOFError."""
        known = {file.path: file for file in files}

        def locate(name: str) -> str:
            if not offers.has(self.project, known[name]):
                raise FileNotFoundError(name)
            return name

        entries = [(name, Entry(FILE, 0, 0, 0, "")) for name in known]
        serving.serve(link, self.secret, self.project, entries, locate)

    def get(self, link: Link, files: Sequence[Offered], lacking: Set[str], taken: set[str]) -> None:
        """Get those of these files that are `lacking`, and add to `taken` those that came as they were
        offered, both by their paths. Raises OSError, which names the file."""
        wanted = {number: file for number, file in enumerate(files) if file.path in lacking}
        writer = FileWriter(self.project, store.ROOT / self.begun, durable=self.durable)
        target = _Target(writer, wanted, taken)
        receiver = Receiver({number: file.size for number, file in wanted.items()}, target)
        try:
            known = {number: one for number, file in wanted.items() if (one := writer.known(file.path))}
            serving.fetch(link, self.secret, Wants(tuple(wanted), known), receiver)
        except (*REFUSED, EOFError) as error:
            why = (isinstance(error, OSError) and error.strerror) or str(error)
            raise LinkError(f"{target.path}: {why}") from None
        finally:
            receiver.close()
            writer.close()

    def forget_begun(self) -> None:
        shutil.rmtree(store.ROOT / self.begun, ignore_errors=True)


class _Target:
    """Writes files that are as they were offered. `path` is that of the last one."""

    def __init__(self, writer: FileWriter, files: Mapping[int, Offered], taken: set[str]) -> None:
        self._writer, self._files, self._taken = writer, files, taken
        self.path = next((one.path for one in files.values()), "")

    def begin(self, number: int, offset: int) -> Incoming:
        self.path = self._files[number].path
        return self._writer.begin(self.path, offset)

    def finish(self, head: FileHead, incoming: Incoming) -> None:
        file = self._files[head.number]
        if (head.size, max(head.mtime_ns, 0)) == (file.size, file.mtime_ns):
            self._writer.finish(file.path, head, incoming, file.mode)
            self._taken.add(file.path)
        else:
            incoming.close()

    def confirm(self, _head: FileHead) -> bool:
        return False

    def gone(self, _head: FileHead) -> None:
        pass
