# SPDX-License-Identifier: MIT OR Apache-2.0
"""Objects that are closed, in any order, by other threads, or in forks: calls raise, and the interpreter lives."""

from __future__ import annotations

import gc
import itertools
import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable

import p2pmem
import pytest
from p2pmem.fake import Fake


def test_calls_of_closed_objects(fake: Fake) -> None:
    device = fake.device()
    buffer = device.alloc(4096)
    mapping, dmabuf = buffer.map(), buffer.share()
    for thing in (mapping, dmabuf, buffer, device):
        assert not thing.closed
        thing.close()
        thing.close()
        assert thing.closed
        with pytest.raises(ValueError, match="is closed"), thing:
            raise AssertionError("it was entered")
    calls: list[Callable[[], object]] = [
        device.info,
        device.providers,
        device.stats,
        device.holders,
        device.events,
        device.explain_last,
        lambda: device.alloc(4096),
        lambda: device.alloc_stripe(4096),
        lambda: device.explain(4096),
        lambda: device.paths([]),
        lambda: device.set_rules([]),
        lambda: device.import_buffer(0),
        buffer.info,
        buffer.map,
        buffer.share,
        buffer.export,
        buffer.fileno,
        buffer.read,
        buffer.flush,
        buffer.fill,
        lambda: buffer.memory,
        lambda: buffer.address,
        lambda: buffer.readinto(bytearray(1)),
        lambda: buffer.write(b"x"),
        lambda: buffer.read_from(__file__),
        lambda: buffer.write_to(__file__),
        mapping.read,
        mapping.flush,
        mapping.fill,
        lambda: mapping.address,
        lambda: mapping.readinto(bytearray(1)),
        lambda: mapping.write(b"x"),
        lambda: mapping.read_from(__file__),
        lambda: mapping.write_to(__file__),
        dmabuf.fileno,
        dmabuf.detach,
    ]
    for call in calls:
        with pytest.raises(ValueError, match="is closed"):
            call()
    # Attributes that never change stay readable.
    assert (buffer.handle, buffer.size, len(mapping), dmabuf.size) == (1, 4096, 4096, 4096)


def test_every_order_of_closing(fake: Fake) -> None:
    with fake.device() as watch:
        for order in itertools.permutations(range(5)):
            device = fake.device()
            buffer = device.alloc(4096)
            things = (device, buffer, buffer.map(), buffer.share(), device.events())
            buffer.write(b"x")
            buffer.fileno()
            for index in order:
                things[index].close()
            assert watch.info().buffers == 0
    assert watch.closed


def test_every_order_of_collection(fake: Fake) -> None:
    with fake.device() as watch:
        for order in itertools.permutations(range(4)):
            device = fake.device()
            buffer = device.alloc(4096)
            things: list[object] = [device, buffer, buffer.map(), buffer.share()]
            del device, buffer
            for index in order:
                things[index] = None
            gc.collect()
            assert watch.info().buffers == 0


def test_the_memory_stays_with_a_mapping(device: p2pmem.Device) -> None:
    buffer = device.alloc(4096)
    mapping = buffer.map()
    buffer.close()
    mapping.write(b"later")
    assert mapping.read(5) == b"later"


def test_a_with_statement_closes_after_an_exception(device: p2pmem.Device) -> None:
    with pytest.raises(KeyError), device.alloc(4096) as buffer, buffer.map() as mapping:
        raise KeyError
    assert buffer.closed and mapping.closed and device.info().buffers == 0


def test_a_refused_free_is_an_exception(fake: Fake, device: p2pmem.Device) -> None:
    buffer = device.alloc(4096)
    fake.fail_next(2)
    with pytest.raises(p2pmem.NotFoundError):
        buffer.close()
    assert buffer.closed


def test_threads_use_what_another_thread_closes(device: p2pmem.Device) -> None:
    failures: list[BaseException] = []

    def use(buffer: p2pmem.Buffer, ready: threading.Barrier) -> None:
        out = bytearray(len(buffer))
        ready.wait()
        try:
            while True:
                buffer.readinto(out)
                buffer.write(out)
                buffer.fileno()
                buffer.info()
        except ValueError:
            pass
        except BaseException as error:  # pylint: disable=broad-exception-caught
            failures.append(error)

    for _ in range(20):
        buffer = device.alloc(1 << 18)
        ready = threading.Barrier(5)
        threads = [threading.Thread(target=use, args=(buffer, ready)) for _ in range(4)]
        for thread in threads:
            thread.start()
        ready.wait()
        buffer.close()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
    assert not failures
    assert device.info().buffers == 0


