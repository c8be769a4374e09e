"""The model that a plan is for: from a folder, a hub name, or one of the well-known ones, without its weights."""

import json
from importlib import resources
from pathlib import Path
from typing import Any

from jaxserve.errors import ConfigError
from jaxserve.hub import resolve

_MODELS = resources.files("jaxserve.plan") / "models"


def known_models() -> list[str]:
    """Models whose config.json comes with jaxserve, so that planning for them needs no network."""
    return sorted(
        file.name.removesuffix(".json") for file in _MODELS.iterdir() if file.name.endswith(".json")
    )


def read_config(model: str) -> dict[str, Any]:
    """Its config.json."""
    if model in known_models():
        return json.loads((_MODELS / f"{model}.json").read_text())
    place = Path(resolve(model, weights=False))
    file = place if place.suffix == ".json" else place / "config.json"
    if not file.is_file():
        raise ConfigError(
            f"{model} has no config.json; give a folder that has one, a hub name, or one of {', '.join(known_models())}"
        )
    return json.loads(file.read_text())
