"""DeCoPrune's HS variant: which heads look at pruned history and which only at a fixed window."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from worldpager.errors import ConfigError


class LayerHeads(BaseModel):
    """Heads of one layer, each in one of two kinds."""

    model_config = ConfigDict(frozen=True)

    layer: int = Field(alias="layer_idx")
    static: tuple[int, ...] = Field(alias="static_head")
    """See the frames of the first and of the last chunk only."""
    dynamic: tuple[int, ...] = Field(alias="dynamic_head")
    """See every token that was kept."""


class HeadMap(BaseModel):
    """A model's heads by kind, as DeCoPrune's calibration writes it. Layer 0 is dynamic whatever
    the map says.
    """

    model_config = ConfigDict(frozen=True)

    model: str
    num_layers: int
    num_heads: int
    layers: tuple[LayerHeads, ...]

    @classmethod
    def read(cls, text: str | bytes, *, model: str, layers: int, heads: int) -> HeadMap:
        """The map in a JSON text, checked to be that of ``model``, its layers and heads.

        Raises :class:`ConfigError` for another model's, for a layer that is missing or there twice,
        and where static and dynamic heads are not together each head exactly once.
        """
        try:
            found = cls.model_validate_json(text)
        except ValidationError as error:
            raise ConfigError(f"this is no head map: {' '.join(str(error).split())}") from None
        stated = (found.model, found.num_layers, found.num_heads)
        if stated != (model, layers, heads):
            raise ConfigError(
                f"the head map is for {stated[0]!r} of {stated[1]} layers and {stated[2]} heads, "
                f"not for {model!r} of {layers} and {heads}"
            )
        if sorted(entry.layer for entry in found.layers) != list(range(layers)):
            raise ConfigError(f"the head map must name each of {layers} layers once")
        for entry in found.layers:
            if sorted([*entry.static, *entry.dynamic]) != list(range(heads)):
                raise ConfigError(
                    f"layer {entry.layer} of the head map must name each of {heads} heads once, as "
                    "static or dynamic"
                )
        by_layer = tuple(sorted(found.layers, key=lambda entry: entry.layer))
        return found.model_copy(update={"layers": by_layer})

    def static_heads(self, layer: int) -> tuple[int, ...]:
        """Heads of ``layer`` that see a fixed window."""
        return () if layer == 0 else self.layers[layer].static

    def active(self, dynamic: Sequence[int], static: int) -> int:
        """Tokens in attention summed over layers and heads, for the pruning ratio: dynamic heads
        of layer l see ``dynamic[l]`` of them, static heads ``static``.
        """
        fixed = [len(self.static_heads(layer)) for layer in range(self.num_layers)]
        return sum(
            (self.num_heads - n) * seen + n * static for n, seen in zip(fixed, dynamic, strict=True)
        )
