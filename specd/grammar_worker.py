"""The process in which a client's grammar is compiled first: whatever it does there can be killed. No torch.

    stdin   a line of vocabulary, then a line of JSON for each grammar   {"id", "kind", "text"}
    stdout  a line of JSON for each                                      {"id", "error": null, "bytes"}

Each grammar is compiled in a child of its own, forked from this process, which has one thread and the vocabulary's trie
already. The kernel ends the child when it has had its time of the processor, or wants too much memory: that is the
grammar's fault. It also ends one that did not get that time for long, which is the machine's ("late" in the answer).
One at a time: a client that sends hostile grammars takes at most one core from the others.
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

CPU_LIMIT_S = 2.0
DEADLINE_S = 10.0
_MAX_GROWTH_BYTES = 1 << 30
_MAX_MESSAGE = 400
_KILLED = f"it took more than {CPU_LIMIT_S:g} s of processor time, or {_MAX_GROWTH_BYTES >> 20} MiB, to compile"


def main() -> None:
    """Serves until stdin ends."""
    tokenizer = read_vocabulary(sys.stdin.buffer.readline())
    for line in sys.stdin.buffer:
        job = json.loads(line)
        child = os.fork()
        if child == 0:
            _child(tokenizer, job)
        _, status = os.waitpid(child, 0)
        if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGALRM:
            _write({"id": job["id"], "error": f"the machine was too busy for {DEADLINE_S:g} s", "late": True})
        elif status != 0:
            _write({"id": job["id"], "error": _KILLED, "killed": True})


def _child(tokenizer: LLTokenizer, job: dict[str, Any]) -> None:
    for number, timer, limit_s in (
        (signal.SIGPROF, signal.ITIMER_PROF, CPU_LIMIT_S),
        (signal.SIGALRM, signal.ITIMER_REAL, DEADLINE_S),
    ):
        signal.signal(number, signal.SIG_DFL)
        signal.setitimer(timer, limit_s)
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
