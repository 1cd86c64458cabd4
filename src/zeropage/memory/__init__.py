"""Where shards live: memory of a rank (`host`), memory that all ranks of a host map (`shared`), or files (`disk`)."""
