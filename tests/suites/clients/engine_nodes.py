# SPDX-License-Identifier: MIT OR Apache-2.0
"""What the scripts for Mooncake and NIXL share: memory that /dev/p2pmem maps, and messages between the two nodes."""

import ctypes
import hashlib
import json
import mmap
import os
import socket

SIZE = 4 << 20


class Memory:
    """A mapping of /dev/p2pmem."""

    def __init__(self):
        self.file = os.open("/dev/p2pmem", os.O_RDWR | os.O_CLOEXEC)
        self.map = mmap.mmap(self.file, SIZE)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.map))

    def fill(self, data):
        self.map[:] = data

    def digest(self):
        return hashlib.sha256(self.map[:]).hexdigest()


class Peer:
    """A connection to the other node, which carries one value per line."""

    def __init__(self, connection):
        self.connection = connection
        self.stream = connection.makefile("rw")

    def send(self, value):
        self.stream.write(json.dumps(value) + "\n")
        self.stream.flush()

    def receive(self):
        """Returns the next value, or None if the other node has disconnected."""
        line = self.stream.readline()
        return json.loads(line) if line else None


def accept(port):
    return Peer(socket.create_server(("", port)).accept()[0])


def connect(address, port):
    return Peer(socket.create_connection((address, port)))


def serve(peer, memory):
    """Sends the digest of the memory each time that the other node asks, until it disconnects."""
    while peer.receive() is not None:
        peer.send(memory.digest())


def move(peer, memory, write, read):
    """Writes the memory to the other node and reads it back, and compares both with the data."""
    data = os.urandom(SIZE)
    wanted = hashlib.sha256(data).hexdigest()
    memory.fill(data)
    write()
    peer.send("digest")
    assert peer.receive() == wanted, "the memory of the other node does not have the written bytes"
    memory.fill(bytes(SIZE))
    read()
    assert memory.digest() == wanted, "the memory of this node does not have the read bytes"
    print(f"verified {2 * SIZE} bytes", flush=True)
