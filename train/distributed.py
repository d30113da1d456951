"""The devices of a run: several processes where the environment says so, virtual ones where the config does."""

import os

import jax
from jax.sharding import AxisType, Mesh

from moejax import make_mesh
from train.config import MeshConfig
from train.errors import InputError

# Number of processes, as launchers state it; jax finds the rest by itself.
_LAUNCHERS = ("SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE")


def start_processes() -> None:
    """Joins the other processes of the run, before any device is looked at. Alone, does nothing.

    Reads JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID where they are set; under Slurm, Open MPI and on
    TPU pods jax finds the others itself.

    Raises:
      InputError: where a number among them is none.
    """
    if "JAX_COORDINATOR_ADDRESS" in os.environ:
        jax.distributed.initialize(
            os.environ["JAX_COORDINATOR_ADDRESS"], _number("JAX_NUM_PROCESSES"), _number("JAX_PROCESS_ID")
        )
    elif _is_pod():
        jax.distributed.initialize()


def start_mesh(cfg: MeshConfig) -> Mesh:
    """The run's mesh. On a machine without accelerators the CPU plays `virtual_devices` devices, if any are asked for.

    Must run before any device is looked at.

    Raises:
      InputError: where the mesh asks for more devices than there are.
    """
    ask_for_devices(cfg)
    try:
        return make_mesh(devices=jax.devices(), axis_type=AxisType.Auto, **cfg.sizes)
    except ValueError as error:
        hint = "" if jax.default_backend() != "cpu" else "; on a CPU, mesh.virtual_devices=N makes N"
        raise InputError(f"{error}{hint}") from error


def ask_for_devices(cfg: MeshConfig) -> None:
    """Has the CPU play `virtual_devices` devices; the first time, before any device is looked at."""
    forced = "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", "")
    if cfg.virtual_devices and not forced and jax.config.values["jax_num_cpu_devices"] != cfg.virtual_devices:
        jax.config.update("jax_num_cpu_devices", cfg.virtual_devices)


def _number(name: str) -> int:
    value = os.environ.get(name, "")
    if not value.isdigit():
        raise InputError(f"{name}={value!r}: needs a whole number, since JAX_COORDINATOR_ADDRESS is set")
    return int(value)


def _is_pod() -> bool:
    sizes = [os.environ.get(name, "1") for name in _LAUNCHERS]
    many = any(size.isdigit() and int(size) > 1 for size in sizes)
    return many or "," in os.environ.get("TPU_WORKER_HOSTNAMES", "")
