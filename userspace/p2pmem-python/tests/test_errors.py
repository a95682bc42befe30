# SPDX-License-Identifier: MIT OR Apache-2.0
"""Failures are exceptions of the right class, with errno, message, and remedy."""

from __future__ import annotations

import errno
import os
import pickle
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import p2pmem
import pytest
from p2pmem.fake import Fake
from p2pmem.rules import Rules

from conftest import DRIVE, NIC


@pytest.mark.skipif(os.path.exists("/dev/p2pmem"), reason="the module is loaded")
def test_a_missing_module_has_a_remedy() -> None:
    with pytest.raises(p2pmem.ModuleMissingError) as caught:
        p2pmem.Device(backend="module")
    error = caught.value
    assert (error.errno, error.kind) == (errno.ENOENT, "module-missing")
    assert str(error) == "cannot open /dev/p2pmem: No such file or directory (ENOENT)"
    assert error.remedy == "load the module: modprobe p2pmem"
    assert isinstance(error, OSError) and error.strerror == str(error)
    if hasattr(error, "add_note"):
        shown = "".join(traceback.format_exception(error)).splitlines()
        assert shown[-2:] == [f"p2pmem.ModuleMissingError: {error}", f"remedy: {error.remedy}"]


def test_backends_are_selected_by_name(tmp_path: Path) -> None:
    for backend in ("driver", "", "Sysfs"):
        with pytest.raises(ValueError, match="is no backend"):
            p2pmem.Device(backend=backend)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="only the backend module has a path"):
        p2pmem.Device(tmp_path, backend="sysfs")
    assert Fake.example().device().backend == "module"


@pytest.mark.skipif(os.path.exists("/dev/p2pmem"), reason="the module is loaded")
def test_a_missing_backend_has_a_reason_and_a_remedy() -> None:
    # A machine may have memory for one of the backends, but hardly for both.
    errors: list[p2pmem.Error] = []
    backends: tuple[Literal["sysfs"], Literal["vfio"]] = ("sysfs", "vfio")
    for backend in backends:
        try:
            p2pmem.Device(backend=backend).close()
        except p2pmem.Error as error:
            errors.append(error)
    assert errors
    for refused in errors:
        assert type(refused) in (p2pmem.BackendUnavailableError, p2pmem.PermissionDeniedError)
        assert refused.remedy and str(refused)
        assert refused.kind != "backend-unavailable" or refused.errno == errno.ENODEV


def test_other_files_are_no_devices(tmp_path: Path) -> None:
    with pytest.raises(p2pmem.NotFoundError) as caught:
        p2pmem.Device(tmp_path / "missing")
    assert isinstance(caught.value, FileNotFoundError) and caught.value.remedy is None
    with pytest.raises(p2pmem.IncompatibleError) as refused:
        p2pmem.Device("/dev/null")
    assert refused.value.errno == errno.ENOTTY


# For each errno of the module: the class of a failed allocation.
ALLOC = [
    (errno.ENOSPC, p2pmem.NoSpaceError),
    (errno.ENODEV, p2pmem.NoProviderError),
    (errno.EDQUOT, p2pmem.QuotaExceededError),
    (errno.EACCES, p2pmem.DeniedByRuleError),
    (errno.EPERM, p2pmem.PermissionDeniedError),
    (errno.EINVAL, p2pmem.InvalidRequestError),
    (errno.ENOMEM, p2pmem.OutOfResourcesError),
    (errno.EHOSTUNREACH, p2pmem.UnreachableError),
    (errno.EOPNOTSUPP, p2pmem.UnsupportedError),
    (errno.ENOTTY, p2pmem.IncompatibleError),
    (errno.EBUSY, p2pmem.BusyError),
    (errno.EINTR, p2pmem.Error),
]


@pytest.mark.parametrize(("number", "kind"), ALLOC, ids=lambda value: getattr(value, "__name__", None))
def test_each_errno_has_its_class(fake: Fake, device: p2pmem.Device, number: int, kind: type[p2pmem.Error]) -> None:
    fake.fail_next(number)
    with pytest.raises(p2pmem.Error) as caught:
        device.alloc(4096)
    assert type(caught.value) is kind
    assert caught.value.errno == number
    # The module stores no message for ENOTTY.
    reason = None if number == errno.ENOTTY else "the test lets the call fail"
    assert caught.value.reason == reason and (reason or "") in str(caught.value)


