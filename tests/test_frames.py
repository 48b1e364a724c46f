"""Persistent inputs: fixed addresses, two frames in turn, and poison for whoever reads too late."""

from __future__ import annotations

import numpy as np
import torch

from specd.frames import Frame, Frames, fresh_upload
from specd.tensors import BatchInfo, batch_info

CPU = torch.device("cpu")


def batch(put: Frame, length: int) -> BatchInfo:
    one = np.ones(2, np.int32)
    pages = np.arange(8, dtype=np.int32)
    indptr = np.asarray([0, 4, 8], np.int32)
    return batch_info(
        query_lens=one, kv_lens=one * length, page_indptr=indptr, page_indices=pages, slots=one, page_size=4, upload=put
    )


def test_a_frame_keeps_its_addresses_and_holds_the_newest_values() -> None:
    frame = Frame(CPU)
    first = batch(frame, 3)
    pointers = [first.positions.data_ptr(), first.write_slots.data_ptr(), first.kv_indices.data_ptr()]
    second = batch(frame, 9)
    assert [second.positions.data_ptr(), second.write_slots.data_ptr(), second.kv_indices.data_ptr()] == pointers
    assert second.positions.tolist() == [8, 8]
    assert first.positions.tolist() == [8, 8]  # the same memory: the step of `first` is long over


def test_inputs_of_one_step_do_not_share_memory() -> None:
    frame = Frame(CPU)
    a, b = frame("a", np.arange(5)), frame("b", np.arange(5) + 10)
    assert (a.tolist(), b.tolist()) == ([0, 1, 2, 3, 4], [10, 11, 12, 13, 14])


def test_a_buffer_grows_when_it_must() -> None:
    frame = Frame(CPU)
    assert frame("a", np.arange(3)).tolist() == [0, 1, 2]
    grown = frame("a", np.arange(1000))
    assert grown.tolist() == list(range(1000))
    assert frame("a", np.arange(900)).data_ptr() == grown.data_ptr()
    assert frame("a", np.arange(6).reshape(2, 3)).shape == (2, 3)
    assert frame("a", np.zeros(0, np.int64)).numel() == 0


def test_neighbouring_steps_have_frames_of_their_own() -> None:
    frames = Frames(CPU)
    first, second = batch(frames.of(0), 3), batch(frames.of(1), 9)
    assert first.positions.tolist() == [2, 2]
    assert second.positions.tolist() == [8, 8]
    assert frames.of(2) is frames.of(0)


def test_only_a_poisoning_frame_is_overwritten_when_its_step_is_over() -> None:
    for poisons, expected in ((False, [2, 2]), (True, [-(1 << 30)] * 2)):
        frames = Frames(CPU, poisons=poisons)
        info = batch(frames.of(7), 3)
        frames.retire(7)
        assert info.positions.tolist() == expected


def test_fresh_tensors_are_never_shared() -> None:
    put = fresh_upload(CPU)
    assert put("a", np.arange(4)).data_ptr() != put("a", np.arange(4)).data_ptr()
