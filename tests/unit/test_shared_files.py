"""Which files are copied between the nodes before ranks start."""

from __future__ import annotations

import pytest

from cloudddp.agent.protocol.snapshots import Copy, Offer, Snapshot, copies, matches
from cloudddp.config.spec.job import JobSpec
from cloudddp.job.snapshots import looking_for, on_some_nodes

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
    found = looking_for(job, ("train.py",))
    assert found is not None
    assert {name: matches(name, found.patterns) for name in shared} == shared
    assert found.every is every
    assert looking_for(JobSpec(), ("train.py",)) is None


@pytest.mark.parametrize(
    ("outputs", "named"),
    [
        ({0: ()}, ""),
        ({0: ("runs/",), 1: ("runs/",)}, ""),
        ({0: ("runs/", "snapshot.pt"), 1: ("runs/",)}, "snapshot.pt: only on node 0)"),
        (
            {0: ("a", "b"), 1: ("c",), 2: ("a",)},
            "a: only on node 0, 2; b: only on node 0; c: only on node 1)",
        ),
    ],
)
def test_files_that_only_some_nodes_have_are_named(outputs: dict[int, tuple[str, ...]], named: str) -> None:
    found = str(on_some_nodes(outputs))
    assert named in found
    assert bool(found) is bool(named)
