#!/usr/bin/python3
# SPDX-License-Identifier: MIT OR Apache-2.0
"""Runs a program, and kills it with SIGKILL when nic0 has read another MiB of payload. Fails if the program ends before.

    kill-while-sending.py PROGRAM ARGUMENT...
"""

import subprocess
import sys

from runner import request_runner


def bytes_read():
    payload = request_runner({"op": "snapshot"})["nic0"]["counters"]["payload"]
    return payload["host_read"] + payload["peer_read"]


before = bytes_read()
program = subprocess.Popen(sys.argv[1:])
# The harness limits the time of this loop.
while bytes_read() < before + (1 << 20):
    if program.poll() is not None:
        sys.exit(f"kill-while-sending: the program ended with {program.returncode}")
program.kill()
program.wait()
