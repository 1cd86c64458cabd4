"""Where one competitor's first rank spends its processor time in a case: functions, the costliest first.

python -m benchmarks.profiling PIECE [--only TEXT] [--competitor NAME] [--steps 3] [--lines 30]
"""

from __future__ import annotations

import argparse
import pstats
import tempfile
from pathlib import Path

from benchmarks.__main__ import PIECES
from benchmarks.fleet import Fleet


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("piece", choices=PIECES)
    parser.add_argument("--only", default="", help="the first case whose name contains this")
    parser.add_argument("--competitor", default="zeropage shared")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--warm-up", type=int, default=2)
    parser.add_argument("--lines", type=int, default=30)
    parser.add_argument("--sort", default="tottime")
    parser.add_argument("--extensions", type=Path, default=Path(__file__).parent / "results" / "extensions")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        cases = PIECES[options.piece](Path(folder) / "model")
        case = next(case for case in cases if options.only in case.name)
        competitor = next(c for c in case.competitors if c.name == options.competitor)
        fleet = Fleet(competitor, case.world, Path(folder), options.extensions)
        try:
            fleet.open(case.job)
            fleet.run(options.warm_up, together=case.together)
            fleet.tell("profile", first=fleet.done, count=options.steps, path=f"{folder}/profile")
        finally:
            fleet.end()
        print(f"{case.name}, {competitor.name}, {options.steps} steps")
        pstats.Stats(f"{folder}/profile.0").strip_dirs().sort_stats(options.sort).print_stats(options.lines)


if __name__ == "__main__":
    main()
