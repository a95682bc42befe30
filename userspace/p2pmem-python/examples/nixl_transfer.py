#!/usr/bin/env python3
# SPDX-License-Identifier: MIT OR Apache-2.0
"""Moves accelerator memory between two nodes with NIXL and its backend UCX, and verifies the bytes.

    b# LD_PRELOAD=libp2pmem_preload.so ./nixl_transfer.py mlx5_0 10.0.0.2 18531
    a# LD_PRELOAD=libp2pmem_preload.so ./nixl_transfer.py mlx5_0 10.0.0.1 18531 --server 10.0.0.2

The buffer of each node is near its NIC. UCX registers memory by its address, so the program needs the preload shim. UCX_TLS
and UCX_NET_DEVICES select other transports and devices.
"""

from __future__ import annotations

import argparse
import base64
import os
import sys
import traceback

import p2pmem
from nixl_cu12 import nixl_agent, nixl_agent_config

from two_nodes import NEEDS_SHIM, SIZE, Peer, arguments, serve, write_and_read_back


def move(agent: nixl_agent, buffer: p2pmem.Buffer, options: argparse.Namespace) -> int:
    """Serves, or moves data to and from the node that serves. Returns the exit code."""
    peer = Peer(options.server, options.port)
    peer.send([base64.b64encode(agent.get_agent_metadata()).decode(), buffer.address])
    metadata, remote = peer.receive()
    other = agent.add_remote_agent(base64.b64decode(metadata))
    if options.server is None:
        serve(peer, buffer)
        return 0

    def transfer(operation: str) -> None:
        ours = agent.get_xfer_descs([(buffer.address, SIZE, 0)], "DRAM")
        theirs = agent.get_xfer_descs([(remote, SIZE, 0)], "DRAM")
        handle = agent.initialize_xfer(operation, ours, theirs, other)
        state = agent.transfer(handle)
        while state == "PROC":
            state = agent.check_xfer_state(handle)
        agent.release_xfer_handle(handle)
        if state != "DONE":
            raise RuntimeError(f"the state is {state}")

    if not options.until_error:
        write_and_read_back(peer, buffer, lambda: transfer("WRITE"), lambda: transfer("READ"))
        return 0
    try:
        while True:
            transfer("WRITE")
    # For example, because the provider of the other node's buffer was removed. NIXL raises exceptions of its own for some
    # errors, and returns a state for others.
    except Exception as error:
        print(f"a write failed with {error!r}", flush=True)
        return 1


def main() -> int:
    options = arguments(__doc__)
    os.environ.setdefault("UCX_TLS", "rc_x")
    os.environ.setdefault("UCX_NET_DEVICES", f"{options.nic}:1")
    with p2pmem.Device() as device, device.alloc(SIZE, near=options.nic) as buffer:
        agent = nixl_agent(options.address, nixl_agent_config(backends=["UCX"]))
        try:
            # Device memory that has an address of the process is DRAM for NIXL; VRAM is memory of CUDA.
            memory = agent.register_memory(agent.get_reg_descs([(buffer.address, SIZE, 0, "")], "DRAM"))
        except Exception as error:
            raise RuntimeError(f"NIXL does not register the buffer: {error!r}\n{NEEDS_SHIM}") from error
        code = move(agent, buffer, options)
        # After an error, the end of the process frees the registration: UCX may still wait for the node that failed.
        if code == 0:
            agent.deregister_memory(memory)
        return code


if __name__ == "__main__":
    try:
        code = main()
    except p2pmem.Error as error:
        print(f"{error}\n{error.remedy or ''}".strip(), file=sys.stderr)
        code = 1
    except Exception:
        traceback.print_exc()
        code = 1
    # Without the destructors of the wheel's copy of libnl, which crash if the system's libnl is loaded too, also without p2pmem.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
