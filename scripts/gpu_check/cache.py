"""The page cache of files: drop, read in, and count cached pages."""

import ctypes
import mmap
import os

BLOCK_BYTES = 8 << 20


def files(folder):
    """The weight files of a checkpoint."""
    return sorted(folder.glob("*.safetensors"))


def drop(paths):
    """Writes back and drops the pages of files; dirty pages cannot be dropped."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def warm(paths):
    """Reads files from the start in large blocks, so that the kernel can use large pages."""
    block = bytearray(BLOCK_BYTES)
    for path in paths:
        with open(path, "rb", buffering=0) as file:
            while file.readinto(block):
                pass


def cached_share(paths):
    """The cached share of the files' pages; None if unknown."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]
    cached = pages = 0
    for path in paths:
        size = os.path.getsize(path)
        if size == 0:
            continue
        descriptor = os.open(path, os.O_RDONLY)
        try:
            address = libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, 0)
        finally:
            os.close(descriptor)
        if address in (None, ctypes.c_void_p(-1).value):
            return None
        count = -(-size // mmap.PAGESIZE)
        vector = ctypes.create_string_buffer(count)
        failed = libc.mincore(address, size, vector)
        libc.munmap(address, size)
        if failed:
            return None
        pages += count
        # Only the lowest bit has a meaning.
        cached += sum(value & 1 for value in vector.raw[:count])
    return cached / pages if pages else None


def prepare(paths, state):
    """Brings files into a state, `cold` or `warm`; returns the cached share, after checking it.

    Raises ValueError where the state was not reached: a figure measured then would carry the wrong name.
    """
    # A virtual machine may lose cached pages to its host at any moment: read them again.
    for _ in range(4):
        if state == "cold":
            drop(paths)
        else:
            warm(paths)
        share = cached_share(paths)
        if share is None or (share <= 0.01 if state == "cold" else share >= 0.999):
            return share
    raise ValueError(f"asked for a {state} cache, {share:.1%} of the files is cached")
