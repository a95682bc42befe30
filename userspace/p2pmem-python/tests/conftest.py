# SPDX-License-Identifier: MIT OR Apache-2.0
"""Fixtures of the tests without the module: the fake device."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import p2pmem
import pytest
from p2pmem.fake import Fake

#: The drive below the switch of provider 1 in the example machine.
DRIVE = "0000:04:00.0"
#: A NIC that reaches no provider.
NIC = "0000:0a:00.0"


@pytest.fixture
def fake() -> Fake:
    return Fake.example()


@pytest.fixture
def device(fake: Fake) -> Iterator[p2pmem.Device]:
    with fake.device() as device:
        yield device


@pytest.fixture
def buffer(device: p2pmem.Device) -> Iterator[p2pmem.Buffer]:
    with device.alloc(1 << 16) as buffer:
        yield buffer


@pytest.fixture
def direct(tmp_path: Path) -> Path:
    """A file of three blocks and a bit, on a file system with direct I/O."""
    path = tmp_path / "data"
    path.write_bytes(bytes(i % 251 for i in range(3 * 4096 + 100)))
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_DIRECT))
    except OSError:
        pytest.skip(f"no direct I/O in {tmp_path}")
    return path
