#!/bin/bash
# SPDX-License-Identifier: MIT OR Apache-2.0
# Makes this node one of a Slurm cluster: node a is the controller, and all nodes run jobs. Slurm hands out the memory of the
# providers that are published, and only users with a job get some. Everything is in /run and /tmp.
#
#   slurm-node.sh           start the daemons
#   slurm-node.sh stop      end the daemons, and remove the rules
set -euo pipefail
if [ "${1:-}" = stop ]; then
    for daemon in slurm/slurmd slurm/slurmctld munge/munged; do
        [ ! -e /run/$daemon.pid ] || kill "$(cat /run/$daemon.pid)"
    done
    exec "$P2PMEM_BIN/p2pmemctl" rules remove 60-root 90-no-job
fi
[ ! -e /run/slurm ] || exit 0
ctl=$P2PMEM_BIN/p2pmemctl
install -d -m 755 /run/slurm /run/munge
install -d -m 755 /tmp/slurm/state /tmp/slurm/spool

# Jobs of users open the device. On other machines, group p2pmem does.
chmod 666 /dev/p2pmem
"$ctl" rules add 60-root --uid 0 --action allow
"$ctl" rules add 90-no-job --action deny

# The nodes have the same machine, and so the same lines.
for node in a b; do
    "$ctl" slurm gres --node $node --write /run/slurm/gres.conf 2>/dev/null
done | grep -v '^#' | sort -u >/run/slurm/gres.lines
resources=$(sed -n 's/^NodeName=a Gres=//p' /run/slurm/gres.lines)
cat >/run/slurm/slurm.conf <<END
ClusterName=p2pmem
SlurmctldHost=a($P2PMEM_ADDR_A)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
StateSaveLocation=/tmp/slurm/state
SlurmdSpoolDir=/tmp/slurm/spool
SlurmctldPidFile=/run/slurm/slurmctld.pid
SlurmdPidFile=/run/slurm/slurmd.pid
SlurmctldLogFile=/run/slurm/slurmctld.log
SlurmdLogFile=/run/slurm/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
MailProg=/bin/true
Prolog=/run/slurm/prolog
Epilog=/run/slurm/epilog
GresTypes=p2pmem
NodeName=a NodeAddr=$P2PMEM_ADDR_A CPUs=4 Gres=$resources
NodeName=b NodeAddr=$P2PMEM_ADDR_B CPUs=4 Gres=$resources
PartitionName=main Nodes=a,b Default=YES
END
echo CgroupPlugin=disabled >/run/slurm/cgroup.conf
for verb in prolog epilog; do
    printf '#!/bin/sh\nexec %s slurm %s >>/run/slurm/%s.log 2>&1\n' "$ctl" $verb $verb >/run/slurm/$verb
    chmod 755 /run/slurm/$verb
done

# A secret of the test bed, for all nodes.
(umask 077 && echo "the munge key of the test bed's nodes" >/run/munge/munge.key)
# munged closes each possible file, one after the other.
ulimit -n 1024
munged --key-file=/run/munge/munge.key --pid-file=/run/munge/munged.pid --log-file=/run/munge/munged.log --seed-file=/run/munge/seed \
    >/dev/null 2>&1
export SLURM_CONF=/run/slurm/slurm.conf
[ "$P2PMEM_NODE" != a ] || "$P2PMEM_CLIENTS/slurm-as.sh" root slurmctld
"$P2PMEM_CLIENTS/slurm-as.sh" root slurmd -N "$P2PMEM_NODE"
