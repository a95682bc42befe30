#!/bin/bash
# SPDX-License-Identifier: MIT OR Apache-2.0
# Runs a program, and kills it, or unbinds fpga0 and publishes it again, once the NIC has moved a megabyte. Prints the exit code of
# the program.
#
#   while-streaming.sh kill|unbind PROGRAM ARGUMENT...
set -euo pipefail
action=$1 device=$P2PMEM_DEV_FPGA0
shift

moved() {
    python3 -c '
import json, socket
peer = socket.socket(socket.AF_UNIX)
peer.connect("/run/p2pmem/host.sock")
peer.sendall(b"{\"op\":\"snapshot\"}\n")
payload = json.loads(peer.makefile().readline())["Ok"]["nic0"]["counters"]["payload"]
print(sum(payload[name] for name in ("host_read", "host_written", "peer_read", "peer_written")))'
}

before=$(moved)
"$@" &
program=$!
# The harness limits the time of this loop.
while :; do
    # An error of the request ends the script: the condition of a loop would not.
    now=$(moved)
    ((now < before + (1 << 20))) || break
    kill -0 "$program"
done
case $action in
kill) kill -KILL "$program" ;;
unbind) echo "$device" >/sys/bus/pci/drivers/p2pmem/unbind ;;
esac
code=0
wait "$program" || code=$?
echo "the program ended with $code"
if [ "$action" = unbind ]; then
    rmdir "/sys/kernel/config/p2pmem/providers/$device"
    "$P2PMEM_CLIENTS/transfer-node.sh"
fi
