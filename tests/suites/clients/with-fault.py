#!/usr/bin/python3
# SPDX-License-Identifier: MIT OR Apache-2.0
"""Runs a program with a fault of the NIC, either from the start or once the program transfers data.

    with-fault.py always REQUEST PROGRAM ARGUMENT...    sends REQUEST before the program starts
    with-fault.py once REQUEST PROGRAM ARGUMENT...      sends REQUEST when the NIC has transferred another MiB of payload
    with-fault.py reset PROGRAM ARGUMENT...             at that time, resets the PCI function by sysfs while its driver is bound

REQUEST is JSON for the NIC's control socket. At the end, the script removes the fault and waits until the port is up, which takes
the driver some time after a reset. Ends with the program's exit code, or with LATE if the port does not come up.
"""

import json
import os
import pathlib
import subprocess
import sys
import time

from runner import late, request_runner, scaled

NIC = "nic0"
PORT_LIMIT = 150
device = pathlib.Path("/sys/bus/pci/devices") / os.environ["P2PMEM_DEV_NIC0"]


def control(request):
    request_runner({"op": "control", "name": NIC, "request": request})


def payload_bytes():
    return sum(request_runner({"op": "snapshot"})[NIC]["counters"]["payload"].values())


def port_up():
    try:
        states = [path.read_text() for path in device.glob("infiniband/*/ports/1/state")]
    except OSError:
        # The driver removes its RDMA device during recovery.
        states = []
    return bool(states) and "ACTIVE" in states[0]


def main():
    how, *rest = sys.argv[1:]
    request = json.loads(rest.pop(0)) if how != "reset" else None
    if how == "always":
        control(request)
        exit_code = subprocess.run(rest, check=False).returncode
    else:
        before = payload_bytes()
        program = subprocess.Popen(rest)
        while payload_bytes() < before + (1 << 20) and program.poll() is None:
            pass
        print("with-fault: now", flush=True)
        if how == "once":
            control(request)
        else:
            (device / "reset").write_text("1")
        exit_code = program.wait()
    if request is not None:
        control({"link": "up"})
        control({"link": {}})
    deadline = time.monotonic() + scaled(PORT_LIMIT)
    while not port_up():
        if time.monotonic() > deadline:
            late(f"the port is not up {PORT_LIMIT} s afterwards")
        time.sleep(0.05)
    sys.exit(exit_code)


main()
