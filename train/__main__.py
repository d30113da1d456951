"""`python -m train CONFIG [key=value ...]`: trains a model. See --help."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import jax
from rich.console import Console

from train.config import TrainConfig, check_config
from train.configs import get_config, list_configs
from train.errors import InputError, RunError
from train.overrides import all_keys, apply_overrides
from train.stages import make_pipeline

_EPILOG = """\
examples:
  python -m train demo
  python -m train demo mesh.data=1 mesh.expert=8 steps=200 run_dir=runs/eight
  python -m train demo layout=search
  python -m train demo layout=best.json#2
  python -m train tiny mesh.stage=2 pipeline.schedule=zeropp pipeline.chunks=1 num_microbatches=4
  python -m train demo data.corpus=~/books,notes.txt model.d_model=256

exit codes: 0 done, or stopped by SIGTERM and saved; 2 the input is wrong; 1 anything else."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str):
        raise InputError(message)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    try:
        return _main(_parser().parse_intermixed_args(arguments))
    except InputError as error:
        print(f"error: {_one_line(error)}", file=sys.stderr)
        return 2
    except RunError as error:
        print(f"error: {_one_line(error)}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m train",
        description="Trains a mixture-of-experts language model.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("config", nargs="?", help="name of a config, see --list")
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="settings to change, see --keys; or layout=FILE.json, layout=search"
    )
    parser.add_argument("--list", action="store_true", help="list the configs, a line each")
    parser.add_argument("--keys", action="store_true", help="list the config's keys with their values")
    parser.add_argument("--dry-run", action="store_true", help="shapes, shardings and memory; runs no step")
    parser.add_argument(
        "--resume",
        default="auto",
        metavar="auto|never|must",
        help="auto (default): go on from the run folder's newest whole checkpoint, if it has one; "
        "never: start anew, the earlier run is moved aside; must: refuse to start without a checkpoint",
    )
    return parser


def _main(chosen: argparse.Namespace) -> int:
    if chosen.list:
        print(list_configs())
        return 0
    if chosen.config is None:
        raise InputError(f"no config named; legal are:\n{list_configs()}".replace("\n", " | "))
    if chosen.resume not in ("auto", "never", "must"):
        raise InputError(f"--resume={chosen.resume!r}: legal are auto, never, must")
    layouts = [text.partition("=")[2] for text in chosen.overrides if text.startswith("layout=")]
    if len(layouts) > 1:
        raise InputError(f"layout={layouts[1]}: given twice, the first is {layouts[0]}")
    overrides = [text for text in chosen.overrides if not text.startswith("layout=")]
    cfg = apply_overrides(get_config(chosen.config), overrides)
    if chosen.keys:
        print("\n".join(f"{key}={value}" for key, value in all_keys(cfg).items()))
        return 0
    if not layouts:
        check_config(cfg)
        make_pipeline(cfg)
    return _run(cfg, chosen, layouts)


def _run(cfg: TrainConfig, chosen: argparse.Namespace, layouts: list[str]) -> int:
    # Imported late: a wrong word on the command line is answered at once.
    from train.distributed import start_processes
    from train.dry_run import dry_run
    from train.layout import laid_out, resolved
    from train.loop import train

    start_processes()
    for layout in layouts:
        cfg = laid_out(cfg, layout, print)
    cfg = resolved(cfg, print)
    _keep_compilations(cfg.compilation_cache)
    if chosen.dry_run:
        print("\n".join(dry_run(cfg)))
        return 0
    folder = Path(cfg.run_dir or f"runs/{chosen.config}").expanduser()
    train(cfg, folder, chosen.resume, Console())
    return 0


def _keep_compilations(folder: str) -> None:
    if folder != "none" and "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        jax.config.update("jax_compilation_cache_dir", str(Path(folder).expanduser()))


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


if __name__ == "__main__":
    sys.exit(main())
