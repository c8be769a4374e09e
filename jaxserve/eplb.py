"""Settings of the balance of experts over devices, under vLLM's names where the meaning is the same."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from jaxserve.errors import ConfigError


@dataclass(frozen=True)
class EplbConfig:
    """When experts are placed anew, and from how much of the traffic."""

    window_size: int = 1000  # the last steps, whose loads experts are placed for
    step_interval: int = 3000  # steps from one placement to the next
    num_redundant_experts: int = 0  # places beyond one for each expert: hot ones get copies
    max_seconds: int = 300  # of work, after which a placement that is under way is given up

    @classmethod
    def of(cls, values: Mapping[str, Any] | None) -> "EplbConfig":
        """ConfigError for a name or a value that means nothing."""
        values, names = dict(values or {}), [f.name for f in fields(cls)]
        for name, value in values.items():
            if name not in names:
                near = difflib.get_close_matches(name, names, n=1)
                raise ConfigError(
                    f"eplb_config has {name}={value!r}, which is unknown; "
                    + (f"did you mean {near[0]}?" if near else f"it may have {', '.join(names)}")
                )
            least = 0 if name == "num_redundant_experts" else 1
            if type(value) is not int or value < least:
                raise ConfigError(f"eplb_config has {name}={value!r}; use an integer of {least} or more")
        return cls(**values)
