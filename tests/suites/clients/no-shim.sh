#!/bin/bash
# SPDX-License-Identifier: MIT OR Apache-2.0
# Runs a program on mappings of /dev/p2pmem without the preload shim, on a kernel without the peer-memory interface. Fails
# unless the RDMA core rejects the memory with EREMOTEIO. (On a kernel with the interface, peer.toml tests that such programs
# work.)
#
#   no-shim.sh PROGRAM ARGUMENT...
set -euo pipefail
grep -qx 'registered_as off' /sys/kernel/debug/p2pmem/peer_memory
output=$(strace -f -e trace=ioctl -e status=failed "$@" 2>&1) && { echo "$output"; echo "the program succeeded"; exit 1; }
echo "$output"
grep -q "Couldn't allocate MR" <<<"$output"
grep -qE 'ioctl\(.*RDMA_VERBS_IOCTL.* = -1 EREMOTEIO' <<<"$output"
echo "as expected: EREMOTEIO"
