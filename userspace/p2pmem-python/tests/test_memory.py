# SPDX-License-Identifier: MIT OR Apache-2.0
"""Copies between buffers and Python objects, and files."""

from __future__ import annotations

import array
import errno
import os
import random
import struct
from pathlib import Path
from typing import Any

import numpy as np
import p2pmem
import pytest


def test_bytes_arrive(buffer: p2pmem.Buffer) -> None:
    assert buffer.write(b"hello", 3) == 5
    assert buffer.read(5, 3) == b"hello"
    assert buffer.read(8) == b"\0\0\0hello"
    assert len(buffer.read()) == len(buffer) and len(buffer.read(offset=100)) == len(buffer) - 100
    out = bytearray(4)
    assert buffer.readinto(out, offset=4) == 4 and out == b"ello"
    buffer.fill(0x11, 4, 2)
    buffer.flush()
    assert buffer.read(7, 2) == b"\0h\x11\x11lo\0"
    buffer.fill()
    assert buffer.read() == bytes(len(buffer))
    assert buffer.write(b"", len(buffer)) == 0 and buffer.readinto(bytearray(), len(buffer)) == 0
    assert buffer.read(0, len(buffer)) == b""


@pytest.mark.parametrize(
    "dtype", ["u1", "i2", "f4", "f8", "?", "f2", "c8", ">i4", "S3", [("a", "i4"), ("b", ">f8")]], ids=str
)
def test_numpy_arrays_of_any_type(buffer: p2pmem.Buffer, dtype: Any) -> None:
    kind = np.dtype(dtype)
    data = np.frombuffer(bytes(i % 2 for i in range(24 * kind.itemsize)), kind).reshape(2, 3, 4)
    assert buffer.write(data, 5) == data.nbytes
    out = np.zeros_like(data)
    assert buffer.readinto(out, 5) == data.nbytes
    assert out.tobytes() == data.tobytes() == buffer.read(data.nbytes, 5)


def test_other_objects_with_the_buffer_protocol(buffer: p2pmem.Buffer) -> None:
    objects: list[Any] = [array.array("d", [1.5, 2.5]), memoryview(b"abcdef")[1:4], np.float64(0.5), np.array(7)]
    for data in objects:
        assert buffer.write(data, 1) == memoryview(data).nbytes
        assert buffer.read(memoryview(data).nbytes, 1) == memoryview(data).tobytes()
    out = array.array("d", [0.0])
    buffer.write(struct.pack("d", 2.25))
    buffer.readinto(out)
    assert out[0] == 2.25
    assert buffer.write(np.zeros((0, 4))) == 0


def test_arrays_that_are_not_contiguous(buffer: p2pmem.Buffer) -> None:
    matrix = np.arange(16, dtype="u4").reshape(4, 4)
    for part in (matrix[:, 1], matrix.T[1:], matrix[::2]):
        with pytest.raises(ValueError, match="ascontiguousarray"):
            buffer.write(part)
        with pytest.raises(ValueError, match="ascontiguousarray"):
            buffer.readinto(part)
    assert buffer.write(matrix[1:3]) == 32
    matrix.flags.writeable = False
    with pytest.raises(TypeError, match="read-only"):
        buffer.readinto(matrix)


def test_copies_larger_than_a_part(device: p2pmem.Device) -> None:
    size = (3 << 20) + 12345
    data = random.Random(1).randbytes(size)
    with device.alloc(size) as buffer:
        assert buffer.write(bytearray(data)) == size
        out = np.zeros(size, "u1")
        assert buffer.readinto(out) == size
        assert out.tobytes() == data and buffer.read(size) == data


def test_copies_at_random_places(buffer: p2pmem.Buffer) -> None:
    choose, model = random.Random(2), bytearray(len(buffer))
    for _ in range(300):
        size = choose.randrange(0, 200)
        offset = choose.randrange(0, len(buffer) - size)
        if choose.random() < 0.5:
            data = choose.randbytes(size)
            buffer.write(data, offset)
            model[offset : offset + size] = data
        else:
            byte = choose.randrange(256)
            buffer.fill(byte, offset, size)
            model[offset : offset + size] = bytes([byte]) * size
        assert buffer.read(size, offset) == model[offset : offset + size]
    assert buffer.read() == model


def test_mappings_are_the_same_memory(buffer: p2pmem.Buffer) -> None:
    with buffer.map() as first, buffer.map() as second:
        assert first.address != second.address and len(first) == first.size == len(buffer)
        first.write(b"first")
        assert second.read(5) == buffer.read(5) == b"first"
        assert buffer.memory is buffer.memory and buffer.address == buffer.memory.address
        assert f"{first.address:#x}" in repr(first)
    assert repr(first) == "<p2pmem.Mapping, closed>"


def test_files_are_read_and_written(buffer: p2pmem.Buffer, direct: Path) -> None:
    content = direct.read_bytes()
    assert buffer.read_from(direct) == len(content)
    assert buffer.read(len(content)) == content
    buffer.fill()
    file = os.open(direct, os.O_RDWR | os.O_DIRECT)
    assert buffer.read_from(file, 4096, offset=8192, size=4096) == 4096
    assert buffer.read(4096, 8192) == content[4096:8192]
    assert buffer.write_to(file, 0, offset=8192, size=4096) == 4096
    os.close(file)
    with open(direct, "rb", buffering=0) as plain:
        assert plain.read(4096) == content[4096:8192]
    buffer.fill(7)
    assert buffer.write_to(str(direct), 8192, size=4096) == 4096
    assert direct.read_bytes()[8192:12288] == b"\7" * 4096


def test_files_that_cannot_be_used(buffer: p2pmem.Buffer, direct: Path) -> None:
    with open(direct, "rb") as plain, pytest.raises(p2pmem.InvalidRequestError, match="O_DIRECT") as caught:
        buffer.read_from(plain)
    assert caught.value.remedy == "open the file with os.open(path, os.O_RDWR | os.O_DIRECT), or pass its path"
    with pytest.raises(p2pmem.NotFoundError) as missing:
        buffer.write_to(direct.parent / "missing")
    assert missing.value.errno == errno.ENOENT and not (direct.parent / "missing").exists()
    file = os.open(direct, os.O_RDONLY | os.O_DIRECT)
    with pytest.raises(p2pmem.DirectIOError) as refused:
        buffer.write_to(file, size=4096)
    assert refused.value.errno == errno.EBADF
    with pytest.raises(ValueError, match="exceed the mapping"):
        buffer.read_from(file, offset=len(buffer) + 1)
    os.close(file)
    with pytest.raises(p2pmem.Error, match="is not an open file descriptor"):
        buffer.read_from(file)
