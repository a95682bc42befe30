#!/bin/bash
# SPDX-License-Identifier: MIT OR Apache-2.0
# Prepares this node for the recorder by NVMe over Fabrics. Node b makes file systems and LUNs on its drives, unmounts them, and
# exports each drive in a subsystem of its own, by a NIC of its own, with buffers in its accelerator.
set -euo pipefail
export LC_ALL=C
"$P2PMEM_CLIENTS/publish-accel.sh"
modprobe nvme-rdma
# Both NICs are in one InfiniBand subnet. By default, each interface answers ARP requests for the addresses of all of them, and a connection
# to the address of one NIC can go to the other one, where nothing listens.
echo 1 >/proc/sys/net/ipv4/conf/all/arp_ignore
echo 2 >/proc/sys/net/ipv4/conf/all/arp_announce
[ "$P2PMEM_NODE" = b ] || exit 0
drives=/run/nvmeof/drive0,/run/nvmeof/drive1 recorder=$P2PMEM_BIN/p2pmem-recorder
for number in 0 1; do
    device=P2PMEM_BLOCK_NVME$number
    mkfs.ext4 -q "${!device}"
    mkdir -p /run/nvmeof/drive$number
    mount -t ext4 "${!device}" /run/nvmeof/drive$number
done
# A LUN does not depend on the machine that has its drives. Its creation writes all of its bytes, which takes less time here. A segment
# has 19 blocks of 1 MiB, or 60 of 64 KiB.
"$recorder" lun create fast --drive $drives --segment-size 20M --segments 2
"$recorder" stream create fast/radar --drive $drives --block-size 1M --channels 2
"$recorder" lun create small --drive $drives --segment-size 4M --segments 8
"$recorder" stream create small/short --drive $drives --block-size 64K --channels 2
for number in 0 1; do
    address=P2PMEM_RDMA_ADDR_B_NIC$number device=P2PMEM_BLOCK_NVME$number
    umount /run/nvmeof/drive$number
    "$P2PMEM_CLIENTS/nvmet-target.sh" "drive$number" "${!address}" $((number + 1))
    cd "/sys/kernel/config/nvmet/subsystems/drive$number/namespaces/1"
    echo -n "${!device}" >device_path
    echo -n "$P2PMEM_DEV_ACCEL0" >p2pmem
    echo 1 >enable
done