def test_classes_are_those_of_python_too() -> None:
    assert issubclass(p2pmem.PermissionDeniedError, PermissionError)
    assert issubclass(p2pmem.DeniedByRuleError, PermissionError)
    assert issubclass(p2pmem.InvalidRequestError, ValueError)
    assert issubclass(p2pmem.NotFoundError, FileNotFoundError)
    assert issubclass(p2pmem.AlreadyExistsError, FileExistsError)
    kinds = {getattr(p2pmem, name).kind for name in p2pmem.__all__ if name.endswith("Error")}
    assert len(kinds) == 19 and "other" in kinds


def test_no_space_names_the_full_providers_and_their_holders(fake: Fake, device: p2pmem.Device) -> None:
    with device.alloc(60 << 20, provider=2):
        fake.set_holders("function size owner\n0000:08:00.0 62914560 pid 812 (ib_write_bw)\n")
        with pytest.raises(p2pmem.NoSpaceError) as caught:
            device.alloc(10 << 20, provider=2)
        [full] = caught.value.full
        assert (full.provider.id, full.provider.free) == (2, 4 << 20)
        assert full.holders == (p2pmem.Holder("pid 812 (ib_write_bw)", 1, 60 << 20),)
        assert device.holders() == [("0000:08:00.0", full.holders[0])]
        fake.set_holders(None)
        with pytest.raises(p2pmem.NoSpaceError) as caught:
            device.alloc(10 << 20, provider=2)
        assert caught.value.full[0].holders is None and device.holders() is None
        assert caught.value.remedy is not None and "p2pmemctl list" in caught.value.remedy


def test_errors_can_be_pickled(fake: Fake, device: p2pmem.Device) -> None:
    fake.fail_next(errno.EDQUOT)
    with pytest.raises(p2pmem.QuotaExceededError) as caught:
        device.alloc(4096)
    error, copy = caught.value, pickle.loads(pickle.dumps(caught.value))
    assert type(copy) is type(error) and str(copy) == str(error)
    assert (copy.errno, copy.reason, copy.remedy) == (error.errno, error.reason, error.remedy)


# Calls that raise ValueError, with a part of the message.
INVALID: list[tuple[str, Callable[[p2pmem.Device, p2pmem.Buffer], Any]]] = [
    ("0 bytes", lambda d, b: d.alloc(0)),
    ("-1 is out of range", lambda d, b: d.alloc(-1)),
    ("out of range", lambda d, b: d.alloc(1 << 64)),
    ("use a power of two", lambda d, b: d.alloc(4096, align=3)),
    ("at most", lambda d, b: d.alloc(4096, align=1 << 40)),
    ("no strategy", lambda d, b: d.alloc(4096, strategy="best")),  # type: ignore[arg-type]
    ("no strategy", lambda d, b: d.alloc(4096, strategy="stripe")),  # type: ignore[arg-type]
    ("required or preferred", lambda d, b: d.alloc(4096, provider=1, prefer=2)),
    ("ids start at 1", lambda d, b: d.alloc(4096, provider=0)),
    ("is not a path class", lambda d, b: d.alloc(4096, max_class="near")),  # type: ignore[arg-type]
    ("is not a path class", lambda d, b: d.alloc(4096, max_class=p2pmem.PathClass.UNREACHABLE)),
    ("is not the name of a PCI device", lambda d, b: d.alloc(4096, near="")),
    ("is not the name of a PCI device", lambda d, b: d.alloc(4096, near=["mlx5_0", "nonsense"])),
    ("is not the name of a PCI device", lambda d, b: p2pmem.Client("nonsense")),
    ("at most 64", lambda d, b: d.alloc(4096, near=[DRIVE] * 65)),
    ("at most 16", lambda d, b: d.alloc_stripe(1 << 20, 17)),
    ("each part needs a page", lambda d, b: d.alloc_stripe(4096, 2)),
    ("has no strategy", lambda d, b: d.explain(4096, parts=2, strategy="pack")),
    ("a uid and a gid", lambda d, b: d.explain(4096, uid=5)),
    ("exceed the mapping", lambda d, b: b.read(1, offset=len(b))),
    ("exceed the mapping", lambda d, b: b.read(len(b) + 1)),
    ("exceed the mapping", lambda d, b: b.read(offset=len(b) + 1)),
    ("exceed the mapping", lambda d, b: b.read(1 << 63)),
    ("exceed the mapping", lambda d, b: b.write(b"ab", len(b) - 1)),
    ("exceed the mapping", lambda d, b: b.readinto(bytearray(2), len(b) - 1)),
    ("exceed the mapping", lambda d, b: b.fill(0, 1, len(b))),
    ("exceed the mapping", lambda d, b: b.write(b"", len(b) + 1)),
    ("out of range", lambda d, b: b.read(-1)),
    ("out of range", lambda d, b: b.read(1, -1)),
    ("256 is out of range", lambda d, b: b.fill(256)),
    ("not inside", lambda d, b: b.export([(0, 0)])),
    ("not inside", lambda d, b: b.export([(4096, 1 << 40)])),
    ("whole pages", lambda d, b: b.export([(0, 100)])),
    ("no number of seconds", lambda d, b: d.events(timeout=-1)),
    ("no number of seconds", lambda d, b: d.events().wait(float("nan"))),
    ("is none of", lambda d, b: d.set_rules([p2pmem.FileRule("x", action="forbid")])),  # type: ignore[arg-type]
    ("too long", lambda d, b: d.set_rules([p2pmem.FileRule("x" * 32, action="deny")])),
    ("PCI address", lambda d, b: d.set_rules([p2pmem.FileRule("x", provider="nvme0")])),
]


