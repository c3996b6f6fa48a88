"""Node ranks: EC2's launch index or the rank tag, unchanged when other nodes end; foreign instances get
none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.instances import inventory_instance

from cloudddp.aws.inventory import Instance
from cloudddp.cluster.model import Cluster
from cloudddp.errors import CloudDDPError
from cloudddp.tags import Tags

START = datetime(2026, 11, 20, 12, tzinfo=UTC)
ID = "c-0123456789"


def instance(
    name: str,
    index: int = 0,
    *,
    reservation: str = "r-up",
    token: str = f"{ID}-abc",
    state: str = "running",
    rank: int | None = None,
    nodes: int | None = 3,
    minutes: int = 0,
) -> Instance:
    return inventory_instance(
        name,
        Tags(cluster="demo", cluster_id=ID, owner="me", node_rank=rank, nodes=nodes, price=1.0),
        state=state,
        reservation=reservation,
        launch_index=index,
        client_token=token,
        launched=START + timedelta(minutes=minutes),
    )


def foreign(name: str, index: int = 0, **changes: object) -> Instance:
    """An instance that was launched later, with the tags of the cluster."""
    own = instance(name, index, reservation="r-foreign", token="console", minutes=9)
    return replace(own, **changes)  # type: ignore[arg-type]


BEYOND = "its rank is 3, and the cluster has 3 nodes"
NODES = (instance("i-a", 0), instance("i-b", 1), instance("i-c", 2))


def cluster(members: Sequence[Instance]) -> Cluster:
    return Cluster.of(members, name="demo", cluster_id=ID, region="us-east-1")


def ids(found: Cluster) -> dict[int, str]:
    return {rank: node.id for rank, node in found.nodes.items()}


def test_rank_tag_wins_over_the_launch_index() -> None:
    """A replacement is launched alone, so that its index is 0."""
    replacement = instance("i-new", 0, reservation="r-new", token=f"{ID}-new", rank=1, minutes=30)
    gone = replace(NODES[1], state="terminated")
    assert ids(cluster([NODES[0], gone, NODES[2], replacement])) == {0: "i-a", 1: "i-new", 2: "i-c"}
    assert ids(cluster([replacement, NODES[2]])) == {1: "i-new", 2: "i-c"}


@pytest.mark.parametrize(
    ("stranger", "reason"),
    [
        (foreign("i-x"), "it was launched separately"),
        (foreign("i-x", 2), "it was launched separately"),
        (foreign("i-x", launched=None), "it was launched separately"),
        (replace(foreign("i-x"), tags=replace(NODES[0].tags, node_rank=0)), "node 0 is i-a"),
        (replace(foreign("i-x"), tags=replace(NODES[0].tags, node_rank=3)), BEYOND),
        (instance("i-x", 1, minutes=1), "node 1 is i-b"),
        (instance("i-x", reservation="r-foreign", token="", rank=3, nodes=9999, minutes=9), BEYOND),
    ],
)
@pytest.mark.parametrize("last", [True, False])
def test_foreign_instance_gets_no_rank_and_shifts_none(stranger: Instance, reason: str, last: bool) -> None:
    found = cluster([*NODES, stranger] if last else [stranger, *NODES])
    assert ids(found) == {0: "i-a", 1: "i-b", 2: "i-c"}
    assert [(one.instance.id, one.reason) for one in found.foreign] == [("i-x", reason)]
    assert (found.missing, len(found.live), found.hour) == (0, 4, 4.0)
    (warning,) = found.warnings
    assert warning.startswith("instance i-x has the tags of cluster 'demo' but is not one of its nodes: ")


def test_launch_is_identified_by_its_token_even_if_newer_and_smaller() -> None:
    """Three older instances were tagged by hand; two nodes have ended and are no longer listed."""
    older = [foreign(f"i-old{n}", n, launched=START - timedelta(days=1)) for n in range(3)]
    found = cluster([*older, NODES[1]])
    assert ids(found) == {1: "i-b"}
    assert [one.instance.id for one in found.foreign] == ["i-old0", "i-old1", "i-old2"]


def test_launch_without_such_a_token_is_the_oldest() -> None:
    nodes = [replace(node, client_token="") for node in NODES]
    assert ids(cluster([*nodes, foreign("i-x", client_token="")])) == {0: "i-a", 1: "i-b", 2: "i-c"}
    assert ids(cluster([nodes[0], foreign("i-x", client_token="")])) == {0: "i-a"}


def test_later_launch_with_a_token_of_the_cluster_is_foreign() -> None:
    """Anyone who may launch instances in the account can read the token, and use one with the same
    beginning."""
    later = [foreign(f"i-x{n}", n, client_token=f"{ID}-x") for n in range(3)]
    found = cluster([*later, *NODES[:2]])
    assert ids(found) == {0: "i-a", 1: "i-b"}
    assert [one.instance.id for one in found.foreign] == ["i-x0", "i-x1", "i-x2"]


def test_launch_is_identified_by_ended_nodes() -> None:
    """The only live instance is not one of the nodes, of which AWS still lists one."""
    found = cluster([replace(NODES[0], state="terminated"), foreign("i-x")])
    assert ids(found) == {}
    assert (found.missing, [one.instance.id for one in found.foreign]) == (3, ["i-x"])


def test_changed_rank_tag_affects_only_that_node_and_a_changed_count_none() -> None:
    retagged = replace(NODES[0], tags=replace(NODES[0].tags, node_rank=1))
    found = cluster([retagged, *NODES[1:]])
    assert ids(found) == {1: "i-b", 2: "i-c"}
    assert [one.instance.id for one in found.foreign] == ["i-a"]

    for count in (1, None, 9999):
        retagged = replace(NODES[0], tags=replace(NODES[0].tags, nodes=count))
        assert ids(cluster([retagged, *NODES[1:]])) == {0: "i-a", 1: "i-b", 2: "i-c"}


def test_instances_without_cluster_id_have_no_rank() -> None:
    found = Cluster.of(NODES, name="demo", cluster_id="", region="us-east-1")
    assert (found.nodes, len(found.live), found.missing, found.warnings) == ({}, 3, 0, [])


@settings(max_examples=40)
@given(st.sets(st.integers(0, 7)), st.randoms(use_true_random=False))
def test_ranks_never_shift(ended: set[int], random: object) -> None:
    members = [
        replace(instance(f"i-{n}", n, nodes=8), state="terminated" if n in ended else "running")
        for n in range(8)
    ]
    members.append(foreign("i-x", 3))
    random.shuffle(members)  # type: ignore[attr-defined]
    assert ids(cluster(members)) == {n: f"i-{n}" for n in range(8) if n not in ended}


def test_require_node() -> None:
    found = cluster(NODES[1:])
    assert found.require_node(1).id == "i-b"
    for rank, message in ((0, "node 0 has ended"), (3, "there is no node 3"), (-1, "there is no node -1")):
        with pytest.raises(CloudDDPError, match=message) as caught:
            found.require_node(rank)
        assert caught.value.hint == "live nodes: 1, 2"
