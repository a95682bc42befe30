#!/bin/bash
# SPDX-License-Identifier: MIT OR Apache-2.0
# Runs a program whose buffer is in accel0, and unbinds accel0 once the NIC has written into it. Afterwards accel0 is a
# provider again. Fails if the unbinding waits for the program, whose run lasts a minute: the bound leaves room for a host
# with other work. How long it takes on a quiet one is the demo's to report.
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
# The harness ends this script should nothing ever be written.
while (($(written) < before + (4 << 20))); do
    kill -0 "$program"
done
start=$(date +%s%N)
echo "$device" >/sys/bus/pci/drivers/p2pmem/unbind
took=$((($(date +%s%N) - start) / 1000000))
echo "unbound in $took ms"
# Its client is gone, and so is its buffer: how it ends is its own affair.
wait "$program" || echo "the program ended with $?"
rmdir "/sys/kernel/config/p2pmem/providers/$device"
"$P2PMEM_BIN/p2pmemctl" publish "$device" --kernel-reserve 64M
((took < 10000))
