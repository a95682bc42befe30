#!/bin/bash
# SPDX-License-Identifier: MIT OR Apache-2.0
# Runs a program that receives from a multicast group, and listens on a TCP port once the program has joined the group. The
# harness waits for that port.
#
#   multicast-receiver.sh PORT PROGRAM ARGUMENT...
set -euo pipefail
port=$1 output=$(mktemp)
shift
stdbuf -oL "$@" >"$output" &
program=$!
# The harness limits the time of this loop.
until grep -q joined "$output"; do
    kill -0 "$program"
done
python3 -c "import socket; socket.create_server(('', $port)).accept()" &
code=0
wait "$program" || code=$?
cat "$output"
exit $code
