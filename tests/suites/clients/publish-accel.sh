#!/bin/bash
# SPDX-License-Identifier: MIT OR Apache-2.0
# Loads the module and publishes accel0 of this node, unless that has been done. Tables of one topology share guests, so all
# tables of `rdma` publish accel0 by this script: with a kernel reserve for nvmet, and with pinned exports for queues.
set -euo pipefail
[ -e /sys/module/p2pmem ] || insmod "$P2PMEM_MODULE"
[ -e "/sys/kernel/config/p2pmem/providers/$P2PMEM_DEV_ACCEL0" ] ||
    "$P2PMEM_BIN/p2pmemctl" publish "$P2PMEM_DEV_ACCEL0" --kernel-reserve 64M --pinned-exports
