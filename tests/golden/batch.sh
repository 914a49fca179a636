#!/usr/bin/env bash
# Job gpt-3f9a2c. Nodes: 2; ranks per node: 4.
# gptctl submits this script. It belongs to its folder, and cannot be submitted again by hand.
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
# Without a trap, the signal would kill this script before the engine can handle it.
gptctl_stop_requested=''
trap 'gptctl_stop_requested=stop-requested' USR1
cd /home/me/work/runs/gpt-3f9a2c || exit 73
fail() {
  echo "error: $*" >&2
  exit 72
}

# If a lost reply made gptctl submit the job twice, only the one with the claim may run.
# A task of an array is known by the id of the array and its number.
gptctl_id=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
gptctl_id=${gptctl_id:-$SLURM_JOB_ID}
grep -qs "\"scheduler_id\": \"$gptctl_id\"" claim.json || {
  echo "Slurm job $gptctl_id does not have the claim of this folder: gptctl abandoned it"
  exit 1
}

# An earlier run may have recorded a result before somebody requeued the job.
rm -f result.json

# gptctl's engine needs Python 3.10 or newer, and only its standard library.
# One that does not start within a minute hangs.
gptctl_limit=()
command -v timeout > /dev/null && gptctl_limit=(timeout 60)
runs_engine() {
  "${gptctl_limit[@]}" "$1" -E -S -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2> /dev/null
}
gptctl_python=/venv/bin/python # the interpreter that ran gptctl submit
if ! runs_engine "$gptctl_python"; then
  # python3 may need the setup to start. The ranks run the setup themselves and must not run it
  # twice: the engine gives them the environment from before.
  exec {gptctl_environment}< <(env -0)
  export GPTCTL_BATCH_ENVIRONMENT=$gptctl_environment
  {

  # Setup of cluster profile lab.
  {
    module load anaconda/3-2023.03
  } || fail 'setup failed: module load anaconda/3-2023.03'
  {
    conda activate gpt
  } || fail 'setup failed: conda activate gpt'
  } >&2
  gptctl_python=$(command -v python3)
fi
runs_engine "$gptctl_python" || fail "no Python 3.10 or newer for gptctl's engine on $(uname -n):" \
  'engine_python of profile lab is not set; the interpreter that ran gptctl submit (/venv/bin/python) and python3 after the setup are missing, too old, or do not start'
# The engine starts launch.sh on every node with srun. It handles attempts, restarts, requeueing,
# stopping and the result. -E: variables such as PYTHONPATH are for the ranks.
trap '' USR1
exec "$gptctl_python" -E -S engine.pyz srun_node /home/me/work/runs/gpt-3f9a2c ${gptctl_stop_requested:+"$gptctl_stop_requested"}
