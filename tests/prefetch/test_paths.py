"""Camera paths: where they go, that they are smooth, and where they come back."""

from __future__ import annotations

import contextlib
import os
import warnings

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from worldpager.errors import ConfigError
from worldpager.prefetch.paths import REACH, first_visit, make_path, path_names, revisit_pairs
from worldpager.prefetch.poses import OPENGL, as_poses


def steps(path):
    """Units moved and degrees turned from each frame to the next."""
    flat = path.reshape(-1, 4, 4)
    moved = np.linalg.norm(np.diff(flat[:, :3, 3], axis=0), axis=1)
    traces = np.einsum("nij,nij->n", flat[:-1, :3, :3], flat[1:, :3, :3])
    return moved, np.degrees(np.arccos(np.clip((traces - 1) / 2, -1, 1)))


@pytest.mark.parametrize("name", path_names())
@pytest.mark.parametrize("frames", [1, 3, 4])
def test_paths_stay_in_the_room_and_never_jump(name, frames):
    path = make_path(name, 300, frames, seed=5)
    assert path.shape == (300, frames, 4, 4)
    as_poses(path.reshape(-1, 4, 4))
    moved, turned = steps(path)
    assert moved.max(initial=0) * frames <= 0.5
    assert turned.max() * frames <= 15
    assert np.abs(path[..., (0, 2), 3]).max() <= REACH
    assert (path[..., 1, 3] == 0).all()
    assert (path[..., 1, 2] == 0).all()  # level


@pytest.mark.parametrize("name", path_names())
def test_paths_are_deterministic_and_extend(name):
    long = make_path(name, 200, 3, seed=7)
    assert np.array_equal(long, make_path(name, 200, 3, seed=7))
    if name != "walk":  # a retraced stretch may be cut short by the end
        assert np.array_equal(long[:90], make_path(name, 90, 3, seed=7))


def test_walk_depends_on_its_seed():
    assert not np.array_equal(make_path("walk", 50, 3, 1), make_path("walk", 50, 3, 2))


def test_yaw_return_turns_ten_degrees_a_chunk_and_back():
    path = make_path("yaw-return", 150, 3)
    yaw = np.degrees(np.arctan2(path[:, 0, 0, 2], path[:, 0, 2, 2]))
    assert yaw[:5] == pytest.approx([0, 10, 20, 30, 40])
    assert (path[..., :3, 3] == 0).all()
    visits = first_visit(path)
    assert (visits[:37] == -1).all()  # 36 is the turn: 35 was never out of sight
    assert visits[37:72].tolist() == list(range(34, -1, -1))
    assert visits[72:108].tolist() == list(range(36))
    # On the way back a chunk shows the frames of its first visit in the opposite order.
    assert np.array_equal(path[50], path[21][::-1])
    pairs = dict(revisit_pairs(path))
    assert pairs[50, 0] == (21, 2)
    assert pairs[73, 1] == (1, 1)
    assert (36, 0) not in pairs


def test_loop_looks_along_itself_and_repeats_lap_after_lap():
    path = make_path("loop", 120, 3)
    flat = path.reshape(-1, 4, 4)
    heading = np.diff(flat[:, :3, 3], axis=0)
    heading /= np.linalg.norm(heading, axis=1, keepdims=True)
    assert np.einsum("ni,ni->n", heading, flat[:-1, :3, 2]).min() > 0.99
    visits = first_visit(path)
    assert visits.tolist() == [-1] * 36 + [chunk % 36 for chunk in range(36, 120)]
    assert np.array_equal(path[100], path[28])
    assert len(revisit_pairs(path)) == 84 * 3


def test_walk_revisits():
    path = make_path("walk", 400, 3)
    visits = first_visit(path)
    again = np.flatnonzero(visits >= 0)
    assert len(again) > 40
    for chunk in again:
        first = path[visits[chunk]]
        same = min(
            np.abs(path[chunk] - first).max(),
            np.abs(path[chunk] - first[::-1]).max(),
        )
        assert same < 2e-3
    for (chunk, frame), (first_chunk, first_frame) in revisit_pairs(path):
        assert first_chunk < chunk - 1
        assert np.abs(path[chunk, frame] - path[first_chunk, first_frame]).max() < 2e-3


def test_visits_respect_the_recent_window_and_the_tolerances():
    path = np.tile(np.eye(4), (6, 2, 1, 1))
    path[:, :, 0, 3] = np.array([0, 1, 2, 0, 1.0005, 1.01])[:, None]
    assert first_visit(path).tolist() == [-1, -1, -1, 0, 1, -1]
    assert first_visit(path, recent=2).tolist() == [-1, -1, -1, 0, 1, -1]
    assert first_visit(path, recent=3).tolist() == [-1] * 6
    assert first_visit(path, units=0.02).tolist() == [-1, -1, -1, 0, 1, 1]
    assert revisit_pairs(path) == [
        ((3, 0), (0, 0)), ((3, 1), (0, 0)), ((4, 0), (1, 0)), ((4, 1), (1, 0)),
    ]  # fmt: skip


