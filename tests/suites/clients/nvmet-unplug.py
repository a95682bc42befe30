#!/usr/bin/python3
# SPDX-License-Identifier: MIT OR Apache-2.0
"""A drive that is unplugged from the target of NVMe over RDMA while the host writes to it.

    nvmet-unplug.py target SUBSYSTEM PORT             where the drive is, and the subsystem with a port
    nvmet-unplug.py host SUBSYSTEM PORT ADDRESS PEER  the other side: connects to ADDRESS, and talks to the target at PEER

The host writes blocks without an end. When some have been written the target has its drive unplugged; the host's writes have to end
in an error, and say which were acknowledged. Then the target has the drive plugged in again, and compares: every block that was
acknowledged has to be there.
"""

import glob
import mmap
import os
import socket
import struct
import subprocess
import sys
import time

from runner import LATE, ask, late, scaled

BLOCK, SLOTS, ENOUGH = 64 << 10, 128, 32
UUID = "70327032-6d65-6d00-0000-000000000001"


def block(number):
    """What the write of that number has."""
    return struct.pack("<Q", number * 0x9E3779B97F4A7C15 % (1 << 64)) * (BLOCK // 8)


def until(what, holds):
    """Waits until something holds, and returns it."""
    end = time.monotonic() + scaled(60)
    while time.monotonic() < end:
        if found := holds():
            return found
        time.sleep(0.02)
    late(what)


def hear(words, what):
    """The other side's next line. One that has ended says itself why: nothing else is known to be wrong here."""
    line = words.readline()
    if not line:
        print(f"nvmet-unplug: the other side has ended: {what}", file=sys.stderr)
        sys.exit(LATE)
    return line.strip()


def direct(path, flags):
    """A file without the page cache, or none while it cannot be opened."""
    try:
        return os.open(path, flags | os.O_DIRECT)
    except OSError:
        return None


def target(subsystem, port):
    """Exports the drive, has it unplugged and plugged in again, and compares."""
    drive = os.environ["P2PMEM_BLOCK_NVME0"]
    namespace = f"/sys/kernel/config/nvmet/subsystems/{subsystem}/namespaces/1"

    def say(attribute, value):
        with open(f"{namespace}/{attribute}", "w", encoding="ascii") as file:
            file.write(value)

    say("device_path", drive)
    say("p2pmem", "1")
    say("enable", "1")
    with socket.create_server(("", port)) as listener:
        peer, _ = listener.accept()
    with peer, peer.makefile("rw") as words:
        if hear(words, "the host does not write") != "writing":
            sys.exit("nvmet-unplug: the host does not write")
        ask({"op": "device-del", "name": "nvme0"})
        acknowledged = int(hear(words, "how many writes were acknowledged"))
        say("enable", "0")
        ask({"op": "device-add", "name": "nvme0"})
        file = until("the drive is back", lambda: direct(drive, os.O_RDONLY))
        memory = mmap.mmap(-1, BLOCK)
        for slot in range(min(SLOTS, acknowledged)):
            last = (acknowledged - 1 - slot) // SLOTS * SLOTS + slot
            os.preadv(file, [memory], slot * BLOCK)
            # The write that failed may have got there.
            if memory[:] not in (block(last), block(acknowledged) if acknowledged % SLOTS == slot else None):
                sys.exit(f"nvmet-unplug: write {last} was acknowledged and is not there")
        os.close(file)
        words.write("compared\n")
        words.flush()
    print(f"{acknowledged} writes were acknowledged, and are there")


def host(subsystem, port, address, peer):
    """Writes until that fails."""

    def nvme(*arguments):
        subprocess.run(["nvme", *arguments], check=True, stdout=subprocess.DEVNULL)

    def subsystem_of(path):
        try:
            with open(f"{path}/device/subsysnqn", encoding="ascii") as file:
                return file.read().strip()
        except OSError:
            return None

    def connected():
        # Where the kernel has multipathing, a path to the drive has no file of its own.
        drives = (path for path in glob.glob("/sys/block/nvme*n*") if subsystem_of(path) == subsystem)
        return next((drive for path in drives if os.path.exists(drive := "/dev/" + os.path.basename(path))), None)

    words = until("the target listens", lambda: listening(peer, port))
    nvme("connect", "-t", "rdma", "-a", address, "-s", "4420", "-n", subsystem, "--nr-io-queues", "1",
         "--hostnqn", f"nqn.2014-08.org.nvmexpress:uuid:{UUID}", "--hostid", UUID)
    try:
        drive = until("the drive is there", connected)
        file = until("the drive can be opened", lambda: direct(drive, os.O_WRONLY))
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
            if number == ENOUGH:
                words.write("writing\n")
                words.flush()
        os.close(file)
    finally:
        nvme("disconnect", "-n", subsystem)
    words.write(f"{number}\n")
    words.flush()
    if hear(words, "the target did not compare") != "compared":
        sys.exit("nvmet-unplug: the target did not compare")


def listening(peer, port):
    """A connection, or none while nobody listens."""
    try:
        return socket.create_connection((peer, port)).makefile("rw")
    except ConnectionRefusedError:
        return None


if sys.argv[1] == "target":
    target(sys.argv[2], int(sys.argv[3]))
else:
    host(sys.argv[2], int(sys.argv[3]), sys.argv[4], sys.argv[5])
