# SPDX-License-Identifier: MIT OR Apache-2.0
"""Allocation, explanations, paths, counters, and file rules."""

from __future__ import annotations

import errno
from typing import Any

import p2pmem
import pytest
from p2pmem import FileRule, PathClass
from p2pmem.fake import Fake

from conftest import DRIVE, NIC


def test_a_buffer_is_near_its_client(device: p2pmem.Device) -> None:
    with device.alloc(5000, near=DRIVE) as buffer:
        assert (buffer.provider, buffer.size, len(buffer)) == (1, 8192, 8192)
        assert buffer.path_class is PathClass.SAME_SWITCH
        assert buffer.bar_offset == 0
        info = buffer.info()
        assert (info.state, info.provider, info.size, info.handles) == ("live", 1, 8192, 1)
        assert repr(buffer) == "<p2pmem.Buffer 1: 8 KiB in provider 1>"
        assert device.info().buffers == 1
    assert device.info().buffers == 0
    assert repr(buffer) == "<p2pmem.Buffer 1: 8 KiB in provider 1, closed>"


def test_clients_are_names_or_objects(device: p2pmem.Device) -> None:
    client = p2pmem.Client(DRIVE)
    assert (client.name, client.addr) == (DRIVE, DRIVE)
    assert client == p2pmem.Client(DRIVE) and len({client, p2pmem.Client(DRIVE)}) == 1
    assert client != p2pmem.Client("04:00.1") and repr(client) == f"<p2pmem.Client {DRIVE} at {DRIVE}>"
    nears: list[Any] = [client, DRIVE, [client], (DRIVE,), iter([DRIVE, client]), {client}]
    for near in nears:
        with device.alloc(4096, near=near) as buffer:
            assert buffer.path_class is PathClass.SAME_SWITCH
    with device.alloc(4096) as buffer:
        assert buffer.path_class is None


def test_arguments_of_requests(device: p2pmem.Device) -> None:
    second = device.providers()[1]
    seconds: list[dict[str, Any]] = [{"provider": 2}, {"provider": second}, {"prefer": second}]
    for arguments in seconds:
        with device.alloc(4096, **arguments) as buffer:
            assert buffer.provider == 2
    with device.alloc(4096), device.alloc(4096, align=1 << 20) as buffer:
        assert buffer.bar_offset == 1 << 20
    strategies: list[Any] = ["nearest", "spread", "pack", "upstream"]
    for strategy in strategies:
        device.alloc(4096, strategy=strategy).close()
    nearest: list[Any] = [PathClass.SAME_SWITCH, "same-switch", "SW", "sw"]
    for farthest in nearest:
        explanation = device.explain(4096, near=DRIVE, max_class=farthest)
        assert explanation.verdicts[1].code == "too-far"


def test_providers(device: p2pmem.Device) -> None:
    first, second, third = device.providers()
    assert [first.id, second.id, third.id] == [1, 2, 3]
    assert (first.addr, first.kind, first.state, first.bar) == ("0000:03:00.0", "own", "live", 2)
    assert (third.kind, third.driver, third.bar, third.class_code) == ("adopted", "nvme", None, 0x010802)
    assert first.size == first.free == first.largest == 256 << 20
    with device.alloc(1 << 20, provider=first):
        assert device.providers()[0].free == 255 << 20
    with pytest.raises(AttributeError):
        first.free = 0  # type: ignore[misc]


def test_paths(device: p2pmem.Device) -> None:
    paths = device.paths([DRIVE, NIC])
    assert [(path.provider, path.client) for path in paths] == [(p, c) for p in (1, 2, 3) for c in (0, 1)]
    assert [path.path_class for path in paths[:3]] == [
        PathClass.SAME_SWITCH,
        PathClass.UNREACHABLE,
        PathClass.HOST_BRIDGE,
    ]
    assert (paths[0].distance, paths[1].distance) == (4, None)
    assert device.paths(DRIVE, rescan=True)[0] == paths[0]


