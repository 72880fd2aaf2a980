"""What a model makes of pictures, computed by its own vision part in transformers.

Owns the tokens of a picture by its size, and the rows that were computed from pixels, a bounded number of bytes of
them; what differs between families is in `vision_encoders`. Any thread may ask. A thread of its own computes one
picture after another in the order in which they were asked for, so that a request with many waits its turn for each;
what is kept is had meanwhile.
"""

from __future__ import annotations

import hashlib
import json
import logging
import threading
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from rekindle.errors import ModelRefused, RequestFailed
from rekindle.model.refusals import LOAD_ERRORS, first_line
from rekindle.model.vision_encoders import ENCODERS, Grid, VisionEncoder
from rekindle.text.pictures import Picture, PictureForm, PictureSpan
from rekindle.text.prompt import PromptEncoder

log = logging.getLogger(__name__)
MOST_BYTES = 128 << 20  # of rows: 100 pictures of 1,088 tokens in a model with rows of 576 values


class Vision:
    """The vision part of a loaded model, and the processor that turns pictures into its pixels."""

    def __init__(self, model: Any, processor: Any, *, most_bytes: int = MOST_BYTES) -> None:
        self._config = model.config
        self._encoder: VisionEncoder = ENCODERS[model.config.model_type](model.model, processor)
        self._processor = processor
        self._most_bytes = most_bytes
        self._rows: OrderedDict[str, Tensor] = OrderedDict()  # by the keys of pictures, the last used one last
        self._lock = threading.Lock()  # of the rows that are kept
        self._thread = ThreadPoolExecutor(1, "vision")  # ends with this object
        # Its attention is bidirectional: that of transformers, which was replaced in the whole model.
        getattr(model.model, self._encoder.tower).config._attn_implementation = "sdpa"

    def form(self, encoder: PromptEncoder) -> PictureForm:
        """Return how pictures stand in prompts of this model, whose tokenizer an encoder without pictures has.

        ModelRefused if the tokenizer writes them by other tokens than the config names.
        """
        own, placeholder = self._encoder, int(self._config.image_token_id)

        def ids(text: str) -> np.ndarray:
            return encoder.encode(encoder.render_text(text, add_leading=False))

        @lru_cache(maxsize=256)
        def tokens(grid: Grid) -> np.ndarray:
            return ids(own.written(grid))

        written = ids(own.token)
        if ids(own.row).tolist() != [placeholder] or len(written) != 1:
            message = f"tokenizer.json has another id for {own.row} than config.json, image_token_id {placeholder}"
            raise ModelRefused(f"{message}: take both from the model's own repository")
        described = json.dumps(self._processor.to_dict(), sort_keys=True, default=str)
        return PictureForm(
            identity=hashlib.blake2b(described.encode(), digest_size=32).digest(),
            written=int(written[0]),
            placeholder=placeholder,
            layout=lambda width, height: tokens(own.grid(width, height)),
            around=own.around,
            is_mutual=self.mutual_rows > 0,
        )

    @property
    def mutual_rows(self) -> int:
        """How many rows of a picture see each other, so that one step computes them; 0: each sees those before it."""
        return self._encoder.mutual_rows

    def see(self, picture: Picture) -> Tensor:
        """Return the rows of a picture [rows, hidden], as its prompt has placeholders; computed once while they are
        kept. BadRequest if its file is damaged."""
        found = self._kept(picture.mark.key)
        return self._thread.submit(self._seen, picture).result() if found is None else found

    def _seen(self, picture: Picture) -> Tensor:
        found = self._kept(picture.mark.key)  # what was asked for before may have been the same
        return self._keep(picture.mark.key, self._computed(picture)) if found is None else found

    def _kept(self, key: str) -> Tensor | None:
        with self._lock:
            if key in self._rows:
                self._rows.move_to_end(key)
            return self._rows.get(key)

    def _keep(self, key: str, rows: Tensor) -> Tensor:
        with self._lock:
            self._rows[key] = rows
            while len(self._rows) > 1 and sum(each.nbytes for each in self._rows.values()) > self._most_bytes:
                self._rows.popitem(last=False)
        return rows

    def rows(self, span: PictureSpan) -> Tensor:
        """Return the rows of a span [count, hidden]."""
        return self.see(span.picture)[span.first : span.first + span.count]

    def _computed(self, picture: Picture) -> Tensor:
        mark = picture.mark
        grid, rows = self._encoder.encoded(picture.decoded())
        if grid != self._encoder.grid(mark.width, mark.height):
            raise RequestFailed(f"a picture of {mark.width} x {mark.height} has a grid of {grid}, expected another")
        return rows


def vision_of(model: Any, directory: Path) -> tuple[Vision | None, tuple[str, ...]]:
    """Return the vision part of a loaded model, if pictures are read for it here, and notes for the user."""
    if model.config.model_type not in ENCODERS:
        return None, ()
    try:
        from transformers import AutoImageProcessor

        return Vision(model, AutoImageProcessor.from_pretrained(directory, trust_remote_code=False)), ()
    except LOAD_ERRORS as error:
        why = f"{type(error).__name__}: {first_line(error)}"
        return None, (f"pictures are lines of text: what reads them (rekindle[vision]) cannot be loaded, {why}",)
