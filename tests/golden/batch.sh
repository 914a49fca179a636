#!/usr/bin/env bash
# Job gpt-3f9a2c: 2 node(s) with 4 rank(s) each. gptctl submits it; it belongs to its folder and runs once.
#SBATCH --job-name=gpt
#SBATCH --partition=a800
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=16
#SBATCH --time=01:00:00
#SBATCH --gres=gpu:4
#SBATCH --exclusive
#SBATCH --chdir=/home/me/work/runs/gpt-3f9a2c
#SBATCH --output=/home/me/work/runs/gpt-3f9a2c/logs/batch.log
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@120
#SBATCH --requeue

umask 077
cd /home/me/work/runs/gpt-3f9a2c || exit 73
say() { echo "[$(date '+%F %T')] $*"; }
# Says how the job ended. What only Slurm knows, such as that a node failed, it says itself.
finish() {
  say "$1${2:+: $2}"
  printf '{"state": "%s", "reason": "%s", "ended": %s}\n' "$1" "${2//[\"\\]/}" "$(date +%s)" > result.json.part && mv result.json.part result.json
  exit "$3"
}
fail() {
  stop_if_slurm_ends_it "$*" # whose signal may have come to what failed before it comes here
  finish FAILED "$*" 1
}
stop_if_cancelled() { [ ! -e cancelled ] || finish CANCELLED cancelled 1; } # with 0, jobs that wait for this one would start

# Slurm's controller may be out of reach for a while; when it answers, it means what it says.
patiently() {
  local _
  for _ in {1..60}; do
    "$@" && return
    if scontrol ping &> /dev/null; then
      "$@"
      return
    fi
    sleep 5
  done
  return 1
}

# Every attempt has a number, over all requeues; this script's output and Slurm's own goes to its folder.
begin_attempt() {
  while [ -e "attempt-$GPTCTL_ATTEMPT" ]; do
    GPTCTL_ATTEMPT=$((GPTCTL_ATTEMPT + 1))
  done
  gptctl_logs=/home/me/work/runs/gpt-3f9a2c/logs/"attempt-$GPTCTL_ATTEMPT"
  mkdir -p "attempt-$GPTCTL_ATTEMPT" "$gptctl_logs" || exit 73
  mv /home/me/work/runs/gpt-3f9a2c/logs/batch.log "$gptctl_logs/batch.log" 2> /dev/null # Slurm has it open, and goes on writing to it
  exec >> "$gptctl_logs/batch.log" 2>&1
  say "attempt $GPTCTL_ATTEMPT, job $SLURM_JOB_ID of Slurm"
  [ ! -e "attempt-$((GPTCTL_ATTEMPT - 1))/hosts" ] || say_which_nodes_are_down < "attempt-$((GPTCTL_ATTEMPT - 1))/hosts"
  newest_checkpoint > "attempt-$GPTCTL_ATTEMPT/began-with"
  # Whatever ended those before it: Slurm itself may start a job again and again, too.
  [ "$(attempts_without_progress)" -le 3 ] || fail "three attempts without progress"
}
# Of the nodes of the attempt before: that one failed is why this attempt is made.
say_which_nodes_are_down() {
  sinfo --noheader --Node --states=down,fail,unknown --nodes="$(paste -sd,)" --format='%N of the attempt before is %T: %E' | sort -u
}

