"""The settings of the DeepSeek-V2 family itself, and the sizes that follow from them. Torch-free."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal

from meshwright.base.config import ModelConfig
from meshwright.base.config.constraints import PositiveFloat, Range
from meshwright.base.models.architecture import LatentAttention
from meshwright.base.models.decoder_spec import RopeScaling
from meshwright.base.models.routing import Routing
from meshwright.errors import ConfigError

Size = Annotated[int, Range(minimum=0, maximum=1 << 20)]
Scale = Annotated[float, Range(minimum=0, maximum=1e6)]


@dataclass(frozen=True)
class DeepSeekV2Options:
    """The settings of the family itself, `[model.options]`."""

    q_lora_rank: Size = 0
    """width that queries are compressed to; 0: they are not compressed"""
    kv_lora_rank: Size = 0
    """width that keys and values are compressed to, together; 0: 4 width / heads"""
    qk_nope_head_dim: Size = 0
    """dimension of a head's queries and keys without rotary position; 0: width / heads"""
    qk_rope_head_dim: Size = 0
    """dimension with rotary position, an even number; all heads share these keys; 0: half of width / heads"""
    v_head_dim: Size = 0
    """dimension of a head's values, at most that of its keys; 0: width / heads"""
    dense_layers: Annotated[int, Range(minimum=0, maximum=1 << 14)] = 1
    """leading blocks with a dense feed-forward instead of experts"""
    dense_ffn: Annotated[int, Range(minimum=0, maximum=1 << 24)] = 0
    """inner width of the feed-forward of these blocks; 0: model.ffn x (model.experts_active + model.experts_shared)"""
    routed_scale: PositiveFloat = 1.0
    """factor of the weights of routed experts, which are probabilities among all experts"""
    groups: Annotated[int, Range(minimum=1, maximum=1 << 14)] = 1
    """equal groups of consecutive experts"""
    groups_active: Annotated[int, Range(minimum=1, maximum=1 << 14)] = 1
    """groups that the experts of a token come from: those with the best experts"""
    routing_bias: bool = False
    """balance experts by a routing bias (model.router_bias_rate), which a Hugging Face folder cannot store"""
    rope_scaling: Literal["none", "yarn"] = "none"
    """scaling of the rotary frequencies (arXiv:2309.00071); the settings below are those of the scaling"""
    rope_factor: Annotated[float, Range(minimum=1, maximum=1e6)] = 40.0
    """low frequencies are divided by it"""
    rope_beta_fast: PositiveFloat = 32.0
    """a frequency with as many rotations in rope_original_context tokens is high, and kept"""
    rope_beta_slow: PositiveFloat = 1.0
    """a frequency with as many rotations in rope_original_context tokens is low"""
    rope_original_context: Annotated[int, Range(minimum=1, maximum=1 << 40)] = 4096
    """tokens of the sequences of the first training"""
    rope_mscale: Scale = 0.0
    """growth of the rotated queries and keys with log(rope_factor); 0: as in the paper"""
    rope_mscale_all_dim: Scale = 0.0
    """growth of all queries and keys with log(rope_factor), by which the rotated ones are divided; 0: none"""

    def latent_attention(self, config: ModelConfig) -> LatentAttention:
        """The sizes of attention."""
        head = config.width // config.heads
        return LatentAttention(
            self.q_lora_rank,
            self.kv_lora_rank or 4 * head,
            self.qk_nope_head_dim or head,
            self.qk_rope_head_dim or max(2, head // 4 * 2),
            self.v_head_dim or head,
        )

    def dense_inner(self, config: ModelConfig) -> int:
        """The inner width of the feed-forward of dense blocks."""
        return self.dense_ffn or config.ffn * (config.experts_active + config.experts_shared)

    @property
    def routing(self) -> Routing:
        return Routing(
            normalize=False,
            scale=self.routed_scale,
            groups=self.groups,
            groups_active=self.groups_active,
            updates_bias=self.routing_bias,
        )

    @property
    def scaling(self) -> RopeScaling | None:
        """The scaling of the rotary frequencies."""
        if self.rope_scaling == "none":
            return None
        all_dimensions = self.growth(self.rope_mscale_all_dim)
        both = self.rope_mscale and self.rope_mscale_all_dim
        amplitude = self.growth(self.rope_mscale) / all_dimensions if both else self.growth(1.0)
        return RopeScaling(
            "yarn",
            self.rope_factor,
            self.rope_beta_slow,
            self.rope_beta_fast,
            self.rope_original_context,
            amplitude=amplitude,
        )

    @property
    def score_scale(self) -> float:
        """The factor of scores besides 1 / sqrt(head size)."""
        return self.growth(self.rope_mscale_all_dim) ** 2 if self.rope_scaling == "yarn" else 1.0

    def growth(self, mscale: float) -> float:
        return 0.1 * mscale * math.log(self.rope_factor) + 1.0


def validate(config: ModelConfig, options: DeepSeekV2Options) -> None:
    """Raises ConfigError for sizes that contradict each other, or that the family does not have."""
    sizes = options.latent_attention(config)
    if not config.experts:
        raise ConfigError(
            "model.experts = 0, and the family deepseek_v2 has experts",
            "try model.experts = 64, or model.family = llama",
        )
    if config.kv_heads != config.heads:
        raise ConfigError(
            f"model.kv_heads = {config.kv_heads}, and the family deepseek_v2 has a key and a value head per query head",
            f"expected model.kv_heads = {config.heads}, as model.heads",
        )
    if options.dense_layers >= config.layers:
        raise ConfigError(
            f"model.options.dense_layers = {options.dense_layers} leaves no experts to model.layers = {config.layers}",
            f"expected from 0 to {config.layers - 1}",
        )
    if sizes.qk_rope_head_dim % 2:
        raise ConfigError(
            f"model.options.qk_rope_head_dim = {sizes.qk_rope_head_dim} is odd", "expected an even number"
        )
    head_size = sizes.qk_nope_head_dim + sizes.qk_rope_head_dim
    if sizes.v_head_dim > head_size:
        raise ConfigError(
            f"model.options.v_head_dim = {sizes.v_head_dim} exceeds the {head_size} dimensions of a key",
            "expected at most qk_nope_head_dim + qk_rope_head_dim",
        )
    if config.experts % options.groups or options.groups_active > options.groups:
        raise ConfigError(
            f"model.options.groups = {options.groups}, of which groups_active = {options.groups_active}, do not divide "
            f"model.experts = {config.experts}",
            "expected equal groups, and at most as many active ones",
        )
    if config.experts_active > (reachable := options.groups_active * config.experts // options.groups):
        raise ConfigError(
            f"model.experts_active = {config.experts_active} exceeds the {reachable} experts of "
            f"model.options.groups_active = {options.groups_active} groups",
            f"expected from 1 to {reachable}",
        )
    if options.rope_scaling == "yarn" and config.rope_theta <= 1:
        raise ConfigError(
            f"model.rope_theta = {config.rope_theta:g} with model.options.rope_scaling = yarn", "expected more than 1"
        )
    if options.rope_beta_fast <= options.rope_beta_slow:
        raise ConfigError(
            f"model.options.rope_beta_fast = {options.rope_beta_fast:g} is not above model.options.rope_beta_slow = "
            f"{options.rope_beta_slow:g}",
            "expected a larger rope_beta_fast",
        )
