"""layouts: which mesh, and what the compiler makes of it. Decides and proves without running a step on a device."""
