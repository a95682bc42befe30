#!/usr/bin/python3
# SPDX-License-Identifier: MIT OR Apache-2.0
"""Runs a command of another node, as ssh does, for programs that start their processes by ssh.

    remote-shell.py serve               runs one command that another node sends, and ends with its exit code
    remote-shell.py ADDRESS COMMAND...  sends a command, and ends after it
"""

import socket
import subprocess
import sys

PORT = 7222


def serve():
    peer, _ = socket.create_server(("", PORT)).accept()
    with peer:
        command = peer.makefile().readline()
        code = subprocess.run(["bash", "-c", command], stdin=subprocess.DEVNULL, check=False).returncode
    sys.exit(code)


def call(address, command):
    with socket.create_connection((address, PORT)) as peer:
        peer.sendall(command.encode() + b"\n")
        peer.recv(1)


if sys.argv[1] == "serve":
    serve()
else:
    call(sys.argv[1], " ".join(sys.argv[2:]))
