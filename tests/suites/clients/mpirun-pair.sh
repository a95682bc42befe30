#!/bin/bash
# SPDX-License-Identifier: MIT OR Apache-2.0
# Starts one rank of an MPI program on each node, with the messages over UCX and the NIC. Runs on node a, while node b runs
# `remote-shell.py serve`, both under with-names.sh.
#
#   mpirun-pair.sh PROGRAM ARGUMENT...
set -euo pipefail
export HOME=/tmp OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
exec mpirun --host a:1,b:1 -np 2 --map-by node --leave-session-attached \
    --prtemca plm_ssh_agent "$P2PMEM_CLIENTS/remote-shell.py" --prtemca plm_ssh_no_tree_spawn 1 \
    --mca pml ucx -x UCX_TLS=rc_x,self -x "UCX_NET_DEVICES=$P2PMEM_RDMA_NIC0:1" -x PYTHONDONTWRITEBYTECODE=1 "$@"
