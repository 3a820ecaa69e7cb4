"""The built-in world model: small, trained, and able to recall what its KV cache holds."""

from worldpager.model_adapter.builtin.model import (
    LayerCache,
    ModelConfig,
    PositionError,
    WorldModel,
    load_model,
)
from worldpager.model_adapter.builtin.pipeline import RolloutPipeline
from worldpager.model_adapter.builtin.rooms import Room, render

__all__ = [
    "LayerCache",
    "ModelConfig",
    "PositionError",
    "RolloutPipeline",
    "Room",
    "WorldModel",
    "load_model",
    "render",
]
