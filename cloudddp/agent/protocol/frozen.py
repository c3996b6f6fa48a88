"""Frozen dataclasses that share their methods. `dataclass(frozen=True)` generates and compiles six functions
for each class: with about 130 classes, that was a third of the time in which a process of the agent starts.

`field(repr=..., hash=...)` have no effect. Methods of a class with the names of the shared ones are replaced.
"""

from __future__ import annotations

from dataclasses import FrozenInstanceError, dataclass
from typing import TYPE_CHECKING, Any, Callable, TypeVar

from cloudddp.agent.protocol.codec import limits

T = TypeVar("T")

if TYPE_CHECKING:
    from typing import dataclass_transform  # novermin: Python 3.11, and nodes may have 3.9
else:

    def dataclass_transform(**_: Any) -> Callable[[T], T]:
        return lambda decorator: decorator


def _set_once(self: Any, name: str, value: Any) -> None:
    if name in self.__dict__ or name not in self.__dataclass_fields__:
        raise FrozenInstanceError(f"cannot assign to field {name!r}")
    self.__dict__[name] = value


def _delete(_: Any, name: str) -> None:
    raise FrozenInstanceError(f"cannot delete field {name!r}")


def _compared(self: Any) -> tuple[Any, ...]:
    return tuple([getattr(self, name) for name, field in self.__dataclass_fields__.items() if field.compare])


def _equals(self: Any, other: object) -> bool:
    return _compared(self) == _compared(other) if other.__class__ is self.__class__ else NotImplemented


def _hash(self: Any) -> int:
    return hash(_compared(self))


def _repr(self: Any) -> str:
    fields = ", ".join(f"{name}={getattr(self, name)!r}" for name in self.__dataclass_fields__)
    return f"{type(self).__qualname__}({fields})"


_METHODS: dict[str, Any] = {
    "__setattr__": _set_once,
    "__delattr__": _delete,
    "__eq__": _equals,
    "__hash__": _hash,
    "__repr__": _repr,
}


@dataclass_transform(frozen_default=True)
def frozen(kind: type[T]) -> type[T]:
    """Return the class as a dataclass whose fields are assigned once, and are within the limits of their
    types."""
    own = kind.__dict__.get("__post_init__")

    def check(self: Any) -> None:
        for name, verify in limits(self.__class__):
            verify(name, getattr(self, name))
        if own:
            own(self)

    kind.__post_init__ = check  # type: ignore[attr-defined]
    for name, method in _METHODS.items():
        setattr(kind, name, method)
    return dataclass(repr=False, eq=False)(kind)
