"""Where shards live: plain memory of a rank (`host`), memory that all ranks of a host map (`shared`), files (`disk`)."""
