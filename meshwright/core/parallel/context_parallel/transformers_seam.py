"""The attention of transformers' models: an implementation and a mask of their attention interface.

The model's own implementation computes the attention of full sequences. Masks are made for full sequences, by the
model's own mask function, where a model of transformers would make that of its chunk.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Any

from torch import Tensor, nn

from meshwright.core.parallel.context_parallel.attention_call import AttentionCall
from meshwright.core.parallel.context_parallel.context_attention import ContextAttention
from meshwright.core.parallel.context_parallel.ring_attention import beyond_ring
from meshwright.core.parallel.context_parallel.seams import (
    TORCH_ATTENTION,
    gather_chunks,
    require_self_attention,
    torch_attention,
)
from meshwright.core.parallel.parallel_spec import copy_module
from meshwright.errors import ConfigError

OWN_IMPLEMENTATIONS = ("sdpa", "eager")
PER_HEAD_ARGUMENTS = ("position_bias", "s_aux")
"""Arguments of an attention function that have a value per head or per pair of tokens of the rank."""
PREFIX, NUMBERS = "meshwright-", count()
"""The names of implementations that are registered here."""


def replace_attention(model: nn.Module, attention: ContextAttention) -> None:
    """Switches the implementation of all models of transformers inside of the model."""
    transformers = sys.modules.get("transformers")
    if transformers is None:  # nobody has made a model of it
        return
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    models = [module for module in model.modules() if isinstance(module, transformers.PreTrainedModel)]
    configs = {id(module.config): module.config for module in models if module._can_set_attn_implementation()}
    for config in configs.values():
        own = config._attn_implementation
        if own in attention.implementations:  # replaced for another stage of the rank
            continue
        if own not in OWN_IMPLEMENTATIONS:
            raise ConfigError(
                f"context parallelism runs the attention of a transformers model on full sequences, and "
                f"attn_implementation is {own}",
                "expected attn_implementation = sdpa or eager",
            )
        if getattr(config, "output_router_logits", False):
            raise ConfigError(
                "the auxiliary loss of routers is a function of full sequences, and context parallelism divides them",
                "try output_router_logits = False in the config of the model, or layout.context = 1",
            )
        seam = TransformersSeam(attention, own)
        name = f"{PREFIX}{own}-{next(NUMBERS)}"
        transformers.AttentionInterface.register(name, seam.attend)
        ALL_MASK_ATTENTION_FUNCTIONS.register(name, seam.mask)
        attention.implementations.add(name)
        config._attn_implementation = name


@dataclass
class TransformersSeam:
    """One implementation of the attention interface: chunks around the model's own implementation."""

    attention: ContextAttention
    own: str
    """the name of the model's own implementation"""

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **rest: Any
    ) -> tuple[Tensor, None]:
        """Has the signature of an attention function of transformers."""
        implementation = self.implementation(module)
        if named := [name for name in PER_HEAD_ARGUMENTS if rest.get(name) is not None]:
            raise ConfigError(
                f"the attention of {type(module).__name__} has a {named[0]}, which context parallelism does not divide",
                "try layout.context = 1",
            )

        def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
            local = module
            if hasattr(module, "num_key_value_groups"):
                # its own number would be wrong where key heads were repeated
                local = copy_module(module, {"num_key_value_groups": q.shape[1] // k.shape[1]})
            out: Tensor = implementation(local, q, k, v, mask, **rest)[0]
            return out.transpose(1, 2)

        causal = rest.get("is_causal")
        call = AttentionCall(
            query,
            key,
            value,
            attend,
            attention_mask,
            bool(getattr(module, "is_causal", True) if causal is None else causal),
            rest.get("scaling"),
            beyond_plain="a soft cap" if rest.get("softcap") else "dropout" if rest.get("dropout") else "",
        )
        with torch_attention(TORCH_ATTENTION):
            return self.attention(call).transpose(1, 2).contiguous(), None

    def implementation(self, module: nn.Module) -> Callable[..., tuple[Tensor, Any]]:
        """The attention function of the model; eager functions are those of its source file."""
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        if self.own == "eager":
            return sys.modules[type(module).__module__].eager_attention_forward  # type: ignore[no-any-return]
        return ALL_ATTENTION_FUNCTIONS[self.own]  # type: ignore[no-any-return]

    def mask(
        self, batch_size: int, q_length: int, kv_length: int, q_offset: int = 0, kv_offset: int = 0, **rest: Any
    ) -> Tensor | None:
        """Has the signature of a mask function of transformers."""
        from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

        if self.attention.enabled:
            require_self_attention(q_length, kv_length)
            group = self.attention.group
            q_length = kv_length = q_length * group.size()
            if rest.get("attention_mask") is not None:
                rest["attention_mask"] = gather_chunks(rest["attention_mask"], group)
            if self.attention.method == "ring":
                require_plain_mask(kv_length, **rest)
                return None
        own_mask = ALL_MASK_ATTENTION_FUNCTIONS[self.own]
        return own_mask(batch_size, q_length, kv_length, q_offset, kv_offset, **rest)  # type: ignore[no-any-return]


def require_plain_mask(
    sequence: int,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    use_vmap: bool = False,
    **_rest: Any,
) -> None:
    """Raises a ConfigError if a mask is more than causal or full; the ring needs no tensor for these."""
    padded = attention_mask is not None and not bool(attention_mask.all())
    windowed = local_size is not None and local_size <= sequence
    if beyond := "padding" if padded else "a sliding window" if windowed else "a mask of its own" if use_vmap else "":
        raise beyond_ring(beyond)
