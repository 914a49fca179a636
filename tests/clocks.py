"""Wall clocks that a test sets, for whole trees of processes. The machine's own clock is never touched.

A small library, compiled for the test and loaded with LD_PRELOAD, adds the number in a file to what programs read as the
time. Steady clocks, sleeps and the times of files stay as they are, as on a machine whose clock is set: files keep the
times that they got before. (Debian's libfaketime would do it, but its sleeps fail after a step back.)
"""

from __future__ import annotations

import shutil
import struct
import subprocess
from pathlib import Path

import pytest

SOURCE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static long long offset(void) {
    static long long *shared;
    if (!shared) {
        const char *name = getenv("TEST_CLOCK_FILE");
        int file = name ? open(name, O_RDONLY | O_CLOEXEC) : -1;
        if (file < 0) return 0;
        void *mapped = mmap(0, sizeof *shared, PROT_READ, MAP_SHARED, file, 0);
        close(file);
        if (mapped == MAP_FAILED) return 0;
        shared = mapped;
    }
    return *(volatile long long *)shared;
}

static int is_wall(clockid_t clock) { return clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE; }

int clock_gettime(clockid_t clock, struct timespec *result) {
    int code = syscall(SYS_clock_gettime, clock, result);
    if (!code && is_wall(clock)) result->tv_sec += offset();
    return code;
}

int gettimeofday(struct timeval *restrict result, void *restrict zone) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    result->tv_sec = now.tv_sec;
    result->tv_usec = now.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *result) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (result) *result = now.tv_sec;
    return now.tv_sec;
}
"""


class TestClock:
    """The clock of the processes that get its environment."""

    __test__ = False  # not a test, whatever its name

    def __init__(self, folder: Path, seconds: int = 0) -> None:
        compiler = shutil.which("cc")
        if not compiler:
            pytest.skip("not installed: cc (a C compiler), which makes the clock that this test sets")
        self._library, self._file = folder / "clock.so", folder / "clock"
        source = folder / "clock.c"
        source.write_text(SOURCE)
        command = [compiler, "-shared", "-fPIC", "-O1", "-w", "-o", str(self._library), str(source), "-ldl"]
        subprocess.run(command, check=True)
        self._file.write_bytes(struct.pack("q", seconds))

    @property
    def env(self) -> dict[str, str]:
        return {"LD_PRELOAD": str(self._library), "TEST_CLOCK_FILE": str(self._file)}

    def set(self, seconds: int) -> None:
        """Make it differ from the real one by this, at once, in every running process."""
        # Written in place: running processes have mapped this file.
        with self._file.open("r+b") as stream:
            stream.write(struct.pack("q", seconds))
