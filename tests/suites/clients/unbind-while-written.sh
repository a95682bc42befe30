#!/bin/bash
# SPDX-License-Identifier: MIT OR Apache-2.0
# Runs a program with a buffer in accel0, and unbinds accel0 once the NIC has written to the buffer. Publishes accel0 again
# afterwards. Fails if unbinding takes 10 s or more: it must not wait for the program, which runs for a minute. The limit allows
# for load on the host; the demo measures the time on an idle one. Fails also if the NIC writes to accelerators after that.
#
#   unbind-while-written.sh PROGRAM ARGUMENT...
set -euo pipefail
device=$P2PMEM_DEV_ACCEL0

written() {
    python3 -c '
import json, socket
peer = socket.socket(socket.AF_UNIX)
peer.connect("/run/p2pmem/host.sock")
peer.sendall(b"{\"op\":\"snapshot\"}\n")
print(json.loads(peer.makefile().readline())["Ok"]["nic0"]["counters"]["payload"]["peer_written"])'
}

before=$(written)
LD_PRELOAD=$P2PMEM_BIN/libp2pmem_preload.so "$@" &
program=$!
# The harness limits the time of this loop.
while (($(written) < before + (4 << 20))); do
    kill -0 "$program"
done
start=$(date +%s%N)
echo "$device" >/sys/bus/pci/drivers/p2pmem/unbind
took=$((($(date +%s%N) - start) / 1000000))
stopped=$(written)
echo "unbound in $took ms"
# The program has lost its client and its buffer, so its exit code is ignored.
wait "$program" || echo "the program ended with $?"
late=$(($(written) - stopped))
echo "$late bytes were written afterwards"
rmdir "/sys/kernel/config/p2pmem/providers/$device"
"$P2PMEM_CLIENTS/publish-accel.sh"
((took < 10000 && late == 0))
