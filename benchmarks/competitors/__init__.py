"""Who is compared. One file each: how that library is set up to train a model of `benchmarks.models`."""
