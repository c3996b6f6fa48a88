"""[[shared]]: what each node of a job exports or mounts. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from cloudddp.agent.protocol.start import SharedFolder
from cloudddp.config.spec import NODE_0, SharedSpec

Sources = Mapping[str, str]
"""Id of a file system -> its source, as mount(8) takes it (aws/file_systems.py)."""


def of_nodes(
    shared: tuple[SharedSpec, ...], addresses: Mapping[int, str], sources: Sources
) -> dict[int, tuple[SharedFolder, ...]]:
    """Return the shared folders of each node. The first one owns what is in them, and exports those of
    `source = "node0"` to the `addresses` of the others."""
    first = min(addresses)
    others = tuple(address for node, address in sorted(addresses.items()) if node != first)

    def of_node(one: SharedSpec, node: int) -> SharedFolder:
        owned = node == first
        if one.source != NODE_0:
            return SharedFolder(one.place, sources[one.source], owned=owned)
        if owned:
            return SharedFolder(one.place, below=one.place, clients=others, owned=True)
        return SharedFolder(one.place, f"{addresses[first]}:/", below=one.place)

    return {node: tuple(of_node(one, node) for one in shared) for node in addresses}
