#!/usr/bin/env bash
# Plays a run on as many hosts as you say, 4 by default, on this machine:
#
#     bash examples/multihost/run.sh 4
#
# 1. A host dies, with all that is on its disk. The run goes on from a near step, of which
#    another host has a copy; it computes the same again, bit for bit.
# 2. One host gets SIGTERM, as before a preemption. All stop at one step, which is saved.
# 3. The run goes on with another mesh.
set -euo pipefail
count=${1:-4}
here=$(cd "$(dirname "$0")" && pwd)
work=$(mktemp -d)
pids=()
trap 'kill -9 "${pids[@]}" 2>/dev/null || true; rm -rf "$work"' EXIT
export JAX_PLATFORMS=cpu JAX_CPU_COLLECTIVES_IMPLEMENTATION=gloo
export XLA_FLAGS=--xla_force_host_platform_device_count=2

start() {  # NAME ARGUMENTS: the processes of an attempt; their logs are NAME.PROCESS.
  name=$1 pids=()
  local port process
  port=$(python -c 'import socket; s = socket.socket(); s.bind(("", 0)); print(s.getsockname()[1])')
  for ((process = 0; process < count; process++)); do
    python "$here/train.py" --root "$work/run" --near "$work/disk$process" --processes "$count" \
      --process "$process" --coordinator "localhost:$port" "${@:2}" >"$work/$name.$process" 2>&1 &
    pids+=($!)
  done
}

await() {  # TEXT: until process 0 has printed it.
  local end=$((SECONDS + 120))
  until grep -q "$1" "$work/$name.0"; do
    if [ "$SECONDS" -gt "$end" ] || ! kill -0 "${pids[0]}" 2>/dev/null; then
      tail -n 30 "$work/$name".*
      exit 1
    fi
    sleep 0.1
  done
}

finish() {  # All of them have to end well.
  local pid
  for pid in "${pids[@]}"; do
    wait "$pid" || { tail -n 30 "$work/$name".*; exit 1; }
  done
  pids=()
}

say() { printf '\n%s (%d s)\n' "$*" "$SECONDS"; }

say "$count hosts of 2 devices: FSDP over hosts, tensors over devices"
start first
await "^step 13:"
kill -9 "${pids[1]}"
say "Host 1 is dead; the others are ended, as a scheduler does it. Its disk is lost"
kill -9 "${pids[@]}" 2>/dev/null || true
wait 2>/dev/null || true
tail -n 2 "$work/first.0"
rm -rf "$work/disk1"

start second
await "^step 23:"
head -n 5 <(grep -v '^\[' "$work/second.0")
# What both attempts have computed is the same, bit for bit.
grep '^step' "$work/first.0" >"$work/known"
again=$(grep -cxFf "$work/known" "$work/second.0")
[ "$again" -ge 3 ] || { echo "the steps that were computed again differ"; exit 1; }
kill -TERM "${pids[$((count - 1))]}"
finish
say "Host $((count - 1)) got SIGTERM, and all have stopped"
tail -n 1 "$work/second.0"

start third --tensor 1
finish
say "The same run, with FSDP over all devices"
grep -v '^\[' "$work/third.0" | sed -n '1,2p;$p'
