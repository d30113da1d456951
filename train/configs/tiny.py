"""The smallest model that has every part."""

from moejax import MoEConfig, TransformerConfig
from train.config import (
    AlarmConfig,
    CheckpointConfig,
    EvalConfig,
    MeshConfig,
    OptimizerConfig,
    SampleConfig,
    TrainConfig,
)


def tiny() -> TrainConfig:
    """A model of 20 thousand parameters, to see that everything runs: one CPU device, a minute with compilation.

    Hardware: 1 CPU device. Evidence: tests/train runs it; nobody should read anything into its loss.
    """
    moe = MoEConfig(d_model=16, d_ff=32, num_experts=8, top_k=2, capacity_factor=None, num_senders=8, dtype="float32")
    model = TransformerConfig(
        vocab_size=264, num_layers=2, d_model=16, num_heads=4, num_kv_heads=2, d_ff=32, moe=moe, dtype="float32"
    )
    return TrainConfig(
        model=model,
        steps=20,
        global_batch=8,
        seq=32,
        mesh=MeshConfig(virtual_devices=8),
        optimizer=OptimizerConfig(learning_rate=3e-3, warmup_steps=5),
        checkpoint=CheckpointConfig(every=5),
        eval=EvalConfig(every=10, max_bytes=4_000),
        alarms=AlarmConfig(),
        sample=SampleConfig(num_tokens=16),
        log_every=1,
    )
