#!/usr/bin/python3
# SPDX-License-Identifier: MIT OR Apache-2.0
"""Unplugs the drive of an NVMe over RDMA target while the host writes to the drive.

    nvmet-unplug.py target SUBSYSTEM PORT             on the node that has the drive and the subsystem
    nvmet-unplug.py host SUBSYSTEM PORT ADDRESS PEER  on the other node: connects to the subsystem at ADDRESS, and to this script
                                                      at PEER, port PORT

The host writes blocks until a write fails. After a number of writes, the target unplugs the drive; a write of the host must then
fail, and the host sends the number of acknowledged writes. The target plugs the drive in again. Fails unless the drive has every
acknowledged block.
"""

import glob
import mmap
import os
import socket
import struct
import subprocess
import sys
import time

from runner import LATE, late, request_runner, scaled

BLOCK, SLOTS, WRITES = 64 << 10, 128, 32
UUID = "70327032-6d65-6d00-0000-000000000001"


def block(number):
    """Returns the data of write `number`."""
    return struct.pack("<Q", number * 0x9E3779B97F4A7C15 % (1 << 64)) * (BLOCK // 8)


def wait_for(what, condition):
    """Waits until condition() is true, and returns its value. Ends with code LATE after the time limit."""
    end = time.monotonic() + scaled(60)
    while time.monotonic() < end:
        if found := condition():
            return found
        time.sleep(0.02)
    late(what)


def receive(peer_file, what):
    """Returns the next line from the other node. If that node has ended, it reports the reason, so this one ends with LATE."""
    line = peer_file.readline()
    if not line:
        print(f"nvmet-unplug: the other node has ended: {what}", file=sys.stderr)
        sys.exit(LATE)
    return line.strip()


def open_direct(path, flags):
    """Opens a file with O_DIRECT. Returns None if that fails."""
    try:
        return os.open(path, flags | os.O_DIRECT)
    except OSError:
        return None


def target(subsystem, port):
    """Exports the drive, unplugs it and plugs it in again, and compares the blocks."""
    drive = os.environ["P2PMEM_BLOCK_NVME0"]
    namespace = f"/sys/kernel/config/nvmet/subsystems/{subsystem}/namespaces/1"

    def set_attribute(attribute, value):
        with open(f"{namespace}/{attribute}", "w", encoding="ascii") as file:
            file.write(value)

    set_attribute("device_path", drive)
    set_attribute("p2pmem", "1")
    set_attribute("enable", "1")
    with socket.create_server(("", port)) as listener:
        peer, _ = listener.accept()
    with peer, peer.makefile("rw") as peer_file:
        if receive(peer_file, "the host does not write") != "writing":
            sys.exit("nvmet-unplug: the host does not write")
        request_runner({"op": "device-del", "name": "nvme0"})
        acknowledged = int(receive(peer_file, "the host did not send the number of acknowledged writes"))
        set_attribute("enable", "0")
        request_runner({"op": "device-add", "name": "nvme0"})
        file = wait_for("the drive does not appear again", lambda: open_direct(drive, os.O_RDONLY))
        memory = mmap.mmap(-1, BLOCK)
        for slot in range(min(SLOTS, acknowledged)):
            last = (acknowledged - 1 - slot) // SLOTS * SLOTS + slot
            os.preadv(file, [memory], slot * BLOCK)
            # The failed write may have reached the drive.
            if memory[:] not in (block(last), block(acknowledged) if acknowledged % SLOTS == slot else None):
                sys.exit(f"nvmet-unplug: write {last} was acknowledged, but the drive does not have its block")
        os.close(file)
        peer_file.write("compared\n")
        peer_file.flush()
    print(f"{acknowledged} writes were acknowledged, and the drive has all of them")


def host(subsystem, port, address, peer):
    """Writes until a write fails."""

    def nvme(*arguments):
        subprocess.run(["nvme", *arguments], check=True, stdout=subprocess.DEVNULL)

    def subsystem_of(path):
        try:
            with open(f"{path}/device/subsysnqn", encoding="ascii") as file:
                return file.read().strip()
        except OSError:
            return None

    def connected():
        # With multipathing in the kernel, a path to the drive has no device node.
        drives = (path for path in glob.glob("/sys/block/nvme*n*") if subsystem_of(path) == subsystem)
        return next((drive for path in drives if os.path.exists(drive := "/dev/" + os.path.basename(path))), None)

    peer_file = wait_for("the target does not listen", lambda: connect_to(peer, port))
    nvme("connect", "-t", "rdma", "-a", address, "-s", "4420", "-n", subsystem, "--nr-io-queues", "1",
         "--hostnqn", f"nqn.2014-08.org.nvmexpress:uuid:{UUID}", "--hostid", UUID)
    try:
        drive = wait_for("the drive does not appear", connected)
        file = wait_for("the drive cannot be opened", lambda: open_direct(drive, os.O_WRONLY))
        memory = mmap.mmap(-1, BLOCK)
        number = 0
        while True:
            memory[:] = block(number)
            try:
                os.pwritev(file, [memory], number % SLOTS * BLOCK)
            except OSError as error:
                print(f"write {number}: {error.strerror}")
                break
            number += 1
            if number == WRITES:
                peer_file.write("writing\n")
                peer_file.flush()
        os.close(file)
    finally:
        nvme("disconnect", "-n", subsystem)
    peer_file.write(f"{number}\n")
    peer_file.flush()
    if receive(peer_file, "the target did not compare") != "compared":
        sys.exit("nvmet-unplug: the target did not compare")


def connect_to(peer, port):
    """Returns a connection, or None if the port does not listen."""
    try:
        return socket.create_connection((peer, port)).makefile("rw")
    except ConnectionRefusedError:
        return None


if sys.argv[1] == "target":
    target(sys.argv[2], int(sys.argv[3]))
else:
    host(sys.argv[2], int(sys.argv[3]), sys.argv[4], sys.argv[5])
