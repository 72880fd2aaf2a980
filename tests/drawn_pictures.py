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
from transformers.models.idefics3.modeling_idefics3 import Idefics3VisionTransformer
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


class Reference:
    """A model by transformers alone, with its own processor of conversations."""

    def __init__(self, directory: Path) -> None:
        self.model = AutoModelForMultimodalLM.from_pretrained(directory, dtype=torch.float32).eval()
        self.processor = Idefics3Processor(  # that of SmolVLM writes the same, and needs packages for videos
            AutoImageProcessor.from_pretrained(directory),
            PreTrainedTokenizerFast(tokenizer_file=str(directory / "tokenizer.json")),
            image_seq_len=self.model.model.image_seq_len,
            chat_template=(directory / "chat_template.jinja").read_text("utf-8"),
        )

    def reply(
        self, messages: Sequence[Mapping[str, Any]], pictures: Sequence[Image.Image], count: int
    ) -> tuple[list[int], list[int], list[float]]:
        """The ids of the prompt, those of a greedy reply of at most `count` tokens, and their log probabilities."""
        written = self.processor.apply_chat_template([_plain(each) for each in messages], add_generation_prompt=True)
        shown = [list(pictures)] if pictures else None
        given = self.processor(text=written, images=shown, return_tensors="pt", add_special_tokens=False)
        with torch.inference_mode():
            made = self.model.generate(
                **given, max_new_tokens=count, do_sample=False, eos_token_id=END_ID, pad_token_id=PAD_ID,
                output_logits=True, return_dict_in_generate=True,
            )  # fmt: skip
        ids = given["input_ids"][0].tolist()
        reply = made.sequences[0, len(ids) :].tolist()
        scores = [torch.log_softmax(row[0], -1)[token].item() for row, token in zip(made.logits, reply, strict=True)]
        return ids, reply, scores


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    content = message["content"]
    parts = [text(content)] if isinstance(content, str) else content
    shown = [each if each["type"] == "text" else {"type": "image"} for each in parts]
    return {"role": message["role"], "content": shown}


@contextmanager
def counted_tiles() -> Iterator[list[int]]:
    """One entry for each call of a vision part, of any model in this process."""
    calls: list[int] = []
    classes = (Idefics3VisionTransformer, SmolVLMVisionTransformer)
    handle = register_module_forward_pre_hook(
        lambda module, args: calls.append(1) if isinstance(module, classes) else None
    )
    try:
        yield calls
    finally:
        handle.remove()
