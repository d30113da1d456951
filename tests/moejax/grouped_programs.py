"""What the ahead-of-time tests of the grouped products compile: a builder that `layouts.aot` calls in its child."""

import jax
import jax.numpy as jnp
import numpy as np

from moejax.grouped_matmul import grouped_glu, grouped_matmul


def feed_forward(devices, *, implementation, dtype, num_tokens, num_rows, d, f, num_groups) -> jax.stages.Lowered:
    """A gated feed-forward over rows read by index, its output weighted; the output and every gradient. One device."""
    mesh = jax.sharding.Mesh(np.asarray(devices[:1]), ("one",))
    here = jax.sharding.NamedSharding(mesh, jax.P())
    array = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, dtype, sharding=here)
    result = "bfloat16" if dtype.startswith("float8") else dtype

    def call(x, gate, up, down, weight, sizes, index):
        options = {"implementation": implementation, "preferred_element_type": result}
        hidden = grouped_glu(x, gate, up, sizes, token_index=index, **options)
        return grouped_matmul(hidden.astype(dtype), down, sizes, row_scale=weight, **options)

    def run(dy, sizes, index, *operands):
        y, pull = jax.vjp(lambda *operands: call(*operands, sizes, index), *operands)
        return y, *pull(dy)

    return jax.jit(run).lower(
        array(result, num_rows, d),
        array(jnp.int32, num_groups),
        array(jnp.int32, num_rows),
        array(dtype, num_tokens, d),
        array(dtype, num_groups, d, f),
        array(dtype, num_groups, d, f),
        array(dtype, num_groups, f, d),
        array(jnp.float32, num_rows),
    )
