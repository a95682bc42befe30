#!/usr/bin/python3
# SPDX-License-Identifier: MIT OR Apache-2.0
"""Tests pyverbs' DmaBufMR on p2pmem memory: RDMA WRITE and READ between two buffers, and calls that must fail.

    dmabuf-mr.py DEVICE

DEVICE is an RDMA device; the test connects two of its queue pairs. Prints "verified N bytes" at the end.
"""

import ctypes
import errno
import fcntl
import mmap
import os
import struct
import sys

import pyverbs.enums as e
from pyverbs.addr import AHAttr
from pyverbs.cq import CQ
from pyverbs.device import Context
from pyverbs.mr import DmaBufMR
from pyverbs.pd import PD
from pyverbs.pyverbs_error import PyverbsRDMAError
from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr
from pyverbs.wr import SGE, SendWR

ACCESS = e.IBV_ACCESS_LOCAL_WRITE | e.IBV_ACCESS_REMOTE_WRITE | e.IBV_ACCESS_REMOTE_READ
PAGE = 4096


def iowr(number, size):
    return 3 << 30 | size << 16 | 0xBC << 8 | number


class Buffer:
    """A p2pmem buffer and a mapping of it."""

    ALLOC = struct.Struct("=QQQIIIIIIII4Q IIQQQII")
    EXPORT = struct.Struct("=QIIIiII")

    def __init__(self, size):
        self.file = os.open("/dev/p2pmem", os.O_RDWR | os.O_CLOEXEC)
        fields = bytearray(self.ALLOC.pack(size, *[0] * 21))
        fcntl.ioctl(self.file, iowr(3, self.ALLOC.size), fields)
        answer = self.ALLOC.unpack(fields)
        self.handle, self.size = answer[15], answer[17]
        self.memory = mmap.mmap(self.file, self.size, offset=answer[18])

    def export(self, *ranges):
        """Returns a dma-buf file that concatenates the ranges (offset, size)."""
        array = ctypes.create_string_buffer(b"".join(struct.pack("=QQ", *part) for part in ranges))
        fields = bytearray(self.EXPORT.pack(ctypes.addressof(array), len(ranges), self.handle, 0, -1, 16, 0))
        fcntl.ioctl(self.file, iowr(8, self.EXPORT.size), fields)
        return self.EXPORT.unpack(fields)[4]


def connect(domain, queue, lid):
    """Returns two connected queue pairs."""
    cap = QPCap(max_send_wr=16, max_recv_wr=16, max_send_sge=1, max_recv_sge=1)
    pair = [QP(domain, QPInitAttr(qp_type=e.IBV_QPT_RC, scq=queue, rcq=queue, cap=cap)) for _ in range(2)]
    for own, other in (pair, pair[::-1]):
        attr = QPAttr(port_num=1)
        attr.qp_access_flags = ACCESS
        attr.dest_qp_num = other.qp_num
        attr.path_mtu = e.IBV_MTU_1024
        attr.max_rd_atomic = attr.max_dest_rd_atomic = 4
        attr.min_rnr_timer, attr.timeout, attr.retry_cnt, attr.rnr_retry = 12, 14, 7, 7
        attr.ah_attr = AHAttr(dlid=lid, port_num=1)
        own.to_rts(attr)
    return pair


def transfer(pair, queue, opcode, local, remote, length, at=0):
    """Does one RDMA operation between two memory regions. Returns the status of the completion."""
    request = SendWR(opcode=opcode, num_sge=1, sg=[SGE(at, length, local.lkey)])
    request.set_wr_rdma(remote.rkey, at)
    pair[0].post_send(request)
    while True:
        count, done = queue.poll()
        if count:
            return done[0].status


def expect_errno(call, *expected):
    """Fails unless the call fails with one of the expected errnos."""
    try:
        call()
    except (OSError, PyverbsRDMAError) as error:
        code = error.errno if isinstance(error, OSError) else error.error_code
        assert code in expected, f"unexpected errno {errno.errorcode.get(code, code)}"
        return
    raise AssertionError("a call that must fail succeeded")


def main():
    context = Context(name=sys.argv[1])
    lid = context.query_port(1).lid
    domain, queue = PD(context), CQ(context, 16)
    pair = connect(domain, queue, lid)
    size = 2 << 20
    data = os.urandom(size)
    source, target = Buffer(size), Buffer(size)
    source.memory[:] = data
    # The target's dma-buf has the second half of the buffer first.
    half = size // 2
    files = [source.export((0, size)), target.export((half, half), (0, half))]
    from_region, to_region = (DmaBufMR(domain, size, ACCESS, dmabuf=file) for file in files)
    assert transfer(pair, queue, e.IBV_WR_RDMA_WRITE, from_region, to_region, size) == e.IBV_WC_SUCCESS
    assert target.memory[:half] == data[half:] and target.memory[half:] == data[:half], "the target does not have the written bytes"
    source.memory[:] = bytes(size)
    assert transfer(pair, queue, e.IBV_WR_RDMA_READ, from_region, to_region, size) == e.IBV_WC_SUCCESS
    assert source.memory[:] == data, "the source does not have the read bytes"

    # A region of a part of the dma-buf is valid; a region or an export beyond the end is not.
    part = DmaBufMR(domain, PAGE, ACCESS, dmabuf=files[0], offset=PAGE)
    part.close()
    expect_errno(lambda: DmaBufMR(domain, size, ACCESS, dmabuf=files[0], offset=PAGE), errno.EINVAL)
    expect_errno(lambda: source.export((0, size + PAGE)), errno.EINVAL)
    expect_errno(lambda: source.export((1, PAGE)), errno.EINVAL)
    # A write of which one byte is beyond the region's end must fail and change nothing.
    status = transfer(pair, queue, e.IBV_WR_RDMA_WRITE, from_region, to_region, 8, size - 7)
    assert status != e.IBV_WC_SUCCESS, "a write beyond the region's end succeeded"
    assert target.memory[:half] == data[half:] and target.memory[half:] == data[:half], "a failed write changed bytes"
    print(f"verified {4 * size} bytes")
    for thing in (*pair, from_region, to_region, queue, domain, context):
        thing.close()


if __name__ == "__main__":
    main()
