"""Zstandard where this computer has it without any installation: Python 3.14's module, or the system's libzstd.

A node decodes with it. dpkg, rpm and systemd depend on libzstd, so that nodes of an older Python have it as well, where the
`zstd` program may be missing. Called in this process it takes no pipe and no second copy, and the size of the result is
bounded by its buffer, whatever the compressed data claims.
"""

from __future__ import annotations

import functools
from typing import Any, Callable, Optional

from cloudddp.agent.protocol.codec import ProtocolError

_LIBRARY = "libzstd.so.1"


def is_available() -> bool:
    return _decompressor() is not None


def decompress(data: bytes, size: int) -> bytes:
    """Return the contents, which have to be of this size. Raises ProtocolError."""
    function = _decompressor()
    if function is None:
        raise ProtocolError("zstd was sent to a computer that has none")
    found = function(data, size)
    if found is None or len(found) != size:
        raise ProtocolError("not the zstd data that it says")
    return found


@functools.lru_cache(maxsize=1)
def _decompressor() -> Optional[Callable[[bytes, int], Optional[bytes]]]:
    """Return a function of data and size, which returns None for invalid data and never more than size + 1 bytes."""
    return _of_python() or _of_library()


def _of_python() -> Optional[Callable[[bytes, int], Optional[bytes]]]:
    try:
        # Python 3.14; importlib: an import statement of what the oldest Python lacks would need an exception in each check.
        from importlib import import_module

        module: Any = import_module("compression.zstd")
    except ImportError:
        return None

    def decompress(data: bytes, size: int) -> Optional[bytes]:
        decoder = module.ZstdDecompressor()
        try:
            found: bytes = decoder.decompress(data, max_length=size + 1)
        except module.ZstdError:
            return None
        return found if decoder.eof and not decoder.unused_data else None

    return decompress


def _of_library() -> Optional[Callable[[bytes, int], Optional[bytes]]]:
    try:
        import ctypes  # a Python may have been built without it

        library = ctypes.CDLL(_LIBRARY)
        function, is_error = library.ZSTD_decompress, library.ZSTD_isError
    except (ImportError, OSError, AttributeError):
        return None
    function.restype = ctypes.c_size_t
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p, ctypes.c_size_t)
    is_error.restype, is_error.argtypes = ctypes.c_uint, (ctypes.c_size_t,)

    def decompress(data: bytes, size: int) -> Optional[bytes]:
        buffer = ctypes.create_string_buffer(size or 1)
        written = function(buffer, size, data, len(data))
        return None if is_error(written) else memoryview(buffer)[:written].tobytes()

    return decompress
