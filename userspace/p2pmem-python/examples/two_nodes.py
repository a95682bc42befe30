# SPDX-License-Identifier: MIT OR Apache-2.0
"""What the examples for Mooncake and NIXL share: their arguments, a connection between two nodes, and the comparison of bytes."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import socket
from collections.abc import Callable
from typing import Any

import p2pmem

#: Bytes of the buffer on each node.
SIZE = 4 << 20

#: What to do if an engine cannot register the memory.
NEEDS_SHIM = "start the program with LD_PRELOAD=libp2pmem_preload.so, and with P2PMEM_PRELOAD_LOG=1 to see each registration"


def arguments(description: str | None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("nic", help="RDMA device of this node, such as mlx5_0")
    parser.add_argument("address", help="IP address of this node")
    parser.add_argument("port", type=int, help="TCP port of the node that serves")
    parser.add_argument("--server", metavar="ADDRESS", help="move data to and from this node; without it, serve")
    parser.add_argument("--until-error", action="store_true", help="write until a write fails, and exit with code 1")
    return parser.parse_args()


class Peer:
    """A connection to the other node. It carries JSON values, one per line."""

    def __init__(self, server: str | None, port: int) -> None:
        if server is None:
            self._connection = socket.create_server(("", port)).accept()[0]
        else:
            self._connection = socket.create_connection((server, port))
        self._stream = self._connection.makefile("rw")

    def send(self, value: Any) -> None:
        self._stream.write(json.dumps(value) + "\n")
        self._stream.flush()

    def receive(self) -> Any:
        """Returns the next value. Raises EOFError if the other node has disconnected."""
        line = self._stream.readline()
        if not line:
            raise EOFError("the other node has disconnected")
        return json.loads(line)


def digest(buffer: p2pmem.Buffer) -> str:
    """The hash of the buffer's bytes. The processor reads them, which is slow."""
    return hashlib.sha256(buffer.read()).hexdigest()


def serve(peer: Peer, buffer: p2pmem.Buffer) -> None:
    """Sends the hash of the buffer each time that the other node asks, until it disconnects."""
    while True:
        try:
            peer.receive()
        except EOFError:
            return
        peer.send(digest(buffer))


def write_and_read_back(
    peer: Peer, buffer: p2pmem.Buffer, write: Callable[[], None], read: Callable[[], None]
) -> None:
    """Writes random bytes to the other node's buffer, reads them back, and compares them on both nodes."""
    data = os.urandom(SIZE)
    wanted = hashlib.sha256(data).hexdigest()
    buffer.write(data)
    # The NIC sees the bytes that the processor wrote.
    buffer.flush()
    write()
    peer.send("digest")
    if peer.receive() != wanted:
        raise RuntimeError("the other node's buffer does not have the written bytes")
    buffer.fill(0)
    buffer.flush()
    read()
    if digest(buffer) != wanted:
        raise RuntimeError("this node's buffer does not have the read bytes")
    print(f"verified {2 * SIZE} bytes", flush=True)
