#!/usr/bin/python3
# SPDX-License-Identifier: MIT OR Apache-2.0
"""Registers one buffer of /dev/p2pmem with several RDMA devices by ibv_reg_mr(), and writes to it through each device.

    two-hcas.py serve PORT DEVICE...            on the target node
    two-hcas.py write ADDRESS PORT DEVICE...    on the node that writes, with its devices in the same order

The n-th device writes the n-th part. Then the nodes compare their buffers, and both print "verified N bytes by M devices".
"""

import ctypes
import hashlib
import json
import mmap
import os
import pathlib
import socket
import sys

import pyverbs.enums as e
from pyverbs.addr import GID, AHAttr, GlobalRoute
from pyverbs.cq import CQ
from pyverbs.device import Context
from pyverbs.mr import MR
from pyverbs.pd import PD
from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr
from pyverbs.wr import SGE, SendWR

ACCESS = e.IBV_ACCESS_LOCAL_WRITE | e.IBV_ACCESS_REMOTE_WRITE
SIZE = 2 << 20


class Adapter:
    """An RDMA device with a registration of the memory and a queue pair."""

    def __init__(self, name, address, size):
        self.context = Context(name=name)
        self.domain, self.queue = PD(self.context), CQ(self.context, 16)
        self.region = MR(self.domain, size, ACCESS, address)
        cap = QPCap(max_send_wr=16, max_recv_wr=16, max_send_sge=1, max_recv_sge=1)
        self.pair = QP(self.domain, QPInitAttr(qp_type=e.IBV_QPT_RC, scq=self.queue, rcq=self.queue, cap=cap))
        port = self.context.query_port(1)
        self.index = None
        if port.link_layer == e.IBV_LINK_LAYER_ETHERNET:
            self.index = ipv4_index(name)
        self.here = {
            "lid": port.lid,
            "gid": None if self.index is None else str(self.context.query_gid(1, self.index)),
            "number": self.pair.qp_num,
            "key": self.region.rkey,
            "address": address,
        }

    def connect(self, there):
        """Connects to the queue pair `there` of the other node."""
        attr = QPAttr(port_num=1)
        attr.qp_access_flags = ACCESS
        attr.dest_qp_num = there["number"]
        attr.path_mtu = e.IBV_MTU_1024
        attr.max_rd_atomic = attr.max_dest_rd_atomic = 1
        attr.min_rnr_timer, attr.timeout, attr.retry_cnt, attr.rnr_retry = 12, 18, 7, 7
        if self.index is None:
            attr.ah_attr = AHAttr(dlid=there["lid"], port_num=1)
        else:
            route = GlobalRoute(dgid=GID(there["gid"]), sgid_index=self.index)
            attr.ah_attr = AHAttr(gr=route, is_global=1, port_num=1)
        self.pair.to_rts(attr)

    def write(self, there, start, size):
        """Writes a part of the memory to the same offset in the memory of the other node."""
        request = SendWR(opcode=e.IBV_WR_RDMA_WRITE, num_sge=1, sg=[SGE(self.here["address"] + start, size, self.region.lkey)])
        request.set_wr_rdma(there["key"], there["address"] + start)
        self.pair.post_send(request)
        while True:
            count, done = self.queue.poll()
            if count:
                assert done[0].status == e.IBV_WC_SUCCESS, f"the write ended with status {done[0].status}"
                return

    def close(self):
        """Closes all objects, dependent ones first."""
        for thing in (self.pair, self.region, self.queue, self.domain, self.context):
            thing.close()


def ipv4_index(name):
    """Returns the index of the first GID of port 1 that is an IPv4-mapped address."""
    gids = pathlib.Path("/sys/class/infiniband", name, "ports/1/gids")
    for index in range(len(list(gids.iterdir()))):
        try:
            if "ffff:" in (gids / str(index)).read_text()[20:30]:
                return index
        except OSError:
            # The entry is unused.
            continue
    sys.exit(f"{name} has no IPv4-mapped GID")


def exchange(peer, value):
    """Sends a value, and returns the value of the other node."""
    peer.write(json.dumps(value) + "\n")
    peer.flush()
    return json.loads(peer.readline())


def main():
    writes = sys.argv[1] == "write"
    rest = sys.argv[2:]
    file = os.open("/dev/p2pmem", os.O_RDWR | os.O_CLOEXEC)
    memory = mmap.mmap(file, SIZE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    if writes:
        memory[:] = os.urandom(SIZE)
        server, port, *names = rest
        connection = socket.create_connection((server, int(port)))
    else:
        memory[:] = bytes(SIZE)
        port, *names = rest
        connection = socket.create_server(("", int(port))).accept()[0]
    peer = connection.makefile("rw")
    adapters = [Adapter(name, address, SIZE) for name in names]
    theirs = exchange(peer, [adapter.here for adapter in adapters])
    for adapter, there in zip(adapters, theirs, strict=True):
        adapter.connect(there)
    exchange(peer, "connected")
    part = SIZE // len(adapters)
    if writes:
        for number, (adapter, there) in enumerate(zip(adapters, theirs)):
            adapter.write(there, number * part, part)
    # The comparison starts after all writes.
    exchange(peer, "written")
    digests = [hashlib.sha256(memory[n * part : (n + 1) * part]).hexdigest() for n in range(len(adapters))]
    wanted = exchange(peer, digests)
    assert digests == wanted, f"the nodes have different bytes: {digests}, {wanted}"
    for adapter in adapters:
        adapter.close()
    print(f"verified {len(adapters) * part} bytes by {len(adapters)} devices")


if __name__ == "__main__":
    main()
