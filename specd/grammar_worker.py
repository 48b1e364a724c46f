"""The process in which a client's grammar is compiled first: whatever it does there can be killed. No torch.

    stdin   a line of vocabulary, then a line of JSON for each grammar   {"id", "kind", "text"}
    stdout  a line of JSON for each                                      {"id", "error": null, "bytes"}

Each grammar is compiled in a child of its own, forked from this process, which has one thread and the vocabulary's trie
already. The kernel ends the child at the deadline, or when it wants too much memory. One at a time: a client that
sends hostile grammars takes at most one core from the others.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from typing import Any

from llguidance import LLTokenizer

from specd.guidance import check_beginning, compile_matcher, read_vocabulary

DEADLINE_S = 2.0
_MAX_GROWTH_BYTES = 1 << 30
_MAX_MESSAGE = 400
_KILLED = f"it took longer than {DEADLINE_S:g} s, or more than {_MAX_GROWTH_BYTES >> 20} MiB, to compile"


def main() -> None:
    """Serves until stdin ends."""
    tokenizer = read_vocabulary(sys.stdin.buffer.readline())
    for line in sys.stdin.buffer:
        job = json.loads(line)
        child = os.fork()
        if child == 0:
            _child(tokenizer, job)
        _, status = os.waitpid(child, 0)
        if status != 0:
            _write({"id": job["id"], "error": _KILLED, "killed": True})


def _child(tokenizer: LLTokenizer, job: dict[str, Any]) -> None:
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, DEADLINE_S)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    limit = _address_space_bytes() + _MAX_GROWTH_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    before = _peak_bytes()
    try:
        check_beginning(compile_matcher(tokenizer, job["kind"], job["text"]))
    except ValueError as error:
        _write({"id": job["id"], "error": str(error)[:_MAX_MESSAGE]})
    except MemoryError:
        os._exit(1)
    else:
        _write({"id": job["id"], "error": None, "bytes": _peak_bytes() - before})
    os._exit(0)


def _write(answer: dict[str, Any]) -> None:
    """One system call: a line is there as a whole or not at all."""
    os.write(sys.stdout.fileno(), json.dumps(answer).encode() + b"\n")


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _address_space_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    main()
