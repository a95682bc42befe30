#!/bin/bash
# SPDX-License-Identifier: MIT OR Apache-2.0
# Runs a program as it is, without the shim, and says how often the module was asked for its memory meanwhile, and how many
# packets an RDMA device in software has sent and received. Fails where the module was not asked, has refused, or has a
# registration left.
#
#   peer-evidence.sh PROGRAM ARGUMENT...
set -euo pipefail
packets=/sys/class/infiniband/rxe0/ports/1/hw_counters

counted() {
    awk -v name="$1" '$1 == name { print $2 }' /sys/kernel/debug/p2pmem/peer_memory
}

mapped=$(counted dma_map) refused=$(counted refused)
sent=$(<$packets/sent_pkts) received=$(<$packets/rcvd_pkts)
env -u LD_PRELOAD "$@"
mapped=$(($(counted dma_map) - mapped)) refused=$(($(counted refused) - refused))
left=$(tail -n +2 /sys/kernel/debug/p2pmem/registrations)
echo "registered $mapped times, $refused refused"
echo "rxe0: $(($(<$packets/sent_pkts) - sent)) packets sent, $(($(<$packets/rcvd_pkts) - received)) received"
[ -z "$left" ] || { echo "left over: $left"; exit 1; }
((mapped > 0 && refused == 0))
