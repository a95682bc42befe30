#!/usr/bin/env python3
# SPDX-License-Identifier: MIT OR Apache-2.0
"""Moves accelerator memory between two nodes with Mooncake's transfer engine, and verifies the bytes.

    b# LD_PRELOAD=libp2pmem_preload.so ./mooncake_transfer.py mlx5_0 10.0.0.2 18530
    a# LD_PRELOAD=libp2pmem_preload.so ./mooncake_transfer.py mlx5_0 10.0.0.1 18530 --server 10.0.0.2

The buffer of each node is near its NIC. The engine registers memory by its address, so the program needs the preload shim.
"""

from __future__ import annotations

import argparse
import sys

import p2pmem
from mooncake.engine import TransferEngine

from two_nodes import NEEDS_SHIM, SIZE, Peer, arguments, serve, write_and_read_back


def move(engine: TransferEngine, buffer: p2pmem.Buffer, options: argparse.Namespace) -> int:
    """Serves, or moves data to and from the node that serves. Returns the exit code."""
    peer = Peer(options.server, options.port)
    if options.server is None:
        # The other node finds this engine and its memory by these values.
        peer.send([f"{options.address}:{engine.get_rpc_port()}", buffer.address])
        serve(peer, buffer)
        return 0
    target, remote = peer.receive()

    def write() -> None:
        check("write", engine.transfer_sync_write(target, buffer.address, remote, SIZE))

    def read() -> None:
        check("read", engine.transfer_sync_read(target, buffer.address, remote, SIZE))

    if not options.until_error:
        write_and_read_back(peer, buffer, write, read)
        return 0
    try:
        while True:
            write()
    except RuntimeError as error:
        # For example, because the provider of the other node's buffer was removed.
        print(error, flush=True)
        return 1


def check(what: str, result: int) -> None:
    if result != 0:
        raise RuntimeError(f"a {what} failed with {result}")


def main() -> int:
    options = arguments(__doc__)
    engine = TransferEngine()
    if engine.initialize(options.address, "P2PHANDSHAKE", "rdma", options.nic) != 0:
        sys.exit(f"the engine does not start with {options.nic}")
    with p2pmem.Device() as device, device.alloc(SIZE, near=options.nic) as buffer:
        if engine.register_memory(buffer.address, SIZE) != 0:
            sys.exit(f"the engine does not register the buffer: {NEEDS_SHIM}")
        try:
            return move(engine, buffer, options)
        finally:
            engine.unregister_memory(buffer.address)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except p2pmem.Error as error:
        sys.exit(f"{error}\n{error.remedy or ''}".strip())
