"""Rotary position embedding, half-split ("neox") layout."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dflash_serve.errors import ConfigError
from dflash_serve.model_config import RopeConfig

__all__ = ["apply_rope", "rope_table"]


def rope_table(config: RopeConfig, head_dim: int, length: int, device: torch.device) -> Tensor:
    """cos | sin for positions 0…length−1: [length, head_dim] float32, first half cos.

    Raises:
        ConfigError: a scaling type that is not supported.
    """
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequency = 1.0 / (config.theta**exponent)
    if config.scaling == "llama3":
        frequency = _llama3(frequency, config)
    elif config.scaling != "default":
        raise ConfigError(
            f"rope scaling type is {config.scaling!r}; supported: 'default', 'llama3'"
        )
    angle = torch.outer(torch.arange(length, dtype=torch.float32), frequency)
    return torch.cat([angle.cos(), angle.sin()], dim=-1).to(device)


def _llama3(frequency: Tensor, config: RopeConfig) -> Tensor:
    """Stretch low frequencies by `factor`, keep high ones, blend between (Llama 3.1)."""
    wavelength = 2 * math.pi / frequency
    low = config.original_max_position / config.low_freq_factor
    high = config.original_max_position / config.high_freq_factor
    smooth = (config.original_max_position / wavelength - config.low_freq_factor) / (
        config.high_freq_factor - config.low_freq_factor
    )
    blended = (1 - smooth) * frequency / config.factor + smooth * frequency
    scaled = torch.where(wavelength > low, frequency / config.factor, frequency)
    return torch.where((wavelength <= low) & (wavelength >= high), blended, scaled)


def apply_rope(x: Tensor, cos_sin: Tensor) -> Tensor:
    """Rotate heads.

    Args:
        x: [T, heads, head_dim].
        cos_sin: [T, head_dim], rows of `rope_table` at the tokens' positions.
    """
    half = x.shape[-1] // 2
    cos, sin = cos_sin[:, None, :half].to(x.dtype), cos_sin[:, None, half:].to(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
