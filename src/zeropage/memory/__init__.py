"""Where shards live: plain memory of one rank (`host`), memory that all ranks of a host map (`shared`), or files (`disk`)."""
