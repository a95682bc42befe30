# SPDX-License-Identifier: MIT OR Apache-2.0
"""The Python package with the module: allocation near devices, direct I/O, RDMA, events, rules, and the removal of a provider."""

import errno
import fcntl
import mmap
import os
import pathlib
import re
import runpy
import struct
import subprocess
import sys
import threading
import time

import numpy as np
import p2pmem
import pytest
import pyverbs.enums as e
from p2pmem.rules import Rule, Rules
from pyverbs.cq import CQ
from pyverbs.device import Context
from pyverbs.mr import DmaBufMR
from pyverbs.pd import PD

from conftest import ACCEL0, ACCEL1, LIMIT, ctl, provider

EXAMPLES = pathlib.Path(__file__).resolve().parents[3] / "userspace" / "p2pmem-python" / "examples"
DRIVE, NIC = os.environ["P2PMEM_BLOCK_NVME0"], os.environ["P2PMEM_RDMA_NIC0"]
SIZE = 1 << 20
NOBODY = 65534
#: ``DMA_HEAP_IOCTL_ALLOC`` and ``struct dma_heap_allocation_data`` of ``linux/dma-heap.h``: size, descriptor, its flags, flags.
DMA_HEAP_ALLOC, DMA_HEAP_ARGUMENTS = 0xC0184800, "=QIIQ"


def example(monkeypatch, name, *arguments):
    """Runs an example as a program, and returns its names."""
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    return runpy.run_path(str(EXAMPLES / name), run_name="__main__")


