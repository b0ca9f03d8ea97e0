"""Contenders with transformers models: accelerate (eager, compiled whole or by region) and Lightning."""

from __future__ import annotations

import logging
import threading
from typing import Any, Literal

import torch
from torch import nn

from benchmarks.gpu.plain_loops import PlainLoop, make_adamw
from benchmarks.gpu.shapes import CLIP, ROPE_THETA, Shape

Compile = Literal["none", "model", "regional"]


def build_transformers_model(shape: Shape, device: torch.device) -> nn.Module:
    """The model of a shape by transformers, in float32, with SDPA and without dropout."""
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    shared: dict[str, Any] = {"use_cache": False, "attn_implementation": "sdpa", "tie_word_embeddings": shape.tie}
    with device:
        if shape.family == "gpt2":
            config = GPT2Config(
                vocab_size=shape.vocab,
                n_positions=shape.sequence,
                n_embd=shape.width,
                n_layer=shape.layers,
                n_head=shape.heads,
                n_inner=shape.ffn,
                resid_pdrop=0.0,
                embd_pdrop=0.0,
                attn_pdrop=0.0,
                **shared,
            )
            model: nn.Module = GPT2LMHeadModel(config)
        else:
            config = LlamaConfig(
                vocab_size=shape.vocab,
                hidden_size=shape.width,
                intermediate_size=shape.ffn,
                num_hidden_layers=shape.layers,
                num_attention_heads=shape.heads,
                num_key_value_heads=shape.kv_heads,
                max_position_embeddings=shape.sequence,
                rms_norm_eps=1e-5,
                rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
                **shared,
            )
            model = LlamaForCausalLM(config)
    return model.float().train()


class AccelerateLoop(PlainLoop):
    """accelerate with mixed precision bf16, fused AdamW and clipping, as its documentation writes the loop."""

    def __init__(self, shape: Shape, device: torch.device, compile_: Compile = "none") -> None:
        from accelerate import Accelerator
        from accelerate.state import AcceleratorState
        from accelerate.utils import TorchDynamoPlugin

        super().__init__(shape, device)
        AcceleratorState._reset_state(reset_partial_state=True)
        options: dict[str, Any] = {}
        if compile_ != "none":
            regional = compile_ == "regional"
            backend = "inductor" if device.type == "cuda" else "eager"
            options["dynamo_plugin"] = TorchDynamoPlugin(backend=backend, use_regional_compilation=regional)
        self.accelerator = Accelerator(mixed_precision="bf16", cpu=device.type == "cpu", **options)
        model = build_transformers_model(shape, device)
        optimizer = make_adamw(model.parameters(), fused=True)
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)

    def step(self) -> None:
        tokens, _ = next(self.batches)
        loss = self.model(input_ids=tokens, labels=tokens).loss
        self.accelerator.backward(loss)
        self.accelerator.clip_grad_norm_(self.model.parameters(), CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.last = loss.detach()


class LightningLoop(PlainLoop):
    """`Trainer.fit` with bf16-mixed, AdamW and gradient_clip_val. It runs in a thread of its own that waits for its
    turn before every batch: Lightning has no way to run one step.
    """

    def __init__(self, shape: Shape, device: torch.device) -> None:
        super().__init__(shape, device)
        self.turn, self.done, self.closed = threading.Semaphore(0), threading.Semaphore(0), False
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self.fit, args=(shape,), daemon=True)
        self.thread.start()

    def fit(self, shape: Shape) -> None:
        try:
            trainer, module, loader = self.build(shape)
            trainer.fit(module, loader)
        except BaseException as error:  # noqa: BLE001 - it is raised where the step is asked for
            self.error = error
            self.done.release()

    def build(self, shape: Shape) -> tuple[Any, Any, Any]:
        import pytorch_lightning

        logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
        loop = self

        class Batches(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
            def __iter__(self) -> Any:
                first = True
                while True:
                    if not first:
                        loop.done.release()
                    first = False
                    loop.turn.acquire()
                    if loop.closed:
                        return
                    yield next(loop.batches)[0]

        class Module(pytorch_lightning.LightningModule):  # type: ignore[misc]
            def __init__(self) -> None:
                super().__init__()
                self.model = build_transformers_model(shape, loop.device)

            def training_step(self, tokens: Any, _index: int) -> Any:
                loss = self.model(input_ids=tokens, labels=tokens).loss
                self.log("loss", loss)
                loop.last = loss.detach()
                return loss

            def configure_optimizers(self) -> Any:
                return make_adamw(self.parameters())

        trainer = pytorch_lightning.Trainer(
            accelerator="gpu" if self.device.type == "cuda" else "cpu",
            devices=1,
            precision="bf16-mixed",
            max_steps=1_000_000,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            gradient_clip_val=CLIP,
        )
        return trainer, Module(), torch.utils.data.DataLoader(Batches(), batch_size=None)

    def step(self) -> None:
        self.turn.release()
        self.done.acquire()
        if self.error is not None:
            raise self.error

    def close(self) -> None:
        self.closed = True
        self.turn.release()
        self.thread.join(60)
