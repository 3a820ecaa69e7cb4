"""What retrieval wants to know of a unit after a restart, as bytes beside its blocks.

The mean keys of its page cannot be had from its record, and reading them out of the stored keys
would take one layer of every chunk: gigabytes, where this takes kilobytes. It is sealed with the
chunk, so it is there exactly when the chunk is.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from worldpager.errors import DamagedBlockError
from worldpager.prefetch.keys import StoredRow, Vector
from worldpager.prefetch.poses import Floats

VERSION = 1
_HEAD = struct.Struct("<HHIIf")  # version, poses, keys, numbers of the prompt, scale of the keys


@dataclass(frozen=True, slots=True)
class Annex:
    """``keys``: the page's row; ``prompt``: embedding of the prompt it was made under, float32
    `[dim]`; ``pose``: where a walker stood after it, `[4, 4]`. Each None where there is none.
    """

    keys: StoredRow | None = None
    prompt: Vector | None = None
    pose: Floats | None = None

    def pack(self) -> bytes:
        """The bytes; none where there is nothing to say."""
        if self.keys is None and self.prompt is None and self.pose is None:
            return b""
        keys = self.keys or StoredRow(np.empty(0, dtype=np.int16), 0.0)
        prompt = np.empty(0, dtype=np.float32) if self.prompt is None else self.prompt
        pose = np.empty(0) if self.pose is None else self.pose[:3].ravel()
        return b"".join(
            [
                _HEAD.pack(VERSION, len(pose) > 0, len(keys.values), len(prompt), keys.scale),
                keys.values.astype("<i2").tobytes(),
                prompt.astype("<f4").tobytes(),
                pose.astype("<f8").tobytes(),
            ]
        )

    @classmethod
    def unpack(cls, data: bytes) -> Annex:
        """The annex that :meth:`pack` made of ``data``; an empty one of no bytes.

        Raises :class:`DamagedBlockError` (``annex``) where the bytes make no sense.
        """
        if not data:
            return cls()
        if len(data) < _HEAD.size:
            raise DamagedBlockError("annex", f"an annex has {_HEAD.size} bytes, not {len(data)}")
        version, poses, keys, prompt, scale = _HEAD.unpack_from(data)
        if version != VERSION:
            raise DamagedBlockError("annex", f"annex version {version} is not {VERSION}")
        ends = np.cumsum([_HEAD.size, 2 * keys, 4 * prompt, 96 * poses]).tolist()
        if poses > 1 or ends[-1] != len(data) or not np.isfinite(scale):
            raise DamagedBlockError(
                "annex", f"an annex of {len(data)} bytes does not end where it says"
            )
        parts = [data[start:end] for start, end in pairwise(ends)]
        pose = None
        if poses:
            pose = np.eye(4)
            pose[:3] = np.frombuffer(parts[2], "<f8").reshape(3, 4)
        return cls(
            StoredRow(np.frombuffer(parts[0], "<i2").astype(np.int16), scale) if keys else None,
            np.frombuffer(parts[1], "<f4").astype(np.float32) if prompt else None,
            pose,
        )
