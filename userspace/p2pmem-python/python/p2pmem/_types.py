# SPDX-License-Identifier: MIT OR Apache-2.0
"""Results of the library as dataclasses. The functions make them of the library's fields."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Union

if TYPE_CHECKING:
    from ._native import Client

Fields = dict[str, Any]


class PathClass(str, enum.Enum):
    """How far a provider is from a client. Smaller is nearer."""

    SAME_DEVICE = "same-device"
    SAME_SWITCH = "same-switch"
    SWITCHES = "switches"
    HOST_BRIDGE = "host-bridge"
    NUMA_NODE = "numa-node"
    SYSTEM = "system"
    UNREACHABLE = "unreachable"

    @property
    def short(self) -> str:
        """The short name, as in the output of ``p2pmemctl topo``."""
        return _SHORT[self]

    def __str__(self) -> str:
        return self.value

    def _compare(self, other: object) -> int | None:
        if not isinstance(other, PathClass):
            return None
        order = list(PathClass)
        return order.index(self) - order.index(other)

    def __lt__(self, other: object) -> bool:
        difference = self._compare(other)
        return NotImplemented if difference is None else difference < 0

    def __le__(self, other: object) -> bool:
        difference = self._compare(other)
        return NotImplemented if difference is None else difference <= 0

    def __gt__(self, other: object) -> bool:
        difference = self._compare(other)
        return NotImplemented if difference is None else difference > 0

    def __ge__(self, other: object) -> bool:
        difference = self._compare(other)
        return NotImplemented if difference is None else difference >= 0


_SHORT = dict(zip(PathClass, ("DEV", "SW", "SWS", "PHB", "NODE", "SYS", "--")))

#: A path class, or its name in long or short form.
AnyPathClass = Union[
    PathClass,
    Literal["same-device", "same-switch", "switches", "host-bridge", "numa-node", "system"],
    Literal["DEV", "SW", "SWS", "PHB", "NODE", "SYS"],
]


@dataclass(frozen=True)
class Info:
    """The module, and the totals of all its providers."""

    #: Version of the ABI.
    abi_version: int
    #: The oldest version of the ABI whose programs work with the module.
    abi_compatible: int
    #: Version of the module.
    version: str
    #: Granularity of buffers and mappings in bytes.
    page_size: int
    #: ``P2PMEM_FEATURE_*`` bits.
    features: int
    #: Number of providers.
    providers: int
    #: Number of live buffers of all programs.
    buffers: int
    #: Bytes in all providers.
    size: int
    #: Free bytes in all providers.
    free: int
    #: Changes when a provider is added or removed, or paths were computed again.
    generation: int


@dataclass(frozen=True)
class Provider:
    """A device with published memory."""

    #: The number of the provider: never 0, never used twice while the module is loaded.
    id: int
    kind: Literal["own", "adopted", "registered", "unknown"]
    #: The PCI function, such as ``0000:03:00.0``.
    addr: str
    state: Literal["live", "revoking", "unknown"]
    #: The BAR, if known.
    bar: int | None
    #: The NUMA node of the function, if it has one.
    numa_node: int | None
    #: Number of live buffers.
    buffers: int
    #: First published byte in the BAR.
    bar_offset: int
    #: Bytes that p2pmem manages.
    size: int
    #: Free bytes.
    free: int
    #: The largest contiguous piece that an allocation could get now, in bytes.
    largest: int
    #: Bytes that stay with the kernel's own users.
    kernel_reserve: int
    #: Bytes of freed buffers that wait for the end of DMA or page references.
    pinned: int
    #: Bytes of freed buffers that wait to be cleared.
    scrubbing: int
    #: PCI vendor id.
    vendor: int
    #: PCI device id.
    device: int
    #: PCI class code, 24 bits.
    class_code: int
    #: Without struct pages: direct I/O does not work.
    pageless: bool
    #: Buffers can be exported as dma-bufs.
    exportable: bool
    #: The administrator allows exports to importers that cannot be revoked.
    pinned_exports: bool
    #: Number of dma-bufs that are not closed.
    exports: int
    #: The driver of the function.
    driver: str | None


@dataclass(frozen=True)
class Path:
    """The path between a provider and a client."""

    #: Id of the provider.
    provider: int
    #: Index of the client in the arguments.
    client: int
    path_class: PathClass
    #: A port on the path redirects peer traffic upstream by ACS.
    acs_redirect: bool
    #: Peer traffic stays below the common bridge and uses bus addresses.
    bus_addr: bool
    #: Number of links.
    hops: int
    #: The distance that the kernel computes; None if unreachable.
    distance: int | None
    #: Bandwidth of the slowest link in MB/s in one direction, if known.
    bandwidth: int | None
    #: NUMA distance (10 is local), if both have a node.
    numa_distance: int | None
    #: The lowest bridge above both; None for the root complex.
    bridge: str | None


@dataclass(frozen=True)
class Stats:
    """Counters of a provider since it was added, or of the whole module."""

    #: Allocated buffers, and their bytes.
    allocs: int
    #: Buffers whose memory was returned.
    frees: int
    #: Requests that no provider served.
    failed: int
    alloc_bytes: int
    free_bytes: int
    #: Mappings in user space.
    maps: int
    #: Bytes that were cleared between owners.
    scrubbed_bytes: int
    #: Freed buffers that had to wait for page references.
    pinned: int
    #: Buffers that were revoked.
    revoked: int
    #: Dma-bufs.
    exports: int
    #: Importers that attached to dma-bufs, and those that were refused.
    attaches: int
    attach_failed: int


@dataclass(frozen=True)
class BufferInfo:
    """The state of a buffer at one moment."""

    #: Id of the provider.
    provider: int
    #: Size in bytes.
    size: int
    #: Offset of the first byte in the provider's BAR, if known.
    bar_offset: int | None
    #: Address on the provider's PCI bus; None without CAP_SYS_ADMIN.
    bus_addr: int | None
    state: Literal["live", "revoking", "gone", "unknown"]
    #: Mappings in user space, of all processes.
    mappings: int
    #: Dma-bufs that are not closed.
    exports: int
    #: Importers that are attached to these dma-bufs.
    attachments: int
    #: Handles on all open files: more than one if the buffer was imported.
    handles: int


@dataclass(frozen=True)
class Holder:
    """The share of a process in the memory of a provider."""

    #: Process id and name, such as ``pid 812 (ib_write_bw)``.
    owner: str
    #: Number of buffers.
    buffers: int
    #: Their bytes.
    size: int


@dataclass(frozen=True)
class FullProvider:
    """A provider without enough space for a request."""

    provider: Provider
    #: The processes that hold buffers, those with the most bytes first; None if the program may not read this.
    holders: tuple[Holder, ...] | None


@dataclass(frozen=True)
class DecidingRule:
    """The rule that decided about a provider."""

    name: str
    #: Whether it is a rule of the open file, and not of the administrator.
    own: bool


@dataclass(frozen=True)
class Verdict:
    """Why a provider was or was not chosen, and the numbers behind this."""

    #: Id of the provider.
    provider: int
    #: Its PCI function.
    addr: str
    #: The verdict, such as ``chosen``, ``unreachable``, ``full``, ``class``, ``denied``.
    code: str
    #: The verdict as a message, with the numbers that matter.
    why: str
    rule: DecidingRule | None
    #: The client that is farthest from the provider, or cannot reach it.
    worst_client: str | None
    #: Class of the path to this client.
    path_class: PathClass | None
    #: Sum of the links to all clients.
    hops: int
    bandwidth: int | None
    numa_distance: int | None
    size: int
    free: int
    largest: int


@dataclass(frozen=True)
class Explanation:
    """A decision: the provider that was chosen or the reason for none, and a verdict for each provider."""

    #: Id of the chosen provider.
    chosen: int | None
    #: The errno of the decision, if no provider was chosen.
    errno: int | None
    #: The module's message.
    text: str
    #: One verdict for each provider, in the order of their ids.
    verdicts: tuple[Verdict, ...]
    #: The explanation for a reader: the result, then a line for each provider.
    lines: tuple[str, ...]

    def __str__(self) -> str:
        return "\n".join(self.lines)


@dataclass(frozen=True)
class Event:
    """A provider was added or removed, or a buffer of the device was revoked."""

    kind: Literal["provider-added", "provider-removed", "buffer-revoked", "lost", "unknown"]
    #: Time of the event, in nanoseconds of ``time.CLOCK_MONOTONIC``.
    time_ns: int
    #: The event as a message.
    text: str
    #: Id of the provider.
    provider: int | None = None
    #: Handle of the buffer that was revoked.
    handle: int | None = None
    #: Number of events that were lost because the program did not read them: list the providers again.
    count: int | None = None
    #: The number of an event that this package does not know.
    code: int | None = None

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class FileRule:
    """A rule of one open device, for ``Device.set_rules()``. An attribute that is None matches everything, or sets nothing."""

    #: The name in verdicts and messages: up to 31 letters, digits, dots, dashes, and underscores.
    name: str
    #: The provider, or its PCI address.
    provider: Provider | str | None = None
    #: The client, or its PCI address.
    client: Client | str | None = None
    action: Literal["allow", "deny", "prefer", "avoid"] | None = None
    #: The farthest path class.
    max_class: AnyPathClass | None = None
    #: Bytes that may be held through the open device, in all providers.
    quota: int | None = None


def _class(fields: Fields, name: str = "path_class") -> Fields:
    """Replaces the field ``class``, a keyword of Python."""
    fields = dict(fields)
    fields[name] = path_class(fields.pop("class"))
    return fields


def path_class(name: str | None) -> PathClass | None:
    return None if name is None else PathClass(name)


def info(fields: Fields) -> Info:
    return Info(**fields)


def provider(fields: Fields) -> Provider:
    fields = dict(fields)
    fields["class_code"] = fields.pop("class")
    return Provider(**fields)


def path(fields: Fields) -> Path:
    return Path(**_class(fields))


def stats(fields: Fields) -> Stats:
    return Stats(**fields)


def buffer_info(fields: Fields) -> BufferInfo:
    return BufferInfo(**fields)


def holder(fields: Fields) -> Holder:
    return Holder(**fields)


def full_provider(fields: Fields) -> FullProvider:
    holders = fields["holders"]
    return FullProvider(
        provider(fields["provider"]),
        None if holders is None else tuple(holder(each) for each in holders),
    )


def verdict(fields: Fields) -> Verdict:
    fields = _class(fields)
    rule = fields.pop("rule")
    return Verdict(rule=None if rule is None else DecidingRule(**rule), **fields)


def explanation(fields: Fields, lines: list[str]) -> Explanation:
    fields = dict(fields)
    verdicts = tuple(verdict(each) for each in fields.pop("verdicts"))
    return Explanation(verdicts=verdicts, lines=tuple(lines), **fields)


def event(fields: Fields, text: str) -> Event:
    fields = dict(fields)
    return Event(kind=fields.pop("event"), text=text, **fields)


def rule_state(fields: Fields) -> Any:
    from . import rules

    return rules.rule_state(fields)


def loaded(fields: Fields) -> Any:
    from . import rules

    return rules.loaded(fields)
