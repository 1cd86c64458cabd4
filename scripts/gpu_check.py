"""Is zeropage right on this GPU, and how fast? Under eight minutes on one.

    python scripts/gpu_check.py [--only correctness|speed] [--device cuda|cpu] [--minutes 8] [--json FILE]

Correctness: a small model trained beside plain torch, in fp32, bf16 and fp16, with parameters on the device and
offloaded to the host, and with delays put in where a missing wait between streams would show as a wrong number: before
each operator (the copies run ahead), or before each copy (the operators do). Speed: step time, tokens a second and
memory of a 1 B and an 8 B model with offload, beside DeepSpeed stage 3 with the same offload (where it is installed)
and plain torch.

Exit status: 0 all right, 1 something is wrong, 77 there is no GPU. `--device cpu` runs the correctness part on
processors, where no stream can go wrong: it shows that this script works.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

import torch  # noqa: E402
from gpu_correctness import check_correctness  # noqa: E402
from gpu_speed import measure_speed, table  # noqa: E402

NO_GPU = 77


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["correctness", "speed"])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--json", type=Path, help="where everything that was found is written")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        print("There is no GPU that torch can use here; nothing was checked.")
        return NO_GPU
    end = time.monotonic() + 60 * options.minutes
    found: dict[str, object] = {"torch": torch.__version__, "device": _name(options.device)}
    print(f"{found['device']}, torch {torch.__version__}", flush=True)
    right = True
    if options.only != "speed":
        verdicts = check_correctness(torch.device(options.device))
        found["correctness"] = [verdict.as_dict() for verdict in verdicts]
        right = all(verdict.right for verdict in verdicts)
    if options.only != "correctness" and options.device == "cuda":
        outcomes = measure_speed(end)
        found["speed"] = [outcome.as_dict() for outcome in outcomes]
        print(table(outcomes))
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1))
    print("all right" if right else "WRONG: see above", flush=True)
    return 0 if right else 1


def _name(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else "processors"


if __name__ == "__main__":
    sys.exit(main())
