# SPDX-License-Identifier: MIT OR Apache-2.0
"""Events, and buffers whose provider is removed."""

from __future__ import annotations

import errno
import os
import select
import signal
import threading
from types import FrameType

import p2pmem
import pytest
from p2pmem.fake import Fake

#: Longer than any machine takes; a test that waits so long has failed.
LONG = 60.0


def test_a_removed_provider(fake: Fake, device: p2pmem.Device) -> None:
    buffer = device.alloc(4096, provider=2)
    with device.events(timeout=0.01) as events:
        assert list(events) == [] and events.poll() is None
        fake.remove_provider(2)
        revoked, removed = list(events)
        assert (revoked.kind, revoked.provider, revoked.handle) == ("buffer-revoked", 2, buffer.handle)
        assert (removed.kind, removed.provider, removed.handle) == ("provider-removed", 2, None)
        assert str(removed) == "provider 2 was removed"
        fake.add_provider("0000:09:00.0", 1 << 20)
        added = events.wait(LONG)
        assert added is not None and (added.kind, added.provider) == ("provider-added", 4)
        assert events.wait(0) is None and events.wait(0.001) is None
    assert buffer.info().state == "gone"
    for call in (buffer.map, buffer.fileno, buffer.share):
        with pytest.raises(p2pmem.RemovedError) as caught:
            call()
        assert caught.value.errno == errno.ENODEV
        assert caught.value.remedy == "the provider was removed: allocate again"
    buffer.close()


def test_a_thread_that_waits_lets_others_run(fake: Fake, device: p2pmem.Device) -> None:
    got: list[p2pmem.Event | None] = []
    events = device.events()
    waiting = threading.Thread(target=lambda: got.append(events.wait(LONG)))
    waiting.start()
    fake.remove_provider(3)
    waiting.join(LONG)
    assert not waiting.is_alive() and got[0] is not None and got[0].provider == 3


def test_the_iterator_waits_without_a_timeout(fake: Fake, device: p2pmem.Device) -> None:
    remove = threading.Thread(target=fake.remove_provider, args=(1,))
    events = device.events()
    remove.start()
    assert next(events).kind == "provider-removed"
    remove.join()


def test_signal_handlers_run_while_waiting(device: p2pmem.Device) -> None:
    class Interrupted(Exception):
        pass

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise Interrupted

    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        sender = threading.Thread(target=os.kill, args=(os.getpid(), signal.SIGUSR1))
        with pytest.raises(Interrupted):
            sender.start()
            device.events().wait(LONG)
        sender.join()
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_the_descriptor_is_readable_while_there_are_events(fake: Fake, device: p2pmem.Device) -> None:
    events = device.events()
    readable = select.poll()
    readable.register(events, select.POLLIN)
    assert readable.poll(0) == []
    fake.remove_provider(1)
    assert readable.poll(0) == [(events.fileno(), select.POLLIN)]
    assert events.poll() is not None and events.poll() is None
    assert readable.poll(0) == []


def test_a_refused_read(fake: Fake, device: p2pmem.Device) -> None:
    events = device.events()
    events.close()
    assert events.closed
    for call in (events.wait, events.poll, events.fileno, lambda: next(events)):
        with pytest.raises(ValueError, match="the sequence of events is closed"):
            call()
