"""Where a node keeps its files."""

import hashlib
import os
import tempfile
from pathlib import Path


def default_state_dir() -> Path:
    """$STATE_DIRECTORY (systemd), else /var/lib/blitzd where it can be written, else
    $XDG_STATE_HOME/blitzd."""
    given = os.environ.get("STATE_DIRECTORY")
    if given:
        return Path(given.split(":")[0])
    system = Path("/var/lib/blitzd")
    if system.is_dir() and os.access(system, os.W_OK):
        return system
    home = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(home) / "blitzd"


def runtime_dir(state_dir: Path) -> Path:
    """A private directory for sockets. Not below the state directory, since a socket's path
    is limited to 107 bytes; but derived from it, so that a restarted daemon finds the
    workers of the last one."""
    digest = hashlib.sha256(str(state_dir.resolve()).encode()).hexdigest()[:12]
    base = os.environ.get("RUNTIME_DIRECTORY") or os.environ.get("XDG_RUNTIME_DIR")
    if base is None or not os.access(base, os.W_OK):
        base = tempfile.gettempdir()
    path = Path(base.split(":")[0]) / f"blitzd-{os.getuid()}-{digest}"
    path.mkdir(mode=0o700, exist_ok=True)
    if path.stat().st_uid != os.getuid():
        raise PermissionError(f"{path} belongs to another user")
    return path


def publish_admin_socket(state_dir: Path, configured: str = "") -> Path:
    """Where the admin API listens on a unix socket: as configured, or else in the runtime
    directory. A link in the state directory leads
    there, so that a tool run by another user, or without the service's environment, finds
    it; not the socket itself, since a state directory's path may be too long for one."""
    socket = Path(configured).absolute() if configured else runtime_dir(state_dir) / "admin.sock"
    link = state_dir / ADMIN_LINK
    if not link.is_symlink() or link.readlink() != socket:
        link.unlink(missing_ok=True)
        link.symlink_to(socket)
    return socket


ADMIN_LINK = "admin.sock"


def find_admin_socket(state_dir: Path) -> Path:
    """Where the daemon of that state directory listens, or did. Raises FileNotFoundError
    when none ever did."""
    return (state_dir / ADMIN_LINK).readlink()
