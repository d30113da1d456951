"""The commands of `python -m layouts`, one a module: `configure(parser)`, then `run(options)`, which returns the exit code."""
