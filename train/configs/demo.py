"""First light on a plain machine."""

from moejax import MoEConfig, TransformerConfig
from train.config import CheckpointConfig, EvalConfig, MeshConfig, OptimizerConfig, SampleConfig, TrainConfig


def demo() -> TrainConfig:
    """A byte model of the Python standard library, expert-parallel over 8 virtual CPU devices: minutes on 2 cores."""
    moe = MoEConfig(
        d_model=128, d_ff=256, num_experts=8, top_k=2, capacity_factor=1.5, aux_loss=1e-2, z_loss=1e-3, dtype="float32"
    )
    model = TransformerConfig(
        vocab_size=264,
        num_layers=4,
        d_model=128,
        num_heads=4,
        num_kv_heads=2,
        d_ff=256,
        moe=moe,
        qk_norm=True,
        dtype="float32",
    )
    return TrainConfig(
        model=model,
        steps=600,
        global_batch=32,
        seq=256,
        mesh=MeshConfig(data=2, expert=4, virtual_devices=8),
        optimizer=OptimizerConfig(learning_rate=3e-3, warmup_steps=50),
        checkpoint=CheckpointConfig(every=100, keep=2),
        eval=EvalConfig(every=100, max_bytes=150_000),
        sample=SampleConfig(num_tokens=240),
        log_every=10,
    )
