"""Text drawn from the model. A plain loop over the whole window for each token: enough to look at, not to serve."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from moejax.axes import mesh_size
from moejax.routing import PerSequence
from moejax.step import TrainState, make_logits
from train.config import RULES, TrainConfig
from train.errors import InputError
from train.stages import make_pipeline
from train.tokens import Tokenizer


def encode_prompt(cfg: TrainConfig, tokenizer: Tokenizer) -> np.ndarray:
    """[n] int32: BOS and the prompt.

    Raises:
      InputError: where prompt and sample together exceed the row that the model is trained on.
    """
    prompt = tokenizer.encode([cfg.sample.prompt.encode()])[0]
    room = cfg.seq - len(prompt) - 1
    if cfg.sample.num_tokens > room:
        raise InputError(
            f"sample.num_tokens={cfg.sample.num_tokens}: with a prompt of {len(prompt)} tokens and seq={cfg.seq}, "
            f"legal are 0 to {max(0, room)}"
        )
    return np.concatenate([[tokenizer.num_text_ids], prompt]).astype(np.int32)


def sample_text(cfg: TrainConfig, state: TrainState, tokenizer: Tokenizer) -> str:
    """The prompt and `cfg.sample.num_tokens` tokens after it, cut at the document's end if one is drawn."""
    prompt = encode_prompt(cfg, tokenizer)
    end = len(prompt) + cfg.sample.num_tokens
    mesh = jax.sharding.get_mesh()
    moe = cfg.model.moe
    # A router that goes by sequences needs one a shard; all but the first are copies that nobody reads.
    copies = mesh_size(mesh, RULES.axes("batch", mesh)) if moe and isinstance(moe.router_rule, PerSequence) else 1
    row = np.zeros((copies, cfg.seq), np.int32)
    row[:, : len(prompt)] = prompt
    everywhere = NamedSharding(mesh, P())
    draw = jax.jit(_make_draw(cfg, tokenizer.num_text_ids, len(prompt), end), out_shardings=everywhere)
    tokens = np.asarray(draw(state.params, state.router, row, jax.random.key(cfg.seed)))[0, 1:end]
    ends = np.flatnonzero(tokens == tokenizer.num_text_ids + 1)
    return tokenizer.decode((tokens[: ends[0]] if len(ends) else tokens).tolist())


def _make_draw(cfg: TrainConfig, num_text_ids: int, begin: int, end: int):
    """(params, router, tokens [n, seq], key) -> tokens, those from `begin` to `end` drawn one after the other, in all rows."""
    logits = make_logits(cfg.model, RULES, make_pipeline(cfg))
    # Ids that stand for no text and do not end the document are never written.
    ids = np.arange(cfg.model.vocab_size)
    legal = (ids < num_text_ids) | (ids == num_text_ids + 1)

    def draw(params, router, tokens, key):
        def add_token(i, carry):
            tokens, key = carry
            key, now = jax.random.split(key)
            scores = logits(params, router, tokens)[0, i - 1] / cfg.sample.temperature
            token = jax.random.categorical(now, jnp.where(legal, scores, -jnp.inf))
            return tokens.at[:, i].set(token.astype(jnp.int32)), key

        return jax.lax.fori_loop(begin, end, add_token, (tokens, key))[0]

    return draw
