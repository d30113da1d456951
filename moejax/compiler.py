"""compiler_options: what XLA has to be told, by platform, for exchanges to run beside products."""

from moejax.checks import one_of

_OVERLAP: dict[str, dict[str, str | bool]] = {
    "cpu": {},
    "gpu": {
        "xla_gpu_enable_latency_hiding_scheduler": True,
        "xla_gpu_dot_merger_threshold_mb": "0",
        "xla_gpu_all_gather_combine_threshold_bytes": "0",
    },
    "tpu": {"xla_tpu_enable_async_all_to_all": True},
}
_DETERMINISTIC: dict[str, dict[str, str | bool]] = {
    "cpu": {},
    "gpu": {"xla_gpu_deterministic_ops": True, "xla_gpu_exclude_nondeterministic_ops": True},
    "tpu": {},
}


def compiler_options(platform: str, *, deterministic: bool = False) -> dict[str, str | bool]:
    """Options for `jax.jit(..., compiler_options=...)` and `Lowered.compile(compiler_options=...)`.

    What each is for, as read in texts compiled ahead of time (jax 0.10.2, eight devices) of a layer with `num_chunks=2`;
    `tests/moejax/test_exchanges_aot.py` holds it:

    - tpu (v5p): an all-to-all is one synchronous instruction; with `xla_tpu_enable_async_all_to_all` it is a start and a
      done, with products of the other part between them, forward and backward.
    - gpu (H100): every collective is a start and a done already, and the latency-hiding scheduler moves products between
      them. This jax's compiler uses that scheduler for these programs unasked; the option asks for it on others. Products of
      two parts with the same weights, small ones, are merged into one that waits for both: a threshold of 0 MB ends that.
      Their gathers over a tensor axis ("hierarchical" over one expert axis) are joined likewise.
    - cpu: nothing. Virtual devices share the cores and XLA:CPU runs no collective beside a product.

    Args:
      platform: "cpu", "gpu" or "tpu", as `jax.default_backend()` says.
      deterministic: the same program and inputs give the same bits on every run. GPUs need options for it, which may slow
        scatters and convolutions down; the others do so anyway.

    Raises:
      ValueError: for another platform.
    """
    one_of("platform", platform, _OVERLAP)
    return _OVERLAP[platform] | (_DETERMINISTIC[platform] if deterministic else {})
