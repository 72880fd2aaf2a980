"""Weights of real GGUF files, as transformers reads them: to the bit."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from rekindle.compute.load import read_config
from rekindle.config import ModelSettings
from rekindle.model import checkpoint
from rekindle.model.adapter import register_attention
from rekindle.model.loader import load_weights
from tests.real.conftest import NAMES

if len(NAMES) > 1:  # transformers takes a minute for both

    def test_weights_are_those_of_transformers(real_file: Path) -> None:
        register_attention()
        directory = checkpoint.Source.find(str(real_file), None).fetch()
        config = read_config(directory)
        ours = load_weights(directory, config, ModelSettings(device="cpu")).model.state_dict()
        (linked,) = directory.glob("*.gguf")
        theirs = AutoModelForCausalLM.from_pretrained(
            directory, config=config, gguf_file=linked.name, dtype=torch.bfloat16
        ).state_dict()
        assert ours.keys() == theirs.keys()
        for name, weight in ours.items():
            assert torch.equal(weight.view(torch.int16), theirs[name].view(torch.int16)), name
