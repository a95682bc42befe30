#!/usr/bin/python3
# SPDX-License-Identifier: MIT OR Apache-2.0
"""Enables and disables namespaces of this node's nvmet subsystems, as a program of another node requests it.

    nvmet-namespaces.py PORT

Each line of the connection is a request: `disable SUBSYSTEM` or `enable SUBSYSTEM`. The answer is `done`. The end of the connection
ends this program. All namespaces are enabled then.
"""

import pathlib
import socket
import sys

ENABLE = {"disable": "0", "enable": "1"}


def set_enabled(subsystem, value):
    """Sets `enable` of a subsystem's namespace, unless it has the value."""
    file = pathlib.Path("/sys/kernel/config/nvmet/subsystems", subsystem, "namespaces/1/enable")
    if file.read_text(encoding="ascii").strip() != value:
        file.write_text(value, encoding="ascii")


def main():
    """Handles the requests of one connection."""
    disabled = set()
    with socket.create_server(("", int(sys.argv[1]))) as listener:
        peer, _ = listener.accept()
    try:
        with peer, peer.makefile("rw") as peer_file:
            for line in peer_file:
                action, subsystem = line.split()
                (disabled.add if action == "disable" else disabled.discard)(subsystem)
                set_enabled(subsystem, ENABLE[action])
                print("done", file=peer_file, flush=True)
    finally:
        for subsystem in disabled:
            set_enabled(subsystem, "1")


main()
