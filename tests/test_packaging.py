"""What is declared about the package fits what is in it."""

import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGE = ROOT / "src" / "lamina"


def pins(name: str) -> dict[str, str]:
    found = re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / name).read_text(), re.MULTILINE)
    return {project.lower(): version for project, version in found}


def test_every_requirement_is_pinned_within_its_range():
    newest = pins("constraints.txt")
    for requirement in map(Requirement, PROJECT["project"]["dependencies"]):
        assert newest[requirement.name] in requirement.specifier


def test_the_oldest_transformers_is_the_one_that_is_stated():
    (stated,) = (r for r in map(Requirement, PROJECT["project"]["dependencies"]) if r.name == "transformers")
    (lowest,) = (s.version for s in stated.specifier if s.operator == ">=")
    oldest = pins("constraints-oldest.txt")["transformers"]
    assert oldest in stated.specifier
    assert oldest.startswith(f"{lowest}.") or oldest == lowest


def test_every_file_that_is_not_python_is_package_data():
    globs = PROJECT["tool"]["setuptools"]["package-data"]["lamina"]
    packed = {path for glob in globs for path in PACKAGE.glob(glob)}
    there = {p for p in PACKAGE.rglob("*") if p.is_file() and p.suffix not in (".py", ".pyc", ".nbi", ".nbc")}
    assert there == packed
    assert PACKAGE / "app" / "report" / "templates" / "report.html.j2" in packed
