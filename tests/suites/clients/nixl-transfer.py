#!/usr/bin/python3
# SPDX-License-Identifier: MIT OR Apache-2.0
"""Moves memory that /dev/p2pmem maps between two nodes by NIXL with its backend UCX. Needs the preload shim.

    nixl-transfer.py serve PORT
    nixl-transfer.py move PORT SERVER       writes, reads back, and verifies; prints "verified N bytes"
    nixl-transfer.py exhaust PORT SERVER    writes until a write fails; prints the error, and exits with 1

The program ends by _exit(): the wheel has its own copy of libnl, and its destructors crash if the system's libnl is loaded too,
also without p2pmem.
"""

import base64
import os
import sys

from nixl_cu12 import nixl_agent, nixl_agent_config

from engine_nodes import SIZE, Memory, accept, connect, move, serve


def main():
    what, port, *server = sys.argv[1:]
    memory = Memory()
    agent = nixl_agent(what, nixl_agent_config(backends=["UCX"]))
    agent.register_memory(agent.get_reg_descs([(memory.address, SIZE, 0, "")], "DRAM"))
    peer = connect(server[0], int(port)) if server else accept(int(port))
    peer.send([base64.b64encode(agent.get_agent_metadata()).decode(), memory.address])
    metadata, remote = peer.receive()
    other = agent.add_remote_agent(base64.b64decode(metadata))
    if what == "serve":
        serve(peer, memory)
        return 0

    def transfer(operation):
        ours = agent.get_xfer_descs([(memory.address, SIZE, 0)], "DRAM")
        theirs = agent.get_xfer_descs([(remote, SIZE, 0)], "DRAM")
        handle = agent.initialize_xfer(operation, ours, theirs, other)
        state = agent.transfer(handle)
        while state == "PROC":
            state = agent.check_xfer_state(handle)
        agent.release_xfer_handle(handle)
        assert state == "DONE", f"a transfer ended with {state}"

    if what == "move":
        move(peer, memory, lambda: transfer("WRITE"), lambda: transfer("READ"))
        return 0
    try:
        while True:
            transfer("WRITE")
    # NIXL raises an exception for some errors, and returns a state for others.
    except Exception as error:
        print(f"failed with {error!r}", flush=True)
        return 1


code = main()
sys.stderr.flush()
os._exit(code)