def as_user(uid, work):
    """Runs work in a fork with another user's ids. Returns what work raised, or None."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
        try:
            work()
            text = ""
        except p2pmem.Error as error:
            text = f"{type(error).__name__}|{error.errno}|{error.remedy}|{error}"
        except BaseException as error:  # pylint: disable=broad-exception-caught
            text = repr(error)
        os.write(writing, text.encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        text = pipe.read()
    assert os.waitpid(pid, 0)[1] == 0
    return text or None


def test_memory_near_a_drive(device):
    with device.alloc(SIZE, near="nvme0") as buffer:
        assert provider(device, ACCEL0).id == buffer.provider
        assert buffer.path_class is p2pmem.PathClass.SAME_SWITCH
        explanation = device.explain_last()
        assert explanation.chosen == buffer.provider and ACCEL0 in str(explanation)
        [path] = device.paths("nvme0")
        assert (path.provider, path.path_class) == (buffer.provider, p2pmem.PathClass.SAME_SWITCH)
        info = buffer.info()
        assert info.state == "live" and info.bus_addr
        # Fresh memory is clear, also if another buffer had it before.
        assert buffer.read(4096) == bytes(4096)


def test_numpy_arrays(device):
    data = np.random.default_rng(3).standard_normal((256, 64))
    with device.alloc(data.nbytes + 4096) as buffer:
        assert buffer.write(data, 100) == data.nbytes
        buffer.flush()
        back = np.empty_like(data)
        assert buffer.readinto(back, 100) == data.nbytes
        assert np.array_equal(data, back)
        buffer.fill(0x5A, 0, 100)
        assert buffer.read(101) == b"\x5a" * 100 + data.tobytes()[:1]


def test_a_drive_reads_and_writes_the_buffer(device, counted):
    data = np.random.default_rng(4).integers(256, size=SIZE, dtype=np.uint8)
    with device.alloc(SIZE, near=DRIVE) as source, device.alloc(SIZE, near=DRIVE) as target:
        source.write(data)
        drive = os.open(DRIVE, os.O_RDWR | os.O_DIRECT)
        assert source.write_to(drive, SIZE) == SIZE
        assert target.read_from(drive, SIZE) == SIZE
        os.close(drive)
        assert target.read() == data.tobytes()
        with pytest.raises(p2pmem.Error) as caught:
            target.read_from(DRIVE, file_offset=1, size=4096)
        assert caught.value.errno == errno.EINVAL and "blocks" in caught.value.remedy
    moved = counted("nvme0", "payload")
    assert moved["accel0"] == 2 * SIZE and moved.get("host", 0) == moved.get("unknown", 0) == 0


def test_example_near_nvme(monkeypatch, capsys, device, counted):
    example(monkeypatch, "near_nvme.py", DRIVE, "nvme0")
    said = capsys.readouterr().out
    assert f"{16 << 20} bytes went from nvme0 to provider {provider(device, ACCEL0).id}" in said
    moved = counted("nvme0", "payload")
    assert moved["accel0"] == 16 << 20
    # The program reads the size of the drive, and no data.
    assert moved.get("host", 0) == 0


def test_example_rdma_write(monkeypatch, capsys, device, counted):
    example(monkeypatch, "rdma_write.py", NIC, str(SIZE))
    assert f"{NIC} wrote {SIZE} bytes from provider" in capsys.readouterr().out
    moved = counted("nic0", "counters", "payload")
    assert moved["peer_written"] >= SIZE and moved["peer_read"] >= SIZE
    assert moved["host_read"] == moved["host_written"] == 0


def test_a_registration_holds_the_memory(monkeypatch, device):
    names = example(monkeypatch, "rdma_write.py", NIC, "4096")
    access = e.IBV_ACCESS_LOCAL_WRITE | e.IBV_ACCESS_REMOTE_WRITE
    source, target = device.alloc(8192, near=NIC), device.alloc(8192, near=NIC)
    source.write(b"held" * 2048)
    mapping = target.map()
    with Context(name=NIC) as context, PD(context) as domain, CQ(context, 2) as queue:
        sender, receiver = names["connect"](context, domain, queue)
        # The ranges change places in the dma-buf.
        with source.share() as dmabuf, target.export([(4096, 8192), (0, 4096)]) as swapped:
            from_region = DmaBufMR(domain, 8192, access, dmabuf=dmabuf.fileno())
            to_region = DmaBufMR(domain, 4100, access, dmabuf=swapped.fileno())
            info = target.info()
            assert (info.exports, info.attachments, info.mappings) == (1, 1, 1)
        # Neither the buffers nor the descriptors are open any more.
        source.close()
        target.close()
        names["rdma_write"](sender, queue, from_region, to_region, 4100)
        assert mapping.read(5) == b"held\0" and mapping.read(4096, 4096) == b"held" * 1024
        mapping.close()
        for thing in (sender, receiver, from_region, to_region):
            thing.close()


def heap_memory(size):
    """Host memory as a dma-buf of the kernel's system heap. Returns the descriptor."""
    heap = os.open("/dev/dma_heap/system", os.O_RDWR | os.O_CLOEXEC)
    try:
        request = struct.pack(DMA_HEAP_ARGUMENTS, size, 0, os.O_RDWR | os.O_CLOEXEC, 0)
        return struct.unpack(DMA_HEAP_ARGUMENTS, fcntl.ioctl(heap, DMA_HEAP_ALLOC, request))[1]
    finally:
        os.close(heap)


def test_a_dma_buf_of_another_driver(monkeypatch, device, counted):
    names = example(monkeypatch, "rdma_write.py", NIC, "4096")
    access = e.IBV_ACCESS_LOCAL_WRITE | e.IBV_ACCESS_REMOTE_WRITE
    data, fd = os.urandom(SIZE), heap_memory(SIZE)
    with p2pmem.DmaBuf(fd) as source, device.alloc(SIZE, near=NIC) as target:
        os.close(fd)
        assert (source.exporter, source.size, source.device) == ("system", SIZE, None)
        with mmap.mmap(source.fileno(), SIZE) as memory:
            memory[:] = data
        before = counted("nic0", "counters", "payload")
        with Context(name=NIC) as context, PD(context) as domain, CQ(context, 2) as queue:
            sender, receiver = names["connect"](context, domain, queue)
            from_region = DmaBufMR(domain, SIZE, access, dmabuf=source.fileno())
            to_region = DmaBufMR(domain, SIZE, access, dmabuf=target.fileno())
            # The registration holds the memory.
            source.close()
            names["rdma_write"](sender, queue, from_region, to_region, SIZE)
            for thing in (sender, receiver, from_region, to_region):
                thing.close()
        assert target.read() == data
    moved = {key: value - before[key] for key, value in counted("nic0", "counters", "payload").items()}
    assert moved["host_read"] >= SIZE and moved["peer_written"] >= SIZE and moved["host_written"] == 0