newest_checkpoint() {
  local newest=-1 step
  for step in /home/me/work/runs/gpt-3f9a2c/output/step_*; do
    step=${step##*/step_}
    [[ $step =~ ^[0-9]+$ ]] && [ "$step" -gt "$newest" ] && newest=$step
  done
  echo "$newest"
}
# How many of the last attempts, this one included, have brought no new checkpoint.
attempts_without_progress() {
  local number=$GPTCTL_ATTEMPT newest
  newest=$(newest_checkpoint)
  while [ "$(cat "attempt-$number/began-with" 2> /dev/null)" = "$newest" ]; do
    number=$((number - 1))
  done
  echo $((GPTCTL_ATTEMPT - number))
}

# Where ranks meet, anew in each attempt.
choose_endpoint() {
  mapfile -t gptctl_nodes < <(scontrol show hostnames "${SLURM_JOB_NODELIST:?this is to be run inside a Slurm job}")
  [ "${#gptctl_nodes[@]}" -gt 0 ] || fail "scontrol does not name the hosts of $SLURM_JOB_NODELIST"
  MASTER_ADDR=$(ip -4 -o address show dev bond0 | awk '{ sub("/.*", "", $4); print $4; exit }')
  [ -n "$MASTER_ADDR" ] || fail "${gptctl_nodes[0]} has no address on "bond0
  MASTER_PORT=$((20000 + (SLURM_JOB_ID + ${GPTCTL_ATTEMPT:-0} * 97) % 12000)) # below the ports that outgoing connections take
  while (exec 3<> "/dev/tcp/$MASTER_ADDR/$MASTER_PORT") 2> /dev/null; do # somebody listens there
    MASTER_PORT=$((MASTER_PORT + 1))
  done
  export MASTER_ADDR MASTER_PORT
  printf '{"host": "%s", "port": %s}\n' "$MASTER_ADDR" "$MASTER_PORT" > "attempt-$GPTCTL_ATTEMPT/endpoint.json"
  printf '%s\n' "${gptctl_nodes[@]}" > "attempt-$GPTCTL_ATTEMPT/hosts"
}

# One launch.sh on every node.
run_attempt() {
  echo "${SLURM_NODEID:-0}" # node id, hosts, head node, number of nodes
  echo "${gptctl_nodes[*]}"
  echo "${gptctl_nodes[0]}"
  echo "${#gptctl_nodes[@]}"
  srun --nodes="${#gptctl_nodes[@]}" --ntasks-per-node=1 --kill-on-bad-exit=1 --unbuffered --immediate=60 \
    --output="${gptctl_logs//%/%%}/node.%n.log" --open-mode=append bash launch.sh &
  gptctl_step=$!
  [ -z "$gptctl_asked" ] || kill -USR1 "$gptctl_step"
  while
    wait "$gptctl_step"
    gptctl_code=$?
    kill -0 "$gptctl_step" 2> /dev/null # a signal ends `wait` early
  do :; done
  wait "$gptctl_step" # again: it may have ended while a signal was dealt with
  gptctl_code=$?
  gptctl_step=''
}

# The scheduler wants the job to stop: before its time limit, at preemption, or to end it. Ranks save and end.
gptctl_step='' gptctl_asked=''
ask_ranks() {
  gptctl_asked=yes
  [ -z "$gptctl_step" ] || { say "asking the ranks to save and stop"; kill -USR1 "$gptctl_step"; }
}
trap ask_ranks USR1 TERM

# The node that failed first, and how; nothing when none did. One that was asked to stop was asked by the scheduler:
# without B:USR1 at preemption, only the ranks hear of it. A node that says nothing has failed, and others fell with it.
first_failure() {
  local file first='' node
  shopt -s nullglob
  gptctl_reason=''
  for file in "attempt-$GPTCTL_ATTEMPT"/node.*.exit; do
    if [ "$(cat "$file")" != 0 ] && { [ -z "$first" ] || [ "$file" -ot "$first" ]; }; then
      first=$file
    fi
  done
  for node in "${!gptctl_nodes[@]}"; do
    if [ ! -s "attempt-$GPTCTL_ATTEMPT/node.$node.exit" ]; then
      gptctl_reason="node $node (${gptctl_nodes[$node]}) ended without a word; srun ended with exit code $gptctl_code"
      return
    fi
  done
  if [ -z "$first" ]; then
    [ "$gptctl_code" = 0 ] || gptctl_reason="srun ended with exit code $gptctl_code"
    return
  fi
  node=${first##*/node.}
  node=${node%.exit}
  [ ! -e "${first%.exit}.asked" ] || gptctl_asked=yes
  gptctl_reason="node $node (${gptctl_nodes[$node]}) ended with exit code $(cat "$first")"
}
# Cancelled, preempted, out of time, a node failed: then Slurm says how the job ended.
stop_if_slurm_ends_it() {
  local state
  command -v squeue > /dev/null || return
  state=$(patiently squeue --noheader --states=all --jobs="$SLURM_JOB_ID" --format=%T)
  [ "$state" != RUNNING ] || return
  say "$*; Slurm ends this job: ${state:-it does not answer}"
  exit 1
}
# Ends this run of the script; Slurm starts it again, on these nodes or others. Else this is how the job ended: $1.
requeue() {
  stop_if_cancelled
  say "requeued: $2"
  if ! patiently scontrol requeue "$SLURM_JOB_ID"; then
    stop_if_slurm_ends_it "$2" # a request whose answer was lost may have been heard
    finish "$1" "$2, and it could not be requeued" 1
  fi
  sleep 300 & # Slurm ends this script
  wait "$!"
  exit 1
}

# Of two submissions of the same job, one has the claim.
grep -qs "\"scheduler_id\": \"$SLURM_JOB_ID\"" claim.json || {
  say "job $SLURM_JOB_ID was given up, and does nothing"
  exit 1
}
rm -f result.json # of a run before this one, after which somebody has requeued the job
export GPTCTL_ATTEMPT=0
[ -z "$SLURM_CPUS_PER_TASK" ] || export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK" # srun does not take it over by itself
unset SLURM_EXPORT_ENV # ranks get what this script has, whatever it got itself
gptctl_failures_here=0
while :; do
  stop_if_cancelled
  begin_attempt
  choose_endpoint
  run_attempt
  first_failure
  [ -n "$gptctl_reason" ] || finish COMPLETED "" 0
  stop_if_cancelled
  stop_if_slurm_ends_it "$gptctl_reason"
  [ "$(attempts_without_progress)" -lt 3 ] || fail "$gptctl_reason; three attempts without progress"
  # Such as a node that was away for a moment: Slurm believes that it still runs the attempt before.
  compgen -G "$gptctl_logs/node.*.log" > /dev/null || requeue FAILED "Slurm starts nothing on these nodes"
  if [ -n "$gptctl_asked" ]; then
    requeue STOPPED "the scheduler asked the job to stop"
  fi

  # First again on these nodes, then on any, then no more.
  touch "attempt-$GPTCTL_ATTEMPT/failed"
  [ ! -e "attempt-$GPTCTL_ATTEMPT/cannot-be-helped" ] || fail "$gptctl_reason; starting again cannot help"
  gptctl_failures=(attempt-*/failed)
  [ "${#gptctl_failures[@]}" -lt 3 ] || fail "$gptctl_reason"
  say "$gptctl_reason"
  gptctl_failures_here=$((gptctl_failures_here + 1))
  [ "$gptctl_failures_here" -lt 2 ] || requeue FAILED "two attempts on these nodes failed"
done
