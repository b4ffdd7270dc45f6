"""The devices of a TPU that is not there: libtpu compiles for them on any machine (extra `aot`)."""

import importlib.util
import os

import jax

from lcjax.cost.chips import Topology
from lcjax.errors import InputError

_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",  # no question to a cloud's metadata server
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # no device is opened, so other processes do not matter
}


def devices(topology: Topology) -> list[jax.Device]:
    """Descriptions of the devices, for meshes and for `lower(...).compile()`; they hold no data."""
    if importlib.util.find_spec("libtpu") is None:
        raise InputError(
            f"--topology={topology}: the TPU compiler is not installed; pip install lcjax[aot]"
        )
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    from jax.experimental import topologies

    # Without it a v4 has two devices a chip, which no program on one sees.
    options = {"chip_config_name": "megacore"} if topology.chip.name == "v4" else {}
    try:
        found = topologies.get_topology_desc(str(topology), "tpu", **options)
    except (jax.errors.JaxRuntimeError, NotImplementedError, ValueError) as error:
        why = str(error).strip().splitlines()[0]
        raise InputError(f"--topology={topology}: libtpu does not know it ({why})") from error
    return list(found.devices)
