#!/usr/bin/python3
# SPDX-License-Identifier: MIT OR Apache-2.0
"""Measures MPI_Allreduce of f32 with the payload in memory that /dev/p2pmem maps. Checks each result. Rank 0 prints the median of the
slowest ranks' times.

    mpi-allreduce.py BYTES CALLS
"""

import array
import mmap
import os
import statistics
import sys
import time

from mpi4py import MPI

size, calls = int(sys.argv[1]), int(sys.argv[2])
world = MPI.COMM_WORLD
rank, ranks = world.Get_rank(), world.Get_size()
memory = mmap.mmap(os.open("/dev/p2pmem", os.O_RDWR | os.O_CLOEXEC), size)
own = array.array("f", [rank + 1.0]) * (size // 4)
expected = array.array("f", [ranks * (ranks + 1) / 2]) * (size // 4)
times = []
for call in range(calls + 1):
    memory[:] = own.tobytes()
    world.Barrier()
    start = time.monotonic()
    world.Allreduce(MPI.IN_PLACE, [memory, MPI.FLOAT], op=MPI.SUM)
    taken = time.monotonic() - start
    assert memory[:] == expected.tobytes(), f"rank {rank}: a wrong result"
    slowest = world.allreduce(taken, op=MPI.MAX)
    if call > 0:
        times.append(slowest)
if rank == 0:
    print(f"milliseconds {statistics.median(times) * 1e3:.3f}", flush=True)
