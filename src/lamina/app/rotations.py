"""What ``lamina rotations`` does: profiles from, and to, OSCAR's rotation files."""

from pathlib import Path

from lamina.app.loading import load_config
from lamina.app.screen import Screen
from lamina.basis.geometry import model_geometry
from lamina.basis.profile import Profile
from lamina.basis.zoo_profile import export_rotation_zoo, import_rotation_zoo
from lamina.errors import ConfigError


def import_rotations(model: str, k: Path, v: Path, output: Path, screen: Screen) -> Profile:
    """Make a profile of a pair of rotation files; only the model's configuration is read."""
    profile = import_rotation_zoo(k, v, model_geometry(load_config(model, screen)), model)
    try:
        profile.save(output)
    except OSError as error:
        raise ConfigError(f"cannot write {output}: {error}. Name a file in a folder that can be written.") from error
    return profile


def export_rotations(source: Path, k: Path, v: Path, *, per_head: bool) -> Profile:
    """Write the OSCAR rotations of a profile; they are derived from its moments unless it holds them already."""
    profile = Profile.load(source)
    if profile.transform not in ("oscar", "hadamard"):
        profile = profile.with_transform("oscar", per_head=per_head)
    try:
        export_rotation_zoo(profile, k, v, per_head=per_head)
    except OSError as error:
        raise ConfigError(
            f"cannot write {error.filename}: {error}. Name files in folders that can be written."
        ) from error
    return profile
