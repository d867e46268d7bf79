#!/usr/bin/env bash
# A Slurm cluster of two nodes on this machine, for tests: slurm.sh FOLDER prints `ready` and holds it until its input ends; everything
# (keys, state, logs, slurm.conf) lies in FOLDER, on ports of its own. Needs root, munged, slurmctld and slurmd (Debian: apt-get install
# --no-install-recommends slurmctld slurmd slurm-client slurm-wlm-basic-plugins munge).
set -euo pipefail
folder=$(realpath "$1")
port=$((20000 + RANDOM % 10000))
host=$(hostname -s)
mkdir -p "$folder"/{state,munge,spool,log}
pids=()
stop() {
    # slurmd waits for the steps of its jobs, so these end first
    scancel --full --user=root 2>/dev/null || true
    for _ in $(seq 60); do [ -z "$(squeue --noheader 2>/dev/null)$(squeue --noheader --steps 2>/dev/null)" ] && break; sleep 0.5; done
    kill "${pids[@]}" 2>/dev/null || true
    sleep 2
    kill -KILL "${pids[@]}" 2>/dev/null || true
    wait
}
trap stop EXIT

# munge insists on folders that nobody else can write to, on a key of its own, and on a socket in a folder that all can enter
chmod 0711 "$folder" && chmod 0755 "$folder/munge"
head -c 1024 /dev/urandom > "$folder/munge/munge.key"
chown -R munge "$folder/munge" && chmod 0400 "$folder/munge/munge.key"
runuser -u munge -- munged --foreground --force --socket="$folder/munge/socket" --key-file="$folder/munge/munge.key" \
    --pid-file="$folder/munge/pid" --log-file="$folder/munge/log" --seed-file="$folder/munge/seed" 2> "$folder/log/munged" &
pids+=($!)

# cred_expire is also what a requeued job waits before it starts again, two minutes by default; sched_interval, until that is noticed, a minute
cat > "$folder/slurm.conf" <<CONF
ClusterName=kvshot
SlurmctldHost=$host(127.0.0.1)
SlurmUser=root
SlurmdUser=root
SlurmctldPort=$port
AuthType=auth/munge
AuthInfo=socket=$folder/munge/socket,cred_expire=10
CryptoType=crypto/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SchedulerParameters=sched_interval=2
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SwitchType=switch/none
KillWait=120
ReturnToService=2
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool/%n
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd-%n.pid
SlurmctldLogFile=$folder/log/slurmctld
SlurmdLogFile=$folder/log/slurmd-%n
NodeName=n1 NodeHostname=$host NodeAddr=127.0.0.1 Port=$((port + 1)) CPUs=1
NodeName=n2 NodeHostname=$host NodeAddr=127.0.0.1 Port=$((port + 2)) CPUs=1
PartitionName=all Nodes=n1,n2 Default=YES MaxTime=60 State=UP
CONF
export SLURM_CONF="$folder/slurm.conf"
mkdir -p "$folder"/spool/{n1,n2}
for _ in $(seq 50); do [ -S "$folder/munge/socket" ] && break; sleep 0.1; done
slurmctld -D 2> "$folder/log/slurmctld.err" & pids+=($!)
for node in n1 n2; do slurmd -D -N "$node" 2> "$folder/log/$node.err" & pids+=($!); done
for _ in $(seq 100); do
    [ "$(sinfo --noheader --format='%T %D' 2>/dev/null)" = "idle 2" ] && { echo ready; break; }
    sleep 0.2
done
cat > /dev/null
