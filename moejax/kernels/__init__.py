"""Implementations of the grouped product, one a file; `moejax.grouped_matmul` is their one way in.

Each is two functions: `product(x, w, rows, scale, how, transpose=False)` and `outer(x, g, rows, scale, how)`. They know
nothing of gradients: `moejax.grouped_matmul` puts both into one custom backward. One that cannot serve a case raises
NotImplementedError, naming the case.
"""
