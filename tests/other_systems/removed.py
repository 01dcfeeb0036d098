"""Removes from this process what macOS or Windows lacks, before Limpet is imported.

    python -m tests.other_systems.removed darwin|win32 SCRIPT

Then it runs the Python code ``SCRIPT``. The system below remains Linux: this shows that no removed
call is needed, not that the calls that remain behave the same elsewhere.
"""

import builtins
import ctypes
import io
import mmap
import os
import select
import signal
import socket
import sys
import tempfile
import time
from typing import Any

_NOT_ON_MACOS: dict[Any, str] = {
    os: "O_DIRECT O_TMPFILE O_PATH O_NOATIME posix_fadvise posix_fallocate pipe2 memfd_create"
    " MFD_CLOEXEC sched_getaffinity sched_setaffinity eventfd pidfd_open copy_file_range splice"
    " setns unshare getrandom setresuid setresgid getresuid getxattr setxattr listxattr",
    mmap: "MAP_POPULATE MAP_STACK MAP_NORESERVE MADV_DONTFORK MADV_DOFORK MADV_HUGEPAGE"
    " MADV_NOHUGEPAGE MADV_REMOVE MADV_POPULATE_WRITE MADV_POPULATE_READ",
    signal: "pidfd_send_signal sigwaitinfo sigtimedwait SIGRTMIN SIGRTMAX SIGPWR SIGSTKFLT SIGPOLL"
    " SIGCLD",
    socket: "SO_PEERCRED SOCK_CLOEXEC SOCK_NONBLOCK AF_NETLINK AF_VSOCK AF_ALG TCP_USER_TIMEOUT"
    " TCP_KEEPIDLE SO_BINDTODEVICE SO_INCOMING_CPU MSG_NOSIGNAL",
    select: "epoll EPOLLIN",
    time: "CLOCK_BOOTTIME CLOCK_TAI",
}
_NOT_ON_WINDOWS: dict[Any, str] = {
    os: "fork forkpty register_at_fork pread pwrite preadv pwritev readv writev statvfs fstatvfs"
    " getuid geteuid getgid getegid getpgid getpgrp setpgid setsid getsid killpg sysconf"
    " sysconf_names uname posix_spawn posix_spawnp waitid wait wait3 wait4 WIFEXITED WIFSIGNALED"
    " WEXITSTATUS WTERMSIG WNOHANG O_CLOEXEC O_DIRECTORY O_NOFOLLOW O_NONBLOCK O_SYNC O_DSYNC"
    " O_NOCTTY O_ASYNC chown fchown fchmod fchdir lchown mkfifo mknod getloadavg nice sync"
    " fdatasync ctermid openpty ttyname tcgetpgrp getpriority initgroups setuid setgid getgroups"
    " sendfile lockf F_LOCK register_at_fork set_blocking get_blocking confstr fpathconf pathconf",
    mmap: "MAP_SHARED MAP_PRIVATE MAP_ANON MAP_ANONYMOUS PROT_READ PROT_WRITE MADV_NORMAL"
    " MADV_DONTNEED MADV_FREE MADV_WILLNEED MADV_SEQUENTIAL MADV_RANDOM",
    signal: "SIGKILL SIGHUP SIGQUIT SIGUSR1 SIGUSR2 SIGXCPU SIGXFSZ SIGCHLD SIGCONT SIGSTOP SIGTSTP"
    " SIGALRM SIGPIPE SIGURG SIGIO SIGWINCH SIGTTIN SIGTTOU SIGVTALRM SIGPROF SIGSYS SIGTRAP SIGBUS"
    " pthread_sigmask pthread_kill sigpending sigwait setitimer getitimer alarm pause siginterrupt"
    " SIG_BLOCK SIG_UNBLOCK SIG_SETMASK ITIMER_REAL",
    socket: "AF_UNIX socketpair SCM_RIGHTS CMSG_LEN CMSG_SPACE SO_REUSEPORT sethostname",
    select: "poll",
    time: "clock_gettime clock_settime clock_getres clock_gettime_ns CLOCK_MONOTONIC CLOCK_REALTIME"
    " CLOCK_THREAD_CPUTIME_ID CLOCK_PROCESS_CPUTIME_ID pthread_getcpuclockid tzset",
}
_MODULES_NOT_ON_WINDOWS = ("fcntl", "resource", "pwd", "grp", "termios", "pty", "tty", "syslog")
_LIBC_NOT_ON_MACOS = ("fallocate", "renameat2", "prctl", "sched_getaffinity", "syncfs")


