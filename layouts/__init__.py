"""layouts: which mesh, and what the compiler makes of it. Decides and proves without running a step on a device."""

from layouts.chart import plot
from layouts.schedules import make_schedule
from layouts.simulate import Costs, simulate
from layouts.tables import Shape

__all__ = ["Costs", "Shape", "make_schedule", "plot", "simulate"]
