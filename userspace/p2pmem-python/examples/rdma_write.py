#!/usr/bin/env python3
# SPDX-License-Identifier: MIT OR Apache-2.0
"""Writes from one buffer to another one by RDMA, with pyverbs, and compares the bytes.

    rdma_write.py [NIC [BYTES]]       NIC is mlx5_0 by default, BYTES 1048576

Both buffers are near the NIC and are registered as dma-bufs. Both queue pairs are the NIC's own, so one machine is enough.
"""

import sys

import numpy as np
import p2pmem
import pyverbs.enums as e
from pyverbs.addr import AHAttr
from pyverbs.cq import CQ
from pyverbs.device import Context
from pyverbs.mr import DmaBufMR
from pyverbs.pd import PD
from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr
from pyverbs.wr import SGE, SendWR

ACCESS = e.IBV_ACCESS_LOCAL_WRITE | e.IBV_ACCESS_REMOTE_WRITE


def connect(context: Context, domain: PD, queue: CQ) -> tuple[QP, QP]:
    """Makes two queue pairs that are connected to each other."""
    lid = context.query_port(1).lid
    cap = QPCap(max_send_wr=1, max_recv_wr=1, max_send_sge=1, max_recv_sge=1)
    init = QPInitAttr(qp_type=e.IBV_QPT_RC, scq=queue, rcq=queue, cap=cap)
    pair = QP(domain, init), QP(domain, init)
    for own, other in (pair, pair[::-1]):
        attr = QPAttr(port_num=1)
        attr.qp_access_flags = ACCESS
        attr.dest_qp_num = other.qp_num
        attr.path_mtu = e.IBV_MTU_1024
        attr.max_rd_atomic = attr.max_dest_rd_atomic = 1
        attr.min_rnr_timer, attr.timeout, attr.retry_cnt, attr.rnr_retry = 12, 14, 7, 7
        attr.ah_attr = AHAttr(dlid=lid, port_num=1)
        own.to_rts(attr)
    return pair


def rdma_write(sender: QP, queue: CQ, source: DmaBufMR, target: DmaBufMR, size: int) -> None:
    """Writes all bytes. A dma-buf's first byte has the address 0."""
    request = SendWR(opcode=e.IBV_WR_RDMA_WRITE, num_sge=1, sg=[SGE(0, size, source.lkey)])
    request.set_wr_rdma(target.rkey, 0)
    sender.post_send(request)
    count = 0
    while not count:
        count, completions = queue.poll()
    if completions[0].status != e.IBV_WC_SUCCESS:
        raise RuntimeError(f"the write ended with status {completions[0].status}")


def main() -> None:
    nic = sys.argv[1] if len(sys.argv) > 1 else "mlx5_0"
    size = int(sys.argv[2]) if len(sys.argv) > 2 else 1 << 20
    data = np.random.default_rng(1).integers(256, size=size, dtype=np.uint8)
    with p2pmem.Device() as device, device.alloc(size, near=nic) as source, device.alloc(size, near=nic) as target:
        source.write(data)
        source.flush()
        with Context(name=nic) as context, PD(context) as domain, CQ(context, 2) as queue:
            sender, receiver = connect(context, domain, queue)
            with (
                DmaBufMR(domain, size, ACCESS, dmabuf=source.fileno()) as from_region,
                DmaBufMR(domain, size, ACCESS, dmabuf=target.fileno()) as to_region,
            ):
                rdma_write(sender, queue, from_region, to_region, size)
            receiver.close()
            sender.close()
        arrived = np.empty_like(data)
        target.readinto(arrived)
        if not np.array_equal(arrived, data):
            raise RuntimeError("other bytes arrived")
        print(f"{nic} wrote {size} bytes from provider {source.provider} to provider {target.provider}, all of them right")


if __name__ == "__main__":
    try:
        main()
    except p2pmem.Error as error:
        sys.exit(f"{error}\n{error.remedy or ''}".strip())
