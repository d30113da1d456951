"""Two processes on one machine: the same run, stopped together, and gone on with by one."""

import os
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest

from tests.conftest import ROOT
from tests.train.conftest import losses
from train.checkpoint import saved_steps
from train.distributed import start_processes
from train.errors import InputError
from train.metrics import read_metrics


def start(base, folder, process, port):
    """One of two processes of the base's run, with 2 of its 4 devices."""
    several = {"JAX_COORDINATOR_ADDRESS": f"localhost:{port}", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": str(process)}
    # Only the first process writes compilations to the cache: with it the other would fall minutes behind.
    alone = {"XLA_FLAGS": "", "JAX_ENABLE_COMPILATION_CACHE": "false"}
    words = [*base.words, "mesh.virtual_devices=2", f"run_dir={folder}"]
    return subprocess.Popen(
        [sys.executable, "-m", "train", *words],
        cwd=ROOT,
        env={**os.environ, **several, **alone},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_two_processes_agree_to_stop_and_one_goes_on(base, tmp_path):
    folder = tmp_path / "run"
    with socket.socket() as found:
        found.bind(("localhost", 0))
        port = found.getsockname()[1]
    processes = [start(base, folder, process, port) for process in range(2)]
    deadline = time.monotonic() + 240
    while len(read_metrics(folder / "metrics.jsonl")) < 6 and time.monotonic() < deadline:
        time.sleep(0.01)
    for process in processes:
        process.send_signal(signal.SIGTERM)
    said = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], said
    assert "stopped by SIGTERM after step" in said[0]
    assert "tok/s" not in said[1], "only the first process speaks"
    stopped = saved_steps(folder / "checkpoints")[-1]
    assert base.run(folder, "--resume", "must") == 0
    found, expected = losses(folder), losses(base.folder)
    assert stopped > 5
    np.testing.assert_allclose(list(found.values()), list(expected.values()), rtol=1e-5)


def test_a_launcher_that_leaves_out_a_number_is_named(monkeypatch):
    monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", "localhost:1")
    monkeypatch.setenv("JAX_NUM_PROCESSES", "two")
    with pytest.raises(InputError, match="JAX_NUM_PROCESSES='two': needs a whole number"):
        start_processes()
