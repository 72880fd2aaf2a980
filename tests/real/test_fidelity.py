"""What formats of KV cost real models on the text of the check: what was measured, with 30 % of room."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from benchmarks.fidelity import Served, scored
from rekindle.model.check_text import text_ids
from rekindle.model.loaded import LoadedModel
from rekindle_lab.bench.eval.kv import layouts_of
from tools.real_models import REAL_MODELS

FORMATS = ("q8h", "q8h/q4h", "q4h")
MOST_KL = {
    "smollm2": {"q8h": 0.0035, "q8h/q4h": 0.0141, "q4h": 0.064},
    "gemma": {"q8h": 0.0030, "q8h/q4h": 0.0105, "q4h": 0.144},
}


def test_formats_of_kv_cost_what_was_measured(loaded: LoadedModel, real_file: Path) -> None:
    (name,) = (name for name, model in REAL_MODELS.items() if model.file == real_file.name)
    layouts = layouts_of(loaded)
    arms = {kv: Served(loaded, layouts[kv]) for kv in FORMATS}
    ids = text_ids(loaded.directory).numpy().astype(np.uint32)
    found = {kv: score.mean_kl for kv, score in scored(Served(loaded, layouts["native"]), arms, [ids]).items()}
    assert 0 < found["q8h"] < found["q8h/q4h"] < found["q4h"], found
    assert all(found[kv] <= most for kv, most in MOST_KL[name].items()), found
