#!/bin/bash
# SPDX-License-Identifier: MIT OR Apache-2.0
# Runs a program without the shim on mappings of /dev/p2pmem. Where the module is a peer-memory client of the RDMA core, the
# program has to succeed, and to have registered by that; elsewhere the core has to refuse its memory by EREMOTEIO.
#
#   no-shim.sh PROGRAM ARGUMENT...
set -euo pipefail
state=/sys/kernel/debug/p2pmem/peer_memory

counted() {
    awk -v name="$1" '$1 == name { print $2 }' $state
}

if grep -qx 'registered_as off' $state; then
    said=$(strace -f -e trace=ioctl -e status=failed "$@" 2>&1) && { echo "$said"; echo "it succeeded"; exit 1; }
    echo "$said"
    grep -q "Couldn't allocate MR" <<<"$said"
    grep -qE 'ioctl\(.*RDMA_VERBS_IOCTL.* = -1 EREMOTEIO' <<<"$said"
    echo "as expected: EREMOTEIO"
else
    mapped=$(counted dma_map) refused=$(counted refused)
    "$@"
    (($(counted dma_map) > mapped && $(counted refused) == refused))
    [ -z "$(tail -n +2 /sys/kernel/debug/p2pmem/registrations)" ]
    echo "as expected: registered by peer memory"
fi
