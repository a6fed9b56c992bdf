#!/usr/bin/env bash
# Converts one checkpoint on many machines that share a file system: a part for each task of a Slurm array, then one job that
# writes index and manifest.
#
#   export SOURCE=/shared/model TARGET=/shared/layers
#   job=$(sbatch --parsable --array=1-8 slurm-array.sh)
#   sbatch --dependency=afterok:"$job" slurm-array.sh
#
# A task that failed is run again by its number; finished files are kept, others are made again:
#
#   sbatch --array=3 slurm-array.sh
#
# PARTS (8 unless it is set) has to be the same for all of them, and so have OPTIONS, such as "--dtype bf16".
#SBATCH --job-name=convert
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --cpus-per-task=4
#SBATCH --mem=512M
#SBATCH --time=04:00:00
#SBATCH --requeue
#SBATCH --signal=B:TERM@60
set -euo pipefail

: "${SOURCE:?the checkpoint to convert}" "${TARGET:?the directory to write, on the shared file system}"
parts=${PARTS:-8}
# Words, on purpose: one variable carries several options.
read -r -a options <<<"${OPTIONS:-}"

if [[ -n ${SLURM_ARRAY_TASK_ID:-} ]]; then
    step=(--part "$SLURM_ARRAY_TASK_ID/$parts" --jobs "${SLURM_CPUS_PER_TASK:-4}")
else
    step=(--finish)
fi

# In place of the shell, so that Slurm's signals reach it: SIGTERM ends it in order, exit code 143.
exec "${LOADCHECK:-loadcheck}" convert "$SOURCE" "$TARGET" "${options[@]}" "${step[@]}" --progress plain
