"""What a compiled text says: collectives and their bytes, products, loops, cycles, memory, and what depends on what.

`read(compiled.as_text())` counts; `parse` with `peak` and the queries of `layouts.hlo.flow` look closer. No jax.
"""

from layouts.hlo.flow import Window, carriers, depends, windows, works
from layouts.hlo.live import Peak, peak
from layouts.hlo.program import COLLECTIVES, Collective, Program, count, read
from layouts.hlo.text import Computation, Instruction, Module, parse

__all__ = [
    "COLLECTIVES",
    "Collective",
    "Computation",
    "Instruction",
    "Module",
    "Peak",
    "Program",
    "Window",
    "carriers",
    "count",
    "depends",
    "parse",
    "peak",
    "read",
    "windows",
    "works",
]
