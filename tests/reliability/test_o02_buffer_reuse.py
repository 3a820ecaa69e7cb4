"""O2: the caller reuses its buffer at once."""

from __future__ import annotations

from pathlib import Path

from tests.reliability.world import World


def test_what_was_written_comes_back_whatever_becomes_of_the_buffer(tmp_path: Path) -> None:
    world = World(tmp_path / "s", dram=12)
    tokens = world.spec.tokens_per_chunk
    with world.memory:
        for chunk in range(200):
            world.retrieve(chunk)  # takes chunk - 1; its KV still stands in the recent window
            world.check(chunk)
            if chunk:
                for cache in world.layers:
                    end = int(cache["local_end_index"])
                    cache["k"][:, end - tokens : end] = 7.0
                    cache["v"][:, end - tokens : end] = 7.0
            world.write(chunk)
        world.retrieve(200)
        world.memory.flush()
        assert all(world.load_patiently(chunk) for chunk in range(200))


def test_a_chunk_written_again_in_a_new_rollout_is_not_mixed_up(tmp_path: Path) -> None:
    world = World(tmp_path / "s", dram=12)
    with world.memory:
        world.run(range(40))
        for cache in world.layers:
            cache["local_end_index"].zero_()
        world.base, world.session = 0, "another world"  # the oracle's seeds: other KV, same ids
        for chunk in range(40):
            world.step(chunk)
        world.memory.flush()
        assert all(world.load_patiently(chunk) for chunk in range(39))
