"""What is particular to the vision part of one family: how its pictures are cut up, written and encoded.

Owns which types of models see here, by a class for each form of vision part: the grid in which a picture of some size
is looked at, the control tokens that stand for it in a prompt, and the call that makes rows of its pixels, which is
transformers' own. Knows no prompts and keeps no rows: that is `vision.Vision`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from PIL.Image import Image

Grid = tuple[int, int]  # rows and columns


class VisionEncoder(Protocol):
    """The vision part of one model, with the processor that prepares its pixels.

    `token`: the control token that a template writes for a picture, in place of which the prompt has its own, with the
    text `around` before and after them. `row`: that of each row which is computed from pixels. `tower`: the name of the
    module in the model that has an attention of its own.
    """

    token: ClassVar[str]
    around: ClassVar[str]
    row: ClassVar[str]
    tower: ClassVar[str]

    @property
    def mutual_rows(self) -> int:
        """How many rows of a picture, all next to each other, see each other; 0: each sees those before it alone."""

    def grid(self, width: int, height: int) -> Grid:
        """Return in which grid a picture of so many pixels is looked at."""

    def written(self, grid: Grid) -> str:
        """Return the control tokens of a picture in a prompt."""

    def encoded(self, image: Image) -> tuple[Grid, Tensor]:
        """Return the grid in which an RGB picture was looked at, and its rows [rows, hidden], in a prompt's order."""


class TileEncoder:
    """SmolVLM and Idefics 3: a grid of tiles of one size, then the whole picture as one; (0, 0) for that alone.

    Tiles go through the vision part one by one, so that a row's bits depend on its picture alone.
    """

    token: ClassVar[str] = "<image>"
    around: ClassVar[str] = ""
    row: ClassVar[str] = "<image>"
    tower: ClassVar[str] = "vision_model"
    mutual_rows = 0

    def __init__(self, model: Any, processor: Any) -> None:
        self._model = model
        self._processor = processor

    def grid(self, width: int, height: int) -> Grid:
        """As `VisionEncoder.grid`."""
        _, rows, columns = self._processor.get_number_of_image_patches(height, width, {})
        return int(rows), int(columns)

    def written(self, grid: Grid) -> str:
        """As `VisionEncoder.written`."""
        from transformers.models.smolvlm.processing_smolvlm import get_image_prompt_string  # Idefics 3 has the same

        around, whole = "<fake_token_around_image>", "<global-img>"
        return str(get_image_prompt_string(*grid, int(self._model.image_seq_len), around, self.row, whole))

    def encoded(self, image: Image) -> tuple[Grid, Tensor]:
        """As `VisionEncoder.encoded`."""
        given = self._processor([[image]], return_tensors="pt", return_row_col_info=True)
        pixels, masks = (given[name].to(self._model.device) for name in ("pixel_values", "pixel_attention_mask"))
        with torch.inference_mode():
            tiles = [
                self._model.get_image_features(
                    pixels[:, at : at + 1], masks[:, at : at + 1], return_dict=True
                ).pooler_output[0]
                for at in range(pixels.shape[1])
            ]
            return (int(given["rows"][0][0]), int(given["cols"][0][0])), torch.cat(tiles)


class PatchEncoder:
    """Mistral 3 with Pixtral's vision part: a grid of square patches, as many as a picture of its size has."""

    token: ClassVar[str] = "[IMG]"
    around: ClassVar[str] = ""
    row: ClassVar[str] = "[IMG]"
    tower: ClassVar[str] = "vision_tower"
    mutual_rows = 0

    def __init__(self, model: Any, processor: Any) -> None:
        self._model = model
        self._processor = processor
        self._side = int(model.config.vision_config.patch_size * model.config.spatial_merge_size)  # pixels

    def grid(self, width: int, height: int) -> Grid:
        """As `VisionEncoder.grid`."""
        from transformers.image_utils import ChannelDimension
        from transformers.models.pixtral.image_processing_pil_pixtral import get_resize_output_image_size

        size = self._processor.size
        most = (size.longest_edge,) * 2 if size.longest_edge else (size.height, size.width)
        shape = np.broadcast_to(np.uint8(0), (height, width, 3))  # no bytes: its shape alone is looked at
        rows, columns = get_resize_output_image_size(shape, most, self._side, ChannelDimension.LAST)
        return int(rows) // self._side, int(columns) // self._side

    def written(self, grid: Grid) -> str:
        """As `VisionEncoder.written`."""
        rows, columns = grid
        return "[IMG_BREAK]".join([self.row * columns] * rows) + "[IMG_END]"

    def encoded(self, image: Image) -> tuple[Grid, Tensor]:
        """As `VisionEncoder.encoded`."""
        # transformers 5.23 takes a single row for its values: such a picture is looked at twice, each by itself.
        images = [image] * 2 if self.grid(*image.size) == (1, 1) else [image]
        given = self._processor(images, patch_size=self._side, return_tensors="pt")
        sizes = given["image_sizes"]
        with torch.inference_mode():
            pixels = given["pixel_values"].to(self._model.device)
            rows, *_ = self._model.get_image_features(pixels, image_sizes=sizes, return_dict=True).pooler_output
        height, width = sizes[0].tolist()
        return (height // self._side, width // self._side), rows


class PooledEncoder:
    """Gemma 3: every picture at one size, its patches pooled to a grid of as many rows, which see each other.

    As its own processor does unless it is asked to, no parts of a long picture are looked at by themselves.
    """

    token: ClassVar[str] = "<start_of_image>"
    around: ClassVar[str] = "\n\n"
    row: ClassVar[str] = "<image_soft_token>"
    tower: ClassVar[str] = "vision_tower"

    def __init__(self, model: Any, processor: Any) -> None:
        self._model = model
        self._processor = processor
        self.mutual_rows = int(model.config.mm_tokens_per_image)

    def grid(self, width: int, height: int) -> Grid:
        """As `VisionEncoder.grid`."""
        side = math.isqrt(self.mutual_rows)
        return side, side

    def written(self, grid: Grid) -> str:
        """As `VisionEncoder.written`."""
        rows, columns = grid
        return f"{self.token}{self.row * (rows * columns)}<end_of_image>"

    def encoded(self, image: Image) -> tuple[Grid, Tensor]:
        """As `VisionEncoder.encoded`."""
        given = self._processor([image], do_pan_and_scan=False, return_tensors="pt")
        with torch.inference_mode():
            pixels = given["pixel_values"].to(self._model.device)
            (rows,) = self._model.get_image_features(pixels, return_dict=True).pooler_output
        side = math.isqrt(len(rows))
        return (side, side), rows


ENCODERS: dict[str, type[TileEncoder | PatchEncoder | PooledEncoder]] = {
    "smolvlm": TileEncoder,
    "idefics3": TileEncoder,
    "mistral3": PatchEncoder,
    "gemma3": PooledEncoder,
}