def test_path_classes_are_ordered() -> None:
    assert sorted(reversed(PathClass)) == list(PathClass)
    assert PathClass.SAME_SWITCH < PathClass.SYSTEM <= PathClass.SYSTEM < PathClass.UNREACHABLE
    assert PathClass.SYSTEM > PathClass.SAME_DEVICE >= PathClass.SAME_DEVICE
    assert max(PathClass.SAME_SWITCH, PathClass.NUMA_NODE) is PathClass.NUMA_NODE
    assert (PathClass.HOST_BRIDGE.short, str(PathClass.HOST_BRIDGE)) == ("PHB", "host-bridge")
    with pytest.raises(TypeError):
        assert PathClass.SYSTEM < 5


def test_counters(device: p2pmem.Device) -> None:
    before = device.stats(1)
    device.alloc(8192, provider=1).close()
    after = device.stats(device.providers()[0])
    assert (after.allocs - before.allocs, after.free_bytes - before.free_bytes) == (1, 8192)
    assert device.stats().allocs == after.allocs
    with pytest.raises(p2pmem.NotFoundError):
        device.stats(77)


def test_explanations(device: p2pmem.Device) -> None:
    explanation = device.explain(4096, near=[DRIVE])
    assert (explanation.chosen, explanation.errno) == (1, None)
    assert [verdict.code for verdict in explanation.verdicts] == ["chosen", "class", "order"]
    first = explanation.verdicts[0]
    assert (first.addr, first.path_class, first.worst_client) == ("0000:03:00.0", PathClass.SAME_SWITCH, DRIVE)
    assert str(explanation).splitlines()[1] == f"0000:03:00.0: {first.why}"
    assert device.info().buffers == 0
    refused = device.explain(1 << 40)
    assert (refused.chosen, refused.errno) == (None, errno.ENODEV)
    assert refused.lines[0].startswith("refused: No such device (ENODEV)")
    striped = device.explain(1 << 20, parts=2)
    assert [verdict.code for verdict in striped.verdicts].count("chosen") == 2
    with device.alloc(4096, provider=2):
        assert device.explain_last().chosen == 2


def test_no_explanation_before_the_first_allocation(fake: Fake) -> None:
    with fake.device() as device, pytest.raises(p2pmem.Error) as caught:
        device.explain_last()
    assert caught.value.errno == errno.ENODATA


def test_an_explanation_for_another_user_needs_root(device: p2pmem.Device) -> None:
    try:
        explanation = device.explain(4096, uid=1000, gid=1000, groups=[1000])
    except p2pmem.Error as error:
        assert "run as root" in str(error)
    else:
        assert explanation.chosen == 1


def test_stripes(device: p2pmem.Device) -> None:
    parts = device.alloc_stripe(3 << 20, 3)
    assert [part.size for part in parts] == [1 << 20] * 3
    assert sorted(part.provider for part in parts) == [1, 2, 3]
    parts.pop().close()
    assert device.info().buffers == 2
    del parts
    assert device.info().buffers == 0
    assert len(device.alloc_stripe(1 << 20)) == 3
    with pytest.raises(p2pmem.NoProviderError):
        device.alloc_stripe(1 << 20, 4)
    assert device.info().buffers == 0


def test_file_rules(device: p2pmem.Device) -> None:
    first = device.providers()[0]
    for provider in (first, first.addr):
        device.set_rules([FileRule("not-this", provider=provider, action="deny")])
        with device.alloc(4096) as buffer:
            assert buffer.provider == 2
        verdict = device.explain_last().verdicts[0]
        assert verdict.code == "denied" and verdict.rule == p2pmem.DecidingRule("not-this", own=True)
    every = FileRule("all", client=p2pmem.Client(DRIVE), action="deny", max_class="SW", quota=1 << 20)
    device.set_rules([every])
    with pytest.raises(p2pmem.DeniedByRuleError) as caught:
        device.alloc(4096)
    assert caught.value.errno == errno.EACCES and caught.value.remedy is not None
    device.set_rules([])
    device.alloc(4096).close()