def test_the_path_to_a_dma_buf(device):
    with device.alloc(4096, near=NIC) as buffer, p2pmem.DmaBuf(buffer, device=ACCEL0) as dmabuf:
        assert (dmabuf.exporter, dmabuf.size, dmabuf.device) == ("p2pmem", 4096, ACCEL0)
        [wanted] = device.paths(NIC)
        for client in (NIC, p2pmem.Client(NIC)):
            path = dmabuf.path_to(client)
            assert (path.path_class, path.hops) == (wanted.path_class, wanted.hops)
    with open("/dev/null", "rb") as other, pytest.raises(p2pmem.InvalidRequestError) as caught:
        p2pmem.DmaBuf(other)
    assert caught.value.errno == errno.EINVAL and caught.value.remedy
    assert re.fullmatch(r"descriptor \d+ \(/dev/null\) is not a dma-buf", str(caught.value))


def test_a_shared_buffer_in_another_process(device):
    with device.alloc(SIZE) as buffer, buffer.share() as dmabuf:
        buffer.write(b"from the parent")

        def child():
            with pytest.raises(p2pmem.Error, match="a fork of it"):
                buffer.read(1)
            with p2pmem.Device() as own, own.import_buffer(dmabuf) as imported:
                assert imported.read(15) == b"from the parent" and imported.info().handles == 2
                imported.write(b"from the child!")
            buffer.close()
            device.close()

        assert as_user(0, child) is None
        assert buffer.info().state == "live" and buffer.read(15) == b"from the child!"


def test_events_and_what_they_end(device, accel1):
    buffer = device.alloc(8192, provider=accel1)
    mapping = buffer.map()
    mapping.write(b"x" * 8192)
    fd = buffer.fileno()
    with device.events(timeout=0.01) as events:
        # The device was open when accel1 was published.
        [added] = events
        assert (added.kind, added.provider) == ("provider-added", accel1.id)
        ctl("unpublish", ACCEL1)
        seen = {event.kind: event for event in iter(lambda: events.wait(0), None)}
    assert (seen["buffer-revoked"].handle, seen["provider-removed"].provider) == (buffer.handle, accel1.id)
    assert seen["provider-removed"].time_ns <= time.clock_gettime_ns(time.CLOCK_MONOTONIC)
    assert buffer.info().state == "gone"
    for call in (
        mapping.read,
        lambda: mapping.readinto(np.empty(10)),
        lambda: mapping.write(b"y", 5),
        lambda: mapping.fill(0, 4097, 3),
        buffer.map,
        buffer.share,
        lambda: device.import_buffer(fd),
    ):
        with pytest.raises(p2pmem.RemovedError) as caught:
            call()
        assert caught.value.errno == errno.ENODEV and caught.value.remedy
    with pytest.raises(p2pmem.DirectIOError) as caught:
        mapping.read_from(DRIVE, size=4096)
    assert caught.value.errno == errno.EFAULT and "revoked" in caught.value.remedy
    buffer.close()
    mapping.close()


def test_a_provider_that_is_removed_during_copies(device, accel1):
    for _ in range(2):
        buffer = device.alloc(4 << 20, provider=provider(device, ACCEL1))
        ended, data = {}, os.urandom(len(buffer))
        started = threading.Barrier(3)

        def copy(name, call, started=started, ended=ended):
            started.wait(LIMIT)
            try:
                while True:
                    call()
            except BaseException as error:  # pylint: disable=broad-exception-caught
                ended[name] = error

        calls = {"write": lambda buffer=buffer, data=data: buffer.write(data), "read": buffer.read}
        threads = [threading.Thread(target=copy, args=item) for item in calls.items()]
        for thread in threads:
            thread.start()
        started.wait(LIMIT)
        ctl("unpublish", ACCEL1)
        for thread in threads:
            thread.join(LIMIT)
            if thread.is_alive():
                raise TimeoutError("a copy goes on after its provider was removed")
        assert {name: type(error) for name, error in ended.items()} == dict.fromkeys(calls, p2pmem.RemovedError), ended
        buffer.close()
        ctl("publish", ACCEL1)


