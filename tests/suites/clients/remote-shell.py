#!/usr/bin/python3
# SPDX-License-Identifier: MIT OR Apache-2.0
"""Runs a command of another node, as ssh does, for programs that start their processes by ssh.

    remote-shell.py serve               runs one command that another node sends, and ends with its exit code
    remote-shell.py ADDRESS COMMAND...  sends a command, and ends after it
"""

import socket
import subprocess
import sys
import time

PORT = 7222
# Longest wait until the other node serves, in seconds.
LIMIT = 30


def serve():
    peer, _ = socket.create_server(("", PORT)).accept()
    with peer:
        command = peer.makefile().readline()
        code = subprocess.run(["bash", "-c", command], stdin=subprocess.DEVNULL, check=False).returncode
    sys.exit(code)


def connect(address):
    """Returns a connection to a node, which may start to serve later than this."""
    deadline = time.monotonic() + LIMIT
    while True:
        try:
            return socket.create_connection((address, PORT))
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def call(address, command):
    with connect(address) as peer:
        peer.sendall(command.encode() + b"\n")
        peer.recv(1)


if sys.argv[1] == "serve":
    serve()
else:
    call(sys.argv[1], " ".join(sys.argv[2:]))
