#!/bin/bash
# SPDX-License-Identifier: MIT OR Apache-2.0
# Runs a program as one of the users root, alice (4001), and bob (4002). For the program, this node and all others have their names.
#
#   slurm-as.sh root|alice|bob PROGRAM ARGUMENT...
set -euo pipefail
user=$1
shift
export SLURM_CONF=/run/slurm/slurm.conf
passwd=$(mktemp)
cat /etc/passwd - >"$passwd" <<'END'
alice:x:4001:4001::/:/bin/sh
bob:x:4002:4002::/:/bin/sh
END
chmod 644 "$passwd"
# shellcheck disable=SC2016
exec "$P2PMEM_CLIENTS/with-names.sh" bash -c '
    mount --bind "$0" /etc/passwd
    id=$(id -u "$1")
    shift
    cd /tmp
    exec setpriv --reuid "$id" --regid "$id" --clear-groups "$@"' "$passwd" "$user" "$@"
