"""Kinds of failure: what a rank does, and which rank, node and cause gptctl must name."""

from __future__ import annotations

import sys
from typing import NamedTuple

START = """\
import os, signal, sys, time
failing = os.environ["RANK"] == "3"
"""
# The rank beside it waits until torchrun ends it. Those of the other node end as soon as it has failed.
WAIT = """
records = os.path.join(os.environ["GPTCTL_ATTEMPT_DIR"], "ranks.1.jsonl")
deadline = time.monotonic() + 120
while time.monotonic() < deadline:
    has_failed = os.environ["GPTCTL_NODE"] == "0" and os.path.exists(records) and '"end"' in open(records).read()
    if has_failed: break
    time.sleep(0.05)
"""
MEMORY = r"; possibly out of memory"


class Case(NamedTuple):
    """A script of which rank 3, the second rank of node 1, fails."""

    name: str
    script: str  # what rank 3 runs
    cause: str  # a regular expression for the whole cause
    rank: int | None = 3  # None: no rank has failed, the node has
    node: int = 1
    exit: int | None = 1
    signal: int | None = None
    setup: tuple[str, ...] = ()
    python: str = ""
    everywhere: bool = False  # all ranks run it: any of them is the first

    @property
    def program(self) -> str:
        body = "\n".join(f"    {line}" for line in self.script.splitlines())
        return f"{START}\nif True:\n{body}{WAIT}" if self.everywhere else f"{START}\nif failing:\n{body}{WAIT}"


CASES = [
    Case("exception", "raise RuntimeError('boom')", "RuntimeError: boom"),
    Case("own exception", "class Boom(Exception): pass\nraise Boom('a', 1)", r"(__main__\.)?Boom: \('a', 1\)"),
    Case("chained", "try: 1 / 0\nexcept ZeroDivisionError as e: raise KeyError('x') from e", "KeyError: 'x'"),
    Case("group", "raise ExceptionGroup('two', [ValueError('a'), TypeError('b')])", r"ExceptionGroup: two \(2 sub-exceptions\)"),
    Case("several lines", "raise RuntimeError('Error(s) in loading:\\n\\tMissing key')", r"RuntimeError: Error\(s\) in loading: Missing key"),
    Case("hostile text", r"raise ValueError('\x1b]0;x\x07\x1b[2J\u202e' + 'y' * 999)", r"ValueError: \\x1b\]0;x\\x07\\x1b\[2J\\u202ey+…"),
    Case("import error", "import nosuch", "ModuleNotFoundError: No module named 'nosuch'"),
    Case("disk full", "stream = open('/dev/full', 'w')\nstream.write('x')\nstream.flush()", r"OSError: \[Errno 28\] No space left on device"),
    Case("memory error", "bytearray(1 << 62)", "MemoryError"),
    Case("cannot allocate", "raise RuntimeError(\"DefaultCPUAllocator: can't allocate memory\")", "RuntimeError: DefaultCPUAllocator: can't allocate memory"),
    Case("exit with text", "sys.exit('no vocabulary')", "exit code 1; last line: no vocabulary"),
    Case("exit code", "print('step 5')\nsys.exit(7)", "exit code 7; last line: step 5", exit=7),
    Case("os._exit", "os._exit(9)", "exit code 9", exit=9),
    Case("handled before", "import traceback\ntry: 1 / 0\nexcept ZeroDivisionError: traceback.print_exc()\nos._exit(5)", "exit code 5; last line: ZeroDivisionError: division by zero", exit=5),
    Case("wrong usage", "import argparse\nargparse.ArgumentParser('x').parse_args(['--nosuch'])", "x: error: unrecognized arguments: --nosuch", exit=2),
    Case("exit code 3", "sys.exit(3)", "exit code 3", exit=3),
    Case("SIGKILL", "os.kill(os.getpid(), 9)", rf"killed by signal 9 \(SIGKILL\){MEMORY}", exit=None, signal=9),
    Case("watcher killed", "os.kill(os.getppid(), 9)", rf"killed by signal 9 \(SIGKILL\) together with its watcher{MEMORY}", exit=None),
    Case("SIGSEGV", "import ctypes\nctypes.string_at(0)", r"killed by signal 11 \(SIGSEGV\) at .*:\d+", exit=None, signal=11),
    Case("SIGABRT", "os.abort()", r"killed by signal 6 \(SIGABRT\) at .*x\.py:\d+", exit=None, signal=6),
    Case("abort with text", "os.write(2, b\"terminate called\\n  what():  bad device\\n\")\nos.abort()", r"killed by signal 6 \(SIGABRT\): bad device at .*x\.py:\d+", exit=None, signal=6),
    Case("SIGTERM", "os.kill(os.getpid(), 15)", r"killed by signal 15 \(SIGTERM\)", exit=None, signal=15),
    Case("KeyboardInterrupt", "os.kill(os.getpid(), 2)\ntime.sleep(9)", "KeyboardInterrupt", exit=None, signal=2),
    Case("lost connection elsewhere", "time.sleep(1)\nraise RuntimeError('the real one')", "RuntimeError: the real one"),
    Case("syntax error", "print((", r"SyntaxError: .* at .*x\.py:\d+", everywhere=True),
    Case("setup fails", "", "setup failed: false", None, 0, 78, setup=("false",)),
    Case("missing interpreter", "", r".*launch\.sh: line \d+: /nosuch/python: No such file or directory", None, 0, 127, setup=("true",), python="/nosuch/python"),
    Case("no torch", "", ".*No module named '?torch'?.*", None, 0, 1, setup=("true",), python="/usr/bin/python3"),
    Case("script missing", "", r".*can't open file '.*x\.py': \[Errno 2\] No such file or directory", exit=2, everywhere=True, setup=('rm -f "$GPTCTL_RUN_DIR"/code/x.py',)),
]  # fmt: skip
# The ranks of the other node fail before it, as they do when a connection breaks: they are not the cause.
LOST_FIRST = (
    "\nif os.environ['GPTCTL_NODE'] == '0': raise RuntimeError('[gloo] Connection closed by peer [127.0.0.1]:1')\n"
)

# In the place of Python with torchrun, which takes seconds to load: starts the ranks of a node, and ends them if one fails.
LAUNCHER = f"""#!{sys.executable} -SE
import os, signal, subprocess, sys, time
if sys.argv[1:3] != ["-m", "torch.distributed.run"]:
    os.execv({sys.executable!r}, [{sys.executable!r}, *sys.argv[1:]])
signal.signal(signal.SIGINT, signal.default_int_handler)  # bash ignores it in what it starts with &; torchrun does not
option = lambda name: next(word.partition("=")[2] for word in sys.argv if word.startswith(f"--{{name}}="))
size, node = int(option("nproc-per-node")), int(option("node-rank"))
script = next(number for number, word in enumerate(sys.argv) if word.endswith("rank_log.py"))
ranks = [
    subprocess.Popen(
        [{sys.executable!r}, *sys.argv[script:]],
        env={{**os.environ, "RANK": str(node * size + local), "LOCAL_RANK": str(local)}},
    )
    for local in range(size)
]
while all(rank.poll() in (None, 0) for rank in ranks) and any(rank.poll() is None for rank in ranks):
    time.sleep(0.02)
failed = any(rank.poll() for rank in ranks)
for rank in ranks:
    if rank.poll() is None:
        rank.terminate()
for rank in ranks:
    rank.wait()
sys.exit(failed)
"""
