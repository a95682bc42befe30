#!/usr/bin/python3
# SPDX-License-Identifier: MIT OR Apache-2.0
"""Runs a program, and does something to it or to its memory when nic0 of this node has moved another MiB of payload. Fails if the
program ends before. Waits for the program, and prints its exit code as a shell does.

    while-moving.py kill PROGRAM ARGUMENT...            kills the program
    while-moving.py unbind DEVICE PROGRAM ARGUMENT...   unbinds DEVICE (fpga0, say), and publishes it again when the program has ended
    while-moving.py replace DEVICE PROGRAM ARGUMENT...  unbinds DEVICE and publishes it again, while the program runs
"""

import os
import pathlib
import subprocess
import sys

from runner import request_runner

NAME = pathlib.Path(sys.argv[0]).stem


def moved():
    payload = request_runner({"op": "snapshot"})["nic0"]["counters"]["payload"]
    return sum(payload[name] for name in ("host_read", "host_written", "peer_read", "peer_written"))


def publish(address):
    os.rmdir(f"/sys/kernel/config/p2pmem/providers/{address}")
    subprocess.run([pathlib.Path(os.environ["P2PMEM_CLIENTS"]) / "transfer-node.sh"], check=True)


def main():
    action, *words = sys.argv[1:]
    address = None if action == "kill" else os.environ[f"P2PMEM_DEV_{words.pop(0).upper()}"]
    before = moved()
    program = subprocess.Popen(words)
    # The harness limits the time of this loop.
    while moved() < before + (1 << 20):
        if program.poll() is not None:
            sys.exit(f"{NAME}: the program ended with {program.returncode}")
    if address is None:
        program.kill()
    else:
        pathlib.Path("/sys/bus/pci/drivers/p2pmem/unbind").write_text(address, encoding="ascii")
    if action == "replace":
        publish(address)
    code = program.wait()
    print(f"the program ended with {code if code >= 0 else 128 - code}", flush=True)
    if action == "unbind":
        publish(address)


main()
