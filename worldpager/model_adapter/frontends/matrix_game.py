"""Matrix-Game 2.0: a world steered by keys and mouse, three latent frames a chunk.

Its action modules have caches and a position table of their own, in frames, and a look at the
controls. Nothing of theirs is retrieved: they see the last frames only. But their table ends too,
after 7,500 frames, and so their positions are lowered like those of self-attention, apart from
them: keys that they cached are rotated back, and rows of controls before that are left out.

No pose exists. The controls of each chunk are read from the call, those of the following chunks
from the argument of the offline ``inference``; the streaming one asks for them when a chunk begins.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any, ClassVar

import torch

from worldpager.model_adapter.frontends import rings
from worldpager.model_adapter.frontends.base import (
    Arguments,
    OnBegin,
    WindowOptions,
    attribute,
    wrap,
)
from worldpager.model_adapter.frontends.rings import Layers
from worldpager.model_adapter.frontends.wan import Call, WanAdapter
from worldpager.prefetch.planner import PATH_AHEAD
from worldpager.quant.rope import RopeLayout

ROWS = 4
"""Rows of controls a latent frame, one a video frame; the very first latent frame has one."""
TURN = 0.1
"""Mouse rate that a turning key of a game without mouse is worth."""


class MatrixGame(WanAdapter):
    """The offline and the streaming pipeline of Matrix-Game 2.0, in all its modes."""

    name: ClassVar[str] = "matrix-game-2"
    looks_for: ClassVar[str] = "generator.model.blocks[*].action_model, and kv_cache1"
    retrieval: ClassVar[str] = "action"
    lists: ClassVar[tuple[str, ...]] = ("kv_cache1",)

    def __init__(self, target: Any, options: WindowOptions) -> None:
        super().__init__(target, options)
        blocks: Any = self.model.blocks
        self._actions = {
            index: block.action_model
            for index, block in enumerate(blocks)
            if block.action_model is not None
        }
        self._action_caches: list[Layers] = []
        self._action_lowered = 0  # frames by which the action modules' positions are lowered
        self._given: Mapping[str, Any] = {}  # the whole rollout's controls, where they are known

    @classmethod
    def matches(cls, target: object) -> bool:
        blocks = attribute(cls.transformer(target), "blocks")
        return blocks is not None and hasattr(blocks[0], "action_model")

    def install(self, undo: ExitStack, begin: OnBegin) -> None:
        super().install(undo, begin)
        undo.callback(self._raise_actions)
        for action in self._actions.values():
            undo.callback(self._lower_action(action))
        streaming = "streaming" in type(self.target).__name__.lower()
        if hasattr(self.target, "inference") and not streaming:
            wrap(undo, self.target, "inference", self._inference)

    # ---- controls ------------------------------------------------------------------------------

    def _inference(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The offline loop: its controls are all there before it begins."""
        given = inspect.signature(original).bind(*args, **kwargs).arguments
        self._given = given.get("conditional_dict", {})
        try:
            return original(*args, **kwargs)
        finally:
            self._given = {}

    def control(self, call: Call) -> Mapping[str, Any]:
        """Keys and mouse of this chunk, and of those after it as far as they are known."""
        start = int(call["current_start"]) // self._native.tokens_per_frame
        rows = {name: call[name] for name in ("keyboard_cond", "mouse_cond")}
        control = dict(self._rows(rows, start) or {})
        frames = self._native.frames_per_chunk
        ahead = [self._rows(self._given, start + n * frames) for n in range(1, max(PATH_AHEAD) + 1)]
        control["ahead"] = [chunk for chunk in ahead if chunk is not None]
        return control

    def _rows(self, given: Mapping[str, Any], start: int) -> dict[str, Any] | None:
        """Controls of the chunk at latent frame ``start``; ``None`` where there are none."""
        end = 1 + ROWS * (start + self._native.frames_per_chunk - 1)
        first = 0 if start == 0 else end - ROWS * self._native.frames_per_chunk
        keyboard, mouse = given.get("keyboard_cond"), given.get("mouse_cond")
        if keyboard is None or keyboard.shape[1] < end:
            return None
        keys = keyboard[0, first:end].float().cpu()
        if mouse is not None:
            return {"keyboard": keys.numpy(), "mouse": mouse[0, first:end].float().cpu().numpy()}
        if keys.shape[1] == len(_RUNNER):
            return _runner(keys)
        return {"keyboard": keys.numpy()}

    # ---- the action modules' own caches and table ----------------------------------------------

    def begin_chunk(self, start: int, caches: list[Layers], call: Call) -> None:
        lists = [call["kv_cache_mouse"], call["kv_cache_keyboard"]]
        self._action_caches = [layers for layers in lists if layers is not None]
        super().begin_chunk(start, caches, call)
        rows = min((len(action.freqs_cos) for action in self._actions.values()), default=None)
        last = start - self._action_lowered + self._native.frames_per_chunk
        if rows is not None and last > rows:
            first: Any = self._action_caches[0][0]["k"]
            self._shift_actions(start - first.shape[1] - self._action_lowered)

    def begin_rollout(self, caches: list[Layers]) -> None:
        super().begin_rollout(caches)
        self._action_lowered = 0
        rings.empty(self._action_caches)

    def state(self, *, begun: bool) -> dict[str, torch.Tensor]:
        state = super().state(begun=begun)
        state["action.lowered"] = torch.tensor(self._action_lowered)
        for which, layers in enumerate(self._action_caches):
            for index in self._actions:
                for name, value in layers[index].items():
                    state[f"action.{which}.{index}.{name}"] = value
        return state

    def fill(self, state: Mapping[str, torch.Tensor], caches: list[Layers], position: int) -> None:
        super().fill(state, caches, position)
        self._action_lowered = int(state["action.lowered"])
        for which, layers in enumerate(self._action_caches):
            for index in self._actions:
                for name, value in layers[index].items():
                    value.copy_(state[f"action.{which}.{index}.{name}"])

    def _shift_actions(self, frames: int) -> None:
        """Lower the action modules' positions by another ``frames``, with what they cached."""
        for layers in self._action_caches:
            for index, action in self._actions.items():
                split = [size // 2 for size in action.mouse_qk_dim_list]
                layout = RopeLayout((split[0], split[1], split[2]), theta=float(action.rope_theta))
                rotation = layout.temporal_rotation(-frames)
                if rotation is not None:
                    rotation.apply_(layers[index]["k"])
                layers[index]["global_end_index"].sub_(frames)
        self._action_lowered += frames

    def _raise_actions(self) -> None:
        """As the loop counts them, for a pipeline that goes on without us."""
        if self._action_lowered:
            self._shift_actions(-self._action_lowered)

    def _lower_action(self, action: torch.nn.Module) -> Callable[[], None]:
        """Have an action module see lowered frames, and the controls from there on."""
        arguments = Arguments(action)

        def hook(_: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            lowered = self._action_lowered
            if lowered == 0:
                return None
            values = {"start_frame": arguments.get("start_frame", args, kwargs) - lowered}
            for name in ("mouse_condition", "keyboard_condition"):
                rows = arguments.get(name, args, kwargs)
                if rows is not None:
                    values[name] = rows[:, ROWS * lowered :]
            return arguments.replaced(args, kwargs, values)

        return action.register_forward_pre_hook(hook, with_kwargs=True).remove


_RUNNER = ("none", "jump", "slide", "turn left", "turn right", "left", "right")
"""Keys of the endless runner's mode."""


def _runner(keys: torch.Tensor) -> dict[str, Any]:
    """The runner's keys as a walker's: it always runs on, and turns where it is told to."""
    walk, still = torch.ones(len(keys)), torch.zeros(len(keys))
    return {
        "keyboard": torch.stack([walk, still, keys[:, 5], keys[:, 6]], dim=1).numpy(),
        "mouse": torch.stack([still, TURN * (keys[:, 4] - keys[:, 3])], dim=1).numpy(),
    }
