#!/bin/bash
# SPDX-License-Identifier: MIT OR Apache-2.0
# Runs a program for which the nodes have their names: a, b, and so on. Other processes of the guest do not see the names.
#
#   with-names.sh PROGRAM ARGUMENT...
set -euo pipefail
hosts=$(mktemp)
echo 127.0.0.1 localhost >"$hosts"
for node in {a..h}; do
    address=P2PMEM_ADDR_${node^}
    [ -z "${!address:-}" ] || echo "${!address} $node" >>"$hosts"
done
# shellcheck disable=SC2016
exec unshare -m bash -c 'mount --bind "$0" /etc/hosts && exec "$@"' "$hosts" "$@"
