"""First light on a plain machine."""

from moejax import MoEConfig, TransformerConfig
from train.config import (
    CheckpointConfig,
    DataConfig,
    EvalConfig,
    MeshConfig,
    OptimizerConfig,
    SampleConfig,
    TrainConfig,
)


def demo() -> TrainConfig:
    """A byte model of the Python standard library, expert-parallel over 8 virtual CPU devices: minutes on 2 cores.

    Two layers of 8 experts, 2 a byte, on mesh (data 2, expert 4); 350 steps of 4,096 bytes. Hardware: 2 CPU cores, about
    330 core-seconds in all, 1.9 GB. Evidence: it ended at 2.15 bits per byte of 100 kB held out, beside 2.65 for byte
    trigrams and 3.52 for byte bigrams (Python 3.11's library).
    float32, because XLA's CPU products are slower in bfloat16 (a step took 11% more).
    """
    moe = MoEConfig(d_model=128, d_ff=256, num_experts=8, top_k=2, capacity_factor=1.5, dtype="float32")
    model = TransformerConfig(
        vocab_size=264,
        num_layers=2,
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
        steps=350,
        global_batch=16,
        seq=256,
        mesh=MeshConfig(data=2, expert=4, virtual_devices=8),
        data=DataConfig(held_out=0.05),
        optimizer=OptimizerConfig(learning_rate=4e-3, warmup_steps=40, final_fraction=0.05),
        checkpoint=CheckpointConfig(every=100, keep=2),
        eval=EvalConfig(every=100, max_bytes=100_000),
        sample=SampleConfig(num_tokens=240),
    )
