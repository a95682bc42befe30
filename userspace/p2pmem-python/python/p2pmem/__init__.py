# SPDX-License-Identifier: MIT OR Apache-2.0
"""PCI peer-to-peer memory: memory of accelerators and drives, allocated near the devices that use it.

Drives and NICs move data to and from this memory without a bounce buffer in host memory::

    import p2pmem

    with p2pmem.Device() as device:
        with device.alloc(16 << 20, near="nvme0") as buffer:
            count = buffer.read_from("/mnt/nvme0/samples")
            print(count, "bytes went from nvme0 to provider", buffer.provider)

- ``Device`` is an open ``/dev/p2pmem``: it lists providers and paths, allocates, and explains.
- ``Client`` is a device that does DMA, by its name.
- ``Buffer`` is an allocation, ``Mapping`` the program's access to it, ``DmaBuf`` the form that drivers and other processes use.
- ``DmaBuf(fd)`` is memory that another driver exported, such as CUDA's.
- ``Events`` reports providers that are added or removed.
- ``p2pmem.rules`` manages the administrator's rules.
- ``p2pmem.fake`` is a device without the module, for tests of programs.

Every failure of the library raises an ``Error``, an ``OSError`` whose ``remedy`` says what to do, if known.
"""

from ._errors import (
    AlreadyExistsError,
    BackendUnavailableError,
    BusyError,
    DeniedByRuleError,
    DirectIOError,
    Error,
    IncompatibleError,
    InvalidRequestError,
    ModuleMissingError,
    NoProviderError,
    NoSpaceError,
    NotFoundError,
    OutOfResourcesError,
    PermissionDeniedError,
    QuotaExceededError,
    RemovedError,
    TransferError,
    UnreachableError,
    UnsupportedError,
)
from ._native import Buffer, Client, Device, DmaBuf, Events, Mapping
from ._types import (
    BufferInfo,
    DecidingRule,
    Event,
    Explanation,
    FileRule,
    FullProvider,
    Holder,
    Info,
    Path,
    PathClass,
    Provider,
    Stats,
    Verdict,
)

__all__ = [
    "AlreadyExistsError",
    "BackendUnavailableError",
    "Buffer",
    "BufferInfo",
    "BusyError",
    "Client",
    "DecidingRule",
    "DeniedByRuleError",
    "Device",
    "DirectIOError",
    "DmaBuf",
    "Error",
    "Event",
    "Events",
    "Explanation",
    "FileRule",
    "FullProvider",
    "Holder",
    "IncompatibleError",
    "Info",
    "InvalidRequestError",
    "Mapping",
    "ModuleMissingError",
    "NoProviderError",
    "NoSpaceError",
    "NotFoundError",
    "OutOfResourcesError",
    "Path",
    "PathClass",
    "PermissionDeniedError",
    "Provider",
    "QuotaExceededError",
    "RemovedError",
    "Stats",
    "TransferError",
    "UnreachableError",
    "UnsupportedError",
    "Verdict",
]
