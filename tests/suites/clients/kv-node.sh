#!/bin/bash
# SPDX-License-Identifier: MIT OR Apache-2.0
# Runs kv_cache.py as a node with a small model, with the preload shim, and with the NIC of this node.
#
#   kv-node.sh prefill|decode OPTION...
set -euo pipefail
case $1 in
prefill) node=(--address "$P2PMEM_ADDR_A" --server "$P2PMEM_ADDR_B") ;;
*) node=(--address "$P2PMEM_ADDR_B") ;;
esac
export PYTHONPATH=$P2PMEM_PYTHON:$P2PMEM_WHEELS LD_PRELOAD=$P2PMEM_BIN/libp2pmem_preload.so
exec python3 -B "$P2PMEM_EXAMPLES/kv_cache.py" "$1" --nic "$P2PMEM_RDMA_NIC0" --layers 2 --width 64 "${node[@]}" "${@:2}"
