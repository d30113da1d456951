"""Reading compiled text: which collectives there are, and how large everything is."""

import math
import re

SHAPE = re.compile(r"\b(?:pred|[su]\d+|bf16|f\d+\w*)\[([\d,]*)\]")
TENSOR = re.compile(r"tensor<((?:\d+x)*)(?:i1|ui\d+|i\d+|bf16|f\d+)>")


def collectives(text: str, name: str) -> list[str]:
    """The element type of every instance of a collective in compiled text, synchronous or started."""
    lines = [line for line in text.splitlines() if f" {name}(" in line or f" {name}-start(" in line]
    return [re.search(r"= \(?(\w+)\[", line).group(1) for line in lines]


def shapes(text: str) -> set[tuple[int, ...]]:
    """Every shape that compiled (HLO) or lowered (StableHLO) text speaks of."""
    compiled = (dims.split(",") for dims in SHAPE.findall(text))
    lowered = (dims.split("x") for dims in TENSOR.findall(text))
    return {tuple(int(n) for n in dims if n) for both in (compiled, lowered) for dims in both}


def larger_than(text: str, size: int) -> list[tuple[int, ...]]:
    """The shapes of `size` elements or more."""
    return sorted(shape for shape in shapes(text) if math.prod(shape) >= size)