def test_allocations_that_fail(device, accel1):
    with pytest.raises(p2pmem.NoProviderError) as caught:
        device.alloc(1 << 40)
    assert caught.value.errno == errno.ENODEV and {full.provider.addr for full in caught.value.full} == {ACCEL0, ACCEL1}
    with device.alloc(accel1.free - SIZE, provider=accel1):
        with pytest.raises(p2pmem.NoSpaceError) as caught:
            device.alloc(2 * SIZE, provider=accel1)
        [full] = caught.value.full
        assert full.provider.addr == ACCEL1 and any(f"pid {os.getpid()} " in holder.owner for holder in full.holders)
        assert any(addr == ACCEL1 and holder.buffers == 1 for addr, holder in device.holders())
        assert device.explain(2 * SIZE, provider=accel1).errno == errno.ENOSPC
    with pytest.raises(p2pmem.Error) as caught:
        device.alloc(4096, near="0000:7f:1f.7")
    assert caught.value.errno == errno.ENODEV and caught.value.reason


def test_stripes_and_file_rules(device, accel1):
    parts = device.alloc_stripe(2 * SIZE, 2, near="nvme0")
    assert {part.provider for part in parts} == {accel1.id, provider(device, ACCEL0).id}
    for part in parts:
        part.close()
    device.set_rules([p2pmem.FileRule("only-accel1", provider=ACCEL0, action="deny")])
    with device.alloc(4096, near="nvme0") as buffer:
        assert buffer.provider == accel1.id
    verdict = next(verdict for verdict in device.explain_last().verdicts if verdict.addr == ACCEL0)
    assert (verdict.code, verdict.rule) == ("denied", p2pmem.DecidingRule("only-accel1", True))
    device.set_rules([p2pmem.FileRule("little", quota=8192)])
    with device.alloc(8192), pytest.raises(p2pmem.QuotaExceededError) as caught:
        device.alloc(4096)
    assert caught.value.errno == errno.EDQUOT and "little" in str(caught.value)


def test_rules_are_root_s(device):
    rules = Rules()
    before = rules.list()
    denied = as_user(NOBODY, lambda: rules.add(Rule("10-mine", action="allow")))
    assert re.match(rf"PermissionDeniedError\|{errno.EACCES}\|run as root\|", denied), denied
    mode = os.stat("/dev/p2pmem").st_mode
    os.chmod("/dev/p2pmem", 0o660)
    denied = as_user(NOBODY, p2pmem.Device)
    assert re.match(rf"PermissionDeniedError\|{errno.EACCES}\|run as root, or join the group", denied), denied
    os.chmod("/dev/p2pmem", 0o666)
    try:
        state = rules.add(Rule("10-nobody", uid=NOBODY, action="deny"))
        assert state.rule == rules.get("10-nobody").rule and state.status

        def use():
            with p2pmem.Device() as own:
                own.alloc(4096)

        denied = as_user(NOBODY, use)
        assert re.match(rf"DeniedByRuleError\|{errno.EACCES}\|.*10-nobody", denied), denied
        assert device.explain(4096, uid=NOBODY, gid=NOBODY).errno == errno.EACCES
        device.alloc(4096).close()
        loaded = rules.load([Rule("10-nobody", uid=f"{NOBODY}", quota=4096)])
        assert loaded.changed == ("10-nobody",)
        assert as_user(NOBODY, use) is None
        with pytest.raises(p2pmem.Error) as caught:
            rules.add(Rule("20-odd", provider="no device"))
        assert caught.value.errno == errno.EINVAL
        rules.remove("10-nobody")
        assert as_user(NOBODY, use) is None
    finally:
        os.chmod("/dev/p2pmem", mode)
        for state in rules.list():
            if state.rule.name not in {known.rule.name for known in before}:
                rules.remove(state.rule.name)
    assert rules.list() == before


def test_a_program_that_ends_with_open_objects(device):
    script = "import p2pmem\ndevice = p2pmem.Device()\nbuffer = device.alloc(1 << 20)\nbuffer.write(b'x')\nbuffer.fileno()\nmapping = buffer.map()\n"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=LIMIT)
