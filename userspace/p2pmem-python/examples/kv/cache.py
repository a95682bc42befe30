# SPDX-License-Identifier: MIT OR Apache-2.0
"""The cache of keys and values in pages, and the drive that keeps the blocks that do not fit.

A block has the keys and values of a fixed number of tokens. A pool has a page for each of its blocks in each layer: first all pages of
layer 0, then those of layer 1, and so on. A block table has the blocks of one sequence in the order of its tokens.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import mmap
import os
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Union

import numpy as np
import p2pmem

from .model import Array, Shape

#: The byte that fills a block which nobody may write.
FREE = 0xEE
#: Bytes at which pages of the cache begin, so that drives can access them without a copy.
ALIGN = mmap.PAGESIZE


class HostMemory:
    """Anonymous memory of the host, with the methods of a buffer."""

    def __init__(self, size: int) -> None:
        self._bytes = mmap.mmap(-1, size)
        self.size = size
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._bytes))

    def read(self, size: int, offset: int) -> bytes:
        return self._bytes[offset : offset + size]

    def readinto(self, out: Array, offset: int) -> int:
        out.reshape(-1).view(np.uint8)[:] = np.frombuffer(self._bytes, np.uint8, out.nbytes, offset)
        return out.nbytes

    def write(self, data: Any, offset: int) -> int:
        view = memoryview(data).cast("B")
        self._bytes[offset : offset + len(view)] = view
        return len(view)

    def flush(self) -> None:
        """Does nothing: devices see host memory as the processor does."""


#: Where a pool can be.
Memory = Union[p2pmem.Buffer, HostMemory]


def page_offset(shape: Shape, blocks: int, layer: int, block: int) -> int:
    """Where a page begins in a pool of so many blocks."""
    return (layer * blocks + block) * shape.page_bytes


class Pool:
    """Blocks in one memory.

    NICs access the window of a pool: its memory, or with `staged`, host memory in which each page has the same place. With `guarded`, a
    block that nobody has is filled with a pattern in the window, and `take` raises RuntimeError if it has changed.
    """

    def __init__(self, shape: Shape, memory: Memory, blocks: int, *, staged: bool = False, guarded: bool = False) -> None:
        self.shape, self.memory, self.blocks = shape, memory, blocks
        self.window: Memory = HostMemory(self.bytes(shape, blocks)) if staged else memory
        self._guard = bytes([FREE]) * shape.page_bytes if guarded else None
        self._free: deque[int] = deque()
        self._taken = set(range(blocks))
        self.give_back(range(blocks))

    @staticmethod
    def bytes(shape: Shape, blocks: int) -> int:
        """The size of the memory of a pool."""
        return shape.layers * blocks * shape.page_bytes

    @property
    def free(self) -> int:
        """The number of blocks that are not taken."""
        return len(self._free)

    def offset(self, layer: int, block: int) -> int:
        """Where a page begins in the memory."""
        return page_offset(self.shape, self.blocks, layer, block)

    def pages(self, blocks: Iterable[int]) -> Iterator[int]:
        """The offsets of the pages of blocks: of each block, a page for each layer."""
        return (self.offset(layer, block) for block in blocks for layer in range(self.shape.layers))

    def take(self, count: int) -> list[int]:
        """Takes the blocks that were given back first, so that their numbers differ from sequence to sequence."""
        if count > len(self._free):
            raise ValueError(f"{count} blocks, but only {len(self._free)} are free")
        taken = [self._free.popleft() for _ in range(count)]
        if self._guard is not None:
            for block in taken:
                if any(self.window.read(self.shape.page_bytes, page) != self._guard for page in self.pages([block])):
                    raise RuntimeError(f"block {block} was written while nobody had it")
        self._taken.update(taken)
        return taken

    def give_back(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            if block not in self._taken:
                raise ValueError(f"block {block} is not taken")
            self._taken.remove(block)
            if self._guard is not None:
                for page in self.pages([block]):
                    self.window.write(self._guard, page)
            self._free.append(block)

    def to_window(self, blocks: Sequence[int]) -> int:
        """Makes blocks ready for the NIC. Returns the number of bytes that the processor copied."""
        self.memory.flush()
        return self._copy(self.memory, self.window, blocks)

    def from_window(self, blocks: Sequence[int]) -> int:
        """Takes over what the NIC has written to blocks. Returns the number of bytes that the processor copied."""
        return self._copy(self.window, self.memory, blocks)

    def _copy(self, source: Memory, target: Memory, blocks: Sequence[int]) -> int:
        if source is target:
            return 0
        for page in self.pages(blocks):
            target.write(source.read(self.shape.page_bytes, page), page)
        return len(blocks) * self.shape.layers * self.shape.page_bytes

    def digest(self, blocks: Sequence[int]) -> str:
        """The hash of the content of blocks. The processor reads them."""
        content = hashlib.sha256()
        for page in self.pages(blocks):
            content.update(self.memory.read(self.shape.page_bytes, page))
        return content.hexdigest()


class SequenceCache:
    """The cache of one sequence: see :class:`.model.Cache`. The processor takes the place of the accelerator's kernels here."""

    def __init__(self, pool: Pool, table: Sequence[int]) -> None:
        self._pool, self._table = pool, table

    def append(self, layer: int, position: int, keys: Array, values: Array) -> None:
        shape = self._pool.shape
        row = shape.width * keys.itemsize
        done = 0
        while done < len(keys):
            index, place = divmod(position + done, shape.block)
            count = min(shape.block - place, len(keys) - done)
            page = self._pool.offset(layer, self._table[index])
            for part, rows in ((0, keys), (shape.block, values)):
                self._pool.memory.write(
                    np.ascontiguousarray(rows[done : done + count]), page + (part + place) * row
                )
            done += count

    def load(self, layer: int, tokens: int) -> tuple[Array, Array]:
        shape = self._pool.shape
        count = shape.blocks(tokens)
        pages = np.empty((count, 2, shape.block, shape.width), np.float32)
        for page, block in zip(pages, self._table):
            self._pool.memory.readinto(page, self._pool.offset(layer, block))
        keys, values = pages.swapaxes(0, 1).reshape(2, -1, shape.width)[:, :tokens]
        return keys, values


