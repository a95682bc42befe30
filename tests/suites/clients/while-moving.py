#!/usr/bin/python3
# SPDX-License-Identifier: MIT OR Apache-2.0
"""Runs a program, and does something to it or to its memory when nic0 of this node has moved some payload meanwhile. Fails if the
program ends before. Waits for the program, and prints its exit code as a shell does."""

import argparse
import os
import pathlib
import subprocess
import sys

from runner import request_runner

NAME = pathlib.Path(sys.argv[0]).stem


def parse():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--after", type=int, default=1 << 20, metavar="BYTES", help="payload that the NIC moves before")
    actions = parser.add_subparsers(dest="action", required=True)
    for name, what in (
        ("kill", "kill the program"),
        ("unbind", "unbind the device, and publish it again when the program has ended"),
        ("replace", "unbind the device and publish it again, while the program runs"),
    ):
        action = actions.add_parser(name, help=what)
        if name != "kill":
            action.add_argument("device", help="fpga0, say")
        action.add_argument("program", nargs=argparse.REMAINDER)
    return parser.parse_args()


def moved():
    payload = request_runner({"op": "snapshot"})["nic0"]["counters"]["payload"]
    return sum(payload[name] for name in ("host_read", "host_written", "peer_read", "peer_written"))


def publish(address):
    os.rmdir(f"/sys/kernel/config/p2pmem/providers/{address}")
    subprocess.run([pathlib.Path(os.environ["P2PMEM_CLIENTS"]) / "transfer-node.sh"], check=True)


def main():
    args = parse()
    address = None if args.action == "kill" else os.environ[f"P2PMEM_DEV_{args.device.upper()}"]
    before = moved()
    program = subprocess.Popen(args.program)
    # The harness limits the time of this loop.
    while moved() < before + args.after:
        if program.poll() is not None:
            sys.exit(f"{NAME}: the program ended with {program.returncode}")
    if address is None:
        program.kill()
    else:
        pathlib.Path("/sys/bus/pci/drivers/p2pmem/unbind").write_text(address, encoding="ascii")
    if args.action == "replace":
        publish(address)
    code = program.wait()
    print(f"the program ended with {code if code >= 0 else 128 - code}", flush=True)
    if args.action == "unbind":
        publish(address)


main()
