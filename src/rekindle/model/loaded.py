"""A loaded model as a value: returned by `load_model`, used to run, test and describe the model.

Reads no files and runs nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from rekindle.kv.plan import ROW_MULTIPLE
from rekindle.model.compute import Compute, Unsaved
from rekindle.model.formats import LayerFormats
from rekindle.spec import ModelSpec

Promise = Literal["bitwise", "close", "none"]  # of the same ids on different paths: see selftest


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run, its spec, and what was found while loading."""

    model: Any
    spec: ModelSpec
    directory: Path
    device: str
    dtype: torch.dtype
    promise: Promise
    formats: tuple[LayerFormats, ...]
    compute: Compute
    notes: tuple[str, ...]  # for the banner
    row_multiple: int = ROW_MULTIPLE  # of the rows of a step
    unsaved: Unsaved | None = None  # to be written to a file for later starts
