"""`python -m zeropage.deepspeed SCRIPT ARGUMENTS` and `python -m zeropage.deepspeed -m MODULE ARGUMENTS`."""

import sys

from zeropage.deepspeed.running import main

if __name__ == "__main__":
    main(sys.argv[1:])
