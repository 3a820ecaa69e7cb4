"""Fuzz the parsers, guided by coverage. Needs the extra ``fuzz`` (atheris).

    python -m tests.fuzz.run TARGET [SECONDS]
    python -m tests.fuzz.run --minimise TARGET

The first begins from valid inputs and the kept corpus, works in ``.fuzz/TARGET`` and puts an input
that breaks a promise into ``tests/fuzz/corpus/TARGET``, where the ordinary tests replay it. The
second reduces what ``.fuzz/TARGET`` has to the inputs that cover the most, and keeps those.
"""

from __future__ import annotations

import hashlib
import logging
import sys
from pathlib import Path

import atheris

COMPILED = [
    f"worldpager.quant.{name}"
    for name in ("kernels", "kernels_means", "kernels_rotated", "kernels_search", "lanes",
                 "lanes_tiles", "tiles")
]  # fmt: skip

with atheris.instrument_imports(include=["worldpager"], exclude=COMPILED):
    from tests.fuzz import targets

WORK = Path(".fuzz")
MOST_INPUT = 32768
SECONDS_EACH = 20


def main(arguments: list[str]) -> None:
    minimise = "--minimise" in arguments
    target, *rest = [a for a in arguments if a != "--minimise"]
    if target not in targets.TARGETS:
        raise SystemExit(f"no target {target!r}; there are {', '.join(targets.TARGETS)}")
    found, kept = WORK / target, targets.CORPUS / target
    for folder in (found, kept):
        folder.mkdir(parents=True, exist_ok=True)
    logging.disable()  # a damaged store is warned about
    for seed in targets.seeds(target):
        targets.check(target, seed)  # also compiles and caches what an input must not wait for
        (found / hashlib.sha1(seed).hexdigest()).write_bytes(seed)
    options = [
        sys.argv[0],
        f"-max_len={MOST_INPUT}",
        "-len_control=0",
        f"-timeout={SECONDS_EACH}",
        "-rss_limit_mb=3000",
        f"-artifact_prefix={kept}/",
        "-print_final_stats=1",
    ]
    if minimise:
        options += ["-merge=1", str(kept), str(found)]
    else:
        options += [f"-max_total_time={int(rest[0]) if rest else 180}", str(found), str(kept)]

    def one(data: bytes) -> None:
        with targets.little_memory():
            targets.check(target, data)

    atheris.Setup(options, one)
    atheris.Fuzz()


if __name__ == "__main__":
    main(sys.argv[1:])
