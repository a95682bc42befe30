# SPDX-License-Identifier: MIT OR Apache-2.0
"""The engines that move blocks: Mooncake's transfer engine, and NIXL with UCX. Both register memory by its address."""

from __future__ import annotations

import base64
import os
import time
from collections.abc import Sequence
from typing import Any, Protocol

from .cache import Memory

#: A piece to write: where it is here, where it goes there, and its size.
Piece = tuple[int, int, int]

#: What to do if an engine cannot register the memory.
NEEDS_SHIM = "start the program with LD_PRELOAD=libp2pmem_preload.so, and with P2PMEM_PRELOAD_LOG=1 to see each registration"


class TransferError(RuntimeError):
    """An engine cannot start, register, connect, or write."""


class Engine(Protocol):
    """Writes to the memory of another node by RDMA."""

    def register(self, memory: Memory) -> None:
        """Makes memory known to the NIC. An engine has one memory."""

    def node(self) -> dict[str, Any]:
        """Returns what the engine of the other node needs to know, for JSON."""

    def connect(self, node: dict[str, Any]) -> None:
        """Takes what the engine of the other node has returned."""

    def write(self, pieces: Sequence[Piece]) -> None:
        """Writes. Returns when the other node's memory has all bytes. Raises TransferError within the engine's limit."""

    def close(self) -> None:
        """Ends the registration."""


class Mooncake:
    """Mooncake's transfer engine."""

    def __init__(self, nic: str, address: str, limit: float) -> None:
        # The longest time of a transfer, in seconds.
        os.environ.setdefault("MC_TRANSFER_TIMEOUT", str(int(limit)))
        from mooncake.engine import TransferEngine

        self._engine = TransferEngine()
        self._address, self._target = address, ""
        self._memory: Memory | None = None
        if self._engine.initialize(address, "P2PHANDSHAKE", "rdma", nic) != 0:
            raise TransferError(f"Mooncake does not start with {nic}: does rdma link show it as active?")

    def register(self, memory: Memory) -> None:
        if self._engine.register_memory(memory.address, memory.size) != 0:
            raise TransferError(f"Mooncake does not register the memory: {NEEDS_SHIM}")
        self._memory = memory

    def node(self) -> dict[str, Any]:
        return {"server": f"{self._address}:{self._engine.get_rpc_port()}"}

    def connect(self, node: dict[str, Any]) -> None:
        self._target = str(node.get("server"))

    def write(self, pieces: Sequence[Piece]) -> None:
        here, there, sizes = (list(column) for column in zip(*pieces))
        result = self._engine.batch_transfer_sync_write(self._target, here, there, sizes)
        if result != 0:
            raise TransferError(f"a write of Mooncake to {self._target} failed with {result}: is the other node alive?")

    def close(self) -> None:
        if self._memory is not None:
            self._engine.unregister_memory(self._memory.address)


class Nixl:
    """NIXL with its backend UCX."""

    def __init__(self, nic: str, address: str, limit: float) -> None:
        os.environ.setdefault("UCX_TLS", "rc_x")
        os.environ.setdefault("UCX_NET_DEVICES", f"{nic}:1")
        # Otherwise the processor copies small pieces into UCX's own buffers.
        os.environ.setdefault("UCX_ZCOPY_THRESH", "0")
        from nixl_cu12 import nixl_agent, nixl_agent_config

        self._limit, self._other = limit, ""
        self._agent = nixl_agent(address, nixl_agent_config(backends=["UCX"]))
        self._memory: Any = None

    def register(self, memory: Memory) -> None:
        # Device memory that has an address of the process is DRAM for NIXL; VRAM is memory of CUDA.
        descriptors = self._agent.get_reg_descs([(memory.address, memory.size, 0, "")], "DRAM")
        try:
            self._memory = self._agent.register_memory(descriptors)
        except Exception as error:
            raise TransferError(f"NIXL does not register the memory: {error!r}: {NEEDS_SHIM}") from error

    def node(self) -> dict[str, Any]:
        return {"metadata": base64.b64encode(self._agent.get_agent_metadata()).decode()}

    def connect(self, node: dict[str, Any]) -> None:
        try:
            self._other = self._agent.add_remote_agent(base64.b64decode(str(node.get("metadata"))))
        except Exception as error:
            raise TransferError(f"NIXL does not accept the other node: {error!r}: use the same version on both") from error

    def write(self, pieces: Sequence[Piece]) -> None:
        end = time.monotonic() + self._limit
        try:
            ours = self._agent.get_xfer_descs([(here, size, 0) for here, _, size in pieces], "DRAM")
            theirs = self._agent.get_xfer_descs([(there, size, 0) for _, there, size in pieces], "DRAM")
            handle = self._agent.initialize_xfer("WRITE", ours, theirs, self._other)
            state = self._agent.transfer(handle)
            while state == "PROC" and time.monotonic() < end:
                # A thread of NIXL makes progress.
                os.sched_yield()
                state = self._agent.check_xfer_state(handle)
            if state == "DONE":
                self._agent.release_xfer_handle(handle)
        except Exception as error:
            raise TransferError(f"a write of NIXL failed with {error!r}: is the other node alive?") from error
        if state != "DONE":
            raise TransferError(f"a write of NIXL has the state {state} after at most {self._limit:g} s: is the other node alive?")

    def close(self) -> None:
        if self._memory is not None:
            self._agent.deregister_memory(self._memory)


#: The engines by their names.
ENGINES: dict[str, type[Mooncake] | type[Nixl]] = {"mooncake": Mooncake, "nixl": Nixl}
