"""`ragged_all_to_all` on every backend: jax's own where the hardware has one, elsewhere a stand-in with the same contract.

S: shards along the axes, n: segments from one shard to another, N: rows of the operand, M: rows of the output.
Arrays of S*n numbers are by shard, then by segment.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int, Shaped

from moejax import axes as ax
from moejax.flat_plan import expand

NATIVE = ("tpu", "gpu")


def ragged_all_to_all(
    operand: Shaped[Array, "N *r"],
    output: Shaped[Array, "M *r"],
    input_offsets: Int[Array, "S_n"],
    send_sizes: Int[Array, "S_n"],
    output_offsets: Int[Array, "S_n"],
    recv_sizes: Int[Array, "S_n"],
    *,
    axis_name: tuple[str, ...],
    pair_rows: int,
) -> Shaped[Array, "M *r"]:
    """`output` with the segments of rows that the shards along `axis_name` sent here written into it.

    Segment i goes to shard i // n: rows [input_offsets[i], input_offsets[i] + send_sizes[i]) of the operand, written there
    from output_offsets[i] on. It is differentiable nowhere: the exchange of gradients is another one, the other way round.

    Args:
      operand: [N, ...].
      output: [M, ...], of the operand's dtype.
      input_offsets: [S*n] int32.
      send_sizes: [S*n] int32.
      output_offsets: [S*n] int32, in the receivers' outputs.
      recv_sizes: [S*n] int32, the send sizes that the others have for here.
      axis_name: the mesh axes.
      pair_rows: rows that one shard sends to another at most; the stand-in sends as many.
    """
    if ax.platform() in NATIVE:
        sizes = (input_offsets, send_sizes, output_offsets, recv_sizes)
        return lax.ragged_all_to_all(operand, output, *sizes, axis_name=axis_name)
    num_rows = min(pair_rows, operand.shape[0])
    by_shard = lambda part: part.reshape(ax.axis_size(axis_name), -1)
    swap = functools.partial(lax.all_to_all, axis_name=axis_name, split_axis=0, concat_axis=0, tiled=True)
    sent = jax.vmap(functools.partial(_packed, num_rows))(by_shard(input_offsets), by_shard(send_sizes))
    packed = swap(operand.at[sent].get(mode="clip"))  # what stands behind the last segment is read by nobody
    source, written = _unpacked(by_shard(swap(output_offsets)), by_shard(recv_sizes), num_rows, output.shape[0])
    received = packed.reshape(-1, *packed.shape[2:]).at[source].get(mode="clip")
    return jnp.where(written.reshape(-1, *[1] * (output.ndim - 1)), received, output)


def _packed(num_rows, offsets, sizes):
    """[num_rows] the operand's row in each place, the segments of one destination standing one after another."""
    segment, place = expand(sizes, num_rows)
    return offsets[segment] + place


def _unpacked(offsets, sizes, num_rows, num_out):
    """For each row of the output, its place among the S * num_rows packed ones, and whether there is one."""
    begin = jnp.arange(offsets.shape[0])[:, None] * num_rows + jnp.cumsum(sizes, 1) - sizes
    row = jnp.arange(num_out, dtype=jnp.int32)[:, None]
    begin, first, size = (part.reshape(-1) for part in (begin, offsets, sizes))
    inside = (row >= first) & (row < first + size)
    return jnp.where(inside, begin + row - first, 0).sum(1, dtype=jnp.int32), inside.any(1)
