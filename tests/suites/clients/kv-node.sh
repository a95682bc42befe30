#!/bin/bash
# SPDX-License-Identifier: MIT OR Apache-2.0
# Runs kv_cache.py with the preload shim and the NIC of this node.
#
#   kv-node.sh EXAMPLES PYTHONPATH ROLE OPTION...
set -euo pipefail
examples=$1 role=$3
export PYTHONPATH=$2 LD_PRELOAD=$P2PMEM_BIN/libp2pmem_preload.so
exec python3 -B "$examples/kv_cache.py" "$role" --nic "$P2PMEM_RDMA_NIC0" "${@:4}"
