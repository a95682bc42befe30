#!/bin/bash
# SPDX-License-Identifier: MIT OR Apache-2.0
# Runs a program without the preload shim. Prints the number of registrations that the module's peer-memory client handled
# meanwhile, and the packets that rxe0 sent and received. Fails if the client handled none, rejected any, or has one left.
#
#   peer-evidence.sh PROGRAM ARGUMENT...
set -euo pipefail
packets=/sys/class/infiniband/rxe0/ports/1/hw_counters

counter() {
    awk -v name="$1" '$1 == name { print $2 }' /sys/kernel/debug/p2pmem/peer_memory
}

mapped=$(counter dma_map) refused=$(counter refused)
sent=$(<$packets/sent_pkts) received=$(<$packets/rcvd_pkts)
env -u LD_PRELOAD "$@"
mapped=$(($(counter dma_map) - mapped)) refused=$(($(counter refused) - refused))
remaining=$(tail -n +2 /sys/kernel/debug/p2pmem/registrations)
echo "registered $mapped times, $refused refused"
echo "rxe0: $(($(<$packets/sent_pkts) - sent)) packets sent, $(($(<$packets/rcvd_pkts) - received)) received"
[ -z "$remaining" ] || { echo "registrations remain: $remaining"; exit 1; }
((mapped > 0 && refused == 0))
