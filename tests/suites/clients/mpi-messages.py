#!/usr/bin/python3
# SPDX-License-Identifier: MIT OR Apache-2.0
"""Sends messages between two ranks of MPI, with the buffers in memory that /dev/p2pmem maps.

    mpi-messages.py move        one message in each direction; rank 0 prints "verified N bytes"
    mpi-messages.py exhaust     messages from rank 0 to rank 1, until one fails, which ends all ranks
"""

import hashlib
import mmap
import os
import sys

from mpi4py import MPI

SIZE = 2 << 20


def digest(memory):
    return hashlib.sha256(memory[:]).hexdigest()


def move(world, memory):
    rank, other = world.Get_rank(), 1 - world.Get_rank()
    for sender in range(2):
        memory[:] = os.urandom(SIZE) if rank == sender else bytes(SIZE)
        if rank == sender:
            world.Send([memory, MPI.BYTE], dest=other)
        else:
            world.Recv([memory, MPI.BYTE], source=other)
        digests = world.allgather(digest(memory))
        assert digests[0] == digests[1], f"rank {rank}: the message of rank {sender} is wrong"
    if rank == 0:
        print(f"verified {2 * SIZE} bytes", flush=True)


def exhaust(world, memory):
    while True:
        if world.Get_rank() == 0:
            world.Send([memory, MPI.BYTE], dest=1)
        else:
            world.Recv([memory, MPI.BYTE], source=0)


file = os.open("/dev/p2pmem", os.O_RDWR | os.O_CLOEXEC)
{"move": move, "exhaust": exhaust}[sys.argv[1]](MPI.COMM_WORLD, mmap.mmap(file, SIZE))
