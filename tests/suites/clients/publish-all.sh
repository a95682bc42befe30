#!/bin/bash
# SPDX-License-Identifier: MIT OR Apache-2.0
# Loads the module and publishes all accelerators of this node, unless that has been done.
set -euo pipefail
[ -e /sys/module/p2pmem ] || insmod "$P2PMEM_MODULE"
for name in "${!P2PMEM_DEV_ACCEL@}"; do
    [ -e "/sys/kernel/config/p2pmem/providers/${!name}" ] ||
        "$P2PMEM_BIN/p2pmemctl" publish "${!name}" --kernel-reserve 0
done
