"""The DeepSpeed-shaped face of zeropage: its names and its configuration, mapped onto the library's own."""
