# SPDX-License-Identifier: MIT OR Apache-2.0
"""The exceptions: one class for each kind of error of the library."""

from __future__ import annotations

from typing import Any, ClassVar

from ._types import FullProvider, full_provider


class Error(OSError):
    """An error of the library or the module.

    ``str()`` is the message: what failed and why. ``errno`` is the error number, always set. Programs react to the class.
    """

    #: The kind of the error, as in the library and in the JSON of p2pmemctl.
    kind: ClassVar[str] = "other"

    #: What to do about the error, if known.
    remedy: str | None
    #: The module's message, if the module refused the call and stored one.
    reason: str | None
    #: The providers without enough space for an allocation that failed for this reason.
    full: tuple[FullProvider, ...]

    def __init__(
        self,
        errno: int,
        message: str,
        *,
        reason: str | None = None,
        remedy: str | None = None,
        full: tuple[FullProvider, ...] = (),
    ) -> None:
        super().__init__(errno, message)
        self.reason = reason
        self.remedy = remedy
        self.full = full
        # Tracebacks of Python 3.11 and later show notes.
        if remedy is not None and hasattr(self, "add_note"):
            self.add_note(f"remedy: {remedy}")

    def __str__(self) -> str:
        return str(self.strerror)


class ModuleMissingError(Error):
    """The module is not loaded, or was unloaded."""

    kind = "module-missing"


class BackendUnavailableError(Error):
    """A backend other than the module has no memory that this program can use."""

    kind = "backend-unavailable"


class IncompatibleError(Error):
    """Module, libraries, and this package are of versions that do not work together."""

    kind = "incompatible"


class PermissionDeniedError(Error, PermissionError):
    """The user may not do this."""

    kind = "permission-denied"


class DeniedByRuleError(Error, PermissionError):
    """A rule denies the memory."""

    kind = "denied-by-rule"


class InvalidRequestError(Error, ValueError):
    """The arguments are invalid."""

    kind = "invalid-request"


class NotFoundError(Error, FileNotFoundError):
    """A device, a provider, a file, or a rule does not exist."""

    kind = "not-found"


class AlreadyExistsError(Error, FileExistsError):
    """A published device, a rule, or a file exists already."""

    kind = "already-exists"


class BusyError(Error):
    """Another driver or program has the device."""

    kind = "busy"


class NoProviderError(Error):
    """No provider can serve the request, no matter how much is freed."""

    kind = "no-provider"


class NoSpaceError(Error):
    """The suitable providers do not have enough free memory now. ``full`` has these providers."""

    kind = "no-space"


class QuotaExceededError(Error):
    """A quota is used up."""

    kind = "quota-exceeded"


class OutOfResourcesError(Error):
    """The NIC or the kernel has no memory or descriptors left."""

    kind = "out-of-resources"


class RemovedError(Error):
    """The provider was removed, and its buffers with it. Allocate again."""

    kind = "removed"


class UnreachableError(Error):
    """A device cannot reach the provider's memory."""

    kind = "unreachable"


class UnsupportedError(Error):
    """Kernel, driver, drive, or library cannot do this."""

    kind = "unsupported"


class DirectIOError(Error):
    """Reading or writing a file failed."""

    kind = "io"


class TransferError(Error):
    """A step of an RDMA transfer failed."""

    kind = "transfer"


_BY_KIND: dict[str, type[Error]] = {
    error.kind: error
    for error in (
        ModuleMissingError,
        BackendUnavailableError,
        IncompatibleError,
        PermissionDeniedError,
        DeniedByRuleError,
        InvalidRequestError,
        NotFoundError,
        AlreadyExistsError,
        BusyError,
        NoProviderError,
        NoSpaceError,
        QuotaExceededError,
        OutOfResourcesError,
        RemovedError,
        UnreachableError,
        UnsupportedError,
        DirectIOError,
        TransferError,
    )
}

# Tracebacks name the classes as programs do.
for _error in (Error, *_BY_KIND.values()):
    _error.__module__ = "p2pmem"


def make(
    kind: str,
    errno: int,
    message: str,
    *,
    reason: str | None = None,
    remedy: str | None = None,
    full: list[dict[str, Any]] | None = None,
) -> Error:
    """Makes the exception for an error of the library."""
    error = _BY_KIND.get(kind, Error)
    providers = tuple(full_provider(fields) for fields in full or ())
    return error(errno, message, reason=reason, remedy=remedy, full=providers)
