"""Messages are frozen dataclasses that share their methods."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, field, fields, replace

import pytest

from cloudddp.agent.protocol.frozen import frozen


@frozen
class Point:
    x: int
    y: int = 2


@frozen
class Other:
    x: int
    y: int = 2


@frozen
class Timed:
    name: str
    at: float = field(default=0.0, compare=False)


def test_frozen_class_behaves_as_a_frozen_dataclass() -> None:
    point = Point(1)
    assert (point.x, point.y, repr(point)) == (1, 2, "Point(x=1, y=2)")
    assert point == Point(1, 2) == replace(Point(5), x=1)
    assert point != Point(1, 3)
    assert point != Other(1)
    assert Timed("a", 1.0) == Timed("a", 2.0) != Timed("b", 1.0)
    assert len({point, Point(1, 2), Point(1, 3)}) == 2
    assert [field.name for field in fields(Point)] == ["x", "y"]
    with pytest.raises(FrozenInstanceError):
        point.x = 3  # type: ignore[misc]
    with pytest.raises(FrozenInstanceError):
        point.z = 3  # type: ignore[attr-defined]
    with pytest.raises(FrozenInstanceError):
        del point.x
    with pytest.raises(TypeError):
        Point()  # type: ignore[call-arg]
