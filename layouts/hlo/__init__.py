"""What a compiled text says: collectives and their bytes, products, loops, cycles, and what depends on what.

`read(compiled.as_text())` counts; `parse` and the queries of `layouts.hlo.flow` look closer. It needs no jax.
"""

from layouts.hlo.flow import Window, carriers, depends, windows
from layouts.hlo.program import COLLECTIVES, Collective, Program, count, read
from layouts.hlo.text import Computation, Instruction, Module, parse

__all__ = [
    "COLLECTIVES",
    "Collective",
    "Computation",
    "Instruction",
    "Module",
    "Program",
    "Window",
    "carriers",
    "count",
    "depends",
    "parse",
    "read",
    "windows",
]
