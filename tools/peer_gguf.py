"""Write the bundled model as a GGUF file, so that a llama.cpp server can replay the same day.

python tools/peer_gguf.py write pocket.gguf [--type bf16|f16|f32]   # needs numpy and gguf
python tools/peer_gguf.py check http://127.0.0.1:8080               # needs rekindle[serve]; the peer's server runs

Weights are copied (rows of Q and K reordered for llama.cpp's rotary embedding), the tokenizer becomes "gpt2" BPE with
the pre-tokenizer "qwen2" (the bundled expression is Qwen 2's), the chat template is embedded. `check` counts the texts
whose tokens equal ours on the peer, and the prompts whose greedy replies do.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

MODEL = Path(__file__).parents[1] / "pocket" / "src" / "rekindle_pocket" / "model"
NUM_TALKS, NUM_WORDS, MAX_TOKENS = 40, 250, 32


def read_weights(path: Path) -> dict[str, np.ndarray]:
    """Return fp32 arrays by name from a safetensors file of bf16 tensors."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__", None)
    found = {}
    for name, about in header.items():
        assert about["dtype"] == "BF16", f"{name} is {about['dtype']}"
        begin, end = (8 + length + offset for offset in about["data_offsets"])
        bits = np.frombuffer(data[begin:end], dtype="<u2").astype(np.uint32) << 16
        found[name] = bits.view(np.float32).reshape(about["shape"])
    return found


def for_rotation(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Reorder rows of a Q or K projection: interleave the halves of each head, as llama.cpp rotates them."""
    rows, columns = weight.shape
    return weight.reshape(num_heads, 2, rows // num_heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def gguf_name(name: str) -> str:
    """Return a tensor's name in a GGUF file of the llama architecture."""
    plain = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    if name in plain:
        return plain[name]
    number, _, part = name.removeprefix("model.layers.").partition(".")
    parts = {
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
    return f"blk.{number}.{parts[part.removesuffix('.weight')]}.weight"


def add_geometry(writer: Any, config: dict[str, Any]) -> None:
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])


def add_tokenizer(writer: Any, config: dict[str, Any]) -> None:
    tokenizer = json.loads((MODEL / "tokenizer.json").read_text())
    tokens = {number: token for token, number in tokenizer["model"]["vocab"].items()}
    control = {item["id"]: item["content"] for item in tokenizer["added_tokens"]}
    names = [control.get(number, tokens.get(number, f"<unused {number}>")) for number in range(config["vocab_size"])]
    merges = [item if isinstance(item, str) else " ".join(item) for item in tokenizer["model"]["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(names)
    writer.add_token_types([3 if number in control else 1 for number in range(len(names))])  # control, normal
    writer.add_token_merges(merges)
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_pad_token_id(config["pad_token_id"])
    writer.add_add_bos_token(False)
    writer.add_chat_template((MODEL / "chat_template.jinja").read_text())


def write(path: Path, kind: str) -> None:
    """Write the file; matrices in `kind`, norms in fp32."""
    import gguf

    config = json.loads((MODEL / "config.json").read_text())
    assert config["tie_word_embeddings"], "a separate output matrix is not written"
    formats = {"f32": gguf.GGMLQuantizationType.F32, "f16": gguf.GGMLQuantizationType.F16}
    matrix_format = formats.get(kind, gguf.GGMLQuantizationType.BF16)
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("pocket")
    add_geometry(writer, config)
    add_tokenizer(writer, config)
    for name, weight in read_weights(MODEL / "model.safetensors").items():
        part = name.split(".")[-2]
        values = for_rotation(weight, heads[part]) if part in heads else weight
        form = matrix_format if values.ndim == 2 else gguf.GGMLQuantizationType.F32
        data = gguf.quantize(np.ascontiguousarray(values), form)
        writer.add_tensor(gguf_name(name), data, raw_dtype=form)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    print(f"{path}: {path.stat().st_size / 2**20:.1f} MiB, matrices in {kind}")


def check(url: str) -> None:
    """Print how many texts have the same tokens on the peer, and how many greedy replies are the same."""
    import random

    from tokenizers import Tokenizer

    from rekindle import Engine
    from rekindle.config import Settings
    from rekindle.harness.http import connect
    from rekindle.pocket.conversations import conversation

    peer = connect(url, timeout_s=120)

    def post(path: str, body: dict[str, Any]) -> Any:
        return peer.post(path, json=body).raise_for_status().json()

    ours = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    chooser = random.Random(5)
    talks = [conversation(chooser, NUM_WORDS)["messages"] for _ in range(NUM_TALKS)]
    texts = [message["content"] for talk in talks for message in talk if message["content"]]
    texts += ["Größe, naïve café, 数字 🙂", "a  b\n\n c\t12345 don't", "x" * 300]
    same = sum(
        post("/extras/tokenize", {"input": text})["tokens"] == ours.encode(text, add_special_tokens=False).ids
        for text in texts
    )
    print(f"tokens: {same} of {len(texts)} texts the same")
    plain = [talk for talk in talks if not any(message.get("tool_calls") for message in talk)]
    equal = 0
    with Engine(Settings.load({"store": "off", "kv": "bf16", "threads": 2})) as engine:
        for talk in plain:
            prompt = talk[:-1]
            mine = engine.chat(None, prompt, temperature=0.0, max_tokens=MAX_TOKENS)
            body = {"messages": prompt, "temperature": 0, "max_tokens": MAX_TOKENS}
            theirs = post("/v1/chat/completions", body)
            assert theirs["usage"]["prompt_tokens"] == mine.report.prompt_tokens, "the prompts differ"
            equal += theirs["choices"][0]["message"]["content"] == mine.text
    print(f"greedy replies: {equal} of {len(plain)} the same (bf16 on both sides)")


def main() -> None:
    """Parse the command line and run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    writing = commands.add_parser("write")
    writing.add_argument("path", type=Path)
    writing.add_argument("--type", choices=("bf16", "f16", "f32"), default="bf16")
    checking = commands.add_parser("check")
    checking.add_argument("url")
    given = parser.parse_args()
    if given.command == "write":
        write(given.path, given.type)
    else:
        check(given.url)


if __name__ == "__main__":
    main()
