"""zeropage beside DeepSpeed stage 3, FSDP2 and DDP.

    python -m benchmarks [PIECE ...] [--repeats 5] [--out benchmarks/results] [--only TEXT]

Pieces: b1 (collectives), b2 (communication-bound step), b3 (compute-bound step), b4 (memory), b5 (optimizer),
b8 (loading), b9 (host overhead). Each competitor runs as processes
of its own, one thread a rank, pinned; they alternate, and medians and quartiles are written to `results.md`, with
everything that was seen in `*.json` beside it. DeepSpeed's extensions are built into a folder of their own before
anything is timed.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.alternate import Case, Outcome, alternate
from benchmarks.competitors.loading import write_model
from benchmarks.fleet import Window
from benchmarks.pieces import memory, parts, training
from benchmarks.report import draw, machine, markdown

PIECES: dict[str, Callable[[Path], list[Case]]] = {
    "b1": lambda _: parts.b1(),
    "b2": lambda _: training.b2(),
    "b3": lambda _: training.b3(),
    "b5": lambda _: parts.b5(),
    "b8": parts.b8,
    "b9": lambda _: training.b9(),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pieces", nargs="*", default=[*PIECES, "b4"], metavar="PIECE")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no new repeat of a case after these")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--competitors", default="", help="some of the competitors, by name, separated by commas")
    parser.add_argument("--extensions", type=Path, default=None, help="where DeepSpeed keeps what it builds")
    options = parser.parse_args()
    unknown = sorted(set(options.pieces) - {*PIECES, "b4"})
    if unknown:
        parser.error(f"there is no piece {', '.join(unknown)}; there are b4, {', '.join(PIECES)}")
    options.out.mkdir(parents=True, exist_ok=True)
    extensions = options.extensions or options.out / "extensions"
    extensions.mkdir(parents=True, exist_ok=True)
    model = options.out / "model"
    if "b8" in options.pieces and not model.exists():
        write_model(model)
    timed = [piece for piece in options.pieces if piece in PIECES]
    cases = [case for piece in timed for case in PIECES[piece](model) if options.only in case.name]
    names = options.competitors.split(",") if options.competitors else []
    competitors = [c for case in cases for c in case.competitors]
    known = dict.fromkeys(c.name for c in [*competitors, *(memory.COMPETITORS if "b4" in options.pieces else ())])
    if set(names) - set(known):
        parser.error(f"there is no competitor {', '.join(set(names) - set(known))}; there are {', '.join(known)}")
    for case in cases:
        chosen = _chosen(case, names)
        if not chosen.competitors:
            continue
        with tempfile.TemporaryDirectory() as logs:
            outcomes = alternate(chosen, options.repeats, Path(logs), extensions, options.minutes)
        _write(options.out, chosen, outcomes)
        print(markdown(chosen, outcomes), flush=True)
    if "b4" in options.pieces:
        _memory(options, extensions, names)
    _write_all(options.out)


def _memory(options: argparse.Namespace, extensions: Path, names: list[str]) -> None:
    for job in memory.cases():
        if options.only not in f"B4 {job['model']}":
            continue
        saved = memory.activations(job)
        with tempfile.TemporaryDirectory() as logs:
            held = memory.measure(job, 2, min(2, options.repeats), Path(logs), extensions, names)
        text = memory.table(job, 2, held, saved)
        record = {"machine": machine(), "job": job, "saved": saved, "held": [asdict(one) for one in held], "text": text}
        (options.out / f"B4-{job['model']}.memory.json").write_text(json.dumps(record, indent=1))
        print(text, flush=True)


def _chosen(case: Case, names: list[str]) -> Case:
    return Case(**{**vars(case), "competitors": [c for c in case.competitors if not names or c.name in names]})


def _write(folder: Path, case: Case, outcomes: list[Outcome]) -> None:
    record = {"machine": machine(), "case": asdict(case), "outcomes": [outcome.raw() for outcome in outcomes]}
    (folder / f"{case.name.replace(' ', '-')}.json").write_text(json.dumps(record, indent=1))


def _write_all(folder: Path) -> None:
    """The table and the picture, over all cases that the folder has records of."""
    records = [json.loads(path.read_text()) for path in sorted(folder.glob("B*.json"))]
    texts = [record["text"] for record in records if "text" in record]
    records = [record for record in records if "case" in record]
    results = [(Case(**record["case"]), [_outcome(raw) for raw in record["outcomes"]]) for record in records]
    head = "".join(f"- {key}: {value}\n" for key, value in machine().items())
    tables = "\n".join([markdown(case, outcomes) for case, outcomes in results] + texts)
    (folder / "results.md").write_text(f"# Benchmarks\n\n{head}\n{tables}\n![times of a step](results.png)\n")
    draw(results, folder / "results.png")


def _outcome(raw: dict[str, Any]) -> Outcome:
    windows = [Window(**window) for window in raw.pop("windows")]
    return Outcome(**raw, windows=windows)


if __name__ == "__main__":
    main()
