"""Files as an attacker, or a crash, would leave them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch


class MakesFolder:
    """Creates a folder when it is unpickled: an example of code in a pickle."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.folder),)


def truncate(path: Path) -> None:
    """Cut a file in half."""
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


def flip_a_bit(path: Path) -> None:
    """In the middle, which is the content of a tensor: torch alone reads it as another number."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def change(path: Path, **values: Any) -> None:
    """Replace values in a file of torch.save. `...` removes one."""
    state = {**torch.load(path, weights_only=True), **values}
    torch.save({name: value for name, value in state.items() if value is not ...}, path)
