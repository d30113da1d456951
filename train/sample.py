"""Text drawn from the model. A plain loop over the whole window for each token: enough to look at, not to serve."""

import jax
import jax.numpy as jnp
import numpy as np

from moejax.step import TrainState, make_logits
from train.config import RULES, TrainConfig
from train.errors import InputError
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
    logits = make_logits(cfg.model, RULES)
    end = len(prompt) + cfg.sample.num_tokens

    def add_token(i, carry):
        tokens, key = carry
        key, now = jax.random.split(key)
        scores = logits(state.params, state.router, tokens)[0, i - 1] / cfg.sample.temperature
        # Ids that stand for no text and do not end the document are never written.
        legal = (jnp.arange(scores.shape[0]) < tokenizer.num_text_ids) | (
            jnp.arange(scores.shape[0]) == tokenizer.num_text_ids + 1
        )
        token = jax.random.categorical(now, jnp.where(legal, scores, -jnp.inf))
        return tokens.at[0, i].set(token.astype(jnp.int32)), key

    def draw(tokens, key):
        return jax.lax.fori_loop(len(prompt), end, add_token, (tokens, key))[0]

    start = jnp.zeros((1, cfg.seq), jnp.int32).at[0, : len(prompt)].set(prompt)
    tokens = np.asarray(jax.jit(draw)(start, jax.random.key(cfg.seed)))[0, 1:end]
    ends = np.flatnonzero(tokens == tokenizer.num_text_ids + 1)
    return tokenizer.decode(tokens[: ends[0]] if len(ends) else tokens)
