#!/bin/bash
# bash examples/multihost/tpu.sh NAME ZONE BUCKET: on each host of a TPU pod that runs.
# JAX asks the pod who takes part.
gcloud compute tpus tpu-vm ssh "$1" --zone "$2" --worker=all --command \
  "python examples/multihost/train.py --root gs://$3/run --near /tmp/near"
