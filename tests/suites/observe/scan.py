#!/usr/bin/env python3
# SPDX-License-Identifier: MIT OR Apache-2.0
"""Checks in a guest that `p2pmemctl scan` finds the devices with memory and the sources of it, without and with the module.
Without the module, checks also `topo`, `explain --what-if`, and `doctor`, and compares computed paths with the module's.

    scan.py FOLDER MODULE ACCELERATOR CMB NVME      FOLDER of p2pmemctl; p2pmem.ko; addresses of an accelerator, of a drive with
                                                    a controller memory buffer, and of a drive without one

Runs the commands as an unprivileged user too. Ends with the module unloaded.
"""

import json
import os
import subprocess
import sys
import xml.etree.ElementTree

from late import LIMIT

FOLDER, MODULE, ACCELERATOR, CMB, NVME = sys.argv[1:]
NOBODY = 65534


def run(*command, user=None):
    """Runs a command, and fails if it fails."""
    return run_all(*command, user=user)[0]


def run_all(*command, user=None, code=0):
    """Runs a command, and fails if its exit code is another one. Returns its output and its messages."""
    done = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        timeout=LIMIT,
        check=False,
        user=user,
    )
    assert done.returncode == code, f"{command}: {done}"
    return done.stdout, done.stderr


def tool(*arguments, user=None, code=0):
    """Runs p2pmemctl with --json."""
    output = run_all(f"{FOLDER}/p2pmemctl", *arguments, "--json", user=user, code=code)[0]
    document = json.loads(output)
    assert document["schema"] == 1, document
    return document


def classes(user=None):
    """The class of each path between a device with memory and a client, and the document of `topo`."""
    topo = tool("topo", user=user)
    clients = [client["addr"] for client in topo["clients"]]
    return {(path["addr"], clients[path["client"]]): path["class"] for path in topo["paths"]}, topo


def drawing(user=None):
    """The texts of the drawing, which has to be a well-formed document, and the messages."""
    document, messages = run_all(f"{FOLDER}/p2pmemctl", "topo", "--svg", "-", user=user)
    root = xml.etree.ElementTree.fromstring(document)
    return [(text.text or "").strip() for text in root.iter("{http://www.w3.org/2000/svg}text")], messages.decode()


def without_module():
    """Checks the commands that answer without the module. Returns the classes of paths."""
    paths, topo = classes()
    assert topo["computed"]["module"] == "not-loaded" and topo["providers"] == [], topo
    assert topo["computed"]["unreadable_bridges"] == [], topo
    assert paths[ACCELERATOR, NVME] == paths[ACCELERATOR, CMB] == "same-switch", paths
    # An unprivileged user gets the same classes, and a note on what only root can read.
    of_nobody, topo = classes(user=NOBODY)
    assert of_nobody == paths and topo["computed"]["unreadable_bridges"], topo
    assert "as root" in topo["computed"]["remedy"] and "modprobe p2pmem" in topo["computed"]["remedy"], topo
    text, messages = run_all(f"{FOLDER}/p2pmemctl", "topo", user=NOBODY)
    assert text.startswith(b"Computed from sysfs: the module is not loaded."), text
    assert b"modprobe p2pmem" in messages and messages.count(b"\n") == 1, messages

    # Accelerator and drive are equally near. The memory of the drive is too small.
    answer = tool("explain", "--what-if", "32M", "--near", NVME, user=NOBODY)
    candidates = {candidate["addr"]: candidate for candidate in answer["candidates"]}
    assert candidates[CMB]["code"] == "too-small", answer
    assert answer["chosen"] == ACCELERATOR and {ACCELERATOR, CMB} <= set(candidates), answer
    assert candidates[CMB]["class"] == "same-switch" and candidates[CMB]["source"]["backend"] == "sysfs", answer
    assert candidates[ACCELERATOR]["source"]["availability"] == "possible", answer
    refused = tool("explain", "--what-if", "1T", user=NOBODY, code=1)
    assert refused["chosen"] is None and refused["errno"] == 19, refused
    messages = run_all(f"{FOLDER}/p2pmemctl", "explain", "16M", user=NOBODY, code=1)[1]
    assert b"modprobe p2pmem" in messages and b"--what-if" in messages, messages

    checks = tool("doctor", user=NOBODY, code=1)["checks"]
    failures = [check["check"] for check in checks if check["level"] == "failure"]
    assert failures == ["module"], checks
    found = next(check["found"] for check in checks if check["check"] == "providers")
    assert ACCELERATOR in found and CMB in found, checks

    texts, messages = drawing(user=NOBODY)
    for addr in (ACCELERATOR, CMB, NVME):
        assert any(addr in text for text in texts), (addr, texts)
    assert "PCIe switch" in texts and any("possible by module" in text for text in texts), texts
    assert "modprobe p2pmem" in messages, messages
    return paths


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

    computed = without_module()

    run("insmod", MODULE)
    loaded, sources = scan()
    assert loaded["module_loaded"] and sources[CMB]["module"][0] == "ready", sources
    assert sources[ACCELERATOR]["module"] == ("possible", f"p2pmemctl publish {ACCELERATOR}"), sources
    run(f"{FOLDER}/p2pmemctl", "publish", ACCELERATOR)
    _, sources = scan()
    assert sources[ACCELERATOR]["module"][0] == "ready", sources
    # The module has computed the same classes, and draws its providers.
    paths, topo = classes()
    assert topo["computed"] is None and (ACCELERATOR, NVME) in paths, topo
    same = {pair: computed[pair] for pair in paths if paths[pair] != "unreachable"}
    assert same == {pair: paths[pair] for pair in same}, (computed, paths)
    texts, messages = drawing()
    assert any(text.startswith("provider ") and text.endswith(" used") for text in texts) and messages == "", texts
    # A device that is not published is a candidate beside the providers.
    answer = tool("explain", "--what-if", "16M", "--near", NVME)
    ids = {candidate["addr"]: candidate["provider"] for candidate in answer["candidates"]}
    assert answer["module"] and ids[ACCELERATOR] > 0 and ids[CMB] > 0 and 0 in ids.values(), answer
    # A user without access to the device does not learn the providers, and the scan claims nothing about them.
    os.chmod("/dev/p2pmem", 0o600)
    for addr in (ACCELERATOR, CMB):
        availability, detail = scan(user=NOBODY)[1][addr]["module"]
        assert availability == "possible" and "member of its group" in detail, detail
    topo = classes(user=NOBODY)[1]
    assert topo["computed"]["module"] == "not-permitted" and "usermod" in topo["computed"]["remedy"], topo
    text = run(f"{FOLDER}/p2pmemctl", "scan", "--all").decode()
    assert all(addr in text for addr in (ACCELERATOR, CMB, NVME)) and "its driver publishes no memory" in text, text
    run(f"{FOLDER}/p2pmemctl", "unpublish", ACCELERATOR)
    run("rmmod", "p2pmem")


main()
