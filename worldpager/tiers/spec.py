"""What makes a stored rollout the one that is meant: names, model, geometry, codecs, format.

A rollout opened under anything else is refused with the field that differs. Each block and each
chunk record carries a 64-bit hash of all of it, so that a file copied from elsewhere is noticed.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, field, fields
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from worldpager.errors import ConfigError, IdentityError
from worldpager.quant.block import identity_hash
from worldpager.quant.shard import tail_bytes
from worldpager.tiers.extents import page_ceil

FORMAT_VERSION = 1
"""Version of all that is on disk: folders, documents, shards. Another one is refused."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}")


def check_name(kind: str, name: str) -> str:
    """``name`` where it is safe as a folder's and a Zarr node's, else :class:`ConfigError`."""
    if _NAME.fullmatch(name) is None:
        raise ConfigError(
            f"{kind} name {name!r} cannot be used: write 1 to 100 letters, digits, '-' or '_', "
            "beginning with a letter or digit"
        )
    return name


MOST_TEXT = 4096
"""Characters of a text that is stored."""


def check_text(kind: str, text: str) -> None:
    """Raises :class:`ConfigError` for a text that could not be read again once it is stored."""
    if len(text) > MOST_TEXT:
        raise ConfigError(
            f"{kind} has {len(text)} characters, more than the {MOST_TEXT} that are stored; "
            "give a hash instead"
        )
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"{kind} {text[:100]!r} is no Unicode text ({error.reason}); decode it first"
        ) from None


@dataclass(frozen=True, slots=True)
class StoreSpec:
    """Identity of one rollout's store; every field takes part in it."""

    session: str
    """Name of the session: the Zarr group."""
    rollout: str
    """Name of the rollout: the group inside it."""
    model: str
    """What computed the KV, down to its weights: a display name and a hash, say."""
    branches: int = field(default=1, kw_only=True)
    """Guidance branches kept together: the layers of the first come first, then the next one's."""
    layers: int
    """Layers of all branches."""
    tokens: int
    """Tokens of a full chunk and layer; a chunk may have fewer."""
    heads: int
    """KV heads, batch items folded in."""
    head_dim: int
    frames: int
    """Latent frames of a full chunk."""
    dtype: str
    """Type of the frontend's cache, e.g. ``"bfloat16"``."""
    codecs: tuple[str, ...]
    """Codec names: one for all layers, or one a layer."""
    positions: str
    """The position scheme: layout and parameters of the rotation that keys carry."""
    streams: tuple[str, ...] = ("kv",)
    """Names of the independent caches: one Zarr array each."""

    def __post_init__(self) -> None:
        """Raises :class:`ConfigError` naming the field that cannot be used."""
        check_name("session", self.session)
        check_name("rollout", self.rollout)
        for stream in self.streams:
            check_name("stream", stream)
        for name in ("model", "dtype", "positions"):
            check_text(name, getattr(self, name))
        for codec in self.codecs:
            check_text("codec", codec)
        if not self.streams or len(set(self.streams)) != len(self.streams):
            raise ConfigError(f"stream names must be given and differ, not {self.streams}")
        for name, most in _MOST.items():
            value = getattr(self, name)
            if not 1 <= value <= most:
                raise ConfigError(f"{name} must be between 1 and {most}, not {value}")
        if self.layers % self.branches:
            raise ConfigError(
                f"{self.layers} layers cannot be those of {self.branches} equal branches"
            )
        if len(self.codecs) not in (1, self.layers):
            raise ConfigError(
                f"{len(self.codecs)} codecs for {self.layers} layers: give one for all or one each"
            )

    @property
    def array_shape(self) -> tuple[int, int, int, int, int]:
        """Shape of one chunk in the Zarr array: ``[layers, 2 (K, V), tokens, heads, head_dim]``."""
        return (self.layers, 2, self.tokens, self.heads, self.head_dim)

    def identity(self, stream: int = 0) -> int:
        """The 64-bit identity that the blocks of ``stream`` (its index) carry: the hash of all
        fields, the stream's name and the format version.
        """
        fields = {
            **asdict(self),
            "codecs": ",".join(self.codecs),
            "streams": ",".join(self.streams),
            "stream": self.streams[stream],
            "format_version": FORMAT_VERSION,
        }
        if self.branches == 1:
            del fields["branches"]  # as it was before there were any
        return identity_hash(fields)

    @property
    def most_bytes(self) -> int:
        """Bytes that no chunk's file exceeds: generous, but it bounds what a file makes us read."""
        plain = 2 * self.tokens * self.heads * self.head_dim * 4
        return self.layers * page_ceil(2 * plain + 65536) + tail_bytes(self.layers)

    def document(self) -> dict[str, object]:
        """The fields as the JSON object that is stored with the rollout."""
        return {"format_version": FORMAT_VERSION, "kind": "rollout", **asdict(self)}

    def check_same(self, stored: StoreSpec) -> None:
        """Raises :class:`IdentityError` for the first field in which ``stored`` differs."""
        for name in (each.name for each in fields(self)):
            theirs, ours = getattr(stored, name), getattr(self, name)
            if theirs != ours:
                raise IdentityError(name, theirs, ours)


_MOST = {
    "branches": 65535,
    "layers": 65535,
    "tokens": 2**32 - 1,
    "heads": 65535,
    "head_dim": 65535,
    "frames": 65535,
}

_Text = Annotated[str, Field(max_length=MOST_TEXT)]


class SpecDocument(BaseModel):
    """The stored form of :class:`StoreSpec`, parsed strictly: nobody vouches for a file."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    format_version: Literal[1]
    kind: Literal["rollout"]
    session: _Text
    rollout: _Text
    model: _Text
    branches: int = 1
    layers: int
    tokens: int
    heads: int
    head_dim: int
    frames: int
    dtype: _Text
    codecs: tuple[_Text, ...]
    positions: _Text
    streams: tuple[_Text, ...]

    def spec(self) -> StoreSpec:
        """The spec. Raises :class:`ConfigError` where a field cannot be used."""
        return StoreSpec(**self.model_dump(exclude={"format_version", "kind"}))
