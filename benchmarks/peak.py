"""The peak memory of a process, as Linux counts it."""

from pathlib import Path

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def can_reset():
    """Whether this system lets a process reset its peak."""
    return CLEAR.exists()


class Peak:
    """Megabytes that the process gains at its peak, from here on."""

    def __init__(self):
        CLEAR.write_text("5")
        self._before = _megabytes("VmRSS")

    def gained(self):
        """Megabytes since then."""
        return _megabytes("VmHWM") - self._before


def peak_megabytes():
    """Megabytes that the process had at its peak so far."""
    return _megabytes("VmHWM")


def _megabytes(name):
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) / 1024
