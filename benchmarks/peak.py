"""Peak memory of a process, as counted by Linux."""

from pathlib import Path

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def can_reset():
    """Return True if a process can reset its peak on this system."""
    return CLEAR.exists()


class Peak:
    """Return the megabytes by which the process's peak rises from here on."""

    def __init__(self):
        CLEAR.write_text("5")
        self._before = _megabytes("VmRSS")

    def gained(self):
        """Megabytes since then."""
        return _megabytes("VmHWM") - self._before


def peak_megabytes():
    """Return the process's peak memory so far, in megabytes."""
    return _megabytes("VmHWM")


def _megabytes(name):
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) / 1024
