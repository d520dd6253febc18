"""Options that several commands take."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

Assignments = Annotated[tuple[str, ...], Parameter(name="--set", negative=())]
ConfigFile = Annotated[Path | None, Parameter(name=("--config", "-c"))]
