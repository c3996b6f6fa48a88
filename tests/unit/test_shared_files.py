"""Which files are copied between the nodes before ranks start."""

from __future__ import annotations

import pytest

from cloudddp.agent.protocol.snapshots import (
    Copy,
    Offer,
    Snapshot,
    copies,
    default_copies,
    differing,
    matches,
)
from cloudddp.config.spec import JobSpec
from cloudddp.job.start_ranks import looking_for

A1, A2, B1 = Snapshot("a", 1, 5), Snapshot("a", 2, 5), Snapshot("b", 1, 5)


@pytest.mark.parametrize(
    ("offered", "every", "newest_only"),
    [
        ([[], []], [], []),
        ([[A1], [A1]], [], []),
        ([[A1], []], [Copy(A1, 0, (1,))], [Copy(A1, 0, (1,))]),
        ([[A1], [A2]], [Copy(A2, 1, (0,))], [Copy(A2, 1, (0,))]),
        ([[A2], [B1]], [Copy(A2, 0, (1,)), Copy(B1, 1, (0,))], [Copy(A2, 0, (1,))]),
        ([[A1, B1], [A1], []], [Copy(A1, 0, (2,)), Copy(B1, 0, (1, 2))], [Copy(A1, 0, (2,))]),
    ],
)
def test_newest_version_goes_to_the_nodes_that_lack_it(
    offered: list[list[Snapshot]], every: list[Copy], newest_only: list[Copy]
) -> None:
    offers = {node: Offer(tuple(files)) for node, files in enumerate(offered)}
    assert copies(offers, every=True) == every
    assert copies(offers, every=False) == newest_only


def test_same_contents_are_not_copied_for_another_time() -> None:
    one, two = (Snapshot("a", time, 5, "f" * 64) for time in (1, 2))
    assert copies({0: Offer((one,)), 1: Offer((two,))}, every=False) == []


@pytest.mark.parametrize(
    ("job", "shared", "every"),
    [
        (
            JobSpec(share=("out",)),
            {"out/a": True, "out/b/c": True, "train.py": False, "x/out/a": False},
            True,
        ),
        (JobSpec(share=("out/**", "s.pt")), {"out/b/c": True, "s.pt": True, "t.pt": False}, True),
        (JobSpec(snapshots=("*.pt",)), {"s.pt": True, "out/s.pt": False}, False),
        (JobSpec(snapshots=("*.pt",), share=("out",)), {"s.pt": False, "out/s.pt": True}, True),
    ],
)
def test_settings_name_what_is_shared(job: JobSpec, shared: dict[str, bool], every: bool) -> None:
    found = looking_for(job, ("train.py",), nodes=2, wrote=False)
    assert found is not None
    assert {name: matches(name, found.patterns) for name in shared} == shared
    assert found.every is every
    assert looking_for(JobSpec(), ("train.py",), nodes=2, wrote=False) is None


@pytest.mark.parametrize(
    ("job", "nodes", "wrote", "restarts_only"),
    [
        (JobSpec(), 2, False, None),
        (JobSpec(), 1, True, False),
        (JobSpec(), 2, True, False),
        (JobSpec(retries=1), 2, False, True),
        (JobSpec(retries=1), 2, True, False),
        (JobSpec(share_mb=0, retries=1), 2, True, False),
        (JobSpec(share_mb=1e-9), 2, True, False),
    ],
)
def test_what_only_some_nodes_wrote_is_shared_by_default(
    job: JobSpec, nodes: int, wrote: bool, restarts_only: bool | None
) -> None:
    found = looking_for(job, (), nodes=nodes, wrote=wrote)
    assert (None if found is None else found.restarts_only) is restarts_only
    assert found is None or found.patterns == ()
    limit = max(1, int(job.share_mb * 2**20)) if nodes > 1 and job.share_mb else 0  # else nothing is copied
    assert found is None or found.limit == limit


FROM_0, FROM_1, FROM_9 = (Snapshot("a", 1, 5, origin=f"i-{node}") for node in (0, 1, 9))


@pytest.mark.parametrize(
    ("offered", "copied"),
    [
        ([[A1], []], [Copy(A1, 0, (1,))]),
        ([[A1], [A2]], []),  # each has its own
        ([[A1], [A2], []], [Copy(A2, 1, (2,))]),
        ([[A1], [FROM_0]], []),  # the copy is of this version
        ([[A2], [FROM_0]], [Copy(A2, 0, (1,))]),
        ([[], [FROM_0], []], []),  # node 0 has deleted it
        ([[], [FROM_9], []], [Copy(FROM_9, 1, (0, 2))]),  # its writer is gone
        ([[], [FROM_9], [FROM_9]], [Copy(FROM_9, 1, (0,))]),
        ([[A1, B1], [FROM_0], []], [Copy(A1, 0, (2,)), Copy(B1, 0, (1, 2))]),
        ([[A2], [FROM_9]], [Copy(A2, 0, (1,))]),  # the new writer's is newer
    ],
)
def test_default_copies_to_nodes_that_have_no_version_of_their_own(
    offered: list[list[Snapshot]], copied: list[Copy]
) -> None:
    offers = {node: Offer(tuple(files)) for node, files in enumerate(offered)}
    assert default_copies(offers, {node: f"i-{node}" for node in offers}) == copied


def test_versions_that_nodes_wrote_themselves_differ() -> None:
    offers = {0: Offer((A1, B1)), 1: Offer((A2, B1)), 2: Offer((FROM_1,))}
    assert differing(offers) == ["a"]
