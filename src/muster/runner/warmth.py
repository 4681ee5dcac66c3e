"""What a runner does ahead of its rank, so that forming a group costs nothing that could have been done before."""

from __future__ import annotations

import ctypes
import importlib
import sys
import time
from typing import TYPE_CHECKING

from muster.facts import Device

if TYPE_CHECKING:
    import mlx.core as mx

#: Imported by every runner, and by one that may be given a model.
_LIGHT_MODULES = ("mlx.core", "muster.group.verify", "muster.group.formation", "muster.runner.group_rank")
_FULL_MODULES = (*_LIGHT_MODULES, "mlx_lm.generate", "muster.model.load", "muster.runner.model_rank")

#: malloc.h of glibc: what `mallopt` sets, and the values that it starts with.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_DEFAULT_THRESHOLD_BYTES = 128 * 1024
#: MLX's ring zero-fills two buffers of 16 MiB on each rank when a group is formed (mlx/distributed/ring/ring.cpp).
_RING_BUFFERS = 2
_RING_BUFFER_BYTES = 17 * 2**20

#: What is copied to see how fast memory is: bytes, and how often. The first also wakes the device up.
_LARGEST_COPY_BYTES = 64 * 2**20
_COPIES = ((8 * 2**20, 2), (_LARGEST_COPY_BYTES, 3))
#: As many copies of the largest size as it would take, its making included, and how long they may take in all.
_FURTHER_COPIES = 5
_COPY_SECONDS = 0.06


def warm_up(*, full: bool) -> None:
    """Import, and run the first operation; a `full` runner, which has the time, also touches the ring's memory."""
    for module in _FULL_MODULES if full else _LIGHT_MODULES:
        importlib.import_module(module)
    import mlx.core as mx

    from muster.group.verify import own_identity

    mx.eval(mx.zeros((1,), mx.uint8, stream=mx.cpu))
    own_identity("", 0, 0, 1, "")  # it remembers the versions that it looked up
    if full:
        _touch_ring_memory()


def _touch_ring_memory() -> None:
    """Have the kernel give the pages of the ring's buffers now.

    Eight thousand page faults take some 20 ms of a core while the neighbours spin, half of what forming takes. The
    blocks are freed again, and with these thresholds glibc keeps them for the next who asks for as much.
    """
    libc = _glibc()
    if libc is None:
        return
    libc.mallopt(_M_MMAP_THRESHOLD, _RING_BUFFER_BYTES * 2)
    libc.mallopt(_M_TRIM_THRESHOLD, _RING_BUFFER_BYTES * _RING_BUFFERS * 2)
    blocks = [libc.malloc(_RING_BUFFER_BYTES) for _ in range(_RING_BUFFERS)]
    for block in filter(None, blocks):
        ctypes.memset(block, 1, _RING_BUFFER_BYTES)
    for block in blocks:
        libc.free(block)


def device() -> Device:
    """What MLX computes on unless it is told otherwise."""
    import mlx.core as mx

    return "gpu" if mx.default_device().type == mx.gpu else "cpu"


def memory_gbps() -> float | None:
    """GB/s, read and written, at which MLX's default device copies; `None` where that fails. Takes some 60 ms at most.

    Of 64 MiB, which no cache holds, unless a copy of 8 MiB says that the device is too slow for that.
    """
    import mlx.core as mx

    best = 0.0
    begin = time.perf_counter()
    try:
        for size, repeats in _COPIES:
            source = mx.zeros((size,), mx.uint8)
            mx.eval(source)
            fastest = min(_copy_seconds(source) for _ in range(repeats))
            best = 2 * size / fastest / 1e9
            spent = time.perf_counter() - begin
            if spent + _FURTHER_COPIES * fastest * _LARGEST_COPY_BYTES / size > _COPY_SECONDS:
                break
    except RuntimeError:  # no memory left on the device: it is a figure for placement, and not worth a start
        return None
    return round(best, 2)


def _copy_seconds(source: mx.array) -> float:
    import mlx.core as mx

    begin = time.perf_counter()
    mx.eval(mx.negative(source))
    return time.perf_counter() - begin


def formed() -> None:
    """The ring has its memory: from now on malloc gives back what is freed, as it does by default."""
    libc = _glibc()
    if libc is not None:
        libc.mallopt(_M_MMAP_THRESHOLD, _DEFAULT_THRESHOLD_BYTES)
        libc.mallopt(_M_TRIM_THRESHOLD, _DEFAULT_THRESHOLD_BYTES)


def _glibc() -> ctypes.CDLL | None:
    """The C library where it is glibc, which alone has `mallopt`."""
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallopt"):
        return None
    libc.malloc.restype = ctypes.c_void_p
    libc.malloc.argtypes = [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    return libc
