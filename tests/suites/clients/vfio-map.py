#!/usr/bin/python3
# SPDX-License-Identifier: MIT OR Apache-2.0
"""Maps host memory and p2pmem memory for DMA of a device by VFIO type1.

    vfio-map.py DEVICE KIND ...     DEVICE is bound to vfio-pci; each KIND is one of
        host        anonymous memory of this process; must succeed, so that failures of the others are meaningful
        p2pmem      a mapping of /dev/p2pmem whose pages the CPU has touched; must fail with EFAULT
        untouched   a mapping of /dev/p2pmem that the CPU has not touched; must fail with EFAULT

Prints a line for each KIND. Ends with exit code 1 if a result differs.
"""

import ctypes
import errno
import fcntl
import mmap
import os
import struct
import sys

SET_IOMMU, GROUP_STATUS, SET_CONTAINER, MAP_DMA, UNMAP_DMA = 0x3B66, 0x3B67, 0x3B68, 0x3B71, 0x3B72
TYPE1V2 = 3
VIABLE = 1
READ_WRITE = 3
IOVA = 1 << 32
SIZE = 2 << 20


def container_of(device):
    """Opens an IOMMU container with the group of the device. Returns the files of both."""
    group = os.open("/dev/vfio/" + os.path.basename(os.readlink(f"/sys/bus/pci/devices/{device}/iommu_group")), os.O_RDWR)
    status = bytearray(struct.pack("II", 8, 0))
    fcntl.ioctl(group, GROUP_STATUS, status)
    if not struct.unpack("II", status)[1] & VIABLE:
        sys.exit(f"vfio-map: the group of {device} is not viable")
    container = os.open("/dev/vfio/vfio", os.O_RDWR)
    fcntl.ioctl(group, SET_CONTAINER, struct.pack("i", container))
    fcntl.ioctl(container, SET_IOMMU, TYPE1V2)
    return container, group


def memory_of(kind):
    """Returns a memory mapping of the KIND."""
    if kind == "host":
        memory = mmap.mmap(-1, SIZE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    else:
        fd = os.open("/dev/p2pmem", os.O_RDWR)
        memory = mmap.mmap(fd, SIZE, mmap.MAP_SHARED)
        os.close(fd)
    if kind != "untouched":
        for at in range(0, SIZE, 4096):
            memory[at] = 1
    return memory


def main():
    device, kinds = sys.argv[1], sys.argv[2:]
    container, _group = container_of(device)
    failed = False
    for kind in kinds:
        memory = memory_of(kind)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        try:
            fcntl.ioctl(container, MAP_DMA, struct.pack("IIQQQ", 32, READ_WRITE, address, IOVA, SIZE))
            answer = "mapped"
            fcntl.ioctl(container, UNMAP_DMA, bytearray(struct.pack("IIQQ", 24, 0, IOVA, SIZE)))
        except OSError as error:
            answer = errno.errorcode.get(error.errno, str(error.errno))
        print(f"{kind}: {answer}", flush=True)
        failed |= answer != ("mapped" if kind == "host" else "EFAULT")
    sys.exit(failed)


main()
