#!/bin/bash
# SPDX-License-Identifier: MIT OR Apache-2.0
# Runs a program without the shim on mappings of /dev/p2pmem, where the RDMA core has no peer-memory interface: it has to refuse
# their memory by EREMOTEIO. (Where the core has the interface, peer.toml shows that such programs run.)
#
#   no-shim.sh PROGRAM ARGUMENT...
set -euo pipefail
grep -qx 'registered_as off' /sys/kernel/debug/p2pmem/peer_memory
said=$(strace -f -e trace=ioctl -e status=failed "$@" 2>&1) && { echo "$said"; echo "it succeeded"; exit 1; }
echo "$said"
grep -q "Couldn't allocate MR" <<<"$said"
grep -qE 'ioctl\(.*RDMA_VERBS_IOCTL.* = -1 EREMOTEIO' <<<"$said"
echo "as expected: EREMOTEIO"
