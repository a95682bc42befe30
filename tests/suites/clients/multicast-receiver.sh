#!/bin/bash
# SPDX-License-Identifier: MIT OR Apache-2.0
# Runs a program that receives from a multicast group, and listens on a TCP port once it has joined: that is what the
# harness waits for.
#
#   multicast-receiver.sh PORT PROGRAM ARGUMENT...
set -euo pipefail
port=$1 said=$(mktemp)
shift
stdbuf -oL "$@" >"$said" &
program=$!
# The harness ends this script should it never join.
until grep -q joined "$said"; do
    kill -0 "$program"
done
python3 -c "import socket; socket.create_server(('', $port)).accept()" &
code=0
wait "$program" || code=$?
cat "$said"
exit $code
