# SPDX-License-Identifier: MIT OR Apache-2.0
"""Buffers as dma-bufs, buffers of other open files, and dma-bufs of other drivers."""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path

import p2pmem
import pytest
from p2pmem.fake import Fake

from conftest import DRIVE


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


def foreign(buffer: p2pmem.Buffer) -> int:
    """A descriptor of a dma-buf of which the package knows nothing."""
    return buffer.share().detach()


def test_a_dma_buf_of_another_driver(buffer: p2pmem.Buffer) -> None:
    fd = foreign(buffer)
    with p2pmem.DmaBuf(fd) as dmabuf:
        assert dmabuf.fileno() != fd and not os.get_inheritable(dmabuf.fileno())
        assert os.path.sameopenfile(dmabuf.fileno(), fd)
        # The object has its own descriptor.
        os.close(fd)
        assert (dmabuf.size, dmabuf.ranges, dmabuf.pinned) == (len(buffer), [(0, len(buffer))], False)
        # The fake dma-buf is a memory file, which has no exporter.
        assert (dmabuf.exporter, dmabuf.device) == (None, None)
        own = dmabuf.fileno()
        # An object with fileno().
        with p2pmem.DmaBuf(dmabuf, device="03:00.0") as second:
            assert second.device == "0000:03:00.0" and second.fileno() != own
        assert is_open(own)
    assert not is_open(own)
    for use in (lambda: dmabuf.exporter, lambda: dmabuf.device, lambda: dmabuf.path_to(DRIVE)):
        with pytest.raises(ValueError, match="the dma-buf is closed"):
            use()


def test_descriptors_that_are_no_dma_bufs(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"data")
    before = len(os.listdir("/proc/self/fd"))
    with path.open("rb") as file, pytest.raises(p2pmem.InvalidRequestError) as caught:
        p2pmem.DmaBuf(file)
    assert caught.value.errno == errno.EINVAL and f"({path}) is not a dma-buf" in str(caught.value)
    assert caught.value.remedy is not None and "cuMemGetHandleForAddressRange()" in caught.value.remedy
    memory = os.memfd_create("other")
    with pytest.raises(p2pmem.InvalidRequestError, match="is not a dma-buf"):
        p2pmem.DmaBuf(memory)
    os.close(memory)
    with pytest.raises(p2pmem.Error, match="is not an open file descriptor") as other:
        p2pmem.DmaBuf(memory)
    assert other.value.errno == errno.EBADF
    for wrong in (None, 1.5, "/dev/null", object()):
        with pytest.raises(TypeError, match="expected a file descriptor"):
            p2pmem.DmaBuf(wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="out of range"):
        p2pmem.DmaBuf(1 << 40)
    assert len(os.listdir("/proc/self/fd")) == before


def test_devices_of_a_dma_buf(device: p2pmem.Device, buffer: p2pmem.Buffer) -> None:
    [provider] = [found for found in device.providers() if found.id == buffer.provider]
    with buffer.share() as shared:
        for given in (provider, p2pmem.Client(provider.addr), provider.addr):
            with p2pmem.DmaBuf(shared, device=given) as dmabuf:
                assert dmabuf.device == provider.addr
        with pytest.raises(p2pmem.InvalidRequestError, match="mlx5_0"):
            p2pmem.DmaBuf(shared, device="mlx5_0")
        with pytest.raises(TypeError, match="expected a PCI address"):
            p2pmem.DmaBuf(shared, device=3)  # type: ignore[arg-type]
        with p2pmem.DmaBuf(shared) as unknown, pytest.raises(p2pmem.InvalidRequestError) as caught:
            unknown.path_to(DRIVE)
        assert caught.value.errno == errno.EINVAL and "is not known" in str(caught.value)
        assert caught.value.remedy == 'pass the device that has the memory: DmaBuf(fd, device="0000:03:00.0")'
        with p2pmem.DmaBuf(shared, device="ffff:ff:1f.7") as missing, pytest.raises(p2pmem.Error) as absent:
            missing.path_to("ffff:ff:1f.6")
        assert absent.value.errno == errno.ENODEV and absent.value.remedy is not None
        with p2pmem.DmaBuf(shared, device=provider) as dmabuf, pytest.raises(TypeError, match="a Client or a name"):
            dmabuf.path_to(1)  # type: ignore[arg-type]
