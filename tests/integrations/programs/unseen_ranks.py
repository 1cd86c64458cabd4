"""`zeropage.transformers.Trainer` with arguments that make Accelerate overlook the other ranks."""

import sys

from parts import arguments, llama, tell

import zeropage as zp
from zeropage.transformers import Trainer

try:
    Trainer(model=llama(), args=arguments(sys.argv[1]))
    said = ""
except zp.errors.ConfigError as error:
    said = str(error)
tell(sys.argv[1], error=said)