def _delete(removed):
    for module, names in removed.items():
        for name in names.split():
            if hasattr(module, name):
                delattr(module, name)


def _hide_folders():
    """Make ``/proc``, ``/sys``, and ``/dev/shm`` absent for calls of Python."""
    hidden = ("/proc", "/sys", "/dev/shm")

    def wrap(module, name):
        inner = getattr(module, name)

        def call(path=".", *args, **kwargs):
            text = os.fsdecode(path) if isinstance(path, str | bytes | os.PathLike) else ""
            if any(text == h or text.startswith(h + "/") for h in hidden):
                raise FileNotFoundError(2, "No such file or directory", text)
            return inner(path, *args, **kwargs)

        setattr(module, name, call)

    for name in ("open", "stat", "lstat", "readlink", "listdir", "scandir", "mkdir", "statvfs"):
        if hasattr(os, name):
            wrap(os, name)
    wrap(io, "open")
    builtins.open = io.open


class _Libc:
    """A C library without some functions."""

    def __init__(self, inner, missing):
        self.__dict__.update(_inner=inner, _missing=missing)

    def __getattr__(self, name):
        if name in self._missing:
            raise AttributeError(f"dlsym: symbol not found: {name}")
        return getattr(self._inner, name)


def _become_darwin():
    _delete(_NOT_ON_MACOS)
    library = ctypes.CDLL

    def load(name=None, *args, **kwargs):
        found = library(name, *args, **kwargs)
        return _Libc(found, _LIBC_NOT_ON_MACOS) if name is None else found

    ctypes.CDLL = load


def _become_win32():
    _become_darwin()
    for name in _MODULES_NOT_ON_WINDOWS:
        sys.modules[name] = None
    library, mapped, opened, link = ctypes.CDLL, mmap.mmap, os.open, os.link
    wakeup, set_blocking = signal.set_wakeup_fd, os.set_blocking
    _delete(_NOT_ON_WINDOWS)

    def load(name, *args, **kwargs):
        if name is None:
            raise TypeError("bad argument type for built-in operation")
        return library(name, *args, **kwargs)

    class Mapping(mapped):
        def __new__(cls, fileno, length, tagname=None, access=0, offset=0):
            assert tagname is None
            return mapped.__new__(cls, fileno, length, access=access, offset=offset)

        def __getattribute__(self, name):
            if name == "madvise":
                raise AttributeError(name)
            return super().__getattribute__(name)

    os.O_BINARY = 1 << 30
    tempfile._bin_openflags |= os.O_BINARY
    tempfile._text_openflags |= os.O_BINARY

    def open_binary(path, flags, mode=0o777, **kwargs):
        if not flags & os.O_BINARY:
            raise AssertionError(f"{path} is opened as text, which changes the ends of lines")
        if os.path.isdir(path):
            raise PermissionError(13, "Permission denied", path)
        return opened(path, flags & ~os.O_BINARY, mode, **kwargs)

    def set_wakeup_fd(fd, **kwargs):
        if fd >= 0:  # Windows does not ask for this
            set_blocking(fd, False)
        return wakeup(fd, **kwargs)

    def link_file(source, target, *, follow_symlinks=True):
        if not follow_symlinks:
            raise NotImplementedError("link: follow_symlinks unavailable on this platform")
        link(source, target)

    ctypes.CDLL, mmap.mmap = load, Mapping
    os.open, os.link = open_binary, link_file
    signal.set_wakeup_fd = set_wakeup_fd
    os.supports_follow_symlinks.discard(link)


def main(system, script):
    # what these need of Linux is of no interest
    import hashlib
    import multiprocessing.util  # noqa: F401
    import subprocess  # noqa: F401
    import sysconfig

    import click  # noqa: F401
    import numpy
    import rich.console  # noqa: F401
    import torch.distributed.checkpoint
    import torch.utils.data

    assert hashlib and numpy and torch  # noqa: PT018
    sysconfig.get_config_vars()
    {"darwin": _become_darwin, "win32": _become_win32}[system]()
    _hide_folders()
    sys.platform = system
    exec(compile(script, "<script>", "exec"), {"__name__": "__main__"})


if __name__ == "__main__":
    main(*sys.argv[1:])
