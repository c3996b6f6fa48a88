"""Which new files a pull takes where there are more than its limit."""

from __future__ import annotations

import os

import pytest

from agent.files.selection import NewFile, choose
from agent.files.tree import Found

MIB = 1 << 20


@pytest.mark.parametrize(
    ("files", "left"),
    [
        # path: MiB; later ones are newer
        ({"a.pt": 2, "b.pt": 2, "c.pt": 2}, {"a.pt"}),
        ({"a.pt": 2, "b.npy": 2, "c.npy": 2}, {"b.npy"}),
        ({"a.pt": 6, "b.pt": 2, "log": 0}, {"a.pt"}),
        ({"dcp/1/.metadata": 0, "dcp/1/__0_0": 3, "dcp/2/.metadata": 0, "dcp/2/__0_0": 3}, {"dcp/1"}),
        ({"hf/checkpoint-5/a": 2, "hf/checkpoint-5/b/c": 2, "hf/checkpoint-10/a": 2}, {"hf/checkpoint-5"}),
        ({"data/set": 3, "runs/a.npy": 2}, {"data/set"}),
        ({"data/set": 3, "a.pt": 1}, set()),
        ({"pulled.pt": 9, "a.pt": 4}, set()),
    ],
)
def test_newest_checkpoints_come_first_and_data_folders_last(files: dict[str, int], left: set[str]) -> None:
    new = [
        NewFile(
            0, "", Found(name, name, os.stat_result([0] * 6 + [size * MIB, 0, at, 0])), name == "pulled.pt"
        )
        for at, (name, size) in enumerate(files.items(), 1)
    ]
    taken, rest = choose(new, 4 * MIB)
    assert set(rest) == left
    found = [*taken, *(one for below in rest.values() for one in below)]
    assert sorted(one.found.name for one in found) == sorted(files)
