"""WorldPager: memory for interactive world models that outgrows GPU and host, and never waits.

The public face. :func:`attach` puts a memory under a pipeline that is known. Any other frontend
implements :class:`FrontendCache`, describes its geometry in a :class:`KVSpec`, opens a
:class:`WorldMemory` and calls ``boundary()`` once per chunk.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from worldpager.errors import FrontendError, WorldPagerError
    from worldpager.model_adapter.branches import BranchedCache
    from worldpager.model_adapter.config import BoundaryReport, MemoryConfig
    from worldpager.model_adapter.frontend import ChunkStep, FrontendCache, KVSpec
    from worldpager.model_adapter.frontends.attach import Attachment, attach
    from worldpager.model_adapter.memory import WorldMemory
    from worldpager.model_adapter.ring_cache import RingCache
    from worldpager.pager.pool import MemoryPool
    from worldpager.quant.rope import RopeLayout, Wall
    from worldpager.tiers.fork import fork

__all__ = [
    "Attachment",
    "BoundaryReport",
    "BranchedCache",
    "ChunkStep",
    "FrontendCache",
    "FrontendError",
    "KVSpec",
    "MemoryConfig",
    "MemoryPool",
    "RingCache",
    "RopeLayout",
    "Wall",
    "WorldMemory",
    "WorldPagerError",
    "attach",
    "fork",
]

_HOMES = {
    "Attachment": "model_adapter.frontends.attach",
    "BoundaryReport": "model_adapter.config",
    "BranchedCache": "model_adapter.branches",
    "ChunkStep": "model_adapter.frontend",
    "FrontendCache": "model_adapter.frontend",
    "FrontendError": "errors",
    "KVSpec": "model_adapter.frontend",
    "MemoryConfig": "model_adapter.config",
    "MemoryPool": "pager.pool",
    "RingCache": "model_adapter.ring_cache",
    "RopeLayout": "quant.rope",
    "Wall": "quant.rope",
    "WorldMemory": "model_adapter.memory",
    "WorldPagerError": "errors",
    "attach": "model_adapter.frontends.attach",
    "fork": "tiers.fork",
}


def __getattr__(name: str) -> object:
    # On demand: importing torch takes seconds, which `worldpager plan --help` should not.
    if name not in _HOMES:
        raise AttributeError(f"module 'worldpager' has no attribute {name!r}")
    return getattr(import_module(f"worldpager.{_HOMES[name]}"), name)
