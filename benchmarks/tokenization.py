"""Tokenizing a dataset on disk: `data prepare` and `datasets.map` with the same tokenizer, two processes each.

Both read the same Arrow files and write the token ids to disk. Each measurement is a process of its own, and times the
call alone; the loops alternate, so that both see the same load of the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import Any

WORKERS = 2
ROUNDS = 7
CORPUS_BYTES = 24 << 20
DOCUMENT_BYTES = 3000
VOCAB = 8192
TRAINING_DOCUMENTS = 1000
MIN_RATIO = 1.0
MESHWRIGHT, DATASETS = "meshwright data prepare", "datasets.map"


def measure() -> dict[str, Any]:
    try:
        import datasets
    except ImportError as error:
        return {"ratio_to_datasets": None, "missing": str(error)}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        print("tokenization: corpus and tokenizer", file=sys.stderr, flush=True)
        texts = generate_corpus()
        train_tokenizer(texts[:TRAINING_DOCUMENTS], folder / "tokenizer.json")
        datasets.disable_progress_bars()
        datasets.Dataset.from_dict({"text": texts}).save_to_disk(folder / "corpus")
        seconds: dict[str, list[float]] = {MESHWRIGHT: [], DATASETS: []}
        tokens = dict.fromkeys(seconds, 0)
        for number in range(ROUNDS + 1):  # the first round fills the page cache
            print(f"tokenization: round {number} of {ROUNDS}", file=sys.stderr, flush=True)
            for loop in seconds if number % 2 else reversed(list(seconds)):
                result = run_process(loop, folder, folder / f"out-{loop.split()[0]}-{number}")
                tokens[loop] = result["tokens"]
                if number:
                    seconds[loop].append(result["seconds"])
    ratios = [peer / own for peer, own in zip(seconds[DATASETS], seconds[MESHWRIGHT], strict=True)]
    quartiles = statistics.quantiles(ratios, n=4)
    return {
        "corpus": {"bytes": sum(len(text.encode()) for text in texts), "documents": len(texts), "vocab": VOCAB},
        "processes": WORKERS,
        "tokens": tokens,
        "seconds": {loop: [round(value, 3) for value in values] for loop, values in seconds.items()},
        "tokens_per_second": {
            loop: round(tokens[loop] / statistics.median(values)) for loop, values in seconds.items()
        },
        "ratio_to_datasets": {
            "median": round(statistics.median(ratios), 3),
            "quartiles": [round(quartiles[0], 3), round(quartiles[2], 3)],
        },
    }


def generate_corpus() -> list[str]:
    """Documents of a few kilobytes, cut from the sources of the standard library, repeated with a number in each."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = "".join(file.read_text(errors="replace") for file in files)
    texts: list[str] = []
    size = 0
    while size < CORPUS_BYTES:
        start = len(texts) * DOCUMENT_BYTES % len(text)
        texts.append(f"document {len(texts)}\n" + text[start : start + DOCUMENT_BYTES])
        size += len(texts[-1])
    return texts


def train_tokenizer(texts: list[str], path: Path) -> None:
    """A byte-level BPE tokenizer, as GPT-2 has it."""
    from tokenizers import Tokenizer
    from tokenizers.decoders import ByteLevel as ByteLevelDecoder
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel
    from tokenizers.trainers import BpeTrainer

    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    alphabet = ByteLevel.alphabet()
    trainer = BpeTrainer(
        vocab_size=VOCAB, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(path))


def run_process(loop: str, folder: Path, out: Path) -> dict[str, Any]:
    environment = os.environ | {"TOKENIZERS_PARALLELISM": "false"}  # one thread per process: there are as many as cores
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.tokenization", loop, str(folder), str(out)],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=600,
    )
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def run_meshwright(folder: Path, out: Path) -> tuple[float, int]:
    from meshwright.core.data.prepare.command import prepare_folder

    inputs, tokenizer = [str(folder / "corpus")], str(folder / "tokenizer.json")
    start = time.monotonic()
    result = prepare_folder(inputs, out, tokenizer, "datasets", "text", "", "auto", WORKERS, 1 << 24, 0)
    return time.monotonic() - start, result["tokens"]


def run_datasets(folder: Path, out: Path) -> tuple[float, int]:
    """The tokenizers library itself, not through transformers: that would be slower. The end-of-text token is added in
    the same pass.
    """
    import datasets
    from tokenizers import Tokenizer

    datasets.disable_progress_bars()
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    end = tokenizer.token_to_id("<|endoftext|>")

    def encode(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        return {"input_ids": [[*encoding.ids, end] for encoding in tokenizer.encode_batch_fast(batch["text"])]}

    dataset = datasets.load_from_disk(str(folder / "corpus"))
    out.mkdir()
    start = time.monotonic()
    mapped = dataset.map(
        encode, batched=True, num_proc=WORKERS, remove_columns=["text"], cache_file_name=str(out / "tokens.arrow")
    )
    seconds = time.monotonic() - start
    return seconds, sum(len(ids) for ids in mapped["input_ids"])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tokenization", description=__doc__)
    parser.add_argument("loop", help=f"{MESHWRIGHT}, or another for datasets")
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    elapsed, count = (run_meshwright if args.loop == MESHWRIGHT else run_datasets)(args.folder, args.out)
    print(json.dumps({"seconds": elapsed, "tokens": count}))
