#!/usr/bin/env python3
# SPDX-License-Identifier: MIT OR Apache-2.0
"""Checks in a guest that `p2pmemctl scan` finds the devices with memory and the sources of it, without and with the module.

    scan.py FOLDER MODULE ACCELERATOR CMB NVME      FOLDER of p2pmemctl; p2pmem.ko; addresses of an accelerator, of a drive with
                                                    a controller memory buffer, and of a drive without one

Runs scan as an unprivileged user too. Ends with the module unloaded.
"""

import json
import os
import subprocess
import sys

from late import LIMIT

FOLDER, MODULE, ACCELERATOR, CMB, NVME = sys.argv[1:]
NOBODY = 65534


def run(*command, user=None):
    """Runs a command, and fails if it fails."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, timeout=LIMIT, check=False, user=user)
    assert done.returncode == 0, f"{command}: {done}"
    return done.stdout


def scan(user=None):
    """The inventory, with the sources of each device as {backend: (availability, detail)}."""
    inventory = json.loads(run(f"{FOLDER}/p2pmemctl", "scan", "--json", user=user))
    sources = {
        device["addr"]: {source["backend"]: (source["availability"], source["detail"]) for source in device["sources"]}
        for device in inventory["memory_devices"]
    }
    return inventory, sources


def main():
    before, sources = scan()
    assert not before["module_loaded"] and before["kernel"] == os.uname().release, before
    assert {ACCELERATOR, CMB} <= set(sources) and NVME not in sources, sources
    availability, detail = sources[ACCELERATOR]["module"]
    assert availability == "possible" and f"p2pmemctl publish {ACCELERATOR}" in detail and "modprobe" in detail, sources
    assert sources[CMB]["module"][0] == "possible" and sources[CMB]["sysfs"][0] == "ready", sources
    assert sources[ACCELERATOR]["sysfs"][0] == sources[ACCELERATOR]["vfio"][0] == "unavailable", sources
    # The sysfs source is the kernel's: its file is there, and the pool has the size that scan reports.
    pool = next(device["pool"] for device in before["memory_devices"] if device["addr"] == CMB)
    folder = f"/sys/bus/pci/devices/{CMB}/p2pmem"
    with open(f"{folder}/size", encoding="ascii") as size:
        assert pool["size"] == int(size.read()) and os.path.exists(f"{folder}/allocate"), pool
    bar = next(device["bars"] for device in before["memory_devices"] if device["addr"] == ACCELERATOR)[-1]
    assert bar["size"] == os.stat(f"/sys/bus/pci/devices/{ACCELERATOR}/resource{bar['index']}").st_size, bar
    clients = {client["addr"] for client in before["clients"]}
    assert {NVME, CMB, ACCELERATOR} <= clients, clients
    # The scan needs no privileges.
    assert scan(user=NOBODY)[1] == sources
    missing = {source["backend"]: source["missing"] for source in before["memory_devices"][0]["sources"]}
    assert missing["module"] == [] and "dma-buf" in missing["sysfs"] and "direct-io" in missing["vfio"], missing
    assert all({"rules", "quotas", "revoke"} <= set(missing[backend]) for backend in ("sysfs", "vfio")), missing

    run("insmod", MODULE)
    loaded, sources = scan()
    assert loaded["module_loaded"] and sources[CMB]["module"][0] == "ready", sources
    assert sources[ACCELERATOR]["module"] == ("possible", f"p2pmemctl publish {ACCELERATOR}"), sources
    run(f"{FOLDER}/p2pmemctl", "publish", ACCELERATOR)
    _, sources = scan()
    assert sources[ACCELERATOR]["module"][0] == "ready", sources
    # A user without access to the device does not learn the providers, and the scan claims nothing about them.
    os.chmod("/dev/p2pmem", 0o600)
    for addr in (ACCELERATOR, CMB):
        availability, detail = scan(user=NOBODY)[1][addr]["module"]
        assert availability == "possible" and "member of its group" in detail, detail
    text = run(f"{FOLDER}/p2pmemctl", "scan", "--all").decode()
    assert all(addr in text for addr in (ACCELERATOR, CMB, NVME)) and "its driver publishes no memory" in text, text
    run(f"{FOLDER}/p2pmemctl", "unpublish", ACCELERATOR)
    run("rmmod", "p2pmem")


main()
