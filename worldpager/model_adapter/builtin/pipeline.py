"""The rollout loop of the built-in model: a few denoising forwards and a clean pass a chunk.

The loop owns the KV cache and otherwise behaves like Matrix-Game 2.0's: every forward of a chunk
carries the same `current_start`, the clean pass at noise level 0 leaves the final keys and values,
and a full ring rolls behind the sink in the first forward of the next chunk. `before_chunk` is
where memory comes in: it may re-lay the cache to `[sink | retrieved | recent]`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from worldpager.errors import ConfigError
from worldpager.model_adapter.builtin.model import LEVELS, LayerCache, WorldModel, denoise
from worldpager.model_adapter.pruning import CleanProbe
from worldpager.quant.pruning.consistency import probe_seed, renoised

Poses = Tensor | NDArray[np.floating]


class RolloutPipeline:
    """One rollout of one world, chunk after chunk.

    Chunks may be generated or observed in any mixture, but in order. Bit for bit repeatable: a
    chunk's noise depends on `(seed, chunk)` alone, and its frames on that, its poses and the
    window, in whatever ring the window lies.
    """

    def __init__(
        self,
        model: WorldModel,
        seed: int = 0,
        *,
        sink_chunks: int = 1,
        retrieve_chunks: int = 3,
        recent_chunks: int = 1,
        levels: Sequence[float] = LEVELS,
        before_chunk: Callable[[int, RolloutPipeline], None] | None = None,
        probe: CleanProbe | None = None,
    ) -> None:
        self.model = model
        self.config = model.config
        self.seed = seed
        self.sink_chunks = sink_chunks
        self.retrieve_chunks = retrieve_chunks
        self.recent_chunks = recent_chunks
        """Finished chunks between the retrieved and the current one; the current does not count."""
        self.levels = tuple(levels)
        self.before_chunk = before_chunk
        """Called as `before_chunk(chunk, pipeline)` before a chunk's first forward."""
        if probe is not None and not 0 <= probe.probe_step < len(self.levels) - 1:
            raise ConfigError(
                f"step {probe.probe_step} cannot be compared with the last of {len(self.levels)}"
            )
        self.probe = probe
        """Told every clean prediction, `[3, frames, H, W]`. An observed chunk, which has none, is
        run once more at the probe step's level for it; what the cache holds is the same."""
        self.base = 0
        """Frames by which positions are lowered. Who sets it also lowers `global_end_index` by
        `base * tokens_per_frame` and rotates the cached keys that are to keep their distance."""
        self.kv_cache: list[LayerCache] = []
        self._begun: int | None = None
        self.allocate(sink_chunks + retrieve_chunks + recent_chunks + 1)

    @classmethod
    def attend_everything(cls, model: WorldModel, chunks: int, seed: int = 0) -> RolloutPipeline:
        """The oracle: a rollout of up to `chunks` chunks that keeps and attends to all of them."""
        pipeline = cls(model, seed)
        pipeline.allocate(chunks)
        return pipeline

    @property
    def window_chunks(self) -> int:
        """Chunks of a full window, the current one included."""
        return self.sink_chunks + self.retrieve_chunks + self.recent_chunks + 1

    def allocate(self, capacity_chunks: int) -> None:
        """A new, empty cache of that many chunks a layer; what it held is gone."""
        tokens = self.config.tokens_per_chunk
        self.kv_cache = self.model.new_cache(1, capacity_chunks * tokens)
        self.model.set_sink(self.sink_chunks * tokens)
        self.base, self._begun = 0, None

    def clear(self) -> None:
        """Forget everything and start a new rollout in the same memory."""
        for cache in self.kv_cache:
            cache["global_end_index"].zero_()
            cache["local_end_index"].zero_()
        self.base, self._begun = 0, None

    def current_start(self, chunk: int) -> int:
        """Token offset that a chunk's forwards carry, lowered by `base`."""
        frames = chunk * self.config.frames_per_chunk - self.base
        return frames * self.config.tokens_per_frame

    @torch.no_grad()
    def generate(self, chunk: int, poses: Poses) -> Tensor:
        """Generate a chunk: poses `[frames, 4, 4]` to float32 `[frames, H, W, 3]` in [0, 1]."""
        poses = self._begin(chunk, poses)
        frames = denoise(
            self.model, self.noise(chunk), poses, self.kv_cache, self.current_start(chunk),
            self.levels, self._seen if self.probe is not None else None,
        ).clamp(-1, 1)  # fmt: skip
        self._clean_pass(chunk, poses, frames)
        return (frames[0].permute(0, 2, 3, 1) + 1) / 2

    @torch.no_grad()
    def observe(self, chunk: int, poses: Poses, frames: Tensor | NDArray[np.floating]) -> None:
        """Take a chunk as seen: frames `[frames, H, W, 3]` in [0, 1] become its memory."""
        poses = self._begin(chunk, poses)
        given = torch.as_tensor(frames, dtype=torch.float32).permute(0, 3, 1, 2)[None] * 2 - 1
        if self.probe is not None:
            self._probe_observed(chunk, poses, given)
        self._clean_pass(chunk, poses, given)

    def _seen(self, step: int, clean: Tensor) -> None:
        if self.probe is not None:
            self.probe(step, clean[0].transpose(0, 1))

    def _probe_observed(self, chunk: int, poses: Tensor, frames: Tensor) -> None:
        """Predict an observed chunk from the probe step's level. Its KV is overwritten by the clean
        pass, which comes at the same position.
        """
        assert self.probe is not None
        step = self.probe.probe_step
        level, steps = self.levels[step], len(self.levels)
        noise = np.random.default_rng(probe_seed(self.seed, chunk))
        values = torch.from_numpy(noise.standard_normal(tuple(frames.shape), np.float32))
        clean = self.model(
            renoised(frames, values, level), torch.full((1,), level), poses,
            kv_cache=self.kv_cache, current_start=self.current_start(chunk),
        )  # fmt: skip
        for number in range(steps):
            self._seen(number, frames if number > step else clean)

    def _begin(self, chunk: int, poses: Poses) -> Tensor:
        if self.before_chunk is not None and chunk != self._begun:
            self.before_chunk(chunk, self)
        self._begun = chunk
        return torch.as_tensor(np.asarray(poses), dtype=torch.float32)[None]

    def noise(self, chunk: int) -> Tensor:
        """A chunk's starting noise: float32 `[1, frames, 3, H, W]`, from `(seed, chunk)` alone."""
        config = self.config
        shape = (1, config.frames_per_chunk, 3, config.image_size, config.image_size)
        values = np.random.default_rng((self.seed, chunk)).standard_normal(shape, np.float32)
        return torch.from_numpy(values)

    def _clean_pass(self, chunk: int, poses: Tensor, frames: Tensor) -> None:
        """The last forward of a chunk, at noise level 0, which leaves its final KV."""
        self.model(
            frames, torch.zeros(1), poses,
            kv_cache=self.kv_cache, current_start=self.current_start(chunk),
        )  # fmt: skip
