#!/usr/bin/python3
# SPDX-License-Identifier: MIT OR Apache-2.0
"""Runs a program while something is wrong with the NIC, or goes wrong once the program's data flows.

    with-fault.py always REQUEST PROGRAM ARGUMENT...    as JSON for the NIC's control socket, from before the program's start
    with-fault.py once REQUEST PROGRAM ARGUMENT...      when the NIC has moved another MiB of payload
    with-fault.py reset PROGRAM ARGUMENT...             then, the function is reset by the kernel, under its driver

Whatever it was is over before this ends, and the port is up again, which takes the driver some time after a reset. Ends as the
program does; as one that lacks time if the NIC does not come back.
"""

import json
import os
import pathlib
import subprocess
import sys
import time

from runner import ask, late, scaled

NIC = "nic0"
BOUND = 150
device = pathlib.Path("/sys/bus/pci/devices") / os.environ["P2PMEM_DEV_NIC0"]


def control(request):
    ask({"op": "control", "name": NIC, "request": request})


def moved():
    return sum(ask({"op": "snapshot"})[NIC]["counters"]["payload"].values())


def port_up():
    try:
        states = [path.read_text() for path in device.glob("infiniband/*/ports/1/state")]
    except OSError:
        # The driver takes its device away while it recovers.
        states = []
    return bool(states) and "ACTIVE" in states[0]


def main():
    how, *rest = sys.argv[1:]
    request = json.loads(rest.pop(0)) if how != "reset" else None
    if how == "always":
        control(request)
        ended = subprocess.run(rest, check=False).returncode
    else:
        before = moved()
        program = subprocess.Popen(rest)
        while moved() < before + (1 << 20) and program.poll() is None:
            pass
        print("with-fault: now", flush=True)
        if how == "once":
            control(request)
        else:
            (device / "reset").write_text("1")
        ended = program.wait()
    if request is not None:
        control({"link": "up"})
        control({"link": {}})
    until = time.monotonic() + scaled(BOUND)
    while not port_up():
        if time.monotonic() > until:
            late(f"the port is not up {BOUND} s afterwards")
        time.sleep(0.05)
    sys.exit(ended)


main()
