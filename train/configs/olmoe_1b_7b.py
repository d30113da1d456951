"""OLMoE-1B-7B's shape (Muennighoff et al. 2024, https://arxiv.org/abs/2409.02060)."""

from moejax import MoEConfig, Softmax, TransformerConfig
from train.config import CheckpointConfig, EvalConfig, MeshConfig, OptimizerConfig, TrainConfig


def olmoe_1b_7b() -> TrainConfig:
    """OLMoE-1B-7B's shape on 64 devices of 80 GB or more; not run at this size yet.

    16 layers, 64 experts of width 1024, 8 a token: 6.9 billion parameters, 1.3 billion of them active. Hardware: 64
    accelerators, experts over the 8 of a node. Step time: not measured. Evidence: sizes, learning rate, batch and
    tokens (5 trillion) are the paper's; unlike it, QK-norm is over each head and what exceeds the capacity is dropped.
    Give it your own text and tokenizer: data.corpus=... data.tokenizer=FILE.json.
    """
    moe = MoEConfig(d_model=2048, d_ff=1024, num_experts=64, top_k=8, router=Softmax(renormalise=False), capacity_factor=1.25)
    model = TransformerConfig(
        vocab_size=50304,
        num_layers=16,
        d_model=2048,
        num_heads=16,
        num_kv_heads=16,
        d_ff=1024,
        moe=moe,
        norm_eps=1e-5,
        qk_norm=True,
        tie_embeddings=False,
        remat="full",
    )
    return TrainConfig(
        model=model,
        steps=1_200_000,
        global_batch=1024,
        seq=4096,
        mesh=MeshConfig(fsdp=8, expert=8),
        optimizer=OptimizerConfig(learning_rate=4e-4, warmup_steps=2500),
        checkpoint=CheckpointConfig(every=1000),
        eval=EvalConfig(every=1000, max_bytes=4_000_000),
        num_microbatches=4,
    )
