"""Write what llama.cpp makes of small GGUF files to tests/model/gguf_facts.json, for tests/model/test_gguf_facts.py.

peer/bin/python -m pip install llama-cpp-python==0.3.36   # builds for some minutes; an environment of its own
python -m tools.gguf_facts peer/bin/python

Two vocabularies are trained whose merges cross every kind of character, so that each way of splitting a text shows in
its ids; and the bundled model is written with each way of scaling its rotary embedding. The peer's ids and log
probabilities are kept, and the vocabularies with them; ids of the real models (tools/real_models.py), too.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from rekindle.model.gguf_splits import SPLITS
from rekindle_lab.bench.engine.gguf_file import write_file
from tests.model.gguf_files import ASKED, ROPES, TEXTS, prompt_of, scaled_model, vocabulary_file
from tools.real_models import REAL_MODELS

ROOT = Path(__file__).parents[1]
FACTS = ROOT / "tests" / "model" / "gguf_facts.json"
NUM_TOKENS = 900  # of a vocabulary
SHOWN = 64  # the last positions whose log probabilities are kept
PEER = """
import json, sys
import llama_cpp, numpy
jobs, out = json.load(open(sys.argv[1])), {"version": llama_cpp.__version__, "ids": {}, "scores": {}}
for name, path in jobs["vocabularies"].items():
    model = llama_cpp.Llama(path, vocab_only=True, verbose=False)
    texts = [text.encode() for text in jobs["texts"]]
    out["ids"][name] = [model.tokenize(text, add_bos=False, special=False) for text in texts]
for name, path in jobs["models"].items():
    model = llama_cpp.Llama(path, n_ctx=1024, n_batch=1024, n_ubatch=1024, n_threads=1, logits_all=True, verbose=False,
                            flash_attn=False, type_k=0, type_v=0)
    ids = jobs["prompt"]
    model.eval(ids)
    rows = numpy.array(model.scores[: len(ids)], dtype=numpy.float64)
    rows -= rows.max(1, keepdims=True)
    rows -= numpy.log(numpy.exp(rows).sum(1, keepdims=True))
    next_ids = numpy.array(ids[1:])
    found = rows[numpy.arange(len(next_ids)), next_ids]
    out["scores"][name] = [round(float(each), 4) for each in found[-jobs["shown"]:]]
json.dump(out, open(sys.argv[2], "w"))
"""


def byte_level_vocabulary() -> dict[str, Any]:
    """Tokens and merges that cross blanks, digits, punctuation and scripts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    return _trained(
        tokenizer, trainers.BpeTrainer(vocab_size=NUM_TOKENS, initial_alphabet=alphabet, show_progress=False)
    )


def sentencepiece_vocabulary() -> dict[str, Any]:
    """The same with blanks as ▁, and without a token for some characters: these are bytes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("[\\U0001f000-\\U0001ffff]"), "removed")
    return _trained(tokenizer, trainers.BpeTrainer(vocab_size=NUM_TOKENS, show_progress=False))


def _trained(tokenizer: Tokenizer, trainer: trainers.BpeTrainer) -> dict[str, Any]:
    tokenizer.train_from_iterator([text + text for text in TEXTS for _ in range(3)], trainer)
    model = json.loads(tokenizer.to_str())["model"]
    return {"tokens": sorted(model["vocab"], key=model["vocab"].get), "merges": [" ".join(x) for x in model["merges"]]}


def facts(peer: str) -> dict[str, Any]:
    """What is kept."""
    vocabularies = {"gpt2": byte_level_vocabulary(), "llama": sentencepiece_vocabulary()}
    with tempfile.TemporaryDirectory() as folder:
        files, models_, place = {}, {}, Path(folder)
        for name in [*SPLITS, "+", "-"]:  # + and -: SentencePiece's, with and without a blank before the text
            files[name] = str(place / f"vocabulary{len(files)}.gguf")
            kind = "llama" if name in "+-" else "gpt2"
            write_file(Path(files[name]), vocabulary_file(vocabularies[kind], kind, name), [])
        for name in ROPES:
            models_[name] = str(place / f"{name}.gguf")
            scaled_model(name, Path(models_[name]))
        files |= {f"real/{name}": str(model.path()) for name, model in REAL_MODELS.items()}
        jobs = {"vocabularies": files, "models": models_, "texts": ASKED, "prompt": prompt_of(), "shown": SHOWN}
        (place / "jobs.json").write_text(json.dumps(jobs))
        subprocess.run([peer, "-c", PEER, str(place / "jobs.json"), str(place / "out.json")], check=True)
        found = json.loads((place / "out.json").read_text())
    real = {name: found["ids"].pop(f"real/{name}") for name in REAL_MODELS}
    return {
        "llama_cpp_python": found["version"],
        "real": real,
        "vocabularies": vocabularies,
        **_grouped(found["ids"]),
        "scores": found["scores"],
    }


def _grouped(ids: dict[str, list[list[int]]]) -> dict[str, Any]:
    """The ids of each way of splitting once, and which names split so."""
    kept: list[list[list[int]]] = []
    names = {}
    for name, each in ids.items():
        if each not in kept:
            kept.append(each)
        names[name] = kept.index(each)
    return {"ids": kept, "names": names}


def main() -> None:
    """Parse the command line and write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peer", help="the Python of an environment with llama-cpp-python")
    FACTS.write_text(json.dumps(facts(parser.parse_args().peer), ensure_ascii=False, separators=(",", ":")) + "\n")
    print(f"{FACTS}: {FACTS.stat().st_size} bytes", file=sys.stderr)


if __name__ == "__main__":
    main()
