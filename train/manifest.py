"""Manifests: a checksum for each file of a checkpoint, so that a truncated or altered one is never loaded."""

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path


def write_manifest(folder: Path, manifest: Path) -> None:
    """Writes the size and SHA-256 of every file under `folder` to `manifest`, in one move.

    A manifest stands for a finished checkpoint: one without it is not trusted.
    """
    files = {str(path.relative_to(folder)): path for path in sorted(folder.rglob("*")) if path.is_file()}
    with ThreadPoolExecutor(4) as pool:
        found = dict(zip(files, pool.map(_fingerprint, files.values()), strict=True))
    manifest.parent.mkdir(parents=True, exist_ok=True)
    draft = manifest.with_suffix(".tmp")
    draft.write_text(json.dumps({"schema": 1, "files": found}, indent=1))
    draft.replace(manifest)


def check_manifest(folder: Path, manifest: Path) -> str | None:
    """None where every file is as it was written, and otherwise what is wrong with the first that is not."""
    try:
        files = json.loads(manifest.read_text())["files"]
    except FileNotFoundError:
        return "has no manifest: its save did not finish"
    except (ValueError, KeyError, OSError) as error:
        return f"has a damaged manifest ({type(error).__name__})"
    for name, wanted in files.items():
        path = folder / name
        if not path.is_file():
            return f"lacks the file {name}"
        if path.stat().st_size != wanted["bytes"]:
            return f"has a file {name} of {path.stat().st_size} bytes: {wanted['bytes']} were written"
        if _fingerprint(path) != wanted:
            return f"has a file {name} whose checksum is not the one written"
    return None


def _fingerprint(path: Path) -> dict[str, int | str]:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"bytes": path.stat().st_size, "sha256": digest}
