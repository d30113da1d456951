"""Noisy top-k gating."""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from moejax.routing import LoadState, Routing, Tokens, check_number, choose, pick, rank, softmax_weights


@dataclasses.dataclass(frozen=True)
class Noisy:
    """Noisy top-k gating (Shazeer et al. 2017, arXiv 1701.06538): learnt Gaussian noise on the logits, in training.

    H = logits + N(0, 1) * (softplus(noise logits) + floor), the noise logits from a second matrix, parameter "router_noise";
    the top k of H, weighted by a softmax over them. Its load loss ("load" in `MoEConfig.extra_losses`) reads how likely each
    token would be to choose each expert if that expert's noise were drawn again. At evaluation there is no noise.

    Attributes:
      floor: added to the noise's deviation, so that nothing is divided by 0 (1e-2 in the authors' code).
    """

    floor: float = 1e-2

    draws = True
    second_matrix = True  # the layer has a parameter router_noise, and hands its outputs over as Tokens.noise_logits

    def __post_init__(self):
        check_number("floor", self.floor, above=True)

    def init_state(self, num_experts: int) -> None:
        """No state."""
        return

    def __call__(
        self, logits: Float[Array, "t E"], top_k: int, state: LoadState | None = None, tokens: Tokens | None = None
    ) -> Routing:
        """Routes by float32 logits; ties go to the lower expert.

        Raises:
          ValueError: in training without a random key, or without the second matrix's outputs.
        """
        if tokens is None or not tokens.context.train:
            expert = choose(logits, top_k, tokens)
            weight, probs = softmax_weights(logits, expert, True)
            hard = (expert[:, :, None] == jnp.arange(logits.shape[-1])).any(1)
            return Routing(expert, weight, logits, probs, load=hard.astype(jnp.float32))
        if tokens.noise_logits is None:
            raise ValueError("noise_logits=None: router 'noisy' in training needs params['router_noise']")
        deviation = jax.nn.softplus(tokens.noise_logits) + self.floor
        draw = lambda key: jax.random.normal(key, logits.shape[-1:])
        noisy = logits + jax.vmap(draw)(tokens.keys("router 'noisy'")) * deviation
        expert = choose(noisy, top_k, tokens)
        weight, _ = softmax_weights(noisy, expert, True)
        load = _probability(logits, noisy, deviation, top_k)
        return Routing(expert, weight, logits, jax.nn.softmax(logits), load=load)


def _probability(
    clean: Float[Array, "t E"], noisy: Float[Array, "t E"], deviation: Float[Array, "t E"], top_k: int
) -> Float[Array, "t E"]:
    """P(x, e) of the paper: that e is among the k highest when its noise is drawn again and the others' noise stays."""
    num_experts = clean.shape[-1]
    if top_k == num_experts:
        return jnp.ones_like(clean)
    best: Int[Array, "t k1"] = rank(noisy, top_k + 1)
    among = (best[:, :top_k, None] == jnp.arange(num_experts)).any(1)
    values = pick(noisy, best[:, top_k - 1 :])
    beaten = jnp.where(among, values[:, 1:], values[:, :1])  # the k-th highest of the others
    return _normal_cdf((clean - beaten) / deviation)


# With a derivative of its own, since that of lax.erf fails inside a shard_map (jax 0.12).
@jax.custom_jvp
def _normal_cdf(z):
    return 0.5 * lax.erfc(-z / math.sqrt(2))


@_normal_cdf.defjvp
def _normal_cdf_jvp(primals, tangents):
    (z,), (dz,) = primals, tangents
    return _normal_cdf(z), dz * jnp.exp(-z * z / 2) / math.sqrt(2 * math.pi)
