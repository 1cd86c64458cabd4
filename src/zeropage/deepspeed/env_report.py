"""`ds_report`, or `python -m zeropage.deepspeed.env_report`: what is here, and which names `import deepspeed` has."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from zeropage import environment
from zeropage.deepspeed.alias import VERSION, installed
from zeropage.deepspeed.keys import KEYS, Treatment
from zeropage.deepspeed.names import MODULES
from zeropage.deepspeed.op_builder import COMPATIBLE_OPS

__all__ = ["cli_main", "main"]


def main(hide_operator_status: bool = False, hide_errors_and_warnings: bool = False) -> None:
    """Print tables of the environment and of the face."""
    console = Console()
    console.print(environment.render(environment.collect()))
    console.print(_face())
    if not hide_operator_status:
        console.print(_operators())


def cli_main() -> None:
    """The console script."""
    main()


def _face() -> Table:
    table = Table("what", "found", title="Under the names of DeepSpeed", title_justify="left")
    table.add_row("version", VERSION)
    table.add_row("`import deepspeed` means zeropage", "yes" if installed() else "no; see zeropage.deepspeed.install")
    table.add_row("modules", str(len(MODULES)))
    for treatment in Treatment:
        number = sum(key.treatment is treatment for key in KEYS.values())
        table.add_row(f"configuration keys: {treatment.value}", str(number))
    return table


def _operators() -> Table:
    table = Table("kernel of DeepSpeed", "served by torch", title="Operators", title_justify="left")
    for name, here in COMPATIBLE_OPS.items():
        table.add_row(name, "yes" if here else "no")
    return table


if __name__ == "__main__":
    main()
