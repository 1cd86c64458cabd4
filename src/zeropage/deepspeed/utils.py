"""`deepspeed.utils`."""

from zeropage.deepspeed import groups, zero_to_fp32
from zeropage.deepspeed.fragments import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_get_local_fp32_param,
    safe_get_local_grad,
    safe_get_local_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_grad,
    safe_set_local_optimizer_state,
    safe_update_full_grad_vectorized,
)
from zeropage.deepspeed.leaf_modules import (
    get_z3_leaf_modules,
    set_z3_leaf_module,
    set_z3_leaf_modules,
    set_z3_leaf_modules_by_name,
    set_z3_leaf_modules_by_suffix,
    unset_z3_leaf_modules,
    z3_leaf_module,
    z3_leaf_parameter,
)
from zeropage.deepspeed.loaders import RepeatingLoader
from zeropage.deepspeed.logs import log_dist, logger, set_log_level_from_string
from zeropage.deepspeed.on_device import OnDevice

__all__ = [
    "OnDevice", "RepeatingLoader", "get_z3_leaf_modules", "groups", "log_dist", "logger", "safe_get_full_fp32_param",
    "safe_get_full_grad", "safe_get_full_optimizer_state", "safe_get_local_fp32_param", "safe_get_local_grad",
    "safe_get_local_optimizer_state", "safe_set_full_fp32_param", "safe_set_full_grad",
    "safe_set_full_optimizer_state", "safe_set_local_fp32_param", "safe_set_local_grad",
    "safe_set_local_optimizer_state", "safe_update_full_grad_vectorized", "set_log_level_from_string",
    "set_z3_leaf_module", "set_z3_leaf_modules", "set_z3_leaf_modules_by_name", "set_z3_leaf_modules_by_suffix",
    "unset_z3_leaf_modules", "z3_leaf_module", "z3_leaf_parameter", "zero_to_fp32",
]  # fmt: skip