def test_a_still_camera_shows_its_first_frame():
    path = np.tile(np.eye(4), (5, 1, 1, 1))
    assert first_visit(path).tolist() == [-1, -1, 0, 0, 0]


# ---- files ---------------------------------------------------------------------------------------


def test_files_of_latents_and_of_chunks(tmp_path):
    path = make_path("walk", 20, 3)
    np.save(tmp_path / "chunks.npy", path)
    np.save(tmp_path / "latents.npy", path.reshape(-1, 4, 4)[:59].astype(np.float32))
    assert np.array_equal(make_path(str(tmp_path / "chunks.npy"), 20, 3), path)
    read = make_path(str(tmp_path / "latents.npy"), 19, 3)
    assert np.allclose(read, path[:19], atol=1e-6)
    assert read.dtype == np.float64
    with pytest.raises(ConfigError, match="for 19 chunks of 3 frames, not for 20"):
        make_path(str(tmp_path / "latents.npy"), 20, 3)


def test_files_in_another_convention(tmp_path):
    path = make_path("walk", 4, 3)
    stored = OPENGL.from_opencv(path.reshape(-1, 4, 4))
    np.save(tmp_path / "gl.npy", stored)
    assert np.allclose(make_path(str(tmp_path / "gl.npy"), 4, 3, convention=OPENGL), path)


def test_bad_files_are_refused(tmp_path):
    def refused(file, text, chunks=1, frames=3):
        with pytest.raises(ConfigError, match=text):
            make_path(str(file), chunks, frames)

    refused(tmp_path / "none.npy", "is not a file")
    refused(tmp_path, "no camera path")
    os.mkfifo(tmp_path / "pipe.npy")
    refused(tmp_path / "pipe.npy", "is not a file")
    (tmp_path / "text.npy").write_text("0 0 0")
    refused(tmp_path / "text.npy", "cannot be read")
    (tmp_path / "empty.npy").write_bytes(b"")
    refused(tmp_path / "empty.npy", "cannot be read")
    np.save(tmp_path / "pickle.npy", np.array([{}], dtype=object), allow_pickle=True)
    refused(tmp_path / "pickle.npy", "cannot be read")
    np.save(tmp_path / "cut.npy", make_path("walk", 20, 3))
    with open(tmp_path / "cut.npy", "r+b") as file:
        file.truncate(1000)
    refused(tmp_path / "cut.npy", "cannot be read")
    with open(tmp_path / "archive.npy", "wb") as file:
        np.savez(file, poses=np.eye(4))
    refused(tmp_path / "archive.npy", "archive of arrays")
    np.save(tmp_path / "flat.npy", np.zeros((3, 16)))
    refused(tmp_path / "flat.npy", r"must hold poses \[N, 4, 4\]")
    np.save(tmp_path / "two.npy", np.tile(np.eye(4), (5, 2, 1, 1)))
    refused(tmp_path / "two.npy", "2 frames a chunk")
    np.save(tmp_path / "bad.npy", np.concatenate([np.eye(4)[None], np.zeros((5, 4, 4))]))
    refused(tmp_path / "bad.npy", r"bad\.npy\[1\] does not end in the row")
    np.save(tmp_path / "nan.npy", np.full((3, 4, 4), np.nan))
    refused(tmp_path / "nan.npy", r"nan\.npy\[0\] holds NaN")


@given(st.lists(st.tuples(st.integers(0, 127), st.integers(0, 255)), max_size=3))
def test_damaged_headers_are_refused_or_read(tmp_path_factory, changes):
    file = tmp_path_factory.getbasetemp() / "damaged.npy"
    np.save(file, make_path("loop", 2, 3))
    data = bytearray(file.read_bytes())
    for where, value in changes:
        data[where] = value
    file.write_bytes(data)
    with contextlib.suppress(ConfigError), warnings.catch_warnings(action="ignore"):
        make_path(str(file), 1, 3)


def test_bad_names_and_sizes():
    with pytest.raises(ConfigError, match=r"'spiral'.*yaw-return, loop, walk and FILE.npy"):
        make_path("spiral", 1, 1)
    for chunks, frames in ((0, 3), (3, 0), (-1, 1)):
        with pytest.raises(ConfigError, match="at least one chunk"):
            make_path("loop", chunks, frames)
