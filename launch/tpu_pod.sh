#!/usr/bin/env bash
# One training on all machines of one or more Cloud TPU slices, started from your own machine:
#
#   TPU=my-pod ZONE=us-central2-b SHARED=10.0.0.2:/vol1 CONFIG=configs/longlora_7b_32k.yaml \
#       launch/tpu_pod.sh
#
# The same command goes on from the last checkpoint, also after the slice was taken away and made
# again. What else may be set:
#   PROJECT      the Google Cloud project; the one of `gcloud config` by default
#   SCRIPT       train.py (the default) or eval.py
#   ARGUMENTS    more settings, such as "--train.lr=1e-4"
#   RUN          the name of the run folder, "lcjax" by default
#   SLICES       of a queued resource with several slices; TPU is then its name:
#
#   gcloud compute tpus queued-resources create my-slices --node-count=2 --zone=ZONE \
#       --accelerator-type=v5p-128 --runtime-version=v2-alpha-tpuv5
#   TPU=my-slices SLICES=2 ARGUMENTS="--mesh.data=2" ZONE=... SHARED=... CONFIG=... launch/tpu_pod.sh
#
# SHARED is an NFS volume (Filestore), which all machines mount as ~/shared: the run folder lies
# there, because checkpoints need storage that all machines share. Data can lie there as well.

set -euo pipefail

: "${TPU:?name the TPU, as gcloud compute tpus tpu-vm list shows it}"
: "${ZONE:?name its zone}"
: "${SHARED:?name an NFS volume, such as 10.0.0.2:/vol1}"
: "${CONFIG:?name a config, such as CONFIG=configs/longlora_7b_32k.yaml}"
SCRIPT=${SCRIPT:-train.py}
ARGUMENTS=${ARGUMENTS:-}
RUN=${RUN:-lcjax}
where=("--zone=$ZONE")
if [ -n "${PROJECT:-}" ]; then
    where+=("--project=$PROJECT")
fi
what=tpu-vm
if [ "${SLICES:-1}" -gt 1 ]; then
    what=queued-resources
    where+=("--node=all") # of all slices
fi

cd "$(dirname "${BASH_SOURCE[0]}")/.."

everywhere() { # a command for the shells of all machines, started together
    gcloud compute tpus "$what" ssh "$TPU" "${where[@]}" --worker=all --command="$1"
}

# The last commit of this checkout goes to every machine; what is not committed stays here.
archive=$(mktemp -t lcjax.XXXXXX)
trap 'rm -f "$archive"' EXIT
git archive --format=tar HEAD -o "$archive"
gcloud compute tpus "$what" scp "$archive" "$TPU:lcjax.tar" "${where[@]}" --worker=all

everywhere "
    set -eu
    mkdir -p lcjax shared
    tar -x -C lcjax -f lcjax.tar
    if [ ! -d venv ]; then
        sudo apt-get update -qq
        sudo apt-get install -y -qq nfs-common python3.11-venv
        python3.11 -m venv venv
    fi
    mountpoint -q shared || sudo mount -t nfs '$SHARED' shared
    venv/bin/pip install -q -e './lcjax[tpu]'
"

# JAX asks the machines which slice and process they are: nothing about them is said here. If this
# connection breaks, the processes get a hang-up, which nohup keeps from them; stop a training with
#   gcloud compute tpus tpu-vm ssh TPU --worker=0 --command='pkill -TERM -f train.py'
# and all machines save the same step and end.
everywhere "
    set -eu
    cd lcjax
    exec nohup ../venv/bin/python -u '$SCRIPT' --config '$CONFIG' \
        --run.folder=\"\$HOME/shared/$RUN\" $ARGUMENTS
"
