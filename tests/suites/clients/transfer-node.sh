#!/bin/bash
# SPDX-License-Identifier: MIT OR Apache-2.0
# Loads the module and publishes accel0 and fpga0 of this node, unless that has been done.
set -euo pipefail
"$P2PMEM_CLIENTS/publish-accel.sh"
[ -e "/sys/kernel/config/p2pmem/providers/$P2PMEM_DEV_FPGA0" ] ||
    "$P2PMEM_BIN/p2pmemctl" publish "$P2PMEM_DEV_FPGA0" --kernel-reserve 0
