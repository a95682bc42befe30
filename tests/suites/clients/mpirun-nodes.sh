#!/bin/bash
# SPDX-License-Identifier: MIT OR Apache-2.0
# Starts ranks of an MPI program on some nodes, with the messages over UCX and the NIC. Runs on the first node, while all
# others run `remote-shell.py serve`, each under with-names.sh.
#
#   mpirun-nodes.sh NODES ARGUMENT...
#
# NODES are names with commas between them, each with a number of ranks if it is not one: a,b or a:4. Ranks are numbered round the nodes. The arguments are those of mpirun: options, a program, its arguments.
set -euo pipefail
nodes=
for node in ${1//,/ }; do
    [[ $node == *:* ]] || node=$node:1
    nodes+=${nodes:+,}$node
done
shift
export HOME=/tmp OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
exec mpirun --host "$nodes" --map-by node --leave-session-attached \
    --prtemca plm_ssh_agent "$P2PMEM_CLIENTS/remote-shell.py" --prtemca plm_ssh_no_tree_spawn 1 \
    --mca pml ucx -x UCX_TLS=rc_x,self -x "UCX_NET_DEVICES=$P2PMEM_RDMA_NIC0:1" -x PYTHONDONTWRITEBYTECODE=1 "$@"
