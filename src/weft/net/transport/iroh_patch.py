"""The copy that iroh 1.2.0 makes of every byte it sends, made fast.

Its Python binding (uniffi 0.31) lowers `bytes` in a loop over single bytes that holds the interpreter's lock: 139
CPU-seconds per GB, 4 MB/s. `mend` replaces that one function by a memmove. It does nothing where the loop is gone
(uniffi 0.32 has mended it) or the binding looks different, and it undoes itself should its self-test fail: then
iroh is slow, not wrong.
"""

import ctypes
from typing import Any

_TEST_NBYTES = 1 << 20


def mend(binding: Any) -> bool:
    """Replace the loop in `binding` (the module `iroh.iroh_ffi`); return whether sending is fast now."""
    builder: Any = getattr(binding, "_UniffiRustBufferBuilder", None)
    original = getattr(builder, "write", None)
    if original is None or not hasattr(builder, "_reserve"):
        return False
    if not _is_loop(original):
        return True
    builder.write = _write
    if _is_right(builder):
        return True
    builder.write = original
    return False


def _is_loop(function: Any) -> bool:
    return "enumerate" in getattr(getattr(function, "__code__", None), "co_names", ())


def _write(self: Any, value: bytes | bytearray | memoryview) -> None:
    """Append `value` to the buffer that goes to Rust."""
    view = memoryview(value).cast("B")
    if not len(view):
        return
    with self._reserve(len(view)):
        target = ctypes.addressof(self.rbuf.data.contents) + self.rbuf.len
        if isinstance(value, bytes):
            ctypes.memmove(target, value, len(view))
        elif view.readonly:  # ctypes cannot point into these
            ctypes.memmove(target, view.tobytes(), len(view))
        else:
            ctypes.memmove(target, (ctypes.c_char * len(view)).from_buffer(view), len(view))


def _is_right(builder_type: Any) -> bool:
    """Return whether what goes into the buffer comes out of it, for each kind of bytes."""
    sample = bytes(range(256)) * (_TEST_NBYTES // 256)
    kinds = (b"\x01", sample, bytearray(sample), memoryview(sample), memoryview(bytearray(sample))[3:-3], b"")
    builder = builder_type()
    for kind in kinds:
        builder.write(kind)
    buffer = builder.finalize()
    try:
        return bool(ctypes.string_at(buffer.data, buffer.len) == b"".join(kinds))
    finally:
        buffer.free()
