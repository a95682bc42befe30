# SPDX-License-Identifier: MIT OR Apache-2.0
"""Buffers as dma-bufs, and buffers of other open files."""

from __future__ import annotations

import errno
import os
import socket

import p2pmem
import pytest
from p2pmem.fake import Fake


def is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def test_a_buffer_has_one_descriptor(buffer: p2pmem.Buffer) -> None:
    fd = buffer.fileno()
    assert buffer.fileno() == fd and is_open(fd) and not os.get_inheritable(fd)
    assert os.fstat(fd).st_size == len(buffer)
    buffer.close()
    assert not is_open(fd)


def test_exports_of_parts(buffer: p2pmem.Buffer) -> None:
    with buffer.export([(8192, 16384), (0, 4096)]) as dmabuf:
        assert (dmabuf.size, dmabuf.ranges, dmabuf.pinned) == (12288, [(8192, 16384), (0, 4096)], False)
        assert os.fstat(dmabuf.fileno()).st_size == 12288
        assert str(dmabuf.fileno()) in repr(dmabuf)
    assert dmabuf.closed and repr(dmabuf) == "<p2pmem.DmaBuf, closed>"
    with pytest.raises(ValueError, match="the dma-buf is closed"):
        dmabuf.fileno()
    with pytest.raises(ValueError, match="at most 64"):
        buffer.export([(0, 4096)] * 65)


def test_pinned_exports_need_the_administrator(fake: Fake, device: p2pmem.Device) -> None:
    with device.alloc(4096, provider=1) as buffer:
        with pytest.raises(p2pmem.PermissionDeniedError) as caught:
            buffer.export(pinned=True)
        assert caught.value.errno == errno.EPERM
        assert caught.value.remedy is not None and "pinned_exports" in caught.value.remedy
        fake.allow_pinned(1)
        with buffer.export(pinned=True) as dmabuf:
            assert dmabuf.pinned


def test_memory_that_cannot_be_exported(device: p2pmem.Device) -> None:
    with device.alloc(4096, provider=3) as buffer:
        with pytest.raises(p2pmem.UnsupportedError):
            buffer.fileno()
        # Only the export has failed.
        assert buffer.read(4) == b"\0\0\0\0"


def test_a_detached_descriptor_belongs_to_the_program(buffer: p2pmem.Buffer) -> None:
    dmabuf = buffer.share()
    fd = dmabuf.detach()
    assert dmabuf.closed and is_open(fd)
    os.close(fd)
    with pytest.raises(ValueError, match="closed"):
        dmabuf.detach()


def test_a_shared_buffer_is_the_same_memory(fake: Fake, device: p2pmem.Device, buffer: p2pmem.Buffer) -> None:
    buffer.write(b"shared")
    ours, theirs = socket.socketpair()
    with ours, theirs, buffer.share() as dmabuf:
        socket.send_fds(ours, [b"buffer"], [dmabuf.fileno()])
        _, [fd], _, _ = socket.recv_fds(theirs, 16, 1)
    with fake.device() as other:
        imported = other.import_buffer(fd)
        os.close(fd)
        assert imported.read(6) == b"shared" and imported.info().handles == 2
        assert (imported.provider, imported.path_class) == (buffer.provider, None)
        buffer.close()
        imported.write(b"S", 0)
        assert imported.read(6) == b"Shared"
        imported.close()
    assert device.info().buffers == 0


def test_what_cannot_be_imported(device: p2pmem.Device, buffer: p2pmem.Buffer) -> None:
    with open(__file__, "rb") as file, pytest.raises(p2pmem.InvalidRequestError) as caught:
        device.import_buffer(file)
    assert caught.value.errno == errno.EINVAL
    assert caught.value.remedy == "pass the descriptor that Buffer.share() returned"
    with buffer.export([(0, 4096)]) as part, pytest.raises(p2pmem.PermissionDeniedError):
        device.import_buffer(part)
