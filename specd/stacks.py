"""Where every thread and every task of this process stands: file, line, function. Never the values of variables."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import traceback
from types import FrameType

_DEPTH = 24  # innermost frames of a stack
_TAIL = 3  # path components of a file name


def thread_stacks() -> dict[str, list[str]]:
    """By thread name, innermost frame last."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return {f"{names.get(ident, '?')}-{ident}": _frames(frame) for ident, frame in sys._current_frames().items()}


def task_stacks() -> dict[str, list[str]]:
    """By task name, of the running event loop."""
    stacks = {}
    for task in asyncio.all_tasks():
        frames = [_place(frame, frame.f_lineno) for frame in task.get_stack(limit=_DEPTH)]
        coroutine = getattr(task.get_coro(), "__qualname__", "?")
        stacks[f"{task.get_name()} {coroutine}"] = frames
    return stacks


def _frames(frame: FrameType) -> list[str]:
    return [_place(found, line) for found, line in traceback.walk_stack(frame)][:_DEPTH][::-1]


def _place(frame: FrameType, line: int) -> str:
    return f"{short_path(frame.f_code.co_filename)}:{line} {frame.f_code.co_qualname}"


def short_path(path: str) -> str:
    """The end of a file's name."""
    return os.sep.join(path.split(os.sep)[-_TAIL:])
