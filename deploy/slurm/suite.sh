#!/usr/bin/env bash
# Submit a suite: what its runs need as one job, then an array with a task for each run, then the report of all.
#
#   deploy/slurm/suite.sh SUITE [KEY=VALUE…] [OPTION…]
#
# Options are those of `sottovoce run`. What jobs may use is in the lines of run.sbatch; SBATCH_ACCOUNT, SBATCH_GPUS and
# the like come before them, and before these what stands in JOB_OPTIONS, such as "--gpus=1 --time=4:00:00". AT_ONCE
# limits how many tasks run at the same time. The same command again goes on: what is finished is not run again.
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
SOTTOVOCE_LABELS=$(sottovoce run "$@" --list)
export SOTTOVOCE_LABELS
mapfile -t labels <<<"$SOTTOVOCE_LABELS"
read -ra options <<<"${JOB_OPTIONS:-}"

parents=$(sbatch "${options[@]}" --parsable --job-name=parents "$here/run.sbatch" "$@" --parents-only)
tasks=$(sbatch "${options[@]}" --parsable --job-name=runs --dependency="afterok:$parents" --kill-on-invalid-dep=yes \
  --array="0-$((${#labels[@]} - 1))${AT_ONCE:+%$AT_ONCE}" --output=slurm-%x-%A-%a.log "$here/run.sbatch" "$@")
report=$(sbatch "${options[@]}" --parsable --job-name=report --dependency="afterok:$tasks" --kill-on-invalid-dep=yes \
  "$here/run.sbatch" "$@")
echo "parents $parents, ${#labels[@]} runs $tasks, report $report"
