"""Steps on a card: a `ModelRunner` whose thread launches on the model's card, the second of several for instance."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rekindle.compute.devices import use
from rekindle.model.batch import SequenceStep
from rekindle.model.runner import LaunchedStep, ModelRunner


class CardRunner(ModelRunner):
    """Launches kernel by kernel."""

    def launch(self, steps: Sequence[SequenceStep], ids: torch.Tensor | None = None) -> LaunchedStep:
        """As `ModelRunner.launch`."""
        use(self._device)
        return super().launch(steps, ids)
