"""What somebody else may have put where a tier has a name of its own."""

import os
import socket

import pytest

__all__ = ["plant"]


def plant(path, kind, aim):
    """Make something of a kind at a path; links lead to `aim`, which exists."""
    if kind == "link":
        path.symlink_to(aim)
    elif kind == "dangling link":
        path.symlink_to(aim.parent / "nothing")
    elif kind == "hard link":
        path.hardlink_to(aim)
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        _make_socket(path)
    elif kind == "empty directory":
        path.mkdir()
    elif kind == "file":
        path.write_bytes(b"theirs")
    else:
        _make_device(path)


def _make_socket(path):
    # Its address has to be short, whatever the path.
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(f"/proc/self/fd/{directory}/{path.name}")
    finally:
        os.close(directory)


def _make_device(path):
    if os.geteuid() != 0:
        pytest.skip("only root can make a device")
    os.mknod(path, 0o600 | 0o020000, os.makedev(1, 3))
