#!/bin/bash
# SPDX-License-Identifier: MIT OR Apache-2.0
# Connects to a drive by NVMe over RDMA, writes it, reads it back and compares.
#
#   nvme-over-rdma.sh ADDRESS SUBSYSTEM BLOCK MIB
set -euo pipefail
address=$1 subsystem=$2 block=$3 mib=$4
uuid=70327032-6d65-6d00-0000-000000000001
data=$(mktemp -d)

nvme connect -t rdma -a "$address" -s 4420 -n "$subsystem" \
    --hostnqn "nqn.2014-08.org.nvmexpress:uuid:$uuid" --hostid "$uuid" --nr-io-queues 1
trap 'nvme disconnect -n "$subsystem"; rm -r "$data"' EXIT
drive=
# The connection exists, so the drive appears; the harness limits the time of this loop.
while [ -z "$drive" ]; do
    for block_device in /sys/block/nvme*n*; do
        # The parent of a drive is its subsystem, or its controller if the kernel has no multipathing.
        [ "$(cat "$block_device/device/subsysnqn" 2>/dev/null)" != "$subsystem" ] ||
            drive=/dev/$(basename "$block_device")
    done
done
# The sysfs entry precedes the device node. Without the node, dd would create a regular file.
while [ ! -b "$drive" ]; do :; done
head -c $((mib << 20)) /dev/urandom >"$data/written"
dd if="$data/written" of="$drive" bs="$block" oflag=direct status=none
dd if="$drive" of="$data/read" bs="$block" count=$(((mib << 20) / $(numfmt --from=iec "$block"))) iflag=direct status=none
cmp "$data/written" "$data/read"
echo "verified $mib MiB"
