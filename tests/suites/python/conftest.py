# SPDX-License-Identifier: MIT OR Apache-2.0
"""The machine that the tests of the Python package run on: a guest of the topology `nic`.

The module is loaded, and accel0 is a provider, before, between, and after the tests. accel1 is a provider while a test uses it.
"""

import os
import pathlib
import subprocess
import sys
import threading
import time

import p2pmem
import pytest

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "clients"))
import runner  # noqa: E402 pylint: disable=wrong-import-position

#: Seconds that a command may take.
LIMIT = runner.scaled(60)
#: Exceptions that say that something took too long.
TOO_LATE = (TimeoutError, subprocess.TimeoutExpired, threading.BrokenBarrierError)
ACCEL0, ACCEL1 = os.environ["P2PMEM_DEV_ACCEL0"], os.environ["P2PMEM_DEV_ACCEL1"]


def ctl(*words):
    """Runs p2pmemctl."""
    command = [f"{os.environ['P2PMEM_BIN']}/p2pmemctl", *words]
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, timeout=LIMIT)


def provider(device, addr):
    """The provider at an address, or None."""
    return next((found for found in device.providers() if found.addr == addr), None)


def wait_for(condition, what):
    """Waits until a condition holds."""
    deadline = time.monotonic() + LIMIT
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(what)
        time.sleep(0.01)


class Outcome:
    """Whether tests failed, and whether time was all that they needed."""

    late, wrong = 0, 0


def pytest_runtest_makereport(call):
    if call.excinfo is not None:
        if isinstance(call.excinfo.value, TOO_LATE):
            Outcome.late += 1
        else:
            Outcome.wrong += 1


def pytest_sessionfinish(session):
    # The harness then runs the tests once more.
    if Outcome.late and not Outcome.wrong:
        session.exitstatus = runner.LATE


@pytest.fixture(scope="session", autouse=True)
def machine():
    if not os.path.exists("/sys/module/p2pmem"):
        depends = subprocess.run(["modinfo", "-F", "depends", os.environ["P2PMEM_MODULE"]], check=True, stdout=subprocess.PIPE, text=True)
        needed = [name for name in depends.stdout.strip().split(",") if name]
        if needed:
            subprocess.run(["modprobe", "-a", *needed], check=True, timeout=LIMIT)
        subprocess.run(["insmod", os.environ["P2PMEM_MODULE"]], check=True, timeout=LIMIT)
    with p2pmem.Device() as device:
        for addr, wanted in ((ACCEL0, True), (ACCEL1, False)):
            if (provider(device, addr) is not None) != wanted:
                ctl("publish" if wanted else "unpublish", addr)


@pytest.fixture
def device():
    with p2pmem.Device() as device:
        before = device.info().buffers
        yield device
        # The test has closed what it allocated. What another process had may take a moment.
        wait_for(lambda: device.info().buffers == before, "a buffer is left")


@pytest.fixture
def accel1(device):
    """accel1 as a provider, which the test may remove."""
    ctl("publish", ACCEL1)
    yield provider(device, ACCEL1)
    if provider(device, ACCEL1) is not None:
        ctl("unpublish", ACCEL1)


@pytest.fixture
def counted():
    """A function that returns what the devices have counted since the test began: the numbers of one device."""
    before = runner.request_runner({"op": "snapshot"})

    def since(name, *path):
        start, now = before[name], runner.request_runner({"op": "snapshot"})[name]
        for step in path:
            start, now = start.get(step, {}), now.get(step, {})
        return {key: value - start.get(key, 0) for key, value in now.items()}

    return since
