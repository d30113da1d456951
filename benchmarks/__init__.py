"""Side-by-side figures of the library, by its public names only. `python -m benchmarks` runs them all."""
