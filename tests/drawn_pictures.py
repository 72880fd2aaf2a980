"""Pictures for tests, drawn by a seed, and what transformers alone makes of conversations with them."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.nn.modules.module import register_module_forward_pre_hook
from transformers import AutoImageProcessor, AutoModelForMultimodalLM, Idefics3Processor, PreTrainedTokenizerFast
from transformers.models.gemma3.processing_gemma3 import Gemma3Processor
from transformers.models.idefics3.modeling_idefics3 import Idefics3VisionTransformer
from transformers.models.pixtral.modeling_pixtral import PixtralVisionModel
from transformers.models.siglip.modeling_siglip import SiglipVisionModel
from transformers.models.smolvlm.modeling_smolvlm import SmolVLMVisionTransformer

from tests.tiny_models import END_ID, PAD_ID

Part = dict[str, Any]


def drawn(seed: int, width: int, height: int) -> Image.Image:
    """Noise: no two of these look alike."""
    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8))


def file_of(picture: Image.Image, form: str = "PNG", **how: Any) -> bytes:
    """Its file."""
    written = io.BytesIO()
    picture.save(written, form, **how)
    return written.getvalue()


def part_of(file: bytes, kind: str = "png") -> Part:
    """A file as OpenAI's clients send it."""
    return {"type": "image_url", "image_url": {"url": f"data:image/{kind};base64,{base64.b64encode(file).decode()}"}}


def text(written: str) -> Part:
    """A part of text."""
    return {"type": "text", "text": written}


Given = dict[str, torch.Tensor]


class _TileProcessor:
    """transformers' own of Idefics 3: that of SmolVLM writes the same, and needs packages for videos."""

    def __init__(self, directory: Path, tokenizer: PreTrainedTokenizerFast, config: Any) -> None:
        count = int((config.vision_config.image_size // config.vision_config.patch_size) ** 2 / config.scale_factor**2)
        images = AutoImageProcessor.from_pretrained(directory)
        self._own = Idefics3Processor(images, tokenizer, image_seq_len=count)

    def __call__(self, written: str, pictures: Sequence[Image.Image]) -> Given:
        shown = [list(pictures)] if pictures else None
        return dict(self._own(text=written, images=shown, return_tensors="pt", add_special_tokens=False))


class _PatchProcessor:
    """What that of Pixtral does, which cannot be imported without torchvision."""

    def __init__(self, directory: Path, tokenizer: PreTrainedTokenizerFast, config: Any) -> None:
        self._images, self._tokenizer = AutoImageProcessor.from_pretrained(directory), tokenizer
        self._side = config.vision_config.patch_size * config.spatial_merge_size

    def __call__(self, written: str, pictures: Sequence[Image.Image]) -> Given:
        given: Given = {}
        if pictures:
            given = dict(self._images(list(pictures), patch_size=self._side, return_tensors="pt"))
        for height, width in given.get("image_sizes", torch.zeros(0, 2)).tolist():
            line = "\0" * int(width // self._side) + "[IMG_BREAK]"
            tokens = (line * int(height // self._side)).removesuffix("[IMG_BREAK]") + "[IMG_END]"
            written = written.replace("[IMG]", tokens, 1)
        ids = self._tokenizer(written.replace("\0", "[IMG]"), return_tensors="pt", add_special_tokens=False)
        return {"input_ids": ids["input_ids"], "attention_mask": ids["attention_mask"], **given}


class _PooledProcessor:
    """transformers' own of Gemma 3."""

    def __init__(self, directory: Path, tokenizer: PreTrainedTokenizerFast, config: Any) -> None:
        images = AutoImageProcessor.from_pretrained(directory)
        self._own = Gemma3Processor(images, tokenizer, image_seq_length=config.mm_tokens_per_image)

    def __call__(self, written: str, pictures: Sequence[Image.Image]) -> Given:
        shown = [list(pictures)] if pictures else None
        return dict(self._own(text=[written], images=shown, return_tensors="pt", add_special_tokens=False))


# As the tokenizer of Gemma 3 names them.
_NAMED = {"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"}
_PROCESSORS = {
    "smolvlm": _TileProcessor,
    "idefics3": _TileProcessor,
    "mistral3": _PatchProcessor,
    "gemma3": _PooledProcessor,
}


class Reference:
    """A model by transformers alone, with its own processor of conversations."""

    def __init__(self, directory: Path) -> None:
        self.model = AutoModelForMultimodalLM.from_pretrained(directory, dtype=torch.float32).eval()
        self.images = AutoImageProcessor.from_pretrained(directory)
        self.template = (directory / "chat_template.jinja").read_text("utf-8")
        kind = self.model.config.model_type
        named = {"extra_special_tokens": _NAMED} if kind == "gemma3" else {}
        self._tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(directory / "tokenizer.json"), **named)
        self._process = _PROCESSORS[kind](directory, self._tokenizer, self.model.config)

    def given(self, messages: Sequence[Mapping[str, Any]], pictures: Sequence[Image.Image]) -> Given:
        """What the model is called with."""
        written = self._tokenizer.apply_chat_template(
            [_plain(each) for each in messages],
            chat_template=self.template,
            add_generation_prompt=True,
            tokenize=False,
        )
        return self._process(written, pictures)

    def reply(
        self, messages: Sequence[Mapping[str, Any]], pictures: Sequence[Image.Image], count: int
    ) -> tuple[list[int], list[int], list[float]]:
        """The ids of the prompt, those of a greedy reply of at most `count` tokens, and their log probabilities."""
        given = self.given(messages, pictures)
        with torch.inference_mode():
            made = self.model.generate(
                **given, max_new_tokens=count, do_sample=False, eos_token_id=END_ID, pad_token_id=PAD_ID,
                output_logits=True, return_dict_in_generate=True,
            )  # fmt: skip
        ids = given["input_ids"][0].tolist()
        reply = made.sequences[0, len(ids) :].tolist()
        scores = [torch.log_softmax(row[0], -1)[token].item() for row, token in zip(made.logits, reply, strict=True)]
        return ids, reply, scores

    def scores(self, messages: Sequence[Mapping[str, Any]], pictures: Sequence[Image.Image]) -> list[float]:
        """The log probability of each token of the prompt but the first."""
        given = self.given(messages, pictures)
        with torch.inference_mode():
            rows = torch.log_softmax(self.model(**given).logits[0, :-1], -1)
        return [float(score) for score in rows.gather(1, given["input_ids"][0, 1:, None])[:, 0]]


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    content = message["content"]
    parts = [text(content)] if isinstance(content, str) else content
    shown = [each if each["type"] == "text" else {"type": "image"} for each in parts]
    return {"role": message["role"], "content": shown}


@contextmanager
def counted_looks() -> Iterator[list[int]]:
    """One entry for each call of a vision part, of any model in this process."""
    calls: list[int] = []
    classes = (Idefics3VisionTransformer, PixtralVisionModel, SiglipVisionModel, SmolVLMVisionTransformer)
    handle = register_module_forward_pre_hook(
        lambda module, args: calls.append(1) if isinstance(module, classes) else None
    )
    try:
        yield calls
    finally:
        handle.remove()
