#!/usr/bin/env python3
# SPDX-License-Identifier: MIT OR Apache-2.0
"""Reads a file from a drive into memory near the drive, from device to device, and sums it up with NumPy.

    near_nvme.py FILE [DRIVE]       DRIVE is nvme0 by default; FILE may be the drive itself, /dev/nvme0n1
"""

import os
import sys

import numpy as np
import p2pmem

#: Most bytes that are read.
LIMIT = 16 << 20


def size_of(path: str) -> int:
    """The size of a file or a block device."""
    with open(path, "rb") as file:
        return file.seek(0, os.SEEK_END)


def main() -> None:
    path, *more = sys.argv[1:]
    drive = p2pmem.Client(more[0] if more else "nvme0")
    size = min(max(size_of(path), 1), LIMIT)
    with p2pmem.Device() as device:
        with device.alloc(size, near=drive) as buffer:
            print(device.explain_last())
            # Up to the end of the file, or of the buffer, which has whole pages.
            count = buffer.read_from(path)
            # A copy by the CPU, for the sum. A device that is near would use the buffer directly.
            data = np.empty(count, dtype=np.uint8)
            buffer.readinto(data)
            print(f"{count} bytes went from {drive.name} to provider {buffer.provider}, their sum is {data.sum(dtype=np.uint64)}")


if __name__ == "__main__":
    try:
        main()
    except p2pmem.Error as error:
        sys.exit(f"{error}\n{error.remedy or ''}".strip())
