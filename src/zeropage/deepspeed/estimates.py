"""DeepSpeed's estimates of the memory that parameters, gradients and Adam's states take.

The formulas are DeepSpeed's, so that numbers that people know come out again: 2 + 2 bytes of 16-bit parameters and
gradients, 16 of fp32 master, gradient and two moments, and room for one gathered layer. What zeropage itself
holds is `engine.memory()`.
"""

from __future__ import annotations

from torch import nn

__all__ = [
    "estimate_zero2_model_states_mem_needs", "estimate_zero2_model_states_mem_needs_all_cold",
    "estimate_zero2_model_states_mem_needs_all_live", "estimate_zero3_model_states_mem_needs",
    "estimate_zero3_model_states_mem_needs_all_cold", "estimate_zero3_model_states_mem_needs_all_live",
]  # fmt: skip

_GB = 2**30


def estimate_zero3_model_states_mem_needs(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    cpu_offload_params: bool = True,
    zero_init: bool = True,
    additional_buffer_factor: float = 1.5,
) -> tuple[int, int, int]:
    """Bytes of host memory a node, of memory a GPU, and of the largest layer gathered."""
    gpus = num_nodes * num_gpus_per_node
    layer = 4 * largest_layer_params
    if cpu_offload:
        on_host = (18 if cpu_offload_params else 16) / num_nodes
        on_gpu = layer if cpu_offload_params else layer + int(2 * total_params / gpus)
        each = on_host if zero_init else max(4 * num_gpus_per_node, on_host)
        host = total_params * each * additional_buffer_factor
    else:
        on_gpu = layer + int(18 * total_params / gpus)
        built = largest_layer_params if zero_init else total_params
        host = built * 4 * num_gpus_per_node * additional_buffer_factor
    return int(host), int(on_gpu), layer


def estimate_zero2_model_states_mem_needs(
    total_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    additional_buffer_factor: float = 1.5,
) -> tuple[int, int]:
    """Bytes of host memory a node, and of memory a GPU."""
    gpus = num_nodes * num_gpus_per_node
    if cpu_offload:
        on_gpu = 2 * total_params
        host = total_params * max(4 * gpus, 16) * additional_buffer_factor
    else:
        on_gpu = 2 * total_params + int(18 * total_params / gpus)
        host = total_params * 4 * num_gpus_per_node * additional_buffer_factor
    return int(host), int(on_gpu)


def estimate_zero3_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Print the estimates for a model, plain or sharded."""
    estimate_zero3_model_states_mem_needs_all_cold(
        _count(model), _largest_layer(model), num_gpus_per_node, num_nodes, additional_buffer_factor
    )


def estimate_zero3_model_states_mem_needs_all_cold(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> None:
    """Print the estimates for every way to offload."""
    _print_setup(num_gpus_per_node, num_nodes)
    print(
        f"SW: Model with {total_params // 10**6}M total params, {largest_layer_params // 10**6}M largest layer params."
    )
    print("  per CPU  |  per GPU |   Options")
    for optimizer, parameters in ((True, True), (True, False), (False, False)):
        for zero_init in (True, False):
            host, on_gpu, _ = estimate_zero3_model_states_mem_needs(
                total_params, largest_layer_params, num_gpus_per_node, num_nodes,
                optimizer, parameters, zero_init, additional_buffer_factor,
            )  # fmt: skip
            options = (
                f"offload_param={_where(parameters)}, offload_optimizer={_where(optimizer)}, zero_init={zero_init:d}"
            )
            print(f" {host / _GB:7.2f}GB | {on_gpu / _GB:6.2f}GB | {options}")


def estimate_zero2_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Print the estimates for a model, plain or sharded."""
    estimate_zero2_model_states_mem_needs_all_cold(
        _count(model), num_gpus_per_node, num_nodes, additional_buffer_factor
    )


def estimate_zero2_model_states_mem_needs_all_cold(
    total_params: int, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Print the estimates for both ways to offload."""
    _print_setup(num_gpus_per_node, num_nodes)
    print(f"SW: Model with {total_params // 10**6}M total params.")
    print("  per CPU  |  per GPU |   Options")
    for offload in (True, False):
        host, on_gpu = estimate_zero2_model_states_mem_needs(
            total_params, num_gpus_per_node, num_nodes, offload, additional_buffer_factor
        )
        print(f" {host / _GB:7.2f}GB | {on_gpu / _GB:6.2f}GB | offload_optimizer={_where(offload)}")


def _print_setup(num_gpus_per_node: int, num_nodes: int) -> None:
    print("Estimated memory needed for params, optim states and gradients for a:")
    nodes, gpus = "nodes" if num_nodes > 1 else "node", "GPUs" if num_gpus_per_node > 1 else "GPU"
    print(f"HW: Setup with {num_nodes} {nodes}, {num_gpus_per_node} {gpus} per node.")


def _where(on_host: bool) -> str:
    return f"{'cpu' if on_host else 'none':4}"


def _count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())  # shared ones once


def _largest_layer(model: nn.Module) -> int:
    return max(sum(p.numel() for p in module.parameters(recurse=False)) for module in model.modules())
