"""The path of a new user, from an empty environment to the text of a fine-tuned model, in nine commands.

`check_wheels.py` calls `follow` with the commands of an environment that has nothing but the wheel. The folder of
weights that the user starts from is written by transformers, in the environment of the tests.
"""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

PREPARE = "data prepare chats.jsonl --format chat --tokenizer model/tokenizer.json --out shards"
STEPS = 120
TRAIN = (
    "train --init-from model --lora.rank=8 --data.kind=shards --data.path=shards --optimizer.lr=1e-2 --ranks 2 "
    f"--steps {STEPS} --checkpoint.every=20 --run runs/tuned"
)
PROMPT = "What is 3 plus 4?"


def write_model(folder: Path) -> None:
    """Writes the folder of a small random Llama with its tokenizer, and chats in JSONL."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM

    chats = [
        [("user", f"What is {a} plus {b}?"), ("assistant", f"{a} plus {b} is {a + b}.")]
        for a in range(10)
        for b in range(10)
    ]
    records = [{"messages": [{"role": role, "content": text} for role, text in chat]} for chat in chats]
    (folder / "chats.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=384, special_tokens=["<|endoftext|>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator([text for chat in chats for _, text in chat], trainer)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=384,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    tokenizer.save(str(folder / "model" / "tokenizer.json"))


def follow(folder: Path, meshwright: Path, run: Callable[..., None]) -> None:
    """Types the commands in `folder`; the installation of the wheel was the first one."""
    write_model(folder)
    run(meshwright, *PREPARE.split())
    kill_after_checkpoint(folder, [str(meshwright), *TRAIN.split()])
    run(meshwright, *TRAIN.split())
    run(meshwright, "report", "runs/tuned")
    run(meshwright, "checkpoint", "verify", "runs/tuned")
    run(meshwright, "checkpoint", "export", "runs/tuned", "--to", "tuned")
    options = ("--temperature", "0", "--tokens", "8", "--json")
    command = [str(meshwright), "sample", "runs/tuned", "--prompt", PROMPT, *options]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=True)
    (sample,) = json.loads(done.stdout)["samples"]
    check_with_transformers(folder / "tuned", sample["tokens"])


def kill_after_checkpoint(folder: Path, command: list[str]) -> None:
    """Starts a run and kills its supervisor once a checkpoint is published, as a lost machine does."""
    process = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not list(folder.glob("runs/tuned/checkpoints/*/manifest.json")):
        assert process.poll() is None, "the run ended before it could be killed"
        assert time.monotonic() < deadline, "no checkpoint was published"
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait(timeout=30)


def check_with_transformers(export: Path, tokens: list[int]) -> None:
    """transformers loads the export, and its greedy generation continues the prompt with the same tokens."""
    import torch
    from tokenizers import Tokenizer
    from transformers import AutoModelForCausalLM

    tokenizer = Tokenizer.from_file(str(export / "tokenizer.json"))
    prompt = tokenizer.encode(PROMPT).ids
    model = AutoModelForCausalLM.from_pretrained(export)
    out = model.generate(torch.tensor([prompt]), max_new_tokens=len(tokens), do_sample=False)
    assert out[0, len(prompt) :].tolist()[: len(tokens)] == tokens, (out, tokens)
