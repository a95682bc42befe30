# SPDX-License-Identifier: MIT OR Apache-2.0
"""Examples that need no hardware, on the fake device. tests/suites/python runs the others in a guest."""

from __future__ import annotations

import asyncio
import runpy
import subprocess
import sys
from pathlib import Path

import p2pmem
import pytest
from p2pmem.fake import Fake

from conftest import DRIVE

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


def test_near_nvme(
    fake: Fake, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], direct: Path
) -> None:
    content = direct.read_bytes()
    monkeypatch.setattr(p2pmem, "Device", fake.device)
    monkeypatch.setattr(sys, "argv", ["near_nvme.py", str(direct), DRIVE])
    runpy.run_path(str(EXAMPLES / "near_nvme.py"), run_name="__main__")
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "0000:03:00.0 was chosen"
    assert said[-1] == f"{len(content)} bytes went from {DRIVE} to provider 1, their sum is {sum(content)}"


def test_watch(fake: Fake, device: p2pmem.Device, capsys: pytest.CaptureFixture[str]) -> None:
    watch = runpy.run_path(str(EXAMPLES / "watch.py"))["watch"]
    fake.remove_provider(1)
    fake.remove_provider(3)
    asyncio.run(watch(device, 2))
    assert capsys.readouterr().out.splitlines() == [
        "provider 1 was removed; providers now: 0000:08:00.0",
        "provider 3 was removed; providers now: 0000:08:00.0",
    ]


@pytest.mark.parametrize("name", ["near_nvme.py", "watch.py"])
def test_without_the_module(name: str) -> None:
    if Path("/dev/p2pmem").exists():
        pytest.skip("the module is loaded")
    # A PCI address needs no such device.
    command = [sys.executable, str(EXAMPLES / name), *([__file__, DRIVE] if name == "near_nvme.py" else [])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("cannot open /dev/p2pmem: No such file or directory (ENOENT)")
    assert "\nload the module: modprobe p2pmem" in done.stderr