def test_threads_make_one_mapping_and_one_descriptor(device: p2pmem.Device) -> None:
    for _ in range(20):
        seen: set[tuple[int, int]] = set()
        ready = threading.Barrier(4)

        def look(
            buffer: p2pmem.Buffer, seen: set[tuple[int, int]] = seen, ready: threading.Barrier = ready
        ) -> None:
            ready.wait()
            seen.add((buffer.address, buffer.fileno()))

        with device.alloc(4096) as buffer:
            threads = [threading.Thread(target=look, args=(buffer,)) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(60)
        assert len(seen) == 1


def in_child(work: Callable[[], None]) -> int:
    """Runs work in a fork that ends as programs do, and returns its exit code."""
    with warnings.catch_warnings():
        # Libraries may have threads, which these forks do not need.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        try:
            work()
            gc.collect()
            os._exit(0)
        except BaseException:  # pylint: disable=broad-exception-caught
            sys.excepthook(*sys.exc_info())
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_fork_cannot_use_or_free_what_its_parent_has(fake: Fake, device: p2pmem.Device) -> None:
    buffer, events = device.alloc(4096), device.events()
    buffer.write(b"parent")
    kept = [device.alloc(4096)]

    def child() -> None:
        calls: list[Callable[[], object]] = [
            device.info,
            lambda: device.alloc(4096),
            buffer.info,
            lambda: buffer.read(1),
            buffer.fileno,
            events.poll,
        ]
        for call in calls:
            with pytest.raises(p2pmem.Error, match="a fork of it") as caught:
                call()
            assert caught.value.remedy is not None and "open the device in this process" in caught.value.remedy
        kept.clear()
        buffer.close()
        device.close()
        assert buffer.closed and device.closed

    assert in_child(child) == 0
    assert device.info().buffers == 2
    assert buffer.info().state == "live" and buffer.read(6) == b"parent"
    assert kept[0].info().state == "live"
    buffer.close()
    kept.pop().close()
    assert device.info().buffers == 0


def test_a_fork_shares_mappings_and_descriptors(device: p2pmem.Device) -> None:
    with device.alloc(4096) as buffer, buffer.map() as mapping, buffer.share() as dmabuf:

        def child() -> None:
            assert os.fstat(dmabuf.fileno()).st_size == 4096
            mapping.write(b"child")
            mapping.close()
            dmabuf.close()

        assert in_child(child) == 0
        assert mapping.read(5) == b"child" and not dmabuf.closed


LOST = """
import faulthandler, os, sys
import p2pmem
from p2pmem.fake import Fake

fake = Fake.example()
buffer = fake.device().alloc(1 << 20)
buffer.write(b"x" * 5000)
if sys.argv[1] == "late":
    faulthandler.enable()
# The fake device's memory is a file without a name. A mapping of what is cut off raises SIGBUS, as that of a removed provider.
links = {fd: os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}")}
[memory] = [int(fd) for fd, target in links.items() if "memfd:p2pmem-fake" in target]
os.ftruncate(memory, 0)
for call in (
    lambda: buffer.read(100, 300),
    lambda: buffer.write(b"x" * 100, 301),
    lambda: buffer.readinto(bytearray(100)),
    lambda: buffer.fill(1),
):
    try:
        call()
    except p2pmem.RemovedError as error:
        assert error.errno == 19 and "allocate again" in error.remedy, error
    else:
        sys.exit("no exception")
if sys.argv[1] == "other":
    # A fault of the program itself.
    import ctypes
    ctypes.string_at(buffer.address, 1)
print("done")
"""


@pytest.mark.parametrize("when", ["early", "late", "other"])
def test_memory_that_is_gone_is_an_exception(when: str) -> None:
    command = [sys.executable, *(["-X", "faulthandler"] if when != "late" else []), "-c", LOST, when]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if when == "other":
        # The handler that Python has installed reports it, and the process ends by the signal.
        assert done.returncode == -7 and "Fatal Python error: Bus error" in done.stderr, done
    else:
        assert (done.returncode, done.stdout) == (0, "done\n"), done
