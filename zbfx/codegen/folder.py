"""The plan folder: JSON, CSV, safetensors and Python, all of which a person can read; nothing in it is unpickled."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from zbfx.errors import PlanError

FORMAT = "zbfx-plan/1"


@dataclass(frozen=True, slots=True, eq=False)
class Folder:
    """What a plan folder holds: manifest (plan.json), schedule (schedule.json, .csv), one source per rank, constants."""

    manifest: Mapping[str, Any]
    schedule: str
    csv: str
    sources: Sequence[str]
    constants: Mapping[str, torch.Tensor]


def write_folder(path: Path, content: Folder) -> None:
    """Write the files; what was there under the same names is replaced. Raises PlanError."""
    try:
        manifest = json.dumps({"format": FORMAT, **content.manifest}, indent=1, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise PlanError(
            f"{path}: this plan cannot be written: an input is no JSON value ({error}); pass it as a tensor"
        ) from error
    try:
        path.mkdir(parents=True, exist_ok=True)
        for old in path.glob("rank_*.py"):
            old.unlink()
        (path / "plan.json").write_text(manifest + "\n")
        (path / "schedule.json").write_text(content.schedule)
        (path / "schedule.csv").write_text(content.csv)
        for rank, source in enumerate(content.sources):
            (path / f"rank_{rank}.py").write_text(source)
    except OSError as error:
        raise PlanError(f"{path}: cannot be written: {error}") from error
    if content.constants:
        _safetensors().save_file({k: v.cpu().contiguous() for k, v in content.constants.items()}, path / "constants.safetensors")


def read_folder(path: Path) -> Folder:
    """Read the files of a plan folder. Raises PlanError where one is missing, damaged or of another format."""
    manifest = _json(path / "plan.json")
    if manifest.get("format") != FORMAT:
        raise PlanError(
            f"{path / 'plan.json'}: format {manifest.get('format')!r}, this zbfx reads {FORMAT!r}: save the plan again"
        )
    count = manifest.get("ranks")
    if not isinstance(count, int) or count < 1:
        raise PlanError(f"{path / 'plan.json'}: ranks={count!r} is no number of ranks")
    sources = [_text(path / f"rank_{rank}.py") for rank in range(count)]
    constants: Mapping[str, torch.Tensor] = {}
    if manifest.get("constants"):
        file = path / "constants.safetensors"
        _exists(file)
        try:
            constants = _safetensors().load_file(file)
        except Exception as error:
            raise PlanError(f"{file}: damaged: {error}") from error
    return Folder(manifest, _text(path / "schedule.json"), "", sources, constants)


def field(data: Any, name: str, kind: type | tuple[type, ...], where: str) -> Any:
    """data[name], of that kind. Raises PlanError."""
    value = data.get(name) if isinstance(data, Mapping) else None
    if not isinstance(value, kind):
        raise PlanError(f"{where}: {name!r} is missing or not a {kind}: save the plan again")
    return value


def _exists(file: Path) -> None:
    if not file.is_file():
        raise PlanError(f"{file}: no such file. A plan folder is what plan.save(folder) or `zbfx dump --out` writes")


def _text(file: Path) -> str:
    _exists(file)
    try:
        return file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(f"{file}: cannot be read: {error}") from error


def _json(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(_text(file))
    except json.JSONDecodeError as error:
        raise PlanError(f"{file}:{error.lineno}: not JSON: {error.msg}") from error
    if not isinstance(value, dict):
        raise PlanError(f"{file}: not a JSON object")
    return value


def _safetensors() -> Any:
    try:
        import safetensors.torch
    except ImportError as error:
        raise PlanError("this plan holds tensor constants, which need safetensors: pip install safetensors") from error
    return safetensors.torch
