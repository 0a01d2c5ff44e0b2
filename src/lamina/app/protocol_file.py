"""What ``lamina protocol`` does: the parts of a protocol file one after another, and the report of all of them.

A protocol file is TOML: settings that all parts share, then ``[[part]]`` tables with a ``name``, a ``kind``
(``fidelity`` or ``evaluate``) and the options of that command.
"""

import json
import os
import time
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from lamina.app.evaluate import EvaluationRequest, check_evaluation, run_evaluation
from lamina.app.evaluation_report import Written, run_report
from lamina.app.fidelity import FidelityRequest, check_fidelity, run_fidelity
from lamina.app.screen import Screen
from lamina.basis.profile import Profile
from lamina.errors import ConfigError, DataError
from lamina.eval.log import digest

KINDS: dict[str, type] = {"fidelity": FidelityRequest, "evaluate": EvaluationRequest}
GIVEN = ("model", "profile", "output", "device", "dtype")
"""Options of the command, not of the file."""


@dataclass(frozen=True)
class ProtocolRequest:
    """Which protocol, for what; fields are the options of ``lamina protocol``."""

    file: Path
    model: str
    profile: Path
    output: Path
    dtype: str = "auto"
    device: str = "auto"


@dataclass(frozen=True)
class Part:
    """One command of a protocol, and where its results go."""

    name: str
    request: FidelityRequest | EvaluationRequest
    result: Path


def run_protocol(request: ProtocolRequest, screen: Screen) -> Written:
    """Do what is not done yet, and draw the report; all parts are checked before the first one runs."""
    parts = read_protocol(request)
    for part in parts:
        if isinstance(part.request, FidelityRequest):
            check_fidelity(part.request)
        else:
            check_evaluation(part.request)
    request.output.mkdir(parents=True, exist_ok=True)
    profile = Profile.load(request.profile).digest()
    for i, part in enumerate(parts, 1):
        wall, cpu = time.perf_counter(), time.process_time()
        screen.remark(f"Part {i} of {len(parts)}: {part.name}")
        if isinstance(part.request, FidelityRequest):
            _fidelity(part.request, part.result, profile, screen)
        else:
            run_evaluation(part.request, screen)
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        screen.remark(f"{part.name}: done in {wall:,.0f} s, {cpu:,.0f} s of them on a processor", "dim")
    return run_report(request.output, None)


def read_protocol(request: ProtocolRequest) -> list[Part]:
    """The parts of a protocol file, with the options of the command.

    Raises
    ------
    ConfigError
        The file cannot be read, or a part is not what it should be; the message names it.
    """
    try:
        document = tomllib.loads(request.file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"cannot read the protocol {request.file}: {error}") from error
    tables = document.pop("part", None)
    if not isinstance(tables, list) or not tables or not all(isinstance(t, dict) for t in tables):
        raise ConfigError(f"{request.file} has no [[part]]; give it at least one, with a name and a kind")
    known = {f.name for kind in KINDS.values() for f in fields(kind)}
    _refuse(request.file, "the file", document, known - set(GIVEN))
    names = [t.get("name") for t in tables]
    if not all(isinstance(n, str) and n and Path(n).name == n for n in names) or len(set(names)) < len(names):
        raise ConfigError(f"{request.file}: every part needs a name of its own that can name a file, not {names}")
    return [_part(request, document, dict(table)) for table in tables]


def _part(request: ProtocolRequest, shared: Mapping[str, Any], table: dict[str, Any]) -> Part:
    name, kind = table.pop("name"), table.pop("kind", None)
    if kind not in KINDS:
        raise ConfigError(f"{request.file}: part {name} has kind {kind!r}; choose from {', '.join(KINDS)}")
    make = KINDS[kind]
    taken = {f.name for f in fields(make)}
    _refuse(request.file, f"part {name}", table, taken - set(GIVEN))
    options = {k: v for k, v in shared.items() if k in taken} | table
    options |= {"model": request.model, "profile": request.profile, "dtype": request.dtype, "device": request.device}
    defaults = {f.name: f.default for f in fields(make)}
    for option, value in options.items():
        wanted = type(defaults.get(option))
        if wanted in (int, str, bool) and type(value) is not wanted:
            raise ConfigError(f"{request.file}: {option} of part {name} is {value!r}; its type is {wanted.__name__}")
    result = request.output / name if kind == "evaluate" else request.output / f"{name}.json"
    if kind == "evaluate":
        options["output"] = result
    try:
        return Part(name, make(**options), result)
    except TypeError as error:
        raise ConfigError(f"{request.file}: part {name} lacks an option ({error})") from error


def _refuse(file: Path, where: str, given: Mapping[str, Any], known: set[str]) -> None:
    unknown = sorted(set(given) - known)
    if unknown:
        raise ConfigError(f"{file}: {where} has {', '.join(unknown)}; it may have {', '.join(sorted(known))}")


def _fidelity(request: FidelityRequest, file: Path, profile: str, screen: Screen) -> None:
    """Measure, unless the file holds the same already."""
    settings = {k: str(v) for k, v in asdict(request).items() if k not in ("profile", "device")} | {"profile": profile}
    run = digest(settings)
    if file.exists():
        try:
            found = json.loads(file.read_bytes())
            same = found.get("run") == run
        except (OSError, ValueError, AttributeError) as error:
            raise DataError(f"cannot go on with {file}: {error}. Delete it, or choose another folder.") from error
        if not same:
            raise DataError(f"{file} was measured with other settings; delete it, or choose another folder")
        return
    report = run_fidelity(request, screen)
    whole = file.with_suffix(".part")
    screen.json(report.as_json() | {"run": run}, str(whole))
    os.replace(whole, file)
