#!/usr/bin/python3
# SPDX-License-Identifier: MIT OR Apache-2.0
"""Moves memory that /dev/p2pmem maps between two nodes by Mooncake's transfer engine. Needs the preload shim.

    mooncake-transfer.py serve NIC ADDRESS PORT             on the node with this address
    mooncake-transfer.py move NIC ADDRESS PORT SERVER       writes, reads back, and verifies; prints "verified N bytes"
    mooncake-transfer.py exhaust NIC ADDRESS PORT SERVER    writes until a write fails; prints "failed with N", and exits with 1

ADDRESS is the address of the node itself, SERVER that of the node that serves on PORT.
"""

import sys

from mooncake.engine import TransferEngine

from engine_nodes import SIZE, Memory, accept, connect, move, serve


def main():
    what, nic, address, port, *server = sys.argv[1:]
    memory, engine = Memory(), TransferEngine()
    assert engine.initialize(address, "P2PHANDSHAKE", "rdma", nic) == 0, "the engine does not start"
    assert engine.register_memory(memory.address, SIZE) == 0, "the engine does not register the memory"
    if what == "serve":
        peer = accept(int(port))
        peer.send([f"{address}:{engine.get_rpc_port()}", memory.address])
        serve(peer, memory)
        return
    peer = connect(server[0], int(port))
    target, remote = peer.receive()

    def write():
        return engine.transfer_sync_write(target, memory.address, remote, SIZE)

    def read():
        return engine.transfer_sync_read(target, memory.address, remote, SIZE)

    def check(result):
        assert result == 0, f"a transfer failed with {result}"

    if what == "move":
        move(peer, memory, lambda: check(write()), lambda: check(read()))
        engine.unregister_memory(memory.address)
        return
    while (result := write()) == 0:
        pass
    print(f"failed with {result}", flush=True)
    sys.exit(1)


main()
