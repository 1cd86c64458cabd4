"""What this machine can do: collectives, memory, disk, arithmetic, and what step time to expect (`zeropage bench`).

    settings    what is asked for, checked before anything starts
    ranks       starts the ranks and hears what they found; each of them runs `rank`
    moving, stepping, local     what a rank measures; `timing` repeats it
    disk        the folder, measured by the command itself
    expect      pure: from rates to the time of a step
    report      what was found, as tables

Nothing here stays behind: ranks end with the command, however it ends, and the file on the disk has no name.
"""

from zeropage.bench.report import Findings, render
from zeropage.bench.run import measure
from zeropage.bench.settings import Settings

__all__ = ["Findings", "Settings", "measure", "render"]