@pytest.mark.parametrize("case", range(len(INVALID)), ids=lambda n: INVALID[n][0])
def test_invalid_values(device: p2pmem.Device, buffer: p2pmem.Buffer, case: int) -> None:
    message, call = INVALID[case]
    before = device.info().buffers
    with pytest.raises(ValueError, match=message) as caught:
        call(device, buffer)
    if isinstance(caught.value, p2pmem.Error):
        assert caught.value.errno in (errno.EINVAL, errno.ENODEV)
    assert device.info().buffers == before


# Calls that raise TypeError.
WRONG: list[Callable[[Any, Any], Any]] = [
    lambda d, b: d.alloc("4096"),
    lambda d, b: d.alloc(4096.0),
    lambda d, b: d.alloc(),
    lambda d, b: d.alloc(4096, DRIVE),
    lambda d, b: d.alloc(4096, near=5),
    lambda d, b: d.alloc(4096, near=[5]),
    lambda d, b: d.alloc(4096, provider="accel0"),
    lambda d, b: d.alloc(4096, max_class=2),
    lambda d, b: d.import_buffer("a file"),
    lambda d, b: d.events(timeout="soon"),
    lambda d, b: d.paths(None),
    lambda d, b: b.write("text"),
    lambda d, b: b.write(5),
    lambda d, b: b.readinto(b"read-only"),
    lambda d, b: b.readinto("text"),
    lambda d, b: b.read_from(None),
    lambda d, b: b.export([1, 2]),
    lambda d, b: p2pmem.Client(5),  # type: ignore[arg-type]
    lambda d, b: p2pmem.Device(5),  # type: ignore[arg-type]
    lambda d, b: Rules(5),  # type: ignore[arg-type]
    lambda d, b: p2pmem.Buffer(),
]


@pytest.mark.parametrize("case", range(len(WRONG)))
def test_wrong_types(device: p2pmem.Device, buffer: p2pmem.Buffer, case: int) -> None:
    with pytest.raises((TypeError, AttributeError)):
        WRONG[case](device, buffer)


def test_a_descriptor_that_is_not_open(device: p2pmem.Device, buffer: p2pmem.Buffer) -> None:
    for call in (lambda: device.import_buffer(99999), lambda: buffer.read_from(99999)):
        with pytest.raises(p2pmem.Error, match="99999 is not an open file descriptor") as caught:
            call()
        assert caught.value.errno == errno.EBADF


def test_an_unreachable_client(device: p2pmem.Device) -> None:
    with pytest.raises(p2pmem.NoProviderError) as caught:
        device.alloc(4096, near=NIC)
    assert caught.value.errno == errno.ENODEV and caught.value.full == ()
    explanation = device.explain_last()
    assert {verdict.code for verdict in explanation.verdicts} == {"unreachable"}