class Drive:
    """A file or a block device for blocks, with direct I/O: between the drive and an accelerator, no byte goes through host memory."""

    def __init__(self, path: str, pool: Pool) -> None:
        if pool.shape.page_bytes % ALIGN:
            raise ValueError(f"a page has {pool.shape.page_bytes} bytes: a drive needs a multiple of {ALIGN}")
        if not isinstance(pool.memory, p2pmem.Buffer):
            raise TypeError("a drive needs a pool in memory of p2pmem")
        self._pool, self._memory = pool, pool.memory
        self._file = os.open(path, os.O_RDWR | os.O_DIRECT | os.O_CREAT, 0o600)
        self._end = 0
        #: Bytes that went to the drive, and that came back.
        self.stored = self.loaded = 0

    def store(self, blocks: Sequence[int]) -> int:
        """Writes blocks. Returns their place, for :meth:`load`."""
        place = self._end
        size = self._pool.shape.page_bytes
        for page in self._pool.pages(blocks):
            self._memory.write_to(self._file, self._end, page, size)
            self._end += size
        self.stored += self._end - place
        return place

    def load(self, place: int, blocks: Sequence[int]) -> None:
        """Reads blocks into others: the place does not depend on their numbers."""
        size = self._pool.shape.page_bytes
        for page in self._pool.pages(blocks):
            got = self._memory.read_from(self._file, place, page, size)
            if got != size:
                raise RuntimeError(f"the drive has {got} bytes of a page of {size}: has something else written to it?")
            place += size
            self.loaded += size

    def close(self) -> None:
        os.close(self._file)

    def __enter__(self) -> Drive:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self.close()
