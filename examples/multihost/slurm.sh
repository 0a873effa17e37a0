#!/bin/bash
# sbatch examples/multihost/slurm.sh: four nodes, a process on each. JAX reads SLURM's
# variables.
#SBATCH --nodes=4 --ntasks-per-node=1 --gpus-per-node=8 --time=04:00:00
#SBATCH --signal=TERM@120 --requeue --open-mode=append
srun python examples/multihost/train.py --root "$SCRATCH/runs/$SLURM_JOB_ID" --near /tmp/near
