#!/bin/bash
# SPDX-License-Identifier: MIT OR Apache-2.0
# Runs a program for which the nodes have the names a and b. Other processes of the guest do not see the names.
#
#   with-names.sh PROGRAM ARGUMENT...
set -euo pipefail
hosts=$(mktemp)
printf '127.0.0.1 localhost\n%s a\n%s b\n' "$P2PMEM_ADDR_A" "$P2PMEM_ADDR_B" >"$hosts"
# shellcheck disable=SC2016
exec unshare -m bash -c 'mount --bind "$0" /etc/hosts && exec "$@"' "$hosts" "$@"
