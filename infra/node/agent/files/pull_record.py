"""What has been pulled from this node and what a pull has left out, for every laptop with the key."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from agent.node import store
from cloudddp.agent.protocol.codec import MAX_REQUEST


@dataclass(frozen=True)
class Pulled:
    """`times`: path -> when it was pulled with all below it, by the file system's clock (ns). `left`: paths
    below these that were not copied -> why."""

    times: dict[str, int] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)

    def is_pulled(self, name: str, written: int) -> bool:
        """Return whether a file that was `written` at a time (ns) has been copied as it is."""
        parts = (name, *map(str, Path(name).parents))  # the last is "."
        return not any(part in self.left for part in parts) and any(
            written < self.times.get(part, 0) for part in parts
        )


def read(project: Path) -> Pulled:
    return store.read(_file(project), Pulled, MAX_REQUEST) or Pulled()


def write(project: Path, record: Pulled) -> None:
    store.write(_file(project), record)


def _file(project: Path) -> Path:
    return store.ROOT / f"pulled-{project.name}.json"
